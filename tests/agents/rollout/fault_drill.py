"""Everything an environment can do wrong, in 64 concurrent episodes.

Eight problems of eight episodes each; which episode does what is fixed. Environments run in processes of their own,
with 2 GiB of memory and 2 seconds a call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.groups import derive_seed
from agents.rollout.manager import rollout_groups
from agents.types import GenerateRequest, SamplingParams, TrajectoryGroup
from envs.execution.load import load_env
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample

GROUP_SIZE = 8
STEP_TIMEOUT_S = 2.0
#: A step may take this long: two tries of two calls at their limit each, and what starting 64 processes takes.
WALL_LIMIT_S = 30.0

GOOD = "good"
#: What the first of eight copies does, the second, and so on; each of these is one problem.
PROBLEMS: tuple[tuple[str, ...], ...] = (
    (GOOD,) * 8,
    ("raise",) * 3 + (GOOD,) * 5,
    ("hang",) * 2 + (GOOD,) * 6,
    ("exit", "exit", "crash", "crash", *(GOOD,) * 4),
    ("allocate", "allocate", "header", "header", *(GOOD,) * 4),
    ("garbage step", "garbage step", "garbage reward", "garbage reward", *(GOOD,) * 4),
    ("sleep",) * 7 + (GOOD,),
    ("raise in reset",) * 8,
)
#: How an episode with each of them ends.
ENDS = {
    GOOD: "completed",
    "raise": "env_error",
    "raise in reset": "env_error",
    "hang": "env_timeout",
    "sleep": "env_timeout",
    "exit": "env_error",
    "crash": "env_error",
    "allocate": "env_error",
    "header": "env_error",
    "garbage step": "env_error",
    "garbage reward": "env_error",
}


def drill(renderer: Renderer, resample: int = 1) -> tuple[list[TrajectoryGroup], float]:
    """Play all problems at once; return their groups and the seconds that it took."""
    seed = 0
    texts = {
        derive_seed(seed, index, copy, *([attempt] if attempt else [])): text
        for index, copies in enumerate(PROBLEMS)
        for copy, text in enumerate(copies)
        for attempt in range(resample + 1)
    }

    def script(turn: int, request: GenerateRequest) -> str:
        return texts[request.seed // 1000] if turn == 0 else "done"

    spec = EnvSpec(
        id="faulty",
        entry_point="tests.faulty_env:FaultyEnv",
        description="Does everything wrong.",
        max_turns=2,
        isolation="process",
        memory_limit_gib=2.0,
        step_timeout_s=STEP_TIMEOUT_S,
    )
    samples = [
        Sample(
            id=f"problem-{index}",
            prompt=({"role": "user", "content": "Do it."},),
            metadata={"fails_in_reset": copies[0] == "raise in reset"},
        )
        for index, copies in enumerate(PROBLEMS)
    ]
    episode = Episode(
        ScriptedEngine(renderer.tokenizer, script),
        renderer,
        Limits(max_turns=spec.max_turns, env=EnvLimits.of(spec)),
        SamplingParams(stop_ids=renderer.stop_ids),
    )
    started = time.perf_counter()
    groups = asyncio.run(
        rollout_groups(episode, samples, load_env(spec), spec.args(), GROUP_SIZE, seed, resample=resample)
    )
    return groups, time.perf_counter() - started


def by_fault(groups: Sequence[TrajectoryGroup]) -> dict[str, Counter[str]]:
    """Return for every kind of episode how often it ended as what, all tries counted."""
    ends: dict[str, Counter[str]] = {name: Counter() for name in ENDS}
    for copies, group in zip(PROBLEMS, groups, strict=True):
        for number, trajectory in enumerate((*group.discarded, *group.trajectories)):
            ends[copies[number % GROUP_SIZE]][trajectory.end_reason.value] += 1
    return ends


def said(groups: Sequence[TrajectoryGroup], fault: str) -> str:
    """Return the last line of what the recording says of a kind of episode."""
    errors = [
        trajectory.error.strip().splitlines()[-1]
        for copies, group in zip(PROBLEMS, groups, strict=True)
        for text, trajectory in zip(copies, group.trajectories, strict=True)
        if text == fault and trajectory.error
    ]
    return errors[0] if errors else ""
