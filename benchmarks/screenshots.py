"""Takes the images of docs/viewer.md: a run in; PNG files, in light and dark, out."""

from __future__ import annotations

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from agents.viewer.export import export
from agents.viewer.source import Source
from benchmarks.browser import chromium

MAX_BYTES = 250_000


@dataclass(frozen=True)
class Screenshot:
    """What is shown: a fragment of the page, in a theme; `hover` is pointed at."""

    name: str
    theme: Literal["light", "dark"]
    fragment: str
    hover: str = ""
    height: int = 900


def shots(source: Source, is_compared: bool, episode: str = "") -> list[Screenshot]:
    """Return what is worth an image of a run: among others the episode, or else one that a tool set right."""
    columns = source.columns
    chosen = max(
        (k for k in range(len(source)) if episode in ("", columns["id"][k])),
        key=lambda k: (columns["phase"][k] == "train", columns["reward"][k] == 1, columns["num_turns"][k], k),
    )
    episode = str(columns["id"][chosen])
    group = "/".join(str(columns[name][chosen]) for name in ("phase", "way", "group"))
    tokens = f"#/episode/{episode}?color="
    found = [
        Screenshot("overview", "light", "#/", ".chart[data-metric=reward] .plot"),
        Screenshot("episodes", "dark", "#/episodes?phase=train&sort=-max_gap"),
        Screenshot("conversation", "light", f"#/episode/{episode}?turn=2", height=1000),
        Screenshot("episode", "light", f"{tokens}gap", ".tokens .r8"),
        Screenshot("probability", "dark", f"{tokens}probability", ".tokens .is-mine:is(.p3, .p4, .p5, .p6)"),
        Screenshot("group", "light", f"#/group/{group}?color=mask&order=reward"),
    ]
    return [*found, Screenshot("compare", "dark", "#/compare")] if is_compared else found


def take_screenshots(folder: Path, run: Path, other: Path | None, episode: str = "", only: str = "") -> None:
    """Write viewer-NAME.png into a folder: all of them, or `only` that of one name."""
    source = Source(run)
    sources = [source, Source(other)] if other else [source]
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        for name, shown in (("one", sources[:1]), ("all", sources)):
            export(Path(scratch) / f"{name}.html", shown)
        for shot in shots(source, other is not None, episode):
            if only not in ("", shot.name):
                continue
            name = "all" if shot.fragment.startswith("#/compare") else "one"
            page = browser.new_page(viewport={"width": 1440, "height": shot.height}, color_scheme=shot.theme)
            page.goto(f"file://{scratch}/{name}.html{shot.fragment}")
            page.wait_for_selector("html[data-ready]")
            page.wait_for_timeout(700)
            if shot.hover and page.locator(shot.hover).count():
                page.locator(shot.hover).first.hover()
                page.wait_for_timeout(200)
            path = folder / f"viewer-{shot.name}.png"
            path.write_bytes(packed(page.screenshot()))
            print(f"{path}: {path.stat().st_size:,} bytes")
            page.close()


def packed(png: bytes) -> bytes:
    """Return an image as a smaller file, of 256 colours where it would be too large otherwise."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for each in (image, image.quantize(256, dither=Image.Dither.NONE)):
        file = io.BytesIO()
        each.save(file, "PNG", optimize=True)
        if len(file.getvalue()) <= MAX_BYTES:
            return file.getvalue()
    raise AssertionError(f"{len(file.getvalue())} bytes, more than {MAX_BYTES}")
