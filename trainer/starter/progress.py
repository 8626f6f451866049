"""Measures how much of held-out lessons the policy gets right, by kind, family and level, with one forward pass.

A greedy policy writes a lesson to the letter exactly if each of its tokens is the most likely one after those before
it. So nothing needs to be sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any

import torch

from agents.model.policy import PolicyModel
from trainer.starter.batches import Collator, SftBatch, taught_logits
from trainer.starter.demonstrations import Demonstration
from trainer.starter.lessons import Lessons
from trainer.starter.plans import Mixture
from trainer.starter.recipes import Recipe

#: One turn with all steps: what is measured of problems does not depend on a stage's habits.
STEPS_ONLY = Mixture(tools_offered=0.0, reasons=1.0, checks=0.0)


@dataclass(frozen=True)
class Scores:
    """Shares of held-out lessons.

    `reading` is the share of the numbers in the pictures that the policy writes right where a lesson first names them,
    given the text before; `exact` that of the lessons that a greedy policy writes to the letter.

    Example: `Scores(0.93, 0.71, {"figure": 0.65, "numbers": 0.8}, {"isosceles": 0.97}, {"1": 0.95})`.
    """

    reading: float
    exact: float
    exact_by_kind: Mapping[str, float] = field(default_factory=dict)
    reading_by_family: Mapping[str, float] = field(default_factory=dict)
    exact_by_family: Mapping[str, float] = field(default_factory=dict)
    reading_by_level: Mapping[str, float] = field(default_factory=dict)

    def as_row(self) -> dict[str, Any]:
        """Return the shares, rounded, for a log."""
        return {
            name: {key: round(share, 4) for key, share in sorted(value.items())}
            if isinstance(value, dict)
            else round(value, 4)
            for name, value in asdict(self).items()
        }


class Probe:
    """Held-out lessons of a stage, for measuring.

    Example: `Probe(tokenizer, recipe, 0, collator).measure(model, device).reading` is 0.1 for a guess among digits.
    """

    def __init__(self, tokenizer: Any, recipe: Recipe, number: int, collator: Collator) -> None:
        stage = replace(
            recipe.stages[number], steps=1, batch_size=recipe.num_probes, mixture=STEPS_ONLY, blind_frac=0.0
        )
        lessons = Lessons(tokenizer, stage, recipe.seed, "validation")
        self._tokenizer = tokenizer
        self.lessons = [lessons[index] for index in range(len(lessons))]
        at_once = recipe.stages[number].batch_size
        parts = [self.lessons[start : start + at_once] for start in range(0, len(self.lessons), at_once)]
        #: Each batch with its lessons in the order of its tokens.
        self._batches = [(collator(part), [lesson for row in collator.rows(part) for lesson in row]) for part in parts]

    @torch.no_grad()
    def measure(self, model: PolicyModel, device: torch.device) -> Scores:
        """Return what the policy gets right now. Compiled blocks run as they were written, for other shapes."""
        exact: dict[tuple[str, str], list[float]] = defaultdict(list)
        reading: dict[tuple[str, str], list[float]] = defaultdict(list)
        for batch, lessons in self._batches:
            for lesson, right in self._right(batch.to(device), lessons, model):
                groups = [("all", ""), ("kind", lesson.kind)]
                groups += [("family", lesson.family), ("level", str(lesson.level))] if lesson.family else []
                read = [all(right[begin:end]) for _, begin, end in first_written(lesson, self._tokenizer)]
                for group in groups:
                    exact[group].append(all(right))
                    reading[group] += read

        def by(values: Mapping[tuple[str, str], list[float]], name: str) -> dict[str, float]:
            return {key: mean(found) for (group, key), found in values.items() if group == name and found}

        return Scores(
            mean(reading["all", ""] or [0.0]),
            mean(exact["all", ""]),
            by(exact, "kind"),
            by(reading, "family"),
            by(exact, "family"),
            by(reading, "level"),
        )

    def _right(
        self, batch: SftBatch, lessons: Sequence[Demonstration], model: PolicyModel
    ) -> Iterator[tuple[Demonstration, list[bool]]]:
        """Yield each lesson with whether the policy's first choice is right, for each taught token."""
        kind = batch.ids_BT.device.type
        autocast = torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
        with autocast, torch.compiler.set_stance("force_eager"):
            right_N = taught_logits(model, batch).argmax(-1) == batch.ids_BT[batch.loss_mask_BT]
        right = iter(right_N.tolist())
        for lesson in lessons:
            yield lesson, [next(right) for _ in range(int(lesson.loss_mask_T.sum()))]


def first_written(lesson: Demonstration, tokenizer: Any) -> Iterator[tuple[int, int, int]]:
    """Yield where a lesson first writes each number of its picture: which of `givens`, and a span of taught tokens."""
    tokens = tokenizer.convert_ids_to_tokens(lesson.ids_T[lesson.loss_mask_T].tolist())
    unread, begin = dict(enumerate(lesson.givens)), 0
    for place, token in enumerate([*tokens, ""]):
        if token.isdigit():
            continue
        number = "".join(tokens[begin:place])
        given = next((given for given, text in unread.items() if text == number), None)
        if given is not None:
            del unread[given]
            yield given, begin, place
        begin = place + 1
