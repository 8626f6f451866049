"""Prints the report of an evaluation as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE
from rich.table import Table

from agents.cli.text import counted
from envs.console import Console
from envs.success import Success
from trainer.evaluation.curve import title
from trainer.evaluation.evaluator import Report
from trainer.evaluation.judges import THRESHOLD
from trainer.evaluation.results import Evaluation, Figure, by_environment

#: The most values of one metadata key that are shown; the file has all.
MAX_VALUES_SHOWN = 24


def print_report(console: Console, report: Report) -> None:
    """Print the ways side by side, their difference, how episodes ended, tool calls, and the figure by metadata."""
    if report.partial:
        console.print(f"partial: {report.partial}", soft_wrap=True)
    if not report.ways:
        return
    console.print(f"{report.model} on {report.env}, {report.num_problems} problems", soft_wrap=True)
    first = next(iter(report.ways.values()))
    # Each environment of a mixture first, then the figures of all together.
    for env in first.by_env:
        console.print(_main_table(report, {way: found.by_env[env] for way, found in report.ways.items()}, f"{env}, "))
    console.print(_main_table(report, report.ways, "together, " if first.by_env else ""))
    if report.difference:
        first, second = map(title, report.ways)
        d = report.difference
        line = f"{first} less {second}, {d.num_problems} problems: {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
        console.print(line, soft_wrap=True)
    for table in (_ends(report), _outcomes(report), _judges(report), *_tags(report)):
        # An environment without tools has no table of calls.
        if table.row_count:
            console.print(table)


def print_endpoints(console: Console, reports: Sequence[Report]) -> None:
    """Print the models of endpoints side by side, with the tokens that servers have counted and what they cost."""
    shown = [(report, way, found) for report in reports for way, found in report.ways.items()]
    if not shown:
        return
    figure = _main_figure(shown[0][0].ways)
    table = _table(
        f"Models [{reports[0].confidence:.0%} interval], all tokens",
        "",
        title(figure),
        "broken",
        "read",
        "written",
        "cost",
    )
    for report, way, found in shown:
        # Not every server counts tokens, and a cached answer may lack them.
        usage = report.usage.get(way, {})
        table.add_row(
            f"{report.model}, {title(way)}",
            str(found.estimate(figure) or ""),
            f"{found.num_broken} of {found.num_problems * found.num_samples}",
            f"{usage.get('prompt_tokens', 0):,.0f}",
            f"{usage.get('completion_tokens', 0):,.0f}",
            f"{usage['cost']:.4g}" if "cost" in usage else "",
        )
    console.print(table)


def _table(title: str, *columns: str, num_words: int = 1) -> Table:
    """Return an empty table: its first columns are for words, which fold if it is narrow, the others for numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for index, column in enumerate(columns):
        is_word = index < num_words
        table.add_column(
            column, justify="left" if is_word else "right", no_wrap=not is_word, overflow="fold", min_width=8 * is_word
        )
    return table


def _main_table(report: Report, ways: Mapping[str, Evaluation], name: str) -> Table:
    """Return the main table, with a column for each way; its title begins with a name."""
    how = f"temperature {report.temperature:g}" if report.temperature else "greedy"
    samples = counted(report.num_samples, "sample")
    table = _table(f"{name}{samples} each, {how} [{report.confidence:.0%} interval]", "", *map(title, ways))
    columns = [_column(evaluation) for evaluation in ways.values()]
    # A row that only one way has, such as pass@k, shows an empty cell for the other.
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _column(evaluation: Evaluation) -> dict[str, str]:
    """Return the cells of one way, by the names of their rows."""
    e = evaluation
    num_episodes = e.num_problems * e.num_samples
    cells = {"problems": str(e.num_problems)}
    cells |= {"accuracy (pass@1)": str(e.accuracy)} if e.accuracy else {}
    cells |= {f"pass@{k}": str(estimate) for k, estimate in e.pass_at.items() if k > 1}
    cells |= {"mean reward": str(e.mean_reward)} if e.mean_reward else {}
    return cells | {
        "broken episodes": f"{e.num_broken} of {num_episodes}",
        "truncated episodes": f"{e.num_truncated} of {num_episodes}",
        "turns": f"{e.mean_turns:.2f}",
        "tool calls": f"{e.mean_tool_calls:.2f}",
        "model tokens": f"{e.mean_tokens:.1f}",
    }


def _main_figure(ways: Mapping[str, Evaluation]) -> Figure:
    """Return the figure that the ways are compared by; all have the same."""
    return next(iter(ways.values())).main


