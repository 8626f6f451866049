"""The starter model: a small Qwen3-VL that this repository trains itself, from architecture to weights."""

from pathlib import Path

#: The checkpoint folder that ships with the package.
STARTER_PATH = Path(__file__).parent / "weights"
