"""Checks how an environment behaves: contract, determinism, malformed calls, time and closing."""

from __future__ import annotations

import json
from collections import Counter

from envs.checking.episodes import PlayedEpisode
from envs.checking.error_location import located_line
from envs.checking.findings import (
    Evidence,
    call_records,
    digest,
    fingerprint,
    grouped,
    has_text,
    listed,
    refuse,
    unlike,
    where,
)
from envs.checks import Broken, NotApplicable
from envs.errors import UserError
from envs.execution.runner import StepResult

#: What an episode has to leave to be noticed, where less than one is no leak.
LEAST = {"bytes of output": 4096}


def check_contract(evidence: Evidence) -> str:
    """Every call returns what the contract says, and none raises or hangs."""
    refuse(grouped((episode, fault.call, fault.summary) for episode, fault in evidence.ordinary_faults))
    try:
        evidence.spec.check_tool_faults(any(episode.runs_tools for episode in evidence.episodes))
    except UserError as error:
        raise Broken(str(error)) from error
    # Without a known right answer an environment may be one that only limits end.
    is_solved = any(map(evidence.is_success, evidence.of("gold")))
    if is_solved and not any(step.done for episode in evidence.episodes for step in episode.steps):
        raise Broken(
            "step never returns done=True, not even after the right answer, so every episode ends as max_turns"
        )
    episodes = evidence.of("survey", "gold", "wrong", "plain")
    slowest_s = max((episode.slowest_s for episode in episodes), default=0.0)
    found = f"{len(episodes)} episodes; the slowest step took {slowest_s:.2g} s{_unwritable(evidence)}"
    if evidence.stopped_after_s:
        return f"stopped after {evidence.stopped_after_s:g} s (--max-seconds); {found}"
    return found


def _unwritable(evidence: Evidence) -> str:
    """Name a key of a step's info whose value a recording can only keep as its `repr`, if there is one."""
    found: dict[str, object] = {}
    for episode in evidence.episodes:
        for step in episode.steps:
            found.update(step.info)
    for key in sorted(found, key=str):
        try:
            json.dumps(found[key])
        except (TypeError, ValueError, RecursionError):
            return f"; in the info of a step {key} is recorded as text only: {found[key]!r:.60}"
    return ""


def check_deterministic(evidence: Evidence) -> str:
    """The same sample and texts give the same episode, and the same index the same sample."""
    different = [
        f"sample {first.id}: differs when it is read again"
        for first, again in zip(evidence.samples, evidence.samples_again, strict=True)
        if fingerprint(first) != fingerprint(again)
    ]
    different += [f"sample {each.id}: an episode changes its prompt or metadata" for each in evidence.samples_changed]
    num_pairs = 0
    for first, again in evidence.repeats:
        # A fault is reported by the contract already, and its text may hold an address.
        if first.fault or again.fault:
            continue
        num_pairs += 1
        if what := _difference(first, again):
            different.append(f"{where(first)}: {what}")
    refuse(different)
    return f"{num_pairs} episodes played twice and {len(evidence.samples)} samples read twice"


def _difference(first: PlayedEpisode, again: PlayedEpisode) -> str | None:
    """Return how two episodes of the same texts differ."""
    shown = [("the first observation", first.opening, again.opening)]
    for number, (one, other) in enumerate(zip(first.steps, again.steps, strict=False), start=1):
        shown.append((f"the answer of step {number}", one.messages, other.messages))
    for what, one, other in shown:
        if digest(one) != digest(other):
            return f"{what} differs: {unlike(one, other)}"
    if (repr(first.tools), len(first.steps)) != (repr(again.tools), len(again.steps)):
        return "the tools or the number of steps differ"
    if first.reward == again.reward:
        return None
    return f"the rewards are {first.reward:g} and {again.reward:g}"


def check_calls(evidence: Evidence) -> str:
    """No model text causes a fault or exceeds the time limit of a step, and a broken call gets an answer."""
    limit_s = evidence.spec.step_timeout_s
    known = {(fault.call, fault.summary) for _, fault in evidence.ordinary_faults}
    problems = []
    faults: list[tuple[PlayedEpisode, str, str]] = []
    outcomes = Counter[str]()
    for episode in evidence.of("hostile", "revealed"):
        script = episode.script
        if episode.fault:
            call, summary = episode.fault.call, episode.fault.summary
            if (call, summary) not in known:  # the contract has reported the others
                faults.append((episode, call, summary))
            continue
        if episode.slowest_s > limit_s:
            problems.append(f"{where(episode)}: a step took {episode.slowest_s:.2g} s, the limit is {limit_s:g} s")
        if not episode.steps or script.kind != "hostile":
            continue
        last = episode.steps[-1]
        outcome = _outcome(last)
        outcomes[outcome] += 1
        if script.needs_answer and outcome != "ok" and not has_text(last.messages):
            problems.append(f"{where(episode)}: the call cannot be made, and the model is not told ({outcome})")
    refuse([*grouped(faults), *problems])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return f"{outcomes.total()} texts: {counts}"


def _outcome(step: StepResult) -> str:
    """Return the outcome of a turn: from the step's info, else from its messages."""
    if records := call_records(step):
        return " + ".join(dict.fromkeys(str(record.get("outcome")) for record in records))
    if step.done:
        return "ends the episode"
    return "answered" if has_text(step.messages) else "silence"


def check_closing(evidence: Evidence) -> str:
    """`close` never raises: after an episode, after a fault, and called twice."""
    refuse(grouped((each, "", located_line(each.close_error)) for each in evidence.episodes if each.close_error))
    if not evidence.of("closing"):
        raise NotApplicable("the check stopped before it")
    return f"after {len(evidence.episodes)} episodes, before the first reset, after a fault, and twice"


def check_leftovers(evidence: Evidence) -> str:
    """Episodes leave nothing behind in the program, and its directory, settings and modules as they were."""
    first, middle, last = evidence.states
    if evidence.spec.isolation == "process":
        raise NotApplicable("a worker process ends what an episode leaves")
    # A new worker, after one that was lost, has nothing left of the episodes before it.
    if not evidence.repeats or middle.pid != last.pid:
        raise NotApplicable("the check stopped before it")
    num_episodes = len(evidence.repeats)
    found = []
    for what, amount in last.amounts.items():
        more = amount - middle.amounts[what]
        if more >= max(2, num_episodes // 2) * LEAST.get(what, 1):  # what is made once and kept is no leak
            found.append(f"{num_episodes} episodes have left {more:,.0f} {what}")
    if last.directory != first.directory:
        found.append(f"the working directory is now {last.directory}")
    # A name stands in the difference twice if its value has changed, once if it is new or gone.
    if changed := sorted({name for name, _ in first.settings ^ last.settings}):
        found.append(f"settings of the whole program are changed: {listed(changed)}")
    # Two plays begin with different seeds.
    seeded = set[str]()
    for one, other in evidence.repeats:
        seeded |= {name for name, _ in one.generators.items() & other.generators.items()}
    if seeded:
        named = listed(sorted(seeded))
        found.append(f"the seed of {named}, which all episodes share, is set; use a generator of your own")
    if found:
        raise Broken("; ".join(found) + "; end it in close, or write `isolation: process`")
    return f"nothing after {num_episodes} episodes played again"
