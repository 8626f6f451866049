"""Compares the training of a run with that of the recorded run whose rollouts it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: All else that a step reports of its training follows from the same computation.
COMPARED = ("loss", "grad_norm", "rollout_train_kl", "entropy")


@dataclass(frozen=True)
class Comparison:
    """How many of the first steps are equal to the bit, and which figures of the next differ.

    Example::

        compare([{"step": 1, "loss": 0.5}], [{"step": 1, "loss": 0.25}])
        # Comparison(num_steps=1, num_equal=0, differing=("loss 0.5 there, 0.25 here",))
    """

    num_steps: int
    num_equal: int
    differing: tuple[str, ...] = ()

    def line(self, other: str) -> str:
        """Return the result in words; `other` names the run compared with."""
        if not self.num_steps:
            return f"against {other}: there are no figures of training to compare with"
        line = (
            f"against {other}: {', '.join(COMPARED)} are equal to the bit in {self.num_equal} of {self.num_steps} steps"
        )
        if self.differing:
            line += f"; step {self.num_equal + 1}: {', '.join(self.differing)}"
        return line


def compare(there: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the training metrics of some steps with those of the same steps of another run."""
    # A run of rollouts alone has no figures of training.
    pairs = [(other, own) for other, own in zip(there, here, strict=False) if COMPARED[0] in other]
    for number, (other, own) in enumerate(pairs):
        found = [(name, other.get(name), own.get(name)) for name in COMPARED]
        # As text too: NaN equals no number, not even itself.
        differing = tuple(
            f"{name} {old} there, {new} here" for name, old, new in found if old != new and str(old) != str(new)
        )
        if differing:
            return Comparison(len(pairs), number, differing)
    return Comparison(len(pairs), len(pairs))
