"""Checks the grader on the run's own problems: a right answer must be a success, and a wrong one must not.

It plays the same scripts as `python -m envs.check`, but on the problems of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.checking.answers import answer_scripts
from envs.checking.episodes import PlayedEpisode, Script, play_episode
from envs.checks import Verdict, fault, ok, skipped, warning
from envs.spec import EnvLimits
from envs.success import Success
from envs.types import Sample
from trainer.rollouts.live import LiveContext

#: The names of the wrong scripts that are played on each problem.
WRONG = ("no answer", "a wrong answer")


@dataclass(frozen=True)
class AnswerRewards:
    """What the answers of a problem got: `gold` is the best reward of a right one, None if unknown.

    `is_solved`: a right answer was a success; `is_fooled`: a wrong one was, None if none was tried. `error` says what
    broke the environment.

    Example: `AnswerRewards("geo3k-1", "68", gold=1.0, is_solved=True, is_fooled=False)`.
    """

    sample_id: str
    label: str | None
    gold: float | None
    is_solved: bool = False
    is_fooled: bool | None = None
    error: str = ""


async def grade_answers(context: LiveContext, success: Success, count: int, with_wrong: bool) -> Verdict:
    """Play right and, if wanted, wrong answers on the first problems, and judge their rewards."""
    chosen = [context.train_samples[index] for index in range(min(count, len(context.train_samples)))]
    labels = [sample.label for sample in chosen if sample.label is not None]
    rewards = [await _grade(context, sample, labels, success, with_wrong) for sample in chosen]
    return check_answers(rewards, success, context.spec.reward_min_val)


async def _grade(
    context: LiveContext, sample: Sample, labels: Sequence[str], success: Success, with_wrong: bool
) -> AnswerRewards:
    part = context.spec.part(sample.metadata)
    rule = success.of(sample.metadata)
    if rule is None:  # one environment of a mixture may know no success
        return AnswerRewards(sample.id, sample.label, None)
    args = context.env_args(part.max_turns)
    limits = EnvLimits.of(part)

    async def played(script: Script) -> PlayedEpisode:
        return await play_episode(lambda: context.build_env(sample, args), sample, script, limits, args.max_turns)

    # An environment may know its own solution only after `reset`.
    survey = await played(Script("survey", "no turn at all"))
    if survey.fault:
        return AnswerRewards(sample.id, sample.label, None, error=survey.fault.summary)
    scripts = answer_scripts(survey, labels, args)
    right: list[PlayedEpisode] = []
    for script in scripts:
        # A grader may read one way of writing the answer only, so one success is enough.
        if script.kind == "gold" and not any(episode.is_success(rule) for episode in right):
            right.append(await played(script))
    wrong = [await played(script) for script in scripts if with_wrong and script.name in WRONG]
    rewarded = [episode.reward for episode in right if episode.reward is not None]
    faults = [episode.fault.summary for episode in right if episode.fault]
    return AnswerRewards(
        sample.id,
        sample.label,
        gold=max(rewarded, default=None),
        is_solved=any(episode.is_success(rule) for episode in right),
        is_fooled=any(episode.is_success(rule) for episode in wrong) if wrong else None,
        error=next(iter(faults), ""),
    )


def check_answers(rewards: Sequence[AnswerRewards], success: Success, worst: float = 0.0) -> Verdict:
    """Return whether right answers are a success, and wrong answers not.

    If a few right answers fail, their labels cannot be graded: a warning. If half of them fail, the grader does not
    work: a fault.
    """
    known = [each for each in rewards if each.gold is not None or each.error]
    if not known:
        return skipped("no solution() and no label that is an answer, so no right answer is known")
    failed = [each for each in known if not each.is_solved]
    if success.key:
        needed = f"a true '{success.key}'"
    else:
        needed = f"{success.reward:g}"
    found = f"{len(known) - len(failed)} of {len(known)} gold answers get {needed}"
    if failed:
        first = failed[0]
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
        # A shaped reward, for instance with a cost for length, may never reach the best; but it is above the worst.
        worthless = [each for each in failed if each.gold is None or each.gold <= worst]
        # A few labels that cannot be graded are usual in data sets.
        if 2 * len(worthless) > len(known):
            return fault(found, fix)
        return warning(found, fix)
    tried = [each for each in known if each.is_fooled is not None]
    fooled = [each for each in tried if each.is_fooled]
    if fooled:
        count = f"{len(fooled)} of {len(tried)} problems"
        found = f"wrong answers get {needed} on {count}, the first is sample {fooled[0].sample_id}"
        fix = "fix the grader: it must not reward every text"
        if len(fooled) == len(tried):
            return fault(found, fix)
        return warning(found, fix)
    if tried:
        found += f", wrong ones less on all {len(tried)}"
    return ok(found)
