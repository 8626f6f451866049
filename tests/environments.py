"""Environments that a test writes into a folder, as a user does: a module, an entry in a registry, rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

#: One turn, whose reward depends on what is written, so that every step teaches something.
LUCKY = """
from envs.env import Env
class Lucky(Env):
    def __init__(self, label): self.label = label
    def reset(self): return {{}}, {{}}
    def step(self, text): return {{}}, True, {{}}
    def reward(self, text): return {reward}
def build_env(sample=None, args=None, **_): return Lucky(sample.label)
"""
#: The bundled geometry with rewards of its own; `right` is the reward that it would give.
GEOMETRY = """
from envs.geo3k.env import Geo3kEnv
class Lucky(Geo3kEnv):
    def reward(self, text):
        right = super().reward(text)
        {reward}
def build_env(sample=None, args=None, **_): return Lucky(sample, args)
"""


@contextmanager
def environment(folder: Path, name: str, source: str, **entry: Any) -> Iterator[list[str]]:
    """Write a module and its entry; yield the flags of a command that uses it, and let this process import it."""
    (folder / f"{name}.py").write_text(source)
    registry = folder / "registry.yaml"
    keys = {"description": "Written by a test.", "max_turns": 1, **entry, "entry_point": f"{name}:build_env"}
    registry.write_text(yaml.safe_dump({name: keys}))
    sys.path.insert(0, str(folder))
    try:
        yield ["--env", name, "--registry", str(registry)]
    finally:
        sys.path.remove(str(folder))


@contextmanager
def lucky_lengths(folder: Path, name: str, reward: str, num_rows: int) -> Iterator[list[str]]:
    """Let one-turn episodes be rewarded by an expression of `text` and `self.label`, on rows "Say 0.", "Say 1.", ..."""
    data = write_rows(folder / "rows.jsonl", *({"problem": f"Say {n}.", "answer": str(n)} for n in range(num_rows)))
    with environment(folder, name, LUCKY.format(reward=reward)) as flags:
        yield [*flags, "--data", data]


@contextmanager
def lucky_geometry(folder: Path, name: str, *statements: str) -> Iterator[list[str]]:
    """Let episodes of geo3k be rewarded by statements on `text` and `right`."""
    entry = yaml.safe_load((ROOT / "registry.yaml").read_text())["geo3k"]
    with environment(folder, name, GEOMETRY.format(reward="\n        ".join(statements)), **entry) as flags:
        yield flags


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    """Write one row a line; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
