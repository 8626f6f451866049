"""Encodes text to token ids and decodes them, as fast as possible with exactly the tokenizer's result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envs.safe_text import well_formed

# Texts that clean-up of spaces, normalisation, truncation or a prefix space would change.
_PROBES = (
    "",
    "a",
    " Yes , it 's . do n't ! ( I 'm ) ?",
    "\n\n \t x\r\n ",
    "é e\u0301 \ufb01 \U0001d518 \U0001f642 \u200b\u3000 한",
    '{"name": "f", "arguments": {"a": [1, 2.5]}}</think>\n\n<tool_call>\n',
    "word 12 " * 400,
)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level BPE.

    A byte that is a visible character stands for itself, all others are written as the characters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Encoder:
    """Encodes and decodes with one tokenizer.

    Example::

        encoder = Encoder(tokenizer)
        ids = encoder.encode("Score 1.0")                      # [50, 83, ...], no token added
        encoder.decode(ids)                                    # "Score 1.0"
        encoder.break_control_tokens("a <|im_end|> b")                     # the token broken by a zero-width space
        encoder.cut("\\n<|im_start|>user\\n<|x|>Hi")             # ("\\n", "<|im_start|>user\\n<|x|>", "Hi")
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        #: Every added token's text and id, special or not.
        self.added: dict[str, int] = {token.content: int(index) for index, token in added.items()}
        self._tokenizer = tokenizer
        self.encode = self._slow_encode
        self.decode = self._slow_decode
        special = set(tokenizer.all_special_tokens)
        control = [t.content for t in added.values() if t.special or t.content.startswith("<|") or t.content in special]
        self._control = _any_of(control)
        cuts: list[str] = []
        if tokenizer.is_fast:
            backend = tokenizer.backend_tokenizer
            cuts = _cut_tokens(added.values(), has_normalizer=backend.normalizer is not None)
            # Called first: this switches off truncation and padding, which a tokenizer.json may have on.
            expected = [self._slow_encode(text) for text in (*_PROBES, "".join(self.added))]
            self._use_backend(backend, expected)
        self._cut = _any_of(cuts)

    def _use_backend(self, backend: Any, expected: list[list[int]]) -> None:
        """Use the tokenizer's backend, two to three times faster, if it gives the same as the tokenizer."""

        def encode(text: str) -> list[int]:
            return backend.encode(text, add_special_tokens=False).ids

        def decode(ids: Sequence[int]) -> str:
            return backend.decode(ids, skip_special_tokens=False)

        if [encode(text) for text in (*_PROBES, "".join(self.added))] == expected:
            self.encode = encode
        if all(decode(ids) == self._slow_decode(ids) for ids in expected):
            self.decode = decode

    def _slow_encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _slow_decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def spell(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for, empty where the tokenizer has no such id.

        The bytes of one token may be part of a character: text only together with the next ones.
        """
        try:
            token = self._tokenizer.convert_ids_to_tokens(int(token_id))
            text = self.decode([int(token_id)])
        except Exception:  # the tokenizer has no such id
            return b""
        if token is None:
            return b""
        if token in self.added:
            return token.encode()
        if "\ufffd" in text and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if token.startswith("\u2581") and not text.startswith(" "):  # how SentencePiece writes a space
            text = f" {text}"
        return well_formed(text).encode()

    def break_control_tokens(self, text: str) -> str:
        """Return the text with every control token in it broken by a zero-width space.

        A data row, a tool or a model may write `<|image_pad|>` or `<|im_end|>` as plain text; it must stay text. Half
        of a surrogate pair, which no tokenizer accepts, becomes U+FFFD.
        """
        return self._control.sub(_break, text if text.isascii() else well_formed(text))

    def first_added(self, text: str) -> str | None:
        """Return the first added token that the tokenizer finds in a text; None where there is none."""
        names = {index: token for token, index in self.added.items()}
        return next((names[index] for index in self.encode(text) if index in names), None)

    def cut(self, text: str) -> tuple[str, str, str]:
        """Return the text before its first added token, the text from there to the end of its last one, and the rest.

        The three can be tokenised separately, the outer two also together with any text next to them. Without an added
        token, the whole text is the first part.
        """
        found = [(match.start(), match.end()) for match in self._cut.finditer(text)]
        if not found:
            return text, "", ""
        start = found[0][0]
        end = found[-1][1]
        return text[:start], text[start:end], text[end:]


def _cut_tokens(added: Iterable[Any], has_normalizer: bool) -> list[str]:
    """Return the tokens that the tokenizer finds next to any text, and that swallow none of that text.

    Left out are tokens that another token contains or overlaps, because it could be found in their place.
    """
    tokens = [token for token in added if token.content]
    texts = [token.content for token in tokens]
    endings = {text[start:] for text in texts for start in range(1, len(text))}
    everything = "\0".join(texts)

    def stands_alone(text: str) -> bool:
        return everything.count(text) == 1 and not any(text[:size] in endings for size in range(1, len(text)))

    def is_plain(token: Any) -> bool:
        return not (token.lstrip or token.rstrip or token.single_word or (token.normalized and has_normalizer))

    return [token.content for token in tokens if is_plain(token) and stands_alone(token.content)]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _break(match: re.Match[str]) -> str:
    return match[0][0] + "\u200b" + match[0][1:]
