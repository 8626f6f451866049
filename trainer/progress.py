"""Where a run stands between two steps: everything of it but the learner's state, as the files of a checkpoint.

In: counters, random generators, groups in flight. Out: `progress.json`, `random.pickle` and `groups.pickle`, and back.
A checkpoint is read as code of its owner's is: pickles can run anything, so never go on from a stranger's run folder.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from agents.rollout import GroupInFlight, ManagerState
from trainer.checkpoint import Checkpoint
from trainer.figures import Evaluation

PROGRESS, RANDOM, GROUPS = "progress.json", "random.pickle", "groups.pickle"
_EVALUATIONS = TypeAdapter(dict[str, Evaluation])


@dataclass(frozen=True)
class Progress:
    """Where the loop stands after `step`.

    `metrics_bytes` and `recorded_bytes`, by file, are the lengths of the files by then: what stands behind them is of
    steps that will be taken again. `seconds` were spent so far, in all processes of the run that it goes on from.

    Example: `Progress(step=10, metrics_bytes=20_480, recorded_bytes={"episodes.jsonl.gz": 1_048_576}, seconds=55.0)`.
    """

    step: int = 0
    metrics_bytes: int = 0
    recorded_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    before: Mapping[str, Evaluation] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    group_fates: Mapping[str, int] = field(default_factory=dict)
    unused_groups: Mapping[str, int] = field(default_factory=dict)
    rollout: ManagerState = field(default_factory=ManagerState)

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint, with the random generators as they are now."""
        numbers = asdict(replace(self, rollout=ManagerState(self.rollout.num_begun)))
        return {
            PROGRESS: json.dumps(numbers, indent=1).encode(),
            RANDOM: pickle.dumps(_random_state()),
            GROUPS: pickle.dumps([_pickled(group) for group in self.rollout.in_flight]),
        }


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Return what a checkpoint holds, and set the random generators to where they were."""
    numbers = json.loads(checkpoint.read(PROGRESS))
    groups = [pickle.loads(group) for group in pickle.loads(checkpoint.read(GROUPS))]
    _set_random_state(pickle.loads(checkpoint.read(RANDOM)))
    rollout = ManagerState(numbers.pop("rollout")["num_begun"], tuple(groups))
    before = _EVALUATIONS.validate_python(numbers.pop("before"))
    return Progress(**numbers | {"faults": tuple(numbers["faults"])}, before=before, rollout=rollout)


def seed_random(seed: int) -> None:
    """Set the random generators of this process, which an environment may draw from, to where a run with a seed begins.

    Nothing of ours draws from them: problems, samples and orders have generators of their own.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _pickled(group: GroupInFlight) -> bytes:
    """Return a group's pickle. Where something that its environment reported has none, it is to be played again."""
    try:
        content = pickle.dumps(group)
        pickle.loads(content)  # an exception with arguments of its own, say, is written and cannot be read
        return content
    except Exception:  # an object of somebody else's raises what it likes
        return pickle.dumps(replace(group, played={}, discarded=(), result=None))


def _random_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _set_random_state(states: Mapping[str, Any]) -> None:
    setters: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    for name, setter in setters.items():
        setter(states[name])
