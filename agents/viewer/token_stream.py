"""Prints an episode's token stream in a terminal.

Tokens are coloured by mask, by probability, or by the gap between the log-probs of engine and trainer.

Legend: T tokens of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from rich.text import Text

from agents.recording import EpisodeRecord, ScoreRecord
from envs.safe_text import escape_lines

Colouring = Literal["mask", "probability", "gap"]

#: Bounds between the five levels of a token: lowest probabilities of levels 0 to 3, lowest gaps of levels 1 to 4.
PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
GAPS = (0.001, 0.01, 0.1, 1.0)
STYLES = ("green", "cyan", "yellow", "magenta", "bold red")
READ = "dim"
WRITTEN = "bold"
UNKNOWN = "underline"
#: Without colours, a token of this level or above is followed by its value.
MIN_NOTED = 2
#: More equal tokens in a row, such as those of an image, are shown as one token with their number.
MAX_RUN = 4
#: The most bytes that a character of UTF-8 has.
_MAX_BYTES = 4


def stream_text(
    episode: EpisodeRecord,
    score: ScoreRecord | None,
    tokens: Mapping[int, bytes],
    by: Colouring,
    has_colours: bool,
) -> Text:
    """Return the stream of an episode. Without colours, ⟦ ⟧ enclose the model's tokens and { } enclose values."""
    values_T = _values(episode, score, by)
    text = Text()
    written = False
    for place, label in _runs(episode, tokens):
        is_model = bool(episode.mask[place])
        if is_model != written and not has_colours:
            text.append("⟦" if is_model else "⟧")
        written = is_model
        if not is_model:
            text.append(label, READ)
            continue
        value = values_T[place]
        if value is None:
            level = None
        else:
            level = level_of(value, by)
        text.append(label, WRITTEN if by == "mask" else UNKNOWN if level is None else STYLES[level])
        if not has_colours and value is not None and level is not None and level >= MIN_NOTED:
            text.append(f"{{{value:.2g}}}")
    if written and not has_colours:
        return text.append("⟧")
    return text


def level_of(value: float, by: Colouring) -> int:
    """Return how strongly a token is coloured, 0 to 4.

    Example: a probability of 0.6 is 1, a gap of 0.05 is 2.
    """
    if by == "probability":
        return sum(value < bound for bound in PROBABILITIES)
    return sum(value >= bound for bound in GAPS)


def legend(by: Colouring, has_colours: bool) -> Text:
    """Return the legend of the colours, or of the marks if there are no colours."""
    bounds = PROBABILITIES if by == "probability" else GAPS
    if not has_colours:
        if by == "probability":
            loud = f"below {bounds[MIN_NOTED - 1]:g}"
        else:
            loud = f"from {bounds[MIN_NOTED - 1]:g} on"
        note = "" if by == "mask" else f", {{{by} {loud}}}"
        return Text(f"⟦written by the model⟧, read{note}")
    if by == "mask":
        return Text.assemble(("written by the model", WRITTEN), "  ", ("read", READ))
    sign = ">=" if by == "probability" else "<"
    last = f"{'<' if by == 'probability' else '>='} {bounds[-1]:g}"
    names = [f"{sign} {bound:g}" for bound in bounds] + [last]
    levels = [part for name, style in zip(names, STYLES, strict=True) for part in ((name, style), "  ")]
    if by == "probability":
        title = "probability "
    else:
        title = "|train - rollout| "
    return Text.assemble(title, *levels, ("unknown", UNKNOWN), "  ", ("read", READ))


def _values(episode: EpisodeRecord, score: ScoreRecord | None, by: Colouring) -> Sequence[float | None]:
    """Return each token's probability or gap; None if it has none."""
    found: list[float | None] = [None] * len(episode.logprobs)
    if by == "probability":
        found = [None if x is None else math.exp(min(x, 0.0)) for x in episode.logprobs]
    elif by == "gap" and score is not None and len(score.logprobs) == len(episode.logprobs):
        pairs = zip(score.logprobs, episode.logprobs, strict=True)
        found = [None if x is None or y is None else abs(x - y) for x, y in pairs]
    each = iter(found)
    return [next(each) if bit else None for bit in episode.mask]


def _runs(episode: EpisodeRecord, tokens: Mapping[int, bytes]) -> Iterator[tuple[int, str]]:
    """Yield the index and text of each token; a long run of equal tokens outside the model's turns is yielded once."""
    texts = texts_of(episode.ids, tokens)
    for (_, is_model), run in groupby(range(len(texts)), lambda place: (episode.ids[place], episode.mask[place])):
        places = list(run)
        if len(places) > MAX_RUN and not is_model:
            yield places[0], f"{escape_lines(texts[places[0]])}×{len(places)}"
        else:
            yield from ((place, escape_lines(texts[place])) for place in places)


def texts_of(ids: Sequence[int], tokens: Mapping[int, bytes]) -> list[str]:
    r"""Return the text of each token; together they are the text of the stream.

    A character that several tokens share belongs to the last of them. Bytes that are not UTF-8 are written out.

    >>> texts_of([1, 2, 3, 9], {1: b"caf", 2: b"\xc3", 3: b"\xa9!"})
    ['caf', '', 'é!', '<|9|>']
    """
    texts: list[str] = []
    while (place := len(texts)) < len(ids):
        found = _whole_characters(ids[place : place + _MAX_BYTES], tokens)
        if found:
            texts += [""] * (found[0] - 1) + [found[1]]
        elif (spelled := tokens.get(ids[place])) is None:
            texts.append(f"<|{ids[place]}|>")
        else:
            texts.append(spelled.decode("utf-8", errors="backslashreplace"))
    return texts


def _whole_characters(ids: Sequence[int], tokens: Mapping[int, bytes]) -> tuple[int, str] | None:
    """Return the smallest number of first tokens that together are whole characters, and their text."""
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
