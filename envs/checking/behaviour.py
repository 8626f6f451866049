"""Checks how an environment behaves: contract, determinism, malformed calls, time and closing."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence

from envs.checking.episodes import Fault, PlayedEpisode, checked_prompt
from envs.checking.findings import (
    NOT_REACHED,
    Evidence,
    call_records,
    digest,
    duration,
    grouped,
    listed,
    said,
    unlike,
    where,
)
from envs.checks import Verdict, fault, ok, skipped
from envs.errors import UserError
from envs.execution.runner import StepResult

#: Fields of `ProcessState` that may grow, what they count, and how much an episode has to leave to be noticed.
LEFTOVERS = (
    ("num_children", "processes", 1),
    ("num_threads", "threads", 1),
    ("num_files", "open files", 1),
    ("num_temporary", "temporary files", 1),
    ("memory_mib", "MiB of memory", 1),
    ("num_printed", "bytes of output", 4096),
)


def check_contract(evidence: Evidence) -> Verdict:
    """Every call returns what the contract says, and none raises or hangs."""
    faults = [
        (episode, fault.call, fault.summary) for episode, fault in evidence.ordinary_faults if not fault.too_large
    ]
    if faults:
        return fault(listed(grouped(faults)) + _worth(evidence, faults))
    try:
        evidence.spec.check_tool_faults(any(episode.runs_tools for episode in evidence.episodes))
    except UserError as error:
        return fault(str(error))
    if _never_ends(evidence):
        rule = "step never returns done=True, not even after the right answer, so every episode ends as max_turns"
        return fault(rule)
    count = len(evidence.of("survey", "gold", "wrong", "plain"))
    detail = f"{count} episodes of reset, step, format_observation, reward and close"
    return ok("; ".join([detail, *_unwritable(evidence)]))


def _never_ends(evidence: Evidence) -> bool:
    """Return whether the right answer is known and is a success, and still no episode ever ended."""
    is_solved = any(map(evidence.is_success, evidence.of("gold")))
    return is_solved and not any(step.done for episode in evidence.episodes for step in episode.steps)


def _unwritable(evidence: Evidence) -> list[str]:
    """Say which keys of a step's info hold values that a recording can only keep as their `repr`."""
    keys: dict[str, str] = {}
    infos = {
        str(key): value for episode in evidence.episodes for step in episode.steps for key, value in step.info.items()
    }
    for key, value in infos.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            keys[key] = repr(value)
    return [
        f"in the info of a step {key} is recorded as text only: {value:.60}" for key, value in sorted(keys.items())[:1]
    ]


def _worth(evidence: Evidence, faults: Sequence[tuple[PlayedEpisode, str, str]]) -> str:
    """Name the setting that says what becomes of an episode whose step fails, if a step failed."""
    is_of_step = any(call.startswith("step") for _, call, _ in faults)
    if is_of_step:
        return f"; in training: on_tool_fault: {evidence.spec.on_tool_fault}"
    return ""


def check_deterministic(evidence: Evidence) -> Verdict:
    """The same sample and texts give the same episode, and the same index the same sample."""
    different = [
        f"sample {first.id}: differs when it is read again"
        for first, again in zip(evidence.samples, evidence.samples_again, strict=True)
        if (first.id, first.label, digest(checked_prompt(first)))
        != (again.id, again.label, digest(checked_prompt(again)))
    ]
    different += [f"sample {each.id}: an episode changes its prompt or metadata" for each in evidence.samples_changed]
    pairs = [(first, again) for first, again in evidence.repeats if not first.fault and not again.fault]
    different += [f"{where(first)}: {what}" for first, again in pairs if (what := _difference(first, again))]
    if different:
        return fault(listed(different))
    if not pairs:
        return skipped(NOT_REACHED)
    return ok(f"{len(pairs)} episodes played twice and {len(evidence.samples)} samples read twice")


def _difference(first: PlayedEpisode, again: PlayedEpisode) -> str | None:
    """Return how two episodes of the same texts differ."""
    if digest(first.opening) != digest(again.opening):
        return f"the first observation differs: {unlike(first.opening, again.opening)}"
    if json.dumps(first.tools, default=repr) != json.dumps(again.tools, default=repr):
        return "the tools differ"
    for number, (one, other) in enumerate(zip(first.steps, again.steps, strict=False), start=1):
        if one.done != other.done:
            return f"step {number} ends the task in only one of two episodes"
        if digest(one.messages) != digest(other.messages):
            return f"the answer of step {number} differs: {unlike(one.messages, other.messages)}"
    if first.reward == again.reward:
        return None
    return f"the rewards are {first.reward:g} and {again.reward:g}"


