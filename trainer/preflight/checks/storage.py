"""Checks the run folder: it must be writable, have room for what a run writes, and be visible to every host.

The check leaves no file behind.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envs.checks import Verdict, combine, fault, ok, warning
from trainer.checkpoint.checkpointer import found_steps
from trainer.checkpoint.run_dir import CHECKPOINTS
from trainer.config.run import RunConfig
from trainer.planning.memory import GIB

#: Bytes of a recorded token in a line of JSON: its id, mask and log-prob, and its share of the text.
RECORDED_BYTES = 24
#: File systems that other hosts see too, as /proc/mounts names them; every `fuse.` one counts too.
SHARED_KINDS = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "smb3", "beegfs", "afs", "glusterfs", "9p", "virtiofs", "wekafs")
)


@dataclass(frozen=True)
class DiskNeed:
    """The most bytes that a run has on disk at once.

    Example, Qwen3-VL-2B trained in full with two checkpoints kept: 3 x 12 bytes for each of 2,127,532,032 parameters
    are 71.3 GiB, the model in bfloat16 4.0 GiB.
    """

    checkpoints: int
    model: int
    sync: int
    recordings: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.checkpoints + self.model + self.sync + self.recordings

    @classmethod
    def of(cls, config: RunConfig, num_parameters: int, num_trained: int, uses_servers: bool) -> DiskNeed:
        """Return what a configuration writes.

        A checkpoint holds float32 weights and Adam's two moments of all trained parameters. While a checkpoint is
        written, there is one more than `keep_checkpoints`.
        """
        if config.trains:
            every = config.checkpoint.save_every
        else:
            every = 0
        kept = config.checkpoint.keep_checkpoints
        if every:
            num_checkpoints = min(kept + 1, -(-config.steps // every))
        else:
            num_checkpoints = 0
        if config.checkpoint.resume:  # existing checkpoints need no new room
            num_existing = len(found_steps(config.checkpoint.resume / CHECKPOINTS))
            num_checkpoints = max(min(1, num_checkpoints), num_checkpoints - num_existing)
        model = 2 * num_parameters if config.trains else 0
        size = 2 if config.model.dtype == "bfloat16" else 4
        episodes = config.steps * config.rollout.problems_per_step * config.rollout.group_size
        tokens = config.data.max_prompt_tokens + config.env.max_new_tokens
        return cls(
            checkpoints=12 * num_trained * num_checkpoints,
            model=model,
            # The folder of the previous version stays until every server has read the new one.
            sync=2 * size * num_parameters if uses_servers else 0,
            recordings=RECORDED_BYTES * episodes * tokens if config.log.record and config.plays else 0,
        )


def check_folder(out: Path, need: DiskNeed, other_hosts: tuple[str, ...] = ()) -> Verdict:
    """Return whether a run folder can be made under `out`, with room for everything that a run writes.

    `other_hosts` are the hosts that must see it too.
    """
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return fault(f"{place} cannot be written: {error.strerror}", "give a folder with --out that can be written")
    free = shutil.disk_usage(place).free
    return combine([_room(place, free, need), *_shared(place, other_hosts)])


def _room(place: Path, free: int, need: DiskNeed) -> Verdict:
    parts = [
        f"{size / GIB:.1f} of {name}"
        for name, size in (
            ("checkpoints", need.checkpoints),
            ("the model", need.model),
            ("weights for servers", need.sync),
            ("recordings", need.recordings),
        )
        if size
    ]
    found = f"a run writes up to {need.total / GIB:.1f} GiB ({', '.join(parts)}), {free / GIB:.1f} are free at {place}"
    fix = "give another --out, a smaller keep_checkpoints, or record less with --record"
    if need.total > free:
        # A run can lose recordings, but not checkpoints, weights for servers or the model at its end.
        least = need.checkpoints + need.model + need.sync
        if least > free:
            return fault(found, fix)
        return warning(found, fix)
    return ok(found)


def _shared(place: Path, other_hosts: tuple[str, ...]) -> list[Verdict]:
    if not other_hosts:
        return []
    kind = file_system(place)
    if kind in SHARED_KINDS or kind.startswith("fuse."):
        return [ok(f"on {kind}")]
    found = f"{place} is on {kind or 'an unknown file system'} of this host, and {', '.join(other_hosts)} must see it"
    return [warning(found, "give a folder on a shared file system with --out")]


def file_system(place: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the kind of file system that a path lies on; "" if unknown.

    Example: `file_system(Path("/shared/runs"))` is "nfs4" if /shared is mounted over NFS.
    """
    best = -1
    kind = ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, target, found, *_ = line.split(" ")
            target = target.replace("\\040", " ")
            if place.resolve().is_relative_to(target) and len(target) >= best:
                best = len(target)
                kind = found
    return kind
