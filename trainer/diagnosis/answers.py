"""Gold answers: on the run's own problems the right answer must get the best reward, and a wrong one must not.

The plays and their texts are those of `python -m envs.check`; here the problems are those that will be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.checking.answers import answer_scripts
from envs.checking.playing import Kind, Meddling, Play, Script, checked_prompt, play
from envs.env import EnvArgs
from envs.runner import EnvLimits
from envs.spec import BuildEnv
from envs.types import Sample, SampleSource
from trainer.diagnosis.finding import Verdict, fault, ok, skipped, warning

#: Wrong texts that are tried on each problem.
WRONG = ("no answer", "a wrong answer")
#: How far below the best reward a sum of floats may end.
SLACK = 1e-6


@dataclass(frozen=True)
class Marks:
    """What one problem's right and wrong answers were worth; None where that is not known, or was not tried.

    `error` is what broke the environment. Example: `Marks("geo3k-1", "68", gold=1.0, wrong=0.0)`.
    """

    sample_id: str
    label: str | None
    gold: float | None
    wrong: float | None
    error: str = ""


async def mark(
    samples: SampleSource, build_env: BuildEnv, args: EnvArgs, limits: EnvLimits, count: int, with_wrong: bool
) -> list[Marks]:
    """Play right answers, and wrong ones, on the first problems; the forms of a right one until one gets the best."""
    chosen = [samples[index] for index in range(min(count, len(samples)))]
    labels = [sample.label for sample in chosen if sample.label is not None]
    return [await _mark(sample, labels, build_env, args, limits, with_wrong) for sample in chosen]


async def _mark(
    sample: Sample, labels: Sequence[str], build_env: BuildEnv, args: EnvArgs, limits: EnvLimits, with_wrong: bool
) -> Marks:
    prompt = checked_prompt(sample)

    async def played(script: Script, meddling: Meddling | None = None) -> Play:
        return await play(lambda: build_env(sample, args), sample, prompt, script, limits, args.max_turns, meddling)

    survey = await played(Script("survey", "no turn at all"), Meddling(read_solution=True))
    marks = Marks(sample.id, sample.label, None, None, survey.fault.summary if survey.fault else "")
    if survey.fault:
        return marks
    scripts = answer_scripts(survey, labels, args)

    def of(kind: Kind) -> list[Script]:
        return [script for script in scripts if script.kind == kind]

    for script in of("gold"):
        found = await played(script)
        if found.reward is None:
            marks = replace(marks, error=found.fault.summary if found.fault else "no reward")
        elif marks.gold is None or found.reward > marks.gold:
            marks = replace(marks, gold=found.reward)
        if found.reward is not None and found.reward >= args.reward_max_val - SLACK:
            break
    for script in of("wrong") if with_wrong else ():
        found = await played(script) if script.name in WRONG else None
        if found is not None and found.reward is not None:
            marks = replace(marks, wrong=max(found.reward, marks.wrong or found.reward))
    return marks


def check_answers(marks: Sequence[Marks], best: float, worst: float = 0.0) -> Verdict:
    """Return whether right answers get the best reward or more, and wrong ones less.

    A few that do not are gold answers that nobody can grade, a half of them a grader that does not work.
    """
    known = [each for each in marks if each.gold is not None or each.error]
    if not known:
        return skipped("no solution() and no label, so nobody knows a right answer")
    right = [each for each in known if each.gold is not None and each.gold >= best - SLACK]
    wrong = [each for each in known if each not in right]
    # A reward that is shaped, by a cost for length say, may never be the best one; one that is the worst is no grade.
    worthless = [each for each in wrong if each.gold is None or each.gold <= worst]
    found = f"{len(right)} of {len(known)} gold answers get {best:g}"
    if wrong:
        first = wrong[0]
        got = first.error if first.gold is None else f"gets {first.gold:g}"
        found += f"; the first that does not: sample {first.sample_id} (label {first.label!r:.60}) {got}"
        fix = "mend the grader, --grader or the rows: python -m envs.check shows each play"
        return fault(found, fix) if 2 * len(worthless) > len(known) else warning(found, fix)
    tried = [each for each in known if each.wrong is not None]
    fooled = [each for each in tried if each.wrong is not None and each.wrong >= best]
    if fooled:
        count = f"{len(fooled)} of {len(tried)} problems"
        found = f"wrong answers get {best:g} on {count}, the first is sample {fooled[0].sample_id}"
        fix = "mend the grader: it must not reward every text"
        return fault(found, fix) if len(fooled) == len(tried) else warning(found, fix)
    return ok(f"{found}{f', wrong ones less on all {len(tried)}' if tried else ''}")
