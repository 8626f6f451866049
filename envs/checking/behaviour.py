"""Checks of what an environment does: it keeps its contract, twice the same, in time, whatever a model writes."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence

from envs.checking.evidence import (
    NOT_REACHED,
    Evidence,
    Finding,
    call_records,
    digest,
    duration,
    grouped,
    listed,
    said,
    unlike,
    where,
)
from envs.checking.playing import Fault, Play, checked_prompt
from envs.runner import StepResult


def check_contract(evidence: Evidence) -> Finding:
    """Every call returns what the contract says, and none raises or hangs."""
    name = "contract"
    faults = [(play, fault) for play, fault in evidence.ordinary_faults if not fault.too_large]
    if faults:
        return Finding(name, False, listed(grouped((play, fault.call, fault.summary) for play, fault in faults)))
    count = len(evidence.of("survey", "gold", "wrong", "plain"))
    return Finding(name, True, f"{count} episodes of reset, step, format_observation, reward and close")


def check_deterministic(evidence: Evidence) -> Finding:
    """The same sample and texts give the same episode, and the same index the same sample."""
    name = "deterministic"
    different = [
        f"sample {first.id}: read again, it is another"
        for first, again in zip(evidence.samples, evidence.samples_again, strict=True)
        if (first.id, first.label, digest(checked_prompt(first)))
        != (again.id, again.label, digest(checked_prompt(again)))
    ]
    pairs = [(first, again) for first, again in evidence.repeats if not first.fault and not again.fault]
    different += [f"{where(first)}: {what}" for first, again in pairs if (what := _difference(first, again))]
    if different:
        return Finding(name, False, listed(different))
    if not pairs:
        return Finding(name, None, NOT_REACHED)
    return Finding(name, True, f"{len(pairs)} episodes played twice and {len(evidence.samples)} samples read twice")


def _difference(first: Play, again: Play) -> str | None:
    """Return how two plays of the same texts differ."""
    if digest(first.opening) != digest(again.opening):
        return f"the first observation differs: {unlike(first.opening, again.opening)}"
    if json.dumps(first.tools, default=repr) != json.dumps(again.tools, default=repr):
        return "the tools differ"
    for number, (one, other) in enumerate(zip(first.steps, again.steps, strict=False), start=1):
        if one.done != other.done:
            return f"step {number} ends the task once and once not"
        if digest(one.messages) != digest(other.messages):
            return f"the answer of step {number} differs: {unlike(one.messages, other.messages)}"
    return None if first.reward == again.reward else f"the rewards are {first.reward:g} and {again.reward:g}"


def check_calls(evidence: Evidence) -> Finding:
    """Nothing that a model can write is a fault, or takes longer than a step may; a broken call is answered."""
    name, limit_s = "malformed calls", evidence.spec.step_timeout_s
    known = {(fault.call, fault.summary) for _, fault in evidence.ordinary_faults}
    plays, problems = evidence.of("hostile", "revealed"), []
    faults: list[tuple[Play, str, str]] = []
    outcomes: dict[str, list[str]] = defaultdict(list)
    for play in plays:
        if play.fault:
            if (play.fault.call, play.fault.summary) not in known and not play.fault.too_large:
                faults.append((play, play.fault.call, play.fault.summary))
            continue
        if play.steps_s and max(play.steps_s) > limit_s:
            problems.append(f"{where(play)}: a step took {duration(max(play.steps_s))}, the limit is {limit_s:g} s")
        if not play.steps or play.script.kind != "hostile":
            continue
        outcome = _outcome(play.steps[-1])
        outcomes[outcome].append(play.script.name)
        if play.script.needs_answer and outcome != "ok" and not any(text.strip() for text in said(play.steps[-1])):
            problems.append(f"{where(play)}: the call cannot be made, and the model is not told ({outcome})")
    if faults or problems:
        return Finding(name, False, listed([*grouped(faults), *problems]))
    if not outcomes:
        return Finding(name, None, NOT_REACHED)
    groups = (f"{outcome}: {', '.join(dict.fromkeys(names))}" for outcome, names in outcomes.items())
    return Finding(name, True, f"{sum(map(len, outcomes.values()))} texts. " + "; ".join(groups))


def _outcome(step: StepResult) -> str:
    """Return what became of a turn, as its info says or else as it looks."""
    if records := call_records(step):
        return " + ".join(dict.fromkeys(str(record.get("outcome")) for record in records))
    if step.done:
        return "ends the episode"
    return "answered" if any(text.strip() for text in said(step)) else "silence"


def check_timing(evidence: Evidence) -> Finding:
    """How long resets and steps take, as the agent loop sees it; `check_calls` judges the odd ones."""
    name, spec = "timing", evidence.spec
    plays = [play for play in evidence.of("gold", "wrong", "plain", "revealed") if not play.fault]
    resets = [play.reset_s for play in plays if play.reset_s is not None]
    steps = [seconds for play in plays for seconds in play.steps_s]
    if not resets or not steps:
        return Finding(name, None, NOT_REACHED)

    def figures(what: str, times: Sequence[float], limit_s: float) -> str:
        share = f"{100 * max(times) / limit_s:.2g} % of the limit of {limit_s:g} s"
        return f"{what} {duration(statistics.median(times))}, at most {duration(max(times))} ({share})"

    detail = f"{figures('reset', resets, spec.reset_timeout_s)}; {figures('step', steps, spec.step_timeout_s)}"
    return Finding(name, max(resets) <= spec.reset_timeout_s and max(steps) <= spec.step_timeout_s, detail)


def check_closing(evidence: Evidence) -> Finding:
    """`close` never raises: after an episode, after a fault, and called twice."""
    name = "closing"
    errors = [(play, Fault("close", play.close_error).summary) for play in evidence.plays if play.close_error]
    if errors:
        return Finding(name, False, listed(grouped((play, "", error) for play, error in errors)))
    if all(play.fault and play.fault.call == "building" for play in evidence.plays):
        return Finding(name, None, NOT_REACHED)
    if not evidence.of("closing"):
        return Finding(name, None, "the plays were given up before it")
    detail = f"after {len(evidence.plays)} episodes, before the first reset, after a fault, and twice"
    return Finding(name, True, detail)
