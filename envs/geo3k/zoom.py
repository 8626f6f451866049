"""Geometry problems with a `zoom` tool that returns an enlarged part of the diagram."""

from __future__ import annotations

from typing import Annotated

from PIL import Image
from pydantic import Field

from envs.env import EnvArgs
from envs.tool_env import ToolEnv
from envs.tools import ToolError, tool
from envs.types import Sample, message_images

SYSTEM_PROMPT = (
    "Solve the problem. Use zoom to see a part of the picture enlarged. Write the final answer as \\boxed{}."
)
MIN_SIDE = 8  # pixels of the original; a smaller part shows nothing useful
MAX_SCALE = 8

Thousandth = Annotated[int, Field(ge=0, le=1000)]


class Geo3kZoomEnv(ToolEnv):
    """One problem with its diagram; `zoom` shows a part of it at the size of the whole.

    Example::

        env = Geo3kZoomEnv(sample, EnvArgs(max_turns=3))       # the sample's image has 160 x 128 pixels
        env.zoom(0, 0, 500, 500)                               # the upper left quarter, 160 x 128 pixels
    """

    def __init__(self, sample: Sample, args: EnvArgs | None = None) -> None:
        super().__init__(sample, args)
        images = message_images(sample.prompt)
        if not images:
            raise ValueError(f"sample {sample.id!r} has no image to zoom into")
        self.image = images[0].convert("RGB")

    @tool
    def zoom(self, left: Thousandth, top: Thousandth, right: Thousandth, bottom: Thousandth) -> Image.Image:
        """Show a part of the picture enlarged.

        Args:
            left: left edge, in thousandths of the width
            top: upper edge, in thousandths of the height
            right: right edge, in thousandths of the width
            bottom: lower edge, in thousandths of the height
        """
        width, height = self.image.size
        box = (left * width // 1000, top * height // 1000, right * width // 1000, bottom * height // 1000)
        part_width = box[2] - box[0]
        part_height = box[3] - box[1]
        if min(part_width, part_height) < MIN_SIDE:
            rule = f"The part must be at least {MIN_SIDE} pixels wide and high, with left < right and top < bottom"
            raise ToolError(f"{rule}; it is {part_width} x {part_height}.", "bad_arguments")
        scale = min(width / part_width, height / part_height, MAX_SCALE)
        size = (round(part_width * scale), round(part_height * scale))
        return self.image.crop(box).resize(size, Image.Resampling.LANCZOS)
