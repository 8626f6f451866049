"""Draws problems of a style side by side: `python -m starter.sheet --style textbook --out sheet.png`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError
from starter.textbook.problems import STYLES, problems_of

GAP = 8  # pixels between images


class SheetConfig(Section):
    """What to draw, and where to."""

    style: str = Field(default="textbook", description="how problems are drawn")
    families: tuple[str, ...] = Field(default=(), description="one problem of each; empty: of all")
    level: int = Field(default=3, ge=1, le=3, description="level of the problems")
    seed: int = Field(default=0, ge=0, description="seed of the problems")
    columns: int = Field(default=8, ge=1, description="images in a row")
    out: Path = Field(default=Path("sheet.png"), description="PNG file to write")


def sheet(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Return images in rows, each row as high as its highest image, on grey."""
    rows = [images[at : at + columns] for at in range(0, len(images), columns)]
    widths = [sum(image.width + GAP for image in row) + GAP for row in rows]
    heights = [max(image.height for image in row) + GAP for row in rows]
    page = Image.new("RGB", (max(widths), sum(heights) + GAP), (225, 225, 225))
    top = GAP
    for row, height in zip(rows, heights, strict=True):
        left = GAP
        for image in row:
            page.paste(image, (left, top))
            left += image.width + GAP
        top += height
    return page


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, write the image, and print question and answer of every problem in it."""
    config = parse(SheetConfig, argv, "python -m starter.sheet", "Draw problems of a style side by side.")
    images = []
    for family in config.families or STYLES[config.style]:
        source = problems_of("train", 1, config.seed, config.style, families=[family], levels=[config.level])
        problem, image = source.item(0)
        images.append(image)
        print(f"{len(images):3}  {family}: {problem.question} {problem.answer}")
    try:
        sheet(images, config.columns).quantize(200).save(config.out, "PNG", optimize=True)
    except (OSError, ValueError) as error:
        rule = "must be a file that can be written"
        fix = f"give another ({error})"
        raise UserError("--out", rule, str(config.out), fix) from error
    print(f"{len(images)} images in {config.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
