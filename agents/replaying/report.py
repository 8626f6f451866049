"""Prints and writes the results of a replay.

Text of models and environments is data: it is printed as it is, with control characters written out.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from agents.cli.text import counted, excerpt_pair
from agents.replaying.difference import KINDS, TOKENS, Difference
from agents.replaying.runner import EpisodeDifferences, ReplaySummary
from envs.console import Console
from envs.errors import UserError
from envs.safe_text import escape_controls

EMPTY = "(empty)"


@dataclass(frozen=True)
class ReportHeader:
    """What was replayed and how; `notes` say what has changed since the recording was made."""

    run: str
    env: str
    model: str
    notes: Sequence[str]
    seconds: float


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line; markup in it has no effect."""
    # `Text`, because a string would be read as markup of rich.
    console.print(Text(escape_controls(text), style), soft_wrap=True)


def print_report(header: ReportHeader, summary: ReplaySummary, num_shown: int, console: Console) -> None:
    """Print what differs: a table of kinds, a line for each episode, totals."""
    for note in header.notes:
        say(console, f"note: {note}", "yellow")
    differing = summary.differing
    if differing:
        console.print(_kinds_table(differing))
        for found in differing[:num_shown]:
            say(console, _episode_line(found))
        if len(differing) > num_shown:
            say(console, f"and {len(differing) - num_shown} more (--show, --report)")
        console.print()
    _say_steadiness(summary, console)
    for why, count in summary.skipped.items():
        say(console, f"{count} not replayed, {why}: {summary.first_skipped[why]}", "yellow")
    say(console, totals(header, summary), "bold red" if differing else "")


def totals(header: ReportHeader, summary: ReplaySummary) -> str:
    """Return the last line: `calculator: 448 episodes, 448 replayed, 0 differ (612 episodes/s)`."""
    stream = "token streams compared, " if header.model else ""
    # A replay of nothing may take no time by the rounded clock.
    rate = summary.num_replayed / header.seconds if header.seconds else 0.0
    return (
        f"{header.env}: {counted(summary.num_episodes, 'episode')}, {summary.num_replayed} replayed, {stream}"
        f"{len(summary.differing)} differ ({rate:.4g} episodes/s)"
    )


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write a report as JSON. Raises `UserError` if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("--report", "must be writable", str(path), f"give another file ({error.strerror})") from error


def as_json(header: ReportHeader, summary: ReplaySummary) -> dict[str, Any]:
    """Return the full report on a replay."""
    return {
        **asdict(header),
        "episodes": summary.num_episodes,
        "replayed": summary.num_replayed,
        "turns": summary.num_turns,
        "differing": len(summary.differing),
        "skipped": dict(summary.skipped),
        "alone": summary.num_alone,
        "unsteady": summary.unsteady,
        "kinds": {kind: count for kind, (count, _) in kinds(summary.differing).items()},
        "found": [asdict(found) for found in summary.differing],
    }


def kinds(several: Sequence[EpisodeDifferences]) -> dict[str, tuple[int, tuple[EpisodeDifferences, Difference]]]:
    """Return, for each kind of difference, the number of episodes with it and the first of them."""
    counts = Counter[str]()
    firsts = {}
    for found in several:
        # The first of each kind in an episode.
        own = {each.kind: (found, each) for each in reversed(found.differences)}
        counts.update(own.keys())
        firsts = own | firsts
    return {kind: (counts[kind], firsts[kind]) for kind in KINDS if kind in counts}


def _kinds_table(several: Sequence[EpisodeDifferences]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what differs", no_wrap=True)
    table.add_column("episodes", justify="right", no_wrap=True)
    table.add_column("first example", overflow="fold")
    for kind, (count, (found, first)) in kinds(several).items():
        old, new = values(first)
        lines = f"{escape_controls(f'{found.id} {first.where}')}\nrecorded: {old}\nreplayed: {new}"
        table.add_row(kind, str(count), Text(lines))
    return table


def values(difference: Difference) -> tuple[str, str]:
    """Return both values of a difference as they are printed."""
    # An empty value would look like a missing one.
    old, new = (value if value != "" else EMPTY for value in (difference.recorded, difference.replayed))
    if difference.kind == TOKENS:
        old, new = (" ".join(_token(each) for each in ids[:4]) or "the end" for ids in (old, new))
    return excerpt_pair(old, new)


def _token(each: Any) -> str:
    # With a tokenizer, an id comes with its text.
    if isinstance(each, list):
        return f"{each[0]} {json.dumps(each[1], ensure_ascii=False)}"
    return str(each)


def _episode_line(found: EpisodeDifferences) -> str:
    turns = defaultdict[str, list[str]](list)
    for each in found.differences:
        turns[each.kind] += [str(each.turn)] * bool(each.turn)
    what = ", ".join(f"{kind} (turn {', '.join(numbers)})" if numbers else kind for kind, numbers in turns.items())
    unsteady = "; another result alone" if found.is_unsteady else ""
    return f"{found.id} ({found.end_reason.value}, reward {found.reward:g}): {what}{unsteady}"


def _say_steadiness(summary: ReplaySummary, console: Console) -> None:
    if not summary.unsteady:
        return
    named = f"{', '.join(summary.unsteady[:3])}{', ...' if len(summary.unsteady) > 3 else ''}"
    say(
        console,
        f"not deterministic: of {counted(summary.num_alone, 'episode')} replayed once more, alone, "
        f"{len(summary.unsteady)} gave another result ({named}): "
        "the environment is random, or its episodes share state",
        "bold red",
    )
