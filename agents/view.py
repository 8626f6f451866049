"""Shows a recorded run in a browser: `python -m agents.view RUN`. A run that is still training is shown live.

`--export PAGE.html` writes the page and all its data as one file instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from agents.cli.text import counted, path_text
from agents.recording.selection import SelectionConfig
from agents.viewer.export import export
from agents.viewer.server import ViewServer
from agents.viewer.source import Source
from envs.config.cli import exit_code, parse
from envs.config.settings import Section


class ViewConfig(Section):
    """The settings of `python -m agents.view`."""

    runs: tuple[Path, ...] = Field(
        min_length=1,
        max_length=2,
        description="run folder or recording folder; a second one is compared with the first",
    )
    export: Path | None = Field(
        default=None, description="HTML file to write, with all data inside; empty: serve the page"
    )
    port: int = Field(default=0, ge=0, le=65535, description="port of the server; 0: a free one")
    browser: bool = Field(default=True, description="open the page in a browser if there is a display")
    selection: SelectionConfig = SelectionConfig()


def write(path: Path, sources: Sequence[Source]) -> int:
    """Write the page to a file and print its size."""
    for source in sources:
        source.check_has_episodes()
    size = export(path, sources)
    counts = " and ".join(f"{counted(len(source), 'episode')} of {path_text(source.path)}" for source in sources)
    print(f"{path_text(path)}: {counts}, {size / 1e6:.1f} MB")
    return 0


def serve(config: ViewConfig, sources: Sequence[Source]) -> int:
    """Serve the page until Ctrl-C."""
    # Ctrl-C is how a person ends it, so it is no error.
    with contextlib.suppress(KeyboardInterrupt), ViewServer(sources, config.port) as server:
        for source in sources:
            print(f"{path_text(source.path)}: {counted(len(source), 'episode')}{', live' if source.is_live else ''}")
        print(f"{server.url}\nOnly this machine can open it; Ctrl-C ends it.", flush=True)
        # A browser of a terminal would take the screen over and show none of the page.
        if config.browser and has_display():
            webbrowser.open(server.url)
        server.serve_forever()
    return 0


def has_display() -> bool:
    """Return whether this machine has a screen to open a browser on."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY"))


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, then write or serve the page."""
    config = parse(ViewConfig, argv, "python -m agents.view", "Show recorded runs in a browser.")
    selection = config.selection
    sources = [Source(path, selection.matches, selection.limit or None) for path in config.runs]
    # Damage is left out of the page, so it is said before anybody relies on the page.
    for note in (note for source in sources for note in source.recording.damage()):
        print(f"note: {note}")
    if config.export:
        return write(config.export, sources)
    return serve(config, sources)


if __name__ == "__main__":
    sys.exit(exit_code(run))
