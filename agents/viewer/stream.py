"""An episode's tokens in a terminal: a record and its score in; text out, coloured by who wrote it, by probability or
by the gap between engine and trainer.

Legend: T tokens of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from rich.text import Text

from agents.recording import EpisodeRecord, ScoreRecord
from agents.viewer.shown import visible_lines
from agents.viewer.spelling import texts_of

Colouring = Literal["mask", "probability", "gap"]

#: Lowest probabilities, and largest gaps, of the levels from the quietest to the loudest; the last has no bound.
PROBABILITIES, GAPS = (0.9, 0.5, 0.1, 0.01), (0.001, 0.01, 0.1, 1.0)
STYLES = ("green", "cyan", "yellow", "magenta", "bold red")
READ, WRITTEN, UNKNOWN = "dim", "bold", "underline"
#: Without colours, a token of this level or a louder one has its figure behind it.
MIN_NOTED = 2
#: A run of more equal tokens, as those of a picture, is shown as one with their number.
MAX_RUN = 4


def stream_text(
    episode: EpisodeRecord,
    score: ScoreRecord | None,
    tokens: Mapping[int, bytes],
    by: Colouring,
    has_colours: bool,
) -> Text:
    """Return the stream of an episode. Without colours, what the model wrote stands in ⟦ ⟧ and figures in { }."""
    values_T = _values(episode, score, by)
    text, written = Text(), False
    for place, label in _runs(episode, tokens):
        is_model = bool(episode.mask[place])
        if is_model != written and not has_colours:
            text.append("⟦" if is_model else "⟧")
        written = is_model
        if not is_model:
            text.append(label, READ)
            continue
        value = values_T[place]
        level = None if value is None else level_of(value, by)
        text.append(label, WRITTEN if by == "mask" else UNKNOWN if level is None else STYLES[level])
        if not has_colours and value is not None and level is not None and level >= MIN_NOTED:
            text.append(f"{{{value:.2g}}}")
    return text.append("⟧") if written and not has_colours else text


def level_of(value: float, by: Colouring) -> int:
    """Return how loud a token is shown, 0 to 4.

    Example: a probability of 0.6 is 1, a gap of 0.05 is 2.
    """
    if by == "probability":
        return sum(value < bound for bound in PROBABILITIES)
    return sum(value >= bound for bound in GAPS)


def legend(by: Colouring, has_colours: bool) -> Text:
    """Return what the colours mean, or what the marks mean where there are none."""
    bounds = PROBABILITIES if by == "probability" else GAPS
    if not has_colours:
        loud = f"below {bounds[MIN_NOTED - 1]:g}" if by == "probability" else f"from {bounds[MIN_NOTED - 1]:g} on"
        note = "" if by == "mask" else f", {{{by} {loud}}}"
        return Text(f"⟦written by the model⟧, read{note}")
    if by == "mask":
        return Text.assemble(("written by the model", WRITTEN), "  ", ("read", READ))
    sign = ">=" if by == "probability" else "<"
    last = f"{'<' if by == 'probability' else '>='} {bounds[-1]:g}"
    names = [f"{sign} {bound:g}" for bound in bounds] + [last]
    levels = [part for name, style in zip(names, STYLES, strict=True) for part in ((name, style), "  ")]
    title = "probability " if by == "probability" else "|train - rollout| "
    return Text.assemble(title, *levels, ("unknown", UNKNOWN), "  ", ("read", READ))


def _values(episode: EpisodeRecord, score: ScoreRecord | None, by: Colouring) -> Sequence[float | None]:
    """Return each token's probability or gap; None where it has none."""
    found: list[float | None] = [None] * len(episode.logprobs)
    if by == "probability":
        found = [None if x is None else math.exp(x) for x in episode.logprobs]
    elif by == "gap" and score is not None and len(score.logprobs) == len(episode.logprobs):
        pairs = zip(score.logprobs, episode.logprobs, strict=True)
        found = [None if x is None or y is None else abs(x - y) for x, y in pairs]
    each = iter(found)
    return [next(each) if bit else None for bit in episode.mask]


def _runs(episode: EpisodeRecord, tokens: Mapping[int, bytes]) -> Iterator[tuple[int, str]]:
    """Yield the place and the text of each token, of runs of equal ones that were read only the first."""
    texts = texts_of(episode.ids, tokens)
    for (_, is_model), run in groupby(range(len(texts)), lambda place: (episode.ids[place], episode.mask[place])):
        places = list(run)
        if len(places) > MAX_RUN and not is_model:
            yield places[0], f"{visible_lines(texts[places[0]])}×{len(places)}"
        else:
            yield from ((place, visible_lines(texts[place])) for place in places)
