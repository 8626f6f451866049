"""Builds the learner and the agent loop of a run.

The learner is an object of this process, or a group of processes (`trainer.learner`). Ray is imported only for a group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agents.endpoints.judge import load_rewards
from agents.engines.base import Engine
from agents.gateway.entries import episode_of
from agents.model.architectures import read_config
from agents.rendering.renderer import Renderer
from agents.rendering.thinking import find_thinking
from agents.rollout.episode import Episode, Limits
from agents.rollout.mixed_episode import by_entry
from agents.types import RouteShape, SamplingParams
from envs.spec import EnvLimits, EnvSpec
from trainer.config.learner import ClusterConfig, LearnerPlan
from trainer.config.rollout import RolloutConfig
from trainer.config.run import RunConfig
from trainer.learner.build import build_learner
from trainer.learner.compile_choice import is_compiled
from trainer.learner.cuda_ipc import share_weights
from trainer.learner.protocol import Learner
from trainer.learner.weight_group import SHARED_VARIABLES
from trainer.learner.weight_sender import RankSender, WeightSender
from trainer.learner.weights_io import meta_model
from trainer.weight_sync.transports import ShareWeights

if TYPE_CHECKING:
    from trainer.setup.cluster import ClusterRoom

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StartedLearner:
    """A learner that is ready to train, and where it runs.

    `share_weights` hands its weights to servers on the node of rank 0; None if they are on no GPU, or servers start on
    another host. `sender` sends them to any host. `node` returns that of rank 0 where servers start on any node of a
    cluster, else ""; `is_apart`: they have GPUs of their own there.
    """

    learner: Learner
    share_weights: ShareWeights | None
    sender: WeightSender
    node: Callable[[], str] = str
    is_apart: bool = False


def start_learner(
    config: LearnerPlan,
    model_path: Path | str,
    sampling: SamplingParams,
    cleanup: ExitStack,
    room: ClusterRoom | None = None,
) -> StartedLearner:
    """Return the learner, in this process or in others; `cleanup` ends the processes that were started.

    They start in `room`, if a part of a cluster is reserved.

    Raises:
        UserError: the cluster is too small or cannot be reached, or the checkpoint cannot be trained.
    """
    # Without ranks nothing of Ray is imported, which would take seconds.
    if not config.cluster.num_ranks:
        device = torch.device(config.model.device)
        learner = build_learner(config, model_path, sampling, device)
        share = partial(share_weights, learner) if device.type == "cuda" else None
        return StartedLearner(learner, share, RankSender(learner))
    from trainer.learner.ray_group import LearnerGroup

    group = LearnerGroup(config, model_path, sampling, room.learners if room else None)
    # Before anything else can fail: ranks must not outlive the command.
    cleanup.callback(group.close)
    # A handle of CUDA memory is worth nothing on another host.
    can_share = (room or group.is_here) and group.device.type == "cuda"
    share = group.share_weights if can_share else None
    if room is None:
        return StartedLearner(group, share, group)
    room.hold(group)
    return StartedLearner(group, share, group, lambda: group.places[0].node, room.is_split)


def with_compile_chosen(plan: RunConfig, model_path: Path | str) -> RunConfig:
    """Return the settings of a learner with `--compile auto` decided, and say so where it was open."""
    on_gpu = learner_device(plan).type == "cuda"
    # Steps are what compiling pays off in; without any there is nothing to choose.
    if plan.learner.compile != "auto" or not on_gpu or not plan.steps:
        return plan
    # Counted on the meta device: the choice comes before the weights are loaded.
    count = sum(parameter.numel() for parameter in meta_model(read_config(model_path)).parameters())
    is_on = is_compiled(plan.learner, on_gpu, count)
    chosen = "on" if is_on else "off"
    logger.info(f"--compile auto is {chosen} at {count / 1e6:.1f} M parameters")
    return plan.model_copy(update={"learner": plan.learner.model_copy(update={"compile": chosen})})


def learner_device(plan: LearnerPlan) -> torch.device:
    """Return the kind of device that the learner computes on."""
    if plan.cluster.num_ranks:
        return torch.device("cuda" if plan.cluster.num_gpus else "cpu")
    return torch.device(plan.model.device)


def connect_workers(cluster: ClusterConfig, spec: EnvSpec, cleanup: ExitStack) -> None:
    """Connect to the run's Ray cluster if environments run on it; without one, the first of them starts one here."""
    # Without a cluster of the run, the first environment starts or finds one.
    if not cluster.num_ranks or all(entry.workers != "ray" for entry in spec.entries):
        return
    cluster.check_ray()
    import ray

    from trainer.learner.ray_group import start_ray

    if start_ray(cluster, more_cpus=os.cpu_count() or 1):
        cleanup.callback(ray.shutdown)


def reserve_room(config: RunConfig, cleanup: ExitStack) -> ClusterRoom | None:
    """Reserve a part of a cluster for learner and servers; None where the run starts no servers on one.

    From here on processes may use NCCL: where weights may travel over it, they read the same variables.
    """
    is_elsewhere = bool(config.engine.engine_url or config.cluster.ray_address)
    if config.engine.sync == "nccl" or (config.engine.sync != "disk" and is_elsewhere):
        for name, value in SHARED_VARIABLES.items():
            os.environ.setdefault(name, value)
    if not (config.cluster.ray_address and config.starts_servers):
        return None
    from trainer.setup.cluster import ClusterRoom

    return ClusterRoom(config, cleanup)


def sampling_params(renderer: Renderer, temperature: float) -> SamplingParams:
    """Return sampling parameters that stop at the model's own stop tokens and never sample its image tokens."""
    return SamplingParams(temperature, renderer.stop_ids, renderer.suppressed_ids)


def training_sampling(renderer: Renderer, config: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of episodes to train on."""
    whole = sampling_params(renderer, config.temperature)
    return replace(whole, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)


def build_episode(
    engine: Engine,
    renderer: Renderer,
    spec: EnvSpec,
    max_turns: int,
    max_new_tokens: int,
    sampling: SamplingParams,
    use_tools: bool = True,
    routes: RouteShape | None = None,
) -> Episode:
    """Return the agent loop that plays an environment with these limits; in a mixture each part has its own too."""

    def of_entry(entry: EnvSpec, turns: int) -> Episode:
        limits = Limits(turns, max_new_tokens, EnvLimits.of(entry))
        thinking = find_thinking(renderer.template, entry.thinking)
        make = episode_of(entry)
        rewards = load_rewards(entry.reward)
        return make(engine, renderer, limits, sampling, use_tools, thinking, rewards, routes, entry.history)

    return by_entry(spec, max_turns, of_entry)
