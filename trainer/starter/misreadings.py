"""What the policy misreads: its own wrong first attempts, thousands a second, found by forward passes over solutions.

The numbers that the policy takes for the likeliest where a solution writes those of the picture are its reading. If it
is wrong, the solution of the problem as read is the attempt that a greedy policy makes. It is not drawn at random: a
third of the slips of a sampled policy are right when it simply reads again, and teach it not to doubt what it reads.

Legend: N taught tokens of a batch, D digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agents.model.policy import PolicyModel
from envs.geo3k.problem import Problem, read_as
from trainer.starter.batches import Collator, SftBatch, taught_logits
from trainer.starter.demonstrations import Demonstration
from trainer.starter.lessons import Lessons, OwnAttempts
from trainer.starter.plans import Attempt
from trainer.starter.progress import first_written


@dataclass(frozen=True)
class Written:
    """Where the solution of the lesson at an index first writes the given at a place: tokens `begin` to `end` - 1."""

    index: int
    problem: Problem
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
            problem = self._lessons.problem(index)
            written += [
                Written(index, problem, problem.drawn_givens[given], begun + begin, begun + end)
                for given, begin, end in first_written(lesson, tokenizer)
            ]
            begun += int(lesson.loss_mask_T.sum())
        return self._collator(lessons), written


@torch.no_grad()
def misreadings(
    model: PolicyModel,
    tokenizer: Any,
    batches: Iterable[tuple[SftBatch, Sequence[Written]]],
    device: torch.device,
) -> list[OwnAttempts]:
    """Return what the policy misreads in batches of `Solutions`: a wrong first attempt, or two wrong ones."""
    digits_D = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    found = []
    for batch, written in batches:
        with autocast, torch.compiler.set_stance("force_eager"):
            logits_ND = taught_logits(model, batch.to(device))[:, digits_D].float().cpu()
        numbers: dict[int, list[Written]] = defaultdict(list)
        for number in written:
            numbers[number.index].append(number)
        for index, spans in numbers.items():
            digits = torch.cat([logits_ND[number.begin : number.end] for number in spans])
            wrong = wrong_attempts([_as_read(spans, reading) for reading in likeliest_two(digits)])
            found += [OwnAttempts(index, wrong[:count]) for count in range(1, len(wrong) + 1)]
    return found


def likeliest_two(logits_ND: Tensor) -> tuple[list[int], list[int]]:
    """Return the two likeliest readings of N digits: the next one differs in the digit where that costs least."""
    best_N2 = logits_ND.topk(2, dim=-1)
    first = best_N2.indices[:, 0].tolist()
    place = int((best_N2.values[:, 0] - best_N2.values[:, 1]).argmin())
    return first, [*first[:place], int(best_N2.indices[place, 1]), *first[place + 1 :]]


def _as_read(spans: Sequence[Written], digits: Sequence[int]) -> Problem | None:
    """Return the problem of these numbers with the digits of a reading; None where it is right, or no such problem."""
    problem, rest = spans[0].problem, iter(digits)
    givens = list(problem.givens)
    for number in spans:
        text = "".join(str(next(rest)) for _ in range(number.begin, number.end))
        givens[number.place] = int(text)
        if str(int(text)) != text:  # it begins with 0
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
