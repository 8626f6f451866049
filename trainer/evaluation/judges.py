"""Compares the verdicts of judges with the environment's own grader, episode by episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.evaluation.results import EvaluatedEpisode

#: A verdict of at least this much, of 0 to 1, calls an episode right.
THRESHOLD = 0.5


@dataclass(frozen=True)
class JudgeAgreement:
    """How often a judge and the grader agree; `right_wrong` counts what the judge calls right and the grader wrong."""

    num_episodes: int
    agreement: float
    right_right: int
    right_wrong: int
    wrong_right: int
    wrong_wrong: int


def agreements(episodes: Sequence[EvaluatedEpisode]) -> Mapping[str, JudgeAgreement]:
    """Return the agreement of each judge, on the episodes with its verdict whose environment knows a success."""
    graded = [episode for episode in episodes if episode.is_right is not None]
    found: dict[str, JudgeAgreement] = {}
    for judge in sorted({judge for episode in graded for judge in episode.verdicts}):
        judged = [episode for episode in graded if judge in episode.verdicts]
        counts = Counter((episode.verdicts[judge] >= THRESHOLD, episode.is_right) for episode in judged)
        cells = [counts[by_judge, by_grader] for by_judge in (True, False) for by_grader in (True, False)]
        found[judge] = JudgeAgreement(len(judged), (cells[0] + cells[3]) / len(judged), *cells)
    return found
