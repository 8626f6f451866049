"""The text of each token of a stream: ids and the bytes of each come in, texts that together are its text go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The most bytes that a character of UTF-8 has.
_MAX_BYTES = 4


def texts_of(ids: Sequence[int], tokens: Mapping[int, bytes]) -> list[str]:
    r"""Return the text of each token. A character that several tokens share stands at the last of them, and bytes that
    are no text are written out.

    >>> texts_of([1, 2, 3, 9], {1: b"caf", 2: b"\xc3", 3: b"\xa9!"})
    ['caf', '', 'é!', '<|9|>']
    """
    texts: list[str] = []
    while (place := len(texts)) < len(ids):
        found = _shared(ids[place : place + _MAX_BYTES], tokens)
        if found:
            texts += [""] * (found[0] - 1) + [found[1]]
        elif (spelled := tokens.get(ids[place])) is None:
            texts.append(f"<|{ids[place]}|>")
        else:
            texts.append(spelled.decode("utf-8", errors="backslashreplace"))
    return texts


def _shared(ids: Sequence[int], tokens: Mapping[int, bytes]) -> tuple[int, str] | None:
    """Return how many of the first tokens make up whole characters together, the fewest, and their text."""
    together = b""
    for count, each in enumerate(ids, start=1):
        if each not in tokens:
            return None
        together += tokens[each]
        try:
            return count, together.decode("utf-8")
        except UnicodeDecodeError:
            continue
    return None
