"""Checks the grader on the run's own problems: a right answer must be a success, and a wrong one must not.

It plays the same scripts as `python -m envs.check`, but on the problems of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.checking.answers import answer_scripts
from envs.checking.episodes import PlayedEpisode, Script, checked_prompt, play_episode
from envs.checks import Verdict, fault, ok, skipped, warning
from envs.env import EnvArgs
from envs.spec import BuildEnv, EnvLimits
from envs.success import Success
from envs.types import Sample, SampleSource

#: The names of the wrong scripts that are played on each problem.
WRONG = ("no answer", "a wrong answer")


@dataclass(frozen=True)
class AnswerRewards:
    """The best rewards that the right and the wrong answers of a problem got; None if unknown or not tried.

    `is_solved`: a right answer was a success; `is_fooled`: a wrong one was. `error` says what broke the environment.

    Example: `AnswerRewards("geo3k-1", "68", gold=1.0, wrong=0.0, is_solved=True)`.
    """

    sample_id: str
    label: str | None
    gold: float | None
    wrong: float | None
    is_solved: bool = False
    is_fooled: bool = False
    error: str = ""


async def grade_answers(
    samples: SampleSource,
    build_env: BuildEnv,
    args: EnvArgs,
    limits: EnvLimits,
    success: Success,
    count: int,
    with_wrong: bool,
) -> list[AnswerRewards]:
    """Play right and, if wanted, wrong answers on the first problems.

    The forms of a right answer are played until one is a success.
    """
    chosen = [samples[index] for index in range(min(count, len(samples)))]
    labels = [sample.label for sample in chosen if sample.label is not None]
    return [await _grade(sample, labels, build_env, args, limits, success, with_wrong) for sample in chosen]


async def _grade(
    sample: Sample,
    labels: Sequence[str],
    build_env: BuildEnv,
    args: EnvArgs,
    limits: EnvLimits,
    success: Success,
    with_wrong: bool,
) -> AnswerRewards:
    prompt = checked_prompt(sample)

    async def played(script: Script) -> PlayedEpisode:
        return await play_episode(lambda: build_env(sample, args), sample, prompt, script, limits, args.max_turns)

    survey = await played(Script("survey", "no turn at all"))
    if survey.fault:
        return AnswerRewards(sample.id, sample.label, None, None, error=survey.fault.summary)
    scripts = answer_scripts(survey, labels, args)
    gold: list[PlayedEpisode] = []
    for script in scripts:
        if script.kind == "gold" and not any(episode.is_success(success) for episode in gold):
            gold.append(await played(script))
    wrong = [await played(script) for script in scripts if with_wrong and script.name in WRONG]
    faults = [episode.fault.summary for episode in gold if episode.fault]
    return AnswerRewards(
        sample.id,
        sample.label,
        gold=_best(gold),
        wrong=_best(wrong),
        is_solved=any(episode.is_success(success) for episode in gold),
        is_fooled=any(episode.is_success(success) for episode in wrong),
        error=faults[-1] if faults else "",
    )


def _best(episodes: Sequence[PlayedEpisode]) -> float | None:
    return max((episode.reward for episode in episodes if episode.reward is not None), default=None)


def check_answers(rewards: Sequence[AnswerRewards], success: Success, worst: float = 0.0) -> Verdict:
    """Return whether right answers are a success, and wrong answers not.

    If a few right answers fail, their labels cannot be graded: a warning. If half of them fail, the grader does not
    work: a fault.
    """
    known = [each for each in rewards if each.gold is not None or each.error]
    if not known:
        return skipped("no solution() and no label that is an answer, so no right answer is known")
    right = [each for each in known if each.is_solved]
    wrong = [each for each in known if each not in right]
    # A shaped reward, for instance with a cost for length, may never reach the best; but it is above the worst.
    worthless = [each for each in wrong if each.gold is None or each.gold <= worst]
    if success.key:
        needed = f"a true '{success.key}'"
    else:
        needed = f"{success.reward:g}"
    found = f"{len(right)} of {len(known)} gold answers get {needed}"
    if wrong:
        first = wrong[0]
        if first.gold is None:
            got = first.error
        else:
            got = f"gets {first.gold:g}"
        found += f"; the first that does not: sample {first.sample_id} (label {first.label!r:.60}) {got}"
        fix = (
            "fix the grader, --grader or the rows: python -m envs.check shows each episode; "
            "where the label is no answer, as in a game, write grader: none in the entry; where another reward is a "
            "success, success: 0.9, a key of the info, or none"
        )
        if 2 * len(worthless) > len(known):
            return fault(found, fix)
        return warning(found, fix)
    tried = [each for each in known if each.wrong is not None]
    fooled = [each for each in tried if each.is_fooled]
    if fooled:
        count = f"{len(fooled)} of {len(tried)} problems"
        found = f"wrong answers get {needed} on {count}, the first is sample {fooled[0].sample_id}"
        fix = "fix the grader: it must not reward every text"
        if len(fooled) == len(tried):
            return fault(found, fix)
        return warning(found, fix)
    return ok(f"{found}{f', wrong ones less on all {len(tried)}' if tried else ''}")
