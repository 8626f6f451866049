"""An environment for the fault drill: it does what the model's text says, raises, hangs, crashes, returns garbage."""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from typing import Any

from envs.env import Env
from envs.types import Sample


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has no pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


class FaultyEnv(Env):
    """Two turns, in the first of which it does what the model's text says."""

    def __init__(self, sample: Sample, args: object) -> None:
        self.sample, self.fault, self.turn = sample, "", 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start, or fail."""
        if self.sample.metadata["fails_in_reset"]:
            raise OSError("no such machine")
        return {}, {}

    def step(self, response_text: str) -> Any:
        """Do what the text says."""
        self.turn += 1
        self.fault = response_text if self.turn == 1 else self.fault
        match response_text:
            case "raise":
                raise ValueError("boom")
            case "hang":
                while True:
                    pass
            case "sleep":
                time.sleep(60)
            case "exit":
                os._exit(3)
            case "crash":
                ctypes.string_at(0)
            case "allocate":
                return {"obs_str": str(len(bytearray(4 * 2**30)))}, False, {}
            case "header":
                return {"obs_str": "", "multi_modal_data": {"image": [png_header(50_000, 50_000)]}}, False, {}
            case "garbage step":
                return "not", "a", "step", 1
        return {"obs_str": "again"} if self.turn == 1 else {}, self.turn == 2, {}

    def reward(self, final_text: str) -> Any:
        """Return 1.0, or garbage."""
        return "much" if self.fault == "garbage reward" else 1.0
