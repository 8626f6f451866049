"""The state of a run between two steps, apart from the learner's, as the files of a checkpoint.

`progress.json` holds counters, `random.pickle` the random generators, `groups.pickle` the groups in flight. Pickles can
run any code: never resume a stranger's run folder.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from agents.rollout.groups import GroupInFlight, ManagerState
from trainer.checkpoint.checkpointer import Checkpoint
from trainer.evaluation.results import Evaluation

PROGRESS = "progress.json"
RANDOM = "random.pickle"
GROUPS = "groups.pickle"
_EVALUATIONS = TypeAdapter(dict[int, dict[str, Evaluation]])


def _random_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


@dataclass(frozen=True)
class LoopState:
    """The state of the loop after `step`.

    `metrics_bytes` and `recorded_bytes` (by file) are the lengths of the files at that time: a resumed run cuts off
    what follows, because it takes those steps again. `seconds` is the time spent so far, in all processes of the run.
    `generators` are the states of the random generators. `evaluations` holds those of each way by step. If the
    evaluation of `step` is still to come, `unfinished_row` has the other metrics of the step, and the metrics file by
    then lacks it.

    Example: `LoopState(step=10, metrics_bytes=20_480, recorded_bytes={"episodes.jsonl.gz": 1_048_576}, seconds=55.0)`.
    """

    step: int = 0
    metrics_bytes: int = 0
    recorded_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    evaluations: Mapping[int, Mapping[str, Evaluation]] = field(default_factory=dict)
    unfinished_row: Mapping[str, float] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    group_outcomes: Mapping[str, int] = field(default_factory=dict)
    unused_groups: Mapping[str, int] = field(default_factory=dict)
    rollout: ManagerState = field(default_factory=ManagerState)
    generators: Mapping[str, Any] = field(default_factory=_random_state, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """The rows of the metrics file by then."""
        return self.step - bool(self.unfinished_row)

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint."""
        # Groups in flight have a file of their own: their episodes are no JSON.
        rollout = ManagerState(self.rollout.num_begun, problems=self.rollout.problems)
        numbers = asdict(replace(self, rollout=rollout, generators={}))
        del numbers["generators"]
        return {
            PROGRESS: json.dumps(numbers, indent=1).encode(),
            RANDOM: pickle.dumps(self.generators),
            GROUPS: pickle.dumps([_pickled(group) for group in self.rollout.in_flight]),
        }


def read_loop_state(checkpoint: Checkpoint) -> LoopState:
    """Return the state that a checkpoint holds, and restore the random generators."""
    numbers = json.loads(checkpoint.read(PROGRESS))
    groups = [pickle.loads(group) for group in pickle.loads(checkpoint.read(GROUPS))]
    # An environment of this run may draw from them too.
    _set_random_state(pickle.loads(checkpoint.read(RANDOM)))
    # Put together again from its two files.
    kept = numbers.pop("rollout")
    rollout = ManagerState(kept["num_begun"], tuple(groups), kept.get("problems", {}))
    evaluations = _EVALUATIONS.validate_python(numbers.pop("evaluations"))
    return LoopState(**numbers | {"faults": tuple(numbers["faults"])}, evaluations=evaluations, rollout=rollout)


def seed_random(seed: int) -> None:
    """Seed the random generators of this process, which an environment may draw from.

    TrueTurn itself does not: problems, samples and orders have generators of their own.
    """
    random.seed(seed)
    # NumPy takes 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Set the random generators back when the block ends: environments of an evaluation may draw from them too."""
    states = _random_state()
    try:
        yield
    finally:
        _set_random_state(states)


def _pickled(group: GroupInFlight) -> bytes:
    """Return a group's pickle; without its episodes, to be played again, where these cannot be pickled."""
    try:
        content = pickle.dumps(group)
        pickle.loads(content)  # some objects, such as exceptions with own arguments, can be written but not read
        return content
    except Exception:  # an environment's object may raise anything
        return pickle.dumps(replace(group, played={}, discarded=(), is_complete=False))


def _set_random_state(states: Mapping[str, Any]) -> None:
    setters: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    for name, setter in setters.items():
        setter(states[name])
