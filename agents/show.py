"""Shows a recorded run in a terminal: `python -m agents.show RUN --worst 5` prints its overview and five episodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.text import Text

from agents.recording.selection import SelectionConfig
from agents.viewer.chat import chat_lines
from agents.viewer.source import Source
from agents.viewer.tables import overview_table, title
from agents.viewer.token_stream import Colouring, legend, stream_text
from envs.config.cli import exit_code, parse
from envs.console import Console

#: Wide enough that a pipe gets every table row on one line.
PIPED_WIDTH = 1000
INDENT = 2


class ShowConfig(BaseModel):
    """The settings of `python -m agents.show`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path = Field(description="run folder or recording folder")
    worst: int = Field(
        default=0, ge=0, description="how many episodes with the lowest rewards to show, the latest first"
    )
    best: int = Field(
        default=0, ge=0, description="how many episodes with the highest rewards to show, the latest first"
    )
    gap: int = Field(default=0, ge=0, description="how many episodes with the largest |rollout - train| to show")
    tokens: bool = Field(default=False, description="show the token stream too")
    color: Colouring = Field(default="probability", description="what the colours of tokens mean")
    full: bool = Field(default=False, description="show long texts in full")
    width: int = Field(default=0, ge=0, description="width in columns; 0: that of the terminal")
    selection: SelectionConfig = SelectionConfig()


def chosen(source: Source, config: ShowConfig) -> list[int]:
    """Return the indices of the episodes to show: the worst, the best, the largest gaps, or all that --id names.

    Example: with rewards (1, 0, 0), `--worst 1` chooses index 2.
    """
    picked = [
        *_top(source, "reward", config.worst, lambda value: value),
        *_top(source, "reward", config.best, lambda value: -value),
        *_top(source, "max_gap", config.gap, lambda value: -value),
    ]
    is_named = bool(config.selection.id) and not (config.worst or config.best or config.gap)
    if is_named:
        return list(range(len(source)))
    return list(dict.fromkeys(picked))


def _top(source: Source, name: str, count: int, key: Callable[[float], float]) -> Iterable[int]:
    cells = source.columns.get(name, [])
    found = [(key(cell), -index) for index, cell in enumerate(cells) if isinstance(cell, int | float)]
    return (-negative for _, negative in sorted(found)[:count])


class Printer:
    """Prints text to a console; wraps lines for a terminal, but not for a pipe."""

    def __init__(self, console: Console, is_wrapped: bool) -> None:
        self.console = console
        self.is_wrapped = is_wrapped

    @property
    def has_colours(self) -> bool:
        """Whether the console shows colours."""
        return self.console.is_terminal and not self.console.no_color

    def say(self, text: Text, indent: int = 0) -> None:
        """Print text with an indent; the wrapped rest of a line is always indented."""
        width = self.console.width - INDENT
        for line in text.split("\n", allow_blank=True):
            for number, row in enumerate(line.wrap(self.console, width) if self.is_wrapped else [line]):
                space = " " * (INDENT if number else indent)
                self.console.print(Text(space).append_text(row), soft_wrap=True)


def print_run(printer: Printer, source: Source, config: ShowConfig) -> None:
    """Print the overview, then the chosen episodes."""
    assert source.recording is not None, "a source that is not live has a recording"
    printer.say(title(source))
    for note in source.recording.damage():
        printer.say(Text(f"note: {note}"))
    source.check_has_episodes()
    printer.console.print(overview_table(source))
    if config.gap and not any(cell is not None for cell in source.columns["max_gap"]):
        printer.say(Text("The trainer has scored none of these episodes, so there are no gaps."))
    if config.tokens:
        tokens = source.recording.tokens()
    else:
        tokens = {}
    for index in chosen(source, config):
        episode = source.record(index)
        score = source.score(index)
        for line in chat_lines(source.recording, episode, source.outcome(index), score, config.full):
            printer.say(line.text, INDENT * line.is_data)
        if config.tokens:
            printer.say(Text.assemble(("tokens", "bold"), "  ", legend(config.color, printer.has_colours)))
            if config.color == "gap" and score is None:
                printer.say(Text("The trainer has not scored this episode."))
            printer.say(stream_text(episode, score, tokens, config.color, printer.has_colours), INDENT)
        printer.console.print()


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and print."""
    config = parse(ShowConfig, argv, "python -m agents.show", "Show a recorded run in the terminal.")
    selection = config.selection
    source = Source(config.run, keep=selection.matches, limit=selection.limit or None)
    console = Console(width=config.width or None)
    if not console.is_terminal and not config.width:
        console = Console(width=PIPED_WIDTH)
    print_run(Printer(console, console.is_terminal or config.width > 0), source, config)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