def _ends(report: Report) -> Table:
    name = title(_main_figure(report.ways))
    table = _table("How episodes ended", "", "end reason", "episodes", "share", name, "turns", num_words=2)
    for way, evaluation in by_environment(report.ways).items():
        for reason, end in evaluation.ends.items():
            if end.accuracy is None:
                figure = end.mean_reward
            else:
                figure = end.accuracy
            cells = f"{end.share:.3f}", "" if figure is None else f"{figure:.3f}", f"{end.mean_turns:.2f}"
            table.add_row(title(way), reason, str(end.num_episodes), *cells)
    return table


def _outcomes(report: Report) -> Table:
    """Return the outcomes of tool calls, for the ways with any calls."""
    table = _table("Tool calls", "", "outcome", "calls", "per turn", num_words=2)
    for way, evaluation in by_environment(report.ways).items():
        # A way without tools has turns without calls only.
        if evaluation.tool_outcomes.keys() - {"none"}:
            for outcome, count in evaluation.tool_outcomes.items():
                if outcome == "none":
                    name = "none (a turn without a call)"
                else:
                    name = outcome
                table.add_row(title(way), name, str(count), f"{count / evaluation.num_turns:.3f}")
    return table


def _judges(report: Report) -> Table:
    """Return how the judges agree with the grader."""
    names = ["episodes", "agreement", "both right", "judge alone", "grader alone", "both wrong"]
    table = _table(f"Judges against the grader, right from {THRESHOLD:g}", "", "judge", *names, num_words=2)
    for way, evaluation in by_environment(report.ways).items():
        for judge, found in evaluation.judges.items():
            counts = found.right_right, found.right_wrong, found.wrong_right, found.wrong_wrong
            table.add_row(title(way), judge, str(found.num_episodes), f"{found.agreement:.3f}", *map(str, counts))
    return table


def _tags(report: Report) -> Iterator[Table]:
    """Yield a table for each metadata key, with a row for each of its values and a column for each way."""
    for tag in dict.fromkeys(tag for evaluation in report.ways.values() for tag in evaluation.by_tag):
        columns = [evaluation.by_tag.get(tag, {}) for evaluation in report.ways.values()]
        # A way that was interrupted may lack some values.
        values = list(dict.fromkeys(value for column in columns for value in column))
        name = title(_main_figure(report.ways)).capitalize()
        table = _table(f"{name} by {tag}", tag, "n", *map(title, report.ways))
        for value in values[:MAX_VALUES_SHOWN]:
            found = [column.get(value) for column in columns]
            # An interrupted way may have played fewer problems.
            num = max(estimate.num_problems for estimate in found if estimate)
            table.add_row(value, str(num), *("" if estimate is None else str(estimate) for estimate in found))
        if len(values) > MAX_VALUES_SHOWN:
            table.caption = f"and {len(values) - MAX_VALUES_SHOWN} more in evaluation.json"
        yield table


def print_training_summary(
    console: Console,
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    ends: Mapping[str, int],
    success: Success | None,
) -> None:
    """Print held-out accuracy before and after training with its 95 % interval, and how training episodes ended.

    Without a `success`, the mean reward takes the accuracy's place.
    """
    if after:
        num_problems = next(iter(after.values())).num_problems
        figure = _main_figure(after)
        table = Table(
            title=f"Held-out {title(figure)}, {num_problems} problems [95 % interval]",
            caption=f"right: {success}" if success else None,
        )
        # Without an accuracy the mean reward is the figure itself.
        others = ("mean reward",) if figure == "accuracy" else ()
        for column in ("", title(figure), "change", *others, "turns"):
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        # A mixture has rows for each environment, in both phases.
        first = by_environment(before)
        for name, final in by_environment(after).items():
            way, _, env = name.partition("/")
            label = f"  {env}" if env else title(way)  # an environment stands below its way of playing
            for phase, result in (("before", first[name]), ("after", final)):
                cells = [f"{label}, {phase}", str(result.estimate(figure) or "")]
                cells.append(_change(first[name], final, figure) if phase == "after" else "")
                if others:
                    cells.append(f"{result.mean_reward.value:.3f}" if result.mean_reward else "")
                table.add_row(*cells, f"{result.mean_turns:.2f}")
        console.print(table)
    table = Table(title="How training episodes ended")
    table.add_column("end reason")
    table.add_column("episodes", justify="right")
    for reason, count in sorted(ends.items(), key=lambda item: -item[1]):
        table.add_row(reason, str(count))
    console.print(table)


def _change(before: Evaluation, after: Evaluation, figure: Figure) -> str:
    first = before.estimate(figure)
    last = after.estimate(figure)
    if first and last:
        return f"{last.value - first.value:+.3f}"
    return ""
