"""Writes the page and all its data as one HTML file, which needs no server and no network.

The export writes one block of episodes at a time, so its memory does not grow with the number of episodes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from agents.recording.schema import image_names
from agents.viewer.page import BLOCK, assemble
from agents.viewer.source import Source
from agents.viewer.strict_json import JSON, dump
from envs.errors import UserError

LEVEL = 6
#: Bytes of the episodes of a block, which the browser unpacks at once.
MAX_BLOCK = 2**28
_RAW = -15  # zlib's value for deflate without a header, which browsers call "deflate-raw"


def export(path: Path, sources: Sequence[Source]) -> int:
    """Write the page of one or two runs; return its size in bytes.

    Example: `export(Path("page.html"), [Source(Path("runs/x"))])`.

    Raises:
        UserError: the file cannot be written.
    """
    page = assemble("file", runs=len(sources))
    # Renamed when whole: a page that was killed half way would open as one without data.
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(page.head.encode())
            for run, source in enumerate(sources):
                for name, content in elements(source):
                    # Base64, in a type that no browser runs: no text of a model can end the element.
                    head = f'<script type="application/octet-stream" id="run-{run}-{name}">'
                    file.write(head.encode() + base64.b64encode(content) + b"</script>\n")
            file.write(page.tail.encode())
        part.replace(path)
    except OSError as error:
        fix = f"give another file ({error.strerror})"
        raise UserError("--export", "must be a file that can be written", str(path), fix) from error
    return path.stat().st_size


def elements(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield the page's data elements for a run: name and content."""
    yield "overview", deflate(dump(without_paths({**source.overview(), "live": False})))
    seen: set[str] = set()
    for first in range(0, len(source), BLOCK):
        if (size := sum(source.sizes[first : first + BLOCK])) > MAX_BLOCK:
            rule = f"must hold blocks of {BLOCK} episodes of at most {MAX_BLOCK} bytes"
            fix = "choose some with --id"
            raise UserError("--export", rule, size, fix)
        lines = list[bytes]()
        names = dict[str, None]()
        for index in range(first, min(first + BLOCK, len(source))):
            episode = source.episode(index)
            lines.append(dump(episode))
            messages = [*episode["messages"], *episode.get("later_messages", ())]
            answers = (message for turn in episode["turns"] for message in turn["observations"])
            names |= dict.fromkeys([*image_names(messages), *image_names(answers)])
        yield f"block-{first // BLOCK}", deflate(b"[%s]" % b",".join(lines))
        # Once in the file, though all samples of a group show it.
        for name in names.keys() - seen:
            content = read_image(source, name)
            if content is not None:
                yield f"image-{Path(name).stem}", content
        seen |= names.keys()


def without_paths(overview: JSON) -> JSON:
    """Return an overview without paths of this machine, because the page may be sent to others.

    Example: the model "/home/me/models/Qwen3-VL" becomes "models/Qwen3-VL".
    """
    manifest = overview["manifest"]
    model = "/".join(Path(manifest["model"]).parts[-2:])
    manifest = {**manifest, "model": model, "registry": Path(manifest["registry"]).name}
    return {**overview, "folder": overview["name"], "registry": "", "manifest": manifest}


def read_image(source: Source, name: str) -> bytes | None:
    """Return an image's file; None if it is missing, or not the image that was recorded."""
    try:
        return source.image(name)
    except UserError:
        return None


def deflate(content: bytes) -> bytes:
    """Return the content, compressed as raw deflate."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _RAW)
    return packer.compress(content) + packer.flush()
