"""The console of all commands: tables, colours and progress bars with text that cannot control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any, cast

import rich.console
from rich.console import ConsoleOptions, RenderableType, RenderHook
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from envs.safe_text import RawStream, escape_lines, guard_streams, is_guarded


class Console(rich.console.Console):
    """A rich console without markup, links and emoji codes, which escapes every text before it is laid out.

    Example::

        Console().print("[bold]a\\x1b[2J")        # [bold]a\\\\x1b[2J
    """

    def __init__(self, **settings: Any) -> None:
        # A text of a model could write markup: a link, a colour that hides it.
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    @property
    def file(self) -> IO[str]:
        """The stream, behind the guard that would escape our own colours."""
        return cast("IO[str]", RawStream(cast("Any", super().file)))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a string as rich text, safe to print."""
        return super().render_str(escape_lines(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what to write. Escapes once more: not every text was a string."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own: it moves the cursor of a progress bar
                yield segment
            else:
                yield Segment(escape_lines(segment.text), segment.style and _without_link(segment.style))

    def push_render_hook(self, hook: RenderHook) -> None:
        """Guard the streams that a progress bar or status has just put in place of guarded ones."""
        super().push_render_hook(hook)
        if any(is_guarded(getattr(stream, "rich_proxied_file", stream)) for stream in (sys.stdout, sys.stderr)):
            guard_streams()


def _without_link(style: Style) -> Style:
    """Return a style without the link that rich reads from markup and from codes in what others print."""
    if style.link:
        return style.update_link(None)
    return style
