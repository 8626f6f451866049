"""Checks the run folder: it must be writable, and have room for what a run writes. The check leaves no file behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from envs.checks import Verdict, fault, ok, warning
from trainer.config.run import RunConfig
from trainer.planning.memory import GIB

#: Bytes of a recorded token in a line of JSON: its id, mask and log-prob, and its share of the text.
RECORDED_BYTES = 24


#: What a run can lose; it cannot do without the rest.
RECORDINGS = "recordings"


def disk_need(config: RunConfig, num_parameters: int, num_trained: int) -> dict[str, int]:
    """Return the most bytes that a run has on disk at once, by what they hold.

    Example, Qwen3-VL-2B trained in full with two checkpoints kept: 3 x 12 bytes for each of 2,127,532,032 parameters
    are 71.3 GiB, the model in bfloat16 4.0 GiB.
    """
    need: dict[str, int] = {}
    if config.trains:
        if every := config.checkpoint.save_every:
            # While a checkpoint is written, there is one more than are kept.
            num_checkpoints = min(config.checkpoint.keep_checkpoints + 1, -(-config.steps // every))
            # Float32 weights and Adam's two moments.
            need["checkpoints"] = 12 * num_trained * num_checkpoints
        need["the model"] = 2 * num_parameters
    if config.uses_servers:
        # The folder of the previous version stays until every server has read the new one.
        need["weights for servers"] = 2 * num_parameters * (2 if config.model.dtype == "bfloat16" else 4)
    if config.log.record and config.plays:
        episodes = config.steps * config.rollout.problems_per_step * config.rollout.group_size
        need[RECORDINGS] = RECORDED_BYTES * episodes * (config.data.max_prompt_tokens + config.env.max_new_tokens)
    return need


def check_folder(out: Path, need: Mapping[str, int]) -> Verdict:
    """Return whether a run folder can be made under `out`, with room for everything that a run writes."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    try:
        # Permissions alone do not tell: a mount may be read-only, a quota used up.
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return fault(f"{place} cannot be written: {error.strerror}", "give a folder with --out that can be written")
    free = shutil.disk_usage(place).free
    parts = ", ".join(f"{size / GIB:.1f} of {name}" for name, size in need.items())
    total = sum(need.values())
    found = f"a run writes up to {total / GIB:.1f} GiB ({parts}), {free / GIB:.1f} are free at {place}"
    fix = "give another --out, a smaller keep_checkpoints, or record less with --record"
    if total - need.get(RECORDINGS, 0) > free:
        return fault(found, fix)
    if total > free:
        return warning(found, fix)
    return ok(found)
