"""List the environments that --env accepts: `python -m envs.list`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field
from rich import box
from rich.table import Table
from rich.text import Text

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.console import Console
from envs.registry import PACKAGED, load_registry, plugin_files
from envs.spec import EnvSpec

#: Width when the output is piped, so that every row stays one line.
PIPED_WIDTH = 1000


class ListConfig(Section):
    """The options of `python -m envs.list`."""

    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")


def list_table(specs: Mapping[str, EnvSpec]) -> Table:
    """Return the environments as a table without importing their code."""
    packages = {str(file): f"package {name}" for name, file in plugin_files()}
    origins = {str(PACKAGED): "packaged", **packages}
    names = ("id", "turns", "tool calls", "isolation", "data", "from", "description")
    table = Table(*names, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    table.columns[0].no_wrap = True
    table.columns[5].overflow = "fold"
    for spec in sorted(specs.values(), key=lambda spec: spec.id):
        cells = (
            spec.id,
            str(spec.max_turns),
            f"{spec.tool_format}, {spec.tool_calls}",
            spec.isolation,
            "no" if spec.dataset is None else "built-in",
            origins.get(spec.origin, spec.origin),
            spec.description,
        )
        table.add_row(*map(Text, cells))
    return table


def run(argv: Sequence[str] | None = None) -> int:
    """Parse and print."""
    config = parse(ListConfig, argv, "python -m envs.list", "List the environments of the registry.")
    registry = load_registry(*config.registry)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(list_table(registry))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
