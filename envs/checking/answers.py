"""Checks the rewards: the right answer is a success, a wrong answer is none, and only the model's own text counts."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from envs.checking.episodes import PlayedEpisode, Script
from envs.checking.findings import NOT_REACHED, Evidence, listed, names_label, quoted, refuse, texts, where
from envs.checking.hostile import MAX_TOOLS, example_arguments, write_call
from envs.checking.messages import usable
from envs.checks import NotApplicable
from envs.env import EnvArgs
from envs.grading import grade
from envs.tool_calls import outside_tool_calls

NO_ANSWER = "That is all."
#: How a model may write its final answer.
FORMS = {"\\boxed{label}": "\\boxed{%s}", "Answer: label": "Answer: %s", "label": "%s"}
#: A number with fewer digits was written by a person.
MIN_ROUNDED_DIGITS = 15


def answer_scripts(
    survey: PlayedEpisode, labels: Sequence[str], args: EnvArgs, keeps_thoughts: bool = False
) -> list[Script]:
    """Return scripts for one sample: right answers, wrong answers, and tool calls that may reveal its label.

    `labels` are those of the samples; one with another meaning becomes a wrong answer. With `keeps_thoughts` the
    environment gets what the model thinks, too.
    """
    label = None
    if args.grader != "none":
        label = survey.sample.label
    scripts = [Script("plain", "a plain answer", ("The answer is 7.",))]
    tools = usable(survey.tools)[:MAX_TOOLS]
    for tool in tools:
        name = tool["function"]["name"]
        call = write_call(name, example_arguments(tool), args.tool_format)
        scripts.append(Script("plain", f"a call of {name}", (call,)))
    if survey.solution:
        scripts.append(Script("gold", "solution()", survey.solution))
    elif label is not None:
        scripts += [Script("gold", name, (form.replace("%s", as_written(label)),)) for name, form in FORMS.items()]
    else:
        return scripts  # what is wrong is not known either
    wrong = {"empty text": "", "no answer": "I do not know.", "a wrong answer": f"\\boxed{{{_near(label)}}}"}
    question = "\n".join(texts(user for user in survey.prompt if user["role"] == "user"))
    # A grader that searches the text for the label pays for a question that names it.
    if question.strip() not in ("", str(label)):
        wrong["the question again"] = question
    revealing: list[Script] = []
    if label is not None:
        if keeps_thoughts:
            wrong["the answer in a thought"] = f"<think>Is it \\boxed{{{as_written(label)}}}?</think>I do not know."
        others = [each for each in dict.fromkeys(labels) if _differ(each, label)]
        if others:
            wrong["another's label"] = f"\\boxed{{{others[0]}}}"
        if len(others) > 1:  # one other could be a part of the right answer
            wrong["several answers"] = f"{others[0]} or {label} or {others[1]}"
        # Longer ones would end before their last text, which is what is judged.
        revealing += [each for each in _revealing(survey, tools, args) if len(each.texts) <= args.max_turns]
    return [*scripts, *(Script("wrong", name, (text,)) for name, text in wrong.items()), *revealing]


def as_written(label: str) -> str:
    """Return a label as a person would write it: without spaces around it, and a number that a computer's rounding has
    made long as a short one.

    >>> as_written(" Paris"), as_written("0.30000000000000004"), as_written("18.799999237060547")
    ('Paris', '0.3', '18.8')
    """
    label = label.strip()
    # Whole numbers are never rounded, and few digits were written by a person.
    if "." not in label or sum(map(str.isdecimal, label)) < MIN_ROUNDED_DIGITS:
        return label
    with contextlib.suppress(ValueError, OverflowError):
        value = float(label)
        digits = 7 if _single(value) == value else 15  # a number of 32 bits that was stored in 64, or one of 64
        short = f"{value:.{digits}g}"
        is_same = digits == 15 or _single(float(short)) == value
        if math.isfinite(value) and is_same and len(short) <= len(label) - 4:
            return short
    return label


def _single(value: float) -> float:
    """Return the nearest number of 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _revealing(survey: PlayedEpisode, tools: Sequence[dict[str, Any]], args: EnvArgs) -> Iterator[Script]:
    """Yield scripts in which the environment may show the label and the model never writes it as its answer."""
    if len(survey.solution) > 1:
        yield Script("revealed", "solution() without its answer", (*survey.solution[:-1], NO_ANSWER))
    label = str(survey.sample.label)
    for tool in tools:
        name = tool["function"]["name"]
        arguments = example_arguments(tool, label)
        if label in arguments.values():
            call = write_call(name, arguments, args.tool_format)
            yield Script("revealed", f"{name} of the label", (call, NO_ANSWER))


def _near(label: str | None) -> str:
    """Return a wrong answer: the next number, or a word."""
    try:
        return str(Fraction(label or "") + 1)
    except (ValueError, ZeroDivisionError):
        if label == "wrong":
            return "right"
        return "wrong"


def _differ(one: str, other: str) -> bool:
    """Return whether two labels certainly have different meanings."""
    try:
        return Fraction(one) != Fraction(other)
    except (ValueError, ZeroDivisionError):
        # The grader alone would call texts different that differ in case or spaces.
        return one.casefold().split() != other.casefold().split() and grade(one, other) == 0.0


