"""What the policy misreads: its own wrong first attempts, thousands a second, found by forward passes over solutions.

Where a solution writes a number of the picture, a number is drawn from those that the policy would write there. If it
is another one, the solution of the problem as read is an attempt that the policy could have made.

Legend: N taught tokens of a batch, D digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from agents.model.policy import PolicyModel
from envs.geo3k.problem import Problem, read_as
from trainer.starter.batches import Collator, SftBatch, taught_logits
from trainer.starter.demonstrations import Demonstration
from trainer.starter.lessons import Lessons, OwnAttempts
from trainer.starter.plans import Attempt
from trainer.starter.progress import first_written

#: Readings of each picture: the first is an attempt; the second, if it differs, the one after it.
READINGS = 2


@dataclass(frozen=True)
class Written:
    """Where the solution of the lesson at `index` first writes the given at `place`: tokens `begin` to `end` - 1 of N.

    Example: `Written(index=40, place=0, begin=12, end=14)`.
    """

    index: int
    place: int
    begin: int
    end: int


class Solutions:
    """The solutions of the problems of some lessons, as a data set, and how its batches are made."""

    def __init__(self, lessons: Lessons, indices: Sequence[int], collator: Collator) -> None:
        self._lessons, self._indices, self._collator = lessons, indices, collator

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> tuple[int, Demonstration]:
        return self._indices[number], self._lessons.solution(self._indices[number])

    def collate(self, solutions: Sequence[tuple[int, Demonstration]]) -> tuple[SftBatch, list[Written]]:
        """Return solutions as a batch, and where it writes the numbers of their pictures."""
        lessons = [lesson for _, lesson in solutions]
        index_of = {id(lesson): index for index, lesson in solutions}
        written, begun = [], 0
        for lesson in (lesson for row in self._collator.rows(lessons) for lesson in row):
            index, tokenizer = index_of[id(lesson)], self._lessons.tokenizer
            places = self._lessons.problem(index).drawn_givens
            written += [
                Written(index, places[given], begun + begin, begun + end)
                for given, begin, end in first_written(lesson, tokenizer)
            ]
            begun += int(lesson.loss_mask_T.sum())
        return self._collator(lessons), written


@torch.no_grad()
def misreadings(
    model: PolicyModel,
    lessons: Lessons,
    batches: Iterable[tuple[SftBatch, Sequence[Written]]],
    device: torch.device,
    seed: int,
) -> list[OwnAttempts]:
    """Return what the policy misreads in batches of `Solutions`: a wrong first attempt, or two wrong ones."""
    digits_D = torch.tensor(lessons.tokenizer.convert_tokens_to_ids(list("0123456789")), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    draws, found = torch.Generator().manual_seed(seed), []
    for batch, written in batches:
        with autocast, torch.compiler.set_stance("force_eager"):
            logits_ND = taught_logits(model, batch.to(device))[:, digits_D].float()
        read_N2 = torch.multinomial(logits_ND.softmax(-1).cpu(), READINGS, replacement=True, generator=draws)
        readings: dict[int, dict[int, list[str]]] = defaultdict(dict)
        for number in written:
            texts = ["".join(map(str, digits)) for digits in read_N2[number.begin : number.end].T.tolist()]
            readings[number.index][number.place] = texts
        for index, texts in readings.items():
            problem = lessons.problem(index)
            wrong = wrong_attempts([_as_read(problem, texts, reading) for reading in range(READINGS)])
            found += [OwnAttempts(index, wrong[:count]) for count in range(1, len(wrong) + 1)]
    return found


def _as_read(problem: Problem, texts: dict[int, list[str]], reading: int) -> Problem | None:
    """Return the problem with the numbers of a reading; None where it is right, or no such problem."""
    givens = list(problem.givens)
    for place, numbers in texts.items():
        givens[place] = int(numbers[reading])
        if str(givens[place]) != numbers[reading]:  # it begins with 0
            return None
    return read_as(problem, tuple(givens))


def wrong_attempts(readings: Sequence[Problem | None]) -> tuple[Attempt, ...]:
    """Return the attempts of readings, one after the other, up to the first that is right or answers as the last."""
    wrong: list[Attempt] = []
    for problem in readings:
        if problem is None or (wrong and wrong[-1].answer == problem.answer):
            break
        wrong.append(Attempt.at(problem, True, wrong))
    return tuple(wrong)
