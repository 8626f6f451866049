"""Text to token ids and back with one tokenizer, by the shortest way that gives exactly what the tokenizer gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envs.types import well_formed

# What clean-up of spaces, normalisation, truncation or a prefix space would show on.
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
    """Return the byte for each character that byte-level BPE writes it as: itself where that can be seen and is no
    space, the next free one from 256 on otherwise."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Encoder:
    """One tokenizer.

    Example::

        encoder = Encoder(tokenizer)
        ids = encoder.encode("Score 1.0")                      # [50, 83, ...], no token added
        encoder.decode(ids)                                    # "Score 1.0"
        encoder.harmless("a <|im_end|> b")                     # the token broken by a zero-width space
        encoder.cut("\\n<|im_start|>user\\n<|x|>Hi")             # ("\\n", "<|im_start|>user\\n<|x|>", "Hi")
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        #: Every added token's text and id, special or not.
        self.added: dict[str, int] = {token.content: int(index) for index, token in added.items()}
        self._tokenizer = tokenizer
        self.encode, self.decode = self._slow_encode, self._slow_decode
        special = set(tokenizer.all_special_tokens)
        control = [t.content for t in added.values() if t.special or t.content.startswith("<|") or t.content in special]
        self._control = _any_of(control)
        cuts: list[str] = []
        if tokenizer.is_fast:
            backend = tokenizer.backend_tokenizer
            cuts = _cut_tokens(added.values(), has_normalizer=backend.normalizer is not None)
            # Called first: Transformers switches off truncation and padding, which a tokenizer.json may have on.
            expected = [self._slow_encode(text) for text in (*_PROBES, "".join(self.added))]
            self._prove(backend, expected)
        self._cut = _any_of(cuts)

    def _prove(self, backend: Any, expected: list[list[int]]) -> None:
        """Take the tokenizer's backend where it gives what the tokenizer gives; it is two to three times faster."""

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

        Those of one token may be part of a character: only together with the next ones they are text.
        """
        try:
            token = self._tokenizer.convert_ids_to_tokens(int(token_id))
            text = self.decode([int(token_id)])
        except Exception:  # an id that no tokenizer takes
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

    def harmless(self, text: str) -> str:
        """Return the text with every control token in it broken by a zero-width space.

        A row, a tool or a model may write `<|image_pad|>` or `<|im_end|>` as plain text; it must stay text. Half a
        surrogate pair, which no tokenizer takes, becomes U+FFFD.
        """
        return self._control.sub(_break, text if text.isascii() else well_formed(text))

    def first_added(self, text: str) -> str | None:
        """Return the first added token of a text, as the tokenizer finds it; None where there is none."""
        names = {index: token for token, index in self.added.items()}
        return next((names[index] for index in self.encode(text) if index in names), None)

    def cut(self, text: str) -> tuple[str, str, str]:
        """Return the text before its first added token, from there to the end of its last one, and the rest.

        The three can be tokenised apart, and the outer two together with any text that stands next to them. With no
        such token, all of it is the first part.
        """
        found = [(match.start(), match.end()) for match in self._cut.finditer(text)]
        if not found:
            return text, "", ""
        start, end = found[0][0], found[-1][1]
        return text[:start], text[start:end], text[end:]


def _cut_tokens(added: Iterable[Any], has_normalizer: bool) -> list[str]:
    """Return the tokens that are found in any surroundings, and take nothing of these.

    Not so where another token contains one, or ends as one begins, and could be found in its place.
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
