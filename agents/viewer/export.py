"""Writes the page with all data inside: sources in, one HTML file out that needs nothing else.

Data are written one after the other, so an export takes the memory of a block of episodes, however many there are.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from agents.viewer.columns import pictures
from agents.viewer.page import BLOCK, assemble
from agents.viewer.source import Source
from agents.viewer.wire import JSON, dump
from envs.errors import UserError

LEVEL = 6
_RAW = -15  # what zlib calls deflate without a header, as browsers' "deflate-raw"


def export(path: Path, sources: Sequence[Source]) -> int:
    """Write the page of one run, or of two; return its size in bytes.

    Example: `export(Path("page.html"), [Source(Path("runs/x"))])`.

    Raises:
        UserError: the file cannot be written.
    """
    page = assemble("file", runs=len(sources))
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(page.head.encode())
            for run, source in enumerate(sources):
                for name, content in elements(source):
                    head = f'<script type="application/octet-stream" id="run-{run}-{name}">'
                    file.write(head.encode() + base64.b64encode(content) + b"</script>\n")
            file.write(page.tail.encode())
        part.replace(path)
    except OSError as error:
        fix = f"give another file ({error.strerror})"
        raise UserError("--export", "must be a file that can be written", str(path), fix) from error
    return path.stat().st_size


def elements(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield what the page holds of a run: the names of elements, and what is in them."""
    yield "overview", deflate(dump(without_places({**source.overview(), "live": False})))
    seen: set[str] = set()
    for first in range(0, len(source), BLOCK):
        block = [source.episode(index) for index in range(first, min(first + BLOCK, len(source)))]
        yield f"block-{first // BLOCK}", deflate(dump(block))
        names = dict.fromkeys(name for episode in block for name in _pictures(episode))
        for name in names.keys() - seen:
            content = read_picture(source, name)
            if content is not None:
                yield f"image-{Path(name).stem}", content
        seen |= names.keys()


def without_places(overview: JSON) -> JSON:
    """Return an overview that names no folder of this machine, for a page is sent to others.

    Example: the model "/home/me/models/Qwen3-VL" becomes "models/Qwen3-VL".
    """
    manifest = overview["manifest"]
    if manifest:
        model = "/".join(Path(manifest["model"]).parts[-2:])
        manifest = {**manifest, "model": model, "registry": Path(manifest["registry"]).name}
    return {**overview, "folder": overview["name"], "manifest": manifest}


def read_picture(source: Source, name: str) -> bytes | None:
    """Return a picture's file; None where there is none, or the name could be that of another file."""
    try:
        return source.picture(name).read_bytes()
    except (UserError, OSError):
        return None


def _pictures(episode: JSON) -> Iterator[str]:
    yield from pictures(episode["messages"])
    for turn in episode["turns"]:
        yield from pictures(turn["observations"])


def deflate(content: bytes) -> bytes:
    """Return the content compressed, without a header."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _RAW)
    return packer.compress(content) + packer.flush()