def check_calls(evidence: Evidence) -> Verdict:
    """No model text causes a fault or exceeds the time limit of a step, and a broken call gets an answer."""
    limit_s = evidence.spec.step_timeout_s
    known = {(fault.call, fault.summary) for _, fault in evidence.ordinary_faults}
    episodes = evidence.of("hostile", "revealed")
    problems = []
    faults: list[tuple[PlayedEpisode, str, str]] = []
    outcomes: dict[str, list[str]] = defaultdict(list)
    for episode in episodes:
        if episode.fault:
            if (episode.fault.call, episode.fault.summary) not in known and not episode.fault.too_large:
                faults.append((episode, episode.fault.call, episode.fault.summary))
            continue
        if episode.steps_s and max(episode.steps_s) > limit_s:
            problems.append(
                f"{where(episode)}: a step took {duration(max(episode.steps_s))}, the limit is {limit_s:g} s"
            )
        if not episode.steps or episode.script.kind != "hostile":
            continue
        outcome = _outcome(episode.steps[-1])
        outcomes[outcome].append(episode.script.name)
        if (
            episode.script.needs_answer
            and outcome != "ok"
            and not any(text.strip() for text in said(episode.steps[-1]))
        ):
            problems.append(f"{where(episode)}: the call cannot be made, and the model is not told ({outcome})")
    if faults or problems:
        return fault(listed([*grouped(faults), *problems]) + _worth(evidence, faults))
    if not outcomes:
        return skipped(NOT_REACHED)
    groups = (f"{outcome}: {', '.join(dict.fromkeys(names))}" for outcome, names in outcomes.items())
    return ok(f"{sum(map(len, outcomes.values()))} texts. " + "; ".join(groups))


def _outcome(step: StepResult) -> str:
    """Return the outcome of a turn: from the step's info, else from its messages."""
    if records := call_records(step):
        return " + ".join(dict.fromkeys(str(record.get("outcome")) for record in records))
    if step.done:
        return "ends the episode"
    if any(text.strip() for text in said(step)):
        return "answered"
    return "silence"


def check_timing(evidence: Evidence) -> Verdict:
    """Resets and steps stay within their time limits; `check_calls` judges the steps with hostile texts."""
    spec = evidence.spec
    episodes = [episode for episode in evidence.of("gold", "wrong", "plain", "revealed") if not episode.fault]
    resets = [episode.reset_s for episode in episodes if episode.reset_s is not None]
    steps = [seconds for episode in episodes for seconds in episode.steps_s]
    if not resets or not steps:
        return skipped(NOT_REACHED)

    def figures(what: str, times: Sequence[float], limit_s: float) -> str:
        share = f"{100 * max(times) / limit_s:.2g} % of the limit of {limit_s:g} s"
        return f"{what} {duration(statistics.median(times))}, at most {duration(max(times))} ({share})"

    if evidence.stopped_after_s:
        stopped = f"stopped after {evidence.stopped_after_s:g} s (--max-seconds); "
    else:
        stopped = ""
    detail = f"{stopped}{figures('reset', resets, spec.reset_timeout_s)}; {figures('step', steps, spec.step_timeout_s)}"
    is_in_time = max(resets) <= spec.reset_timeout_s and max(steps) <= spec.step_timeout_s
    if not is_in_time:
        return fault(detail)
    return ok(detail)


def check_closing(evidence: Evidence) -> Verdict:
    """`close` never raises: after an episode, after a fault, and called twice."""
    errors = [
        (episode, Fault("close", episode.close_error).summary) for episode in evidence.episodes if episode.close_error
    ]
    if errors:
        return fault(listed(grouped((episode, "", error) for episode, error in errors)))
    if all(episode.fault and episode.fault.call == "building" for episode in evidence.episodes):
        return skipped(NOT_REACHED)
    if not evidence.of("closing"):
        return skipped("the check stopped before it")
    detail = f"after {len(evidence.episodes)} episodes, before the first reset, after a fault, and twice"
    return ok(detail)


def check_leftovers(evidence: Evidence) -> Verdict:
    """Episodes leave nothing behind in the program, and its directory, settings and modules as they were."""
    first, middle, last = evidence.states
    if evidence.spec.isolation == "process":
        return skipped("a worker process ends what an episode leaves")
    if not evidence.repeats or middle.pid != last.pid:
        return skipped("the check stopped before it")
    num_episodes = len(evidence.repeats)
    found = []
    for field, nouns, per_episode in LEFTOVERS:
        more = getattr(last, field) - getattr(middle, field)
        if more >= max(2, num_episodes // 2) * per_episode:  # what is made once and kept is no leak
            found.append(f"{num_episodes} episodes have left {more:,.0f} {nouns}")
    if last.directory != first.directory:
        found.append(f"the working directory is now {last.directory}")
    if changed := sorted({name for name, _ in first.variables ^ last.variables}):
        found.append(f"environment variables are changed: {listed(changed)}")
    if patched := sorted({name for name, _ in first.functions - last.functions}):
        found.append(f"functions of Python are replaced: {listed(patched)}")
    if changed := sorted({name for name, _ in first.settings - last.settings}):
        found.append(f"settings of the whole program are changed: {listed(changed)}")
    if seeded := sorted({name for pair in evidence.repeats for name in _seeded(*pair)}):
        found.append(f"the seed of {listed(seeded)}, which all episodes share, is set; use a generator of your own")
    if found:
        return fault("; ".join(found) + "; end it in close, or write `isolation: process`")
    return ok(f"nothing after {num_episodes} episodes played again")


def _seeded(first: PlayedEpisode, again: PlayedEpisode) -> list[str]:
    """Return the generators that two plays, begun with different seeds, have left in the same state."""
    return [name for name, state in again.generators.items() if state == first.generators.get(name)]
