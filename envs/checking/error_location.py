"""Finds the line of an environment author's code that raised an error, such as "shop.py:12"."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from envs.execution.runner import last_line
from envs.registry import plugin_files

_ENVS = Path(__file__).parents[1]
_OURS = (_ENVS, _ENVS.with_name("agents"))
#: Bundled environments count as an author's code too.
_BUNDLED = tuple(
    _ENVS / name
    for name in ("geo3k", "calculator.py", "guess.py", "from_gymnasium.py", "from_openenv.py", "from_verifiers.py")
)
_LIBRARY = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def author_location(frames: Iterable[tuple[str, int | str | None]]) -> str | None:
    """Return the last frame (file, line) that lies in an author's code, as text; None if there is none.

    >>> author_location([("/home/me/shop.py", 12), (re.__file__, 30)])
    'shop.py:12'
    """
    for file, line in reversed([*frames]):
        if _is_authors(Path(file)):
            return f"{Path(file).name}:{line}"
    return None


def located_line(fault: str | None, default: str = "") -> str:
    """Return the last line of a fault's text with the place in an author's code that raised it, or `default`.

    Example: "KeyError: 2 (shop.py:12)".
    """
    line = last_line(fault)
    place = author_location(_FRAME.findall(fault or "")) or default
    if not place or f"({place})" in line:
        return line
    return f"{line} ({place})"


def _is_authors(file: Path) -> bool:
    if file.name.startswith("<"):  # frozen modules and code given to exec
        return False
    if any(file.is_relative_to(folder) for folder in _BUNDLED):
        return True
    if any(file.is_relative_to(folder) for folder in _OURS):
        return False
    if {"site-packages", "dist-packages"} & {*file.parts}:  # an installed package may provide environments too
        return any(file.is_relative_to(registry.parent) for _, registry in plugin_files())
    return not any(file.is_relative_to(folder) for folder in _LIBRARY)
