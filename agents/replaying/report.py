"""Prints and writes what a replay has found; text of models and environments is data, and is shown, never obeyed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agents.replaying.difference import KINDS, TOKENS, Difference
from agents.replaying.rescore import Rescoring
from agents.replaying.rounds import Found, Outcome
from agents.visible import contrast, shown, visible
from envs.errors import UserError

MAX_PAIRS = 12
EMPTY = "(empty)"


@dataclass(frozen=True)
class Setting:
    """What was replayed, and how: `notes` say what is not as it was when the recording was made."""

    run: str
    env: str
    model: str
    notes: Sequence[str]
    num_turns: int | None
    seconds: float


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is, without markup or colours of its own."""
    console.print(Text(visible(text), style), soft_wrap=True)


def print_report(setting: Setting, outcome: Outcome, num_shown: int, console: Console) -> None:
    """Print what differs: a table of kinds, a line for each episode, totals."""
    for note in setting.notes:
        say(console, f"note: {note}", "yellow")
    for what, several in (("", outcome.differing), ("doubtful: ", outcome.doubtful)):
        if several:
            console.print(_kinds_table(several, what))
            for found in several[:num_shown]:
                say(console, _episode_line(found))
            if len(several) > num_shown:
                say(console, f"and {len(several) - num_shown} more (--show, --report)")
            console.print()
    if outcome.doubtful:
        say(console, f"{len(outcome.doubtful)} are doubtful: JSON could not hold their label or metadata as they were")
    _say_steadiness(outcome, console)
    _say_skipped(outcome, console)
    say(console, totals(setting, outcome), "bold red" if outcome.differing else "")


def totals(setting: Setting, outcome: Outcome) -> str:
    """Return the last line: `calculator: 448 episodes, 448 replayed, 0 differ (612 episodes/s)`."""
    what = f"up to turn {setting.num_turns}, " if setting.num_turns else ""
    stream = "token streams compared, " if setting.model else ""
    rate = outcome.num_replayed / setting.seconds if setting.seconds else 0.0
    return (
        f"{setting.env}: {_count(outcome.num_episodes, 'episode')}, {outcome.num_replayed} replayed, {what}{stream}"
        f"{len(outcome.differing)} differ ({rate:.4g} episodes/s)"
    )


def print_rescoring(setting: Setting, rescoring: Rescoring, grader: str, num_shown: int, console: Console) -> None:
    """Print old rewards against new ones, and episodes whose reward is another one."""
    for note in setting.notes:
        say(console, f"note: {note}", "yellow")
    episodes, flipped = rescoring.episodes, rescoring.flipped
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("recorded", f"with {grader}", "episodes", "first example"):
        table.add_column(name, justify="right" if name == "episodes" else "left", overflow="fold")
    for (old, new), count in sorted(rescoring.pairs().items(), key=lambda item: -item[1])[:MAX_PAIRS]:
        first = next(each for each in episodes if (each.old, each.new) == (old, new))
        example = f"{first.id}: {shown(first.final_text, 40)} against {shown(first.label or 'no label', 30)}"
        table.add_row(f"{old:g}", f"{new:g}", str(count), Text(visible(example)))
    console.print(table)
    for each in flipped[:num_shown]:
        say(console, f"{each.id}: {each.old:g} -> {each.new:g}, {shown(each.final_text)} against {each.label}")
    if len(flipped) > num_shown:
        say(console, f"and {len(flipped) - num_shown} more (--show, --report)")
    if told := sum(each.is_told_else for each in episodes):
        say(console, f"{told} would also have told the model something else, and then have gone on otherwise", "yellow")
    for end, count in rescoring.lost.items():
        say(console, f"{count} have no reward now: {end}", "yellow")
    _say_skipped(rescoring.outcome, console)
    if episodes:
        old, new = (sum(values) / len(episodes) for values in zip(*((e.old, e.new) for e in episodes), strict=True))
        say(console, f"mean reward {old:.4g} recorded, {new:.4g} with {grader}; {len(flipped)} of {len(episodes)} flip")


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write everything as JSON. Raises `UserError` where the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("--report", "must be writable", str(path), f"give another file ({error.strerror})") from error


