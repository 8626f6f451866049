"""Prints the overview of a run in a terminal: a table of its episodes by phase, way and end reason."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from agents.cli.text import counted, one_line
from agents.viewer.columns import Cell
from agents.viewer.source import Source

_WORDS = ("phase", "way", "end")
_FIGURES = ("episodes", "share", "reward", "turns", "tokens", "written", "calls", "failed", "kl", "max gap")


def title(source: Source) -> Text:
    """Return a line that describes the run: "a: geo3k, 448 episodes, steps 0 to 6, model agents/model/starter"."""
    parts = [counted(len(source), "episode")]
    if steps := [step for step in source.columns.get("step", []) if isinstance(step, int)]:
        parts.append(f"steps {min(steps)} to {max(steps)}")
    if source.recording:
        parts = [source.recording.manifest.env.id, *parts, f"model {source.recording.manifest.model}"]
    return Text(one_line(f"{source.folder.absolute().name}: {', '.join(parts)}", 1000))


def overview_table(source: Source) -> Table:
    """Return a row for each phase, way and end reason: the number of episodes, and the means of their figures.

    `tokens` counts the whole stream, `written` the model's tokens; `failed` is the share of tool calls whose outcome is
    not "ok"; `kl` is the mean over all tokens of the row that the trainer has scored.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in (*_WORDS, *_FIGURES):
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    columns = source.columns
    groups: dict[tuple[Cell, Cell], dict[Cell, list[int]]] = {}
    for index, (phase, way, end) in enumerate(
        zip(columns["phase"], columns["way"], columns["end_reason"], strict=True)
    ):
        groups.setdefault((phase, way), {}).setdefault(end, []).append(index)
    for key, ends in groups.items():
        num_episodes = sum(map(len, ends.values()))
        for end, indices in sorted(ends.items(), key=lambda item: -len(item[1])):
            words = (one_line(str(cell), 40) for cell in (*key, end))
            cells = (*words, str(len(indices)), f"{len(indices) / num_episodes:.3f}", *_figures(source, indices))
            table.add_row(*map(Text, cells))
    return table


def _figures(source: Source, indices: Sequence[int]) -> list[str]:
    def numbers(name: str) -> list[float]:
        return [float(x) for i in indices if isinstance(x := source.columns[name][i], int | float)]

    def mean(name: str, form: str) -> str:
        found = numbers(name)
        if found:
            return format(sum(found) / len(found), form)
        return ""

    num_calls = sum(numbers("num_tool_calls"))
    num_failed = sum(numbers("num_tool_errors"))
    pairs = [(source.columns["kl"][i], source.columns["num_model_tokens"][i]) for i in indices]
    scored = [(kl, count) for kl, count in pairs if isinstance(kl, float) and isinstance(count, int)]
    num_scored = sum(count for _, count in scored)
    gaps = numbers("max_gap")
    return [
        mean("reward", ".3f"),
        mean("num_turns", ".2f"),
        mean("num_tokens", ".1f"),
        mean("num_model_tokens", ".1f"),
        f"{num_calls:.0f}",
        f"{num_failed / num_calls:.3f}" if num_calls else "",
        f"{sum(kl * count for kl, count in scored) / num_scored:.1e}" if num_scored else "",
        f"{max(gaps):.1e}" if gaps else "",
    ]
