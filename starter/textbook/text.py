"""Draws short texts as masks: letters slanted, digits and signs upright, as textbooks do.

The fonts come with Pillow and matplotlib, which this package requires, so they are the same on every machine.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

FontName = Literal["Aileron", "DejaVuSans", "STIXGeneral"]
FONTS: tuple[FontName, ...] = ("Aileron", "DejaVuSans", "STIXGeneral")

#: File names of the slanted letters; Aileron has none and is sheared.
_SLANTED = {"DejaVuSans": "DejaVuSans-Oblique", "STIXGeneral": "STIXGeneralItalic"}
#: The height of a digit is about the same in all fonts at these factors.
_FACTOR = {"Aileron": 1.0, "DejaVuSans": 0.92, "STIXGeneral": 1.1}
_SHEAR = 0.2
DETAIL = 4  # texts and strokes are drawn so many times larger, then reduced


@cache
def _folder() -> Path:
    """Return matplotlib's folder of fonts, without importing matplotlib."""
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None, "matplotlib is a dependency of this package"
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


@cache
def _font(name: FontName, size: int, slanted: bool) -> ImageFont.FreeTypeFont:
    # The basic layout engine, because Raqm is not on every machine.
    if name == "Aileron":
        font = ImageFont.load_default(size=size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow has FreeType"
        return font.font_variant(layout_engine=ImageFont.Layout.BASIC)
    file = _folder() / f"{_SLANTED[name] if slanted else name}.ttf"
    return ImageFont.truetype(str(file), size, layout_engine=ImageFont.Layout.BASIC)


def _style_of(character: str) -> tuple[bool, bool]:
    """Return whether a character is slanted, and whether it is the minus sign, which Aileron lacks."""
    return character.isalpha(), character == "−"


@lru_cache(maxsize=4096)
def text_mask(text: str, name: FontName, size: float) -> Image.Image:
    """Return the ink of a text, 0 to 255, cropped to it; `size` is the font's size in pixels."""
    large = round(size * DETAIL * _FACTOR[name])
    mask = Image.new("L", (large * (len(text) + 2), 2 * large), 0)
    x = large // 2
    for (slanted, is_minus), run in groupby(text, _style_of):
        part = "".join(run)
        font = _font("DejaVuSans" if is_minus else name, large, slanted)
        ink = Image.new("L", mask.size, 0)
        ImageDraw.Draw(ink).text((x, 1.5 * large), part, fill=255, font=font, anchor="ls")
        if slanted and name not in _SLANTED:
            ink = ink.transform(ink.size, Image.Transform.AFFINE, (1, _SHEAR, -_SHEAR * 1.5 * large, 0, 1, 0))
        mask.paste(ink, mask=ink)
        x += round(font.getlength(part)) + (round(0.06 * large) if slanted else 0)
    box = mask.getbbox()
    assert box is not None, f"the text {text!r} has ink"
    left, top, right, bottom = box
    grown = (left - left % DETAIL, top - top % DETAIL, right + -right % DETAIL, bottom + -bottom % DETAIL)
    return mask.crop(grown).reduce(DETAIL)