def as_json(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    """Return everything that was found."""
    return {
        **asdict(setting),
        "episodes": outcome.num_episodes,
        "replayed": outcome.num_replayed,
        "turns": outcome.num_turns,
        "differing": len(outcome.differing),
        "doubtful": len(outcome.doubtful),
        "skipped": dict(outcome.skipped),
        "alone": outcome.again,
        "unsteady": outcome.unsteady,
        "hurried": outcome.hurried,
        "kinds": {kind: count for kind, (count, _) in kinds(outcome.differing).items()},
        "found": [asdict(found) for found in outcome.found],
    }


def rescoring_as_json(setting: Setting, rescoring: Rescoring, grader: str) -> dict[str, Any]:
    """Return old and new reward of every episode."""
    return {
        **asdict(setting),
        "grader": grader,
        "flipped": len(rescoring.flipped),
        "lost": dict(rescoring.lost),
        "skipped": dict(rescoring.outcome.skipped),
        "rewards": [asdict(each) for each in rescoring.episodes],
    }


def kinds(several: Sequence[Found]) -> dict[str, tuple[int, tuple[Found, Difference]]]:
    """Return, for each kind of difference, how many episodes have it and the first of them."""
    counts = Counter(kind for found in several for kind in {each.kind for each in found.differences})
    first = {}
    for found in several:
        for each in found.differences:
            first.setdefault(each.kind, (found, each))
    return {kind: (counts[kind], first[kind]) for kind in KINDS if kind in counts}


def _kinds_table(several: Sequence[Found], what: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what differs", no_wrap=True)
    table.add_column("episodes", justify="right", no_wrap=True)
    table.add_column("first example", overflow="fold")
    for kind, (count, (found, first)) in kinds(several).items():
        old, new = values(first)
        lines = f"{visible(f'{found.id} {first.where}')}\nrecorded: {old}\nreplayed: {new}"
        table.add_row(f"{what}{kind}", str(count), Text(lines))
    return table


def values(difference: Difference) -> tuple[str, str]:
    """Return both values of a difference as they are printed."""
    old, new = (value if value != "" else EMPTY for value in (difference.recorded, difference.replayed))
    if difference.kind == TOKENS:
        old, new = (" ".join(_token(each) for each in ids[:4]) or "the end" for ids in (old, new))
    return contrast(old, new)


def _token(each: Any) -> str:
    return f"{each[0]} {json.dumps(each[1], ensure_ascii=False)}" if isinstance(each, list) else str(each)


def _episode_line(found: Found) -> str:
    turns: dict[str, list[str]] = {}
    for each in found.differences:
        turns.setdefault(each.kind, []).extend([str(each.turn)] if each.turn else [])
    what = ", ".join(f"{kind} (turn {', '.join(numbers)})" if numbers else kind for kind, numbers in turns.items())
    unsteady = "; alone, something else" if found.is_unsteady else ""
    return f"{found.id} ({found.end_reason.value}, reward {found.reward:g}): {what}{unsteady}"


def _say_steadiness(outcome: Outcome, console: Console) -> None:
    if outcome.hurried:
        slow = f"{_count(len(outcome.hurried), 'episode')} ran into a time limit among others, and not alone"
        say(console, f"{slow}: the machine is slow for so many at once (--max-concurrent)", "yellow")
    if not outcome.unsteady:
        return
    named = f"{', '.join(outcome.unsteady[:3])}{', ...' if len(outcome.unsteady) > 3 else ''}"
    say(
        console,
        f"not steady: of {_count(outcome.again, 'episode')} that were played once more, alone, {len(outcome.unsteady)} "
        f"came to something else ({named}): the environment is random, or its episodes touch one another",
        "bold red",
    )


def _say_skipped(outcome: Outcome, console: Console) -> None:
    for why, count in outcome.skipped.items():
        say(console, f"{count} not replayed, {why}: {outcome.first_skipped[why]}", "yellow")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