def check_gold(evidence: Evidence) -> str:
    """The right answer is a success."""
    by_sample: dict[str, list[PlayedEpisode]] = defaultdict(list)
    for episode in evidence.of("gold"):
        by_sample[episode.sample.id].append(episode)
    if not by_sample:
        raise NotApplicable("no solution() and no label that is an answer, so the right answer is unknown")
    judged = [(episode, episode.reward) for episode in evidence.of("gold") if episode.reward is not None]
    if evidence.spec.success_rule is None:
        rewards = listed(f"{reward:g}" for _, reward in judged)
        raise NotApplicable(f"the entry says success: none; rewards: {rewards or 'none'}")
    problems = []
    for episodes in by_sample.values():
        sample = episodes[0].sample
        scores = [f"{episode.script.name} {episode.reward:g}" for episode in episodes if episode.reward is not None]
        num_turns = len(episodes[0].script.texts)
        if num_turns > evidence.args.max_turns:
            problems.append(f"{where(episodes[0])}: takes {num_turns} turns, max_turns is {evidence.args.max_turns}")
        # One form is enough: a prompt may ask for a box, or for the bare answer.
        elif scores and not any(map(evidence.is_success, episodes)):
            form = ""
            if sample.label and as_written(sample.label) != sample.label:
                form = f", as a person writes it {as_written(sample.label)!r}"
            rule = f"{', '.join(scores)}; {_needed(evidence, episodes)}"
            problems.append(f"sample {sample.id} (label {sample.label!r:.40}{form}): {rule}")
    refuse(problems)
    if not judged:
        raise NotApplicable(NOT_REACHED)
    total = Counter(episode.script.name for episode, _ in judged)
    right = Counter(episode.script.name for episode, _ in judged if evidence.is_success(episode))
    return ", ".join(f"{form} {right[form]}/{count}" for form, count in total.items())


def _needed(evidence: Evidence, episodes: Sequence[PlayedEpisode]) -> str:
    """Say what the right answer would need to be a success, and how to say something else."""
    spec = evidence.spec
    if isinstance(spec.success, str):
        keys = listed(key for each in episodes for step in each.steps for key in step.info)
        return f"success is {spec.success_rule}, which has {keys or 'no key'}"
    if spec.success is not None:
        return f"success is {spec.success_rule}"
    best = max(each.reward for each in episodes if each.reward is not None)
    needed = f"best is {spec.reward_max_val:g}"
    if best > spec.reward_min_val:
        return f"{needed}; if that is a success, write success: {best:g} in the entry"
    return needed


def check_wrong(evidence: Evidence) -> str:
    """Wrong answers are no success, and no reward is out of the range of the entry."""
    spec = evidence.spec
    judged = [(episode, episode.reward) for episode in evidence.of("wrong") if episode.reward is not None]
    problems = [
        f"{where(episode)}: {quoted(episode.script.texts[-1])} scores {reward:g}"
        for episode, reward in judged
        if evidence.is_success(episode)
    ]
    low, high = spec.reward_bounds
    for episode in evidence.episodes:
        reward = episode.reward
        if reward is not None and reward < low:
            problems.append(f"{where(episode)}: scores {reward:g}, below the reward_min_val {low:g} of the entry")
        if reward is not None and reward > high:
            problems.append(f"{where(episode)}: scores {reward:g}, above the reward_max_val {high:g} of the entry")
    refuse(problems)
    if not judged:
        raise NotApplicable("no wrong answer is known")
    num_worst = sum(reward == spec.reward_min_val for _, reward in judged)
    return f"none of {len(judged)} texts is a success; {num_worst} score {spec.reward_min_val:g}"


def check_reward_source(evidence: Evidence) -> str:
    """The reward depends on the model's own text only, not on what the environment showed."""
    tool_format = evidence.args.tool_format
    # Where the answer is what a tool is given, the last text says nothing about the reward.
    if not any(
        names_label(outside_tool_calls(episode.script.texts[-1], tool_format), episode.sample.label)
        for episode in filter(evidence.is_success, evidence.of("gold"))
    ):
        raise NotApplicable("no final text with the label is known to get a reward")
    revealing = [each for each in evidence.of("revealed") if each.reward is not None and _shows_label(each)]
    if not revealing:
        raise NotApplicable("no tool result showed a label")
    problems = [
        f"{where(episode)}: shown {episode.sample.label!r:.40}, "
        f"the model's {quoted(episode.script.texts[-1])} scores {episode.reward:g}"
        for episode in filter(evidence.is_success, revealing)
    ]
    refuse(problems)
    return f"{len(revealing)} results showed the label; a final text without an answer scored less"


def _shows_label(episode: PlayedEpisode) -> bool:
    """Return whether the environment showed the label and the script was played to its last text."""
    label = episode.sample.label
    answers = [message for step in episode.steps for message in step.messages]
    return len(episode.steps) == len(episode.script.texts) and any(names_label(text, label) for text in texts(answers))
