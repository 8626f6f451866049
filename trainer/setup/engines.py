"""Builds the engine of a run or an evaluation, and the transport that brings it the learner's weights.

Only here, and where servers are placed (`trainer.setup.servers`, `trainer.setup.ray_servers`), has an engine a name.
Everything else asks an engine what it can do.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from agents.engines.base import Engine, EngineSetup, TrainableEngine, capabilities_of, memory_engine
from agents.engines.hf import HFEngine
from agents.engines.own import make_engine
from agents.engines.sglang import SGLangEngine
from agents.engines.weight_servers import ServersEngine, kinds_of, servers_of
from agents.model.architectures import ModelFacts, read_config
from agents.model.policy import PolicyModel
from agents.types import RouteShape
from envs.errors import UserError
from trainer.config.inputs import ModelConfig
from trainer.config.rollout import EngineConfig, ServersConfig
from trainer.config.run import RunConfig
from trainer.learner.lora import adapted_layers
from trainer.learner.weights_io import meta_model
from trainer.setup.components import StartedLearner, learner_device
from trainer.setup.model_source import OpenedModel
from trainer.setup.servers import check_servers, give_routes, place_servers, server_settings, shared_gpus
from trainer.weight_sync.group_transport import GroupTransport
from trainer.weight_sync.transports import (
    AdapterTransport,
    DiskTransport,
    InProcessTransport,
    IpcTransport,
    ServersTransport,
    Transport,
    note_merged,
    refused,
)

if TYPE_CHECKING:
    from trainer.setup.cluster import ClusterRoom
    from trainer.setup.ray_servers import RayLauncher

#: The values of `--sync` with which servers get adapters alone.
WITH_ADAPTERS = ("auto", "adapter")

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class EngineRoom:
    """What an engine has room for, and where: its first GPU, episodes at once, and what servers share with a learner.

    `launcher` starts servers on a cluster; without it they start on this host. `routes`: what is asked of servers
    about a mixture's experts.
    """

    first_gpu: int
    max_batch: int
    max_sessions: int
    keeps_kv_cache: bool = False
    shares_gpus: bool = False
    frees_memory: bool = False
    launcher: RayLauncher | None = None
    routes: RouteShape | None = None


def run_engine(
    config: RunConfig, source: OpenedModel, folder: Path, cluster: ClusterRoom | None, cleanup: ExitStack
) -> TrainableEngine:
    """Return the engine of a run, not started yet; servers of its own start with `launch`, beside the learner.

    They take the learner's adapters, if it trains some that servers can take. `cleanup` ends their processes.
    """
    engine = config.engine
    learner = config.learner
    # The learner takes the first GPUs of the host, one for each rank.
    gpus = tuple(range(config.cluster.num_gpus or int(learner_device(config).type == "cuda")))
    # Servers that run elsewhere share no GPU with the learner, whatever --placement says.
    colocated = config.starts_servers and engine.placement == "colocate"
    first_gpu = 0
    shares = colocated
    if cluster:
        shares = not cluster.is_split
    elif config.starts_servers:
        first_gpu = place_servers(engine, gpus, engine.placement)
        shares = colocated or bool(shared_gpus(engine, gpus, torch.cuda.device_count()))
    else:
        first_gpu = place_servers(engine, gpus)
    room = EngineRoom(
        first_gpu,
        config.rollout.max_batch,
        config.rollout.max_sessions(config.data.eval_size or 0),
        keeps_kv_cache=config.rollout.keep_kv_cache,
        shares_gpus=shares,
        frees_memory=colocated,
        launcher=cluster.launcher if cluster else None,
        routes=source.facts.routes if config.reads_routes else None,
    )
    model = config.model
    # The ranks hold the first GPUs; an embedded engine goes beside them.
    if config.cluster.num_gpus:
        model = model.model_copy(update={"device": f"cuda:{first_gpu}"})
    built = build_engine(engine, model, config.engine_choice[0], source, folder, TrainableEngine, room)
    if config.rollout.top_k and not capabilities_of(built).gives_kept_ids:
        rule = f"needs an engine that says what each token was drawn from, which {type(built).__name__} does not"
        fix = "leave --top-k, --top-p and min_p out, or see Capabilities.gives_kept_ids in agents/engines/base.py"
        raise UserError("--top-k", rule, config.rollout.top_k, fix)
    if isinstance(built, SGLangEngine) and config.starts_servers:
        if learner.lora_rank and engine.sync in WITH_ADAPTERS:
            layers = adapted_layers(meta_model(read_config(source.path)), learner)
            # They must be told at their start: SGLang reserves room for adapters then.
            if not built.why_no_adapter(layers):
                built.adapt(learner.lora_rank, kinds_of(layers))
        cleanup.callback(built.servers.end)
    return built


def build_transport(config: RunConfig, learner: StartedLearner, engine: TrainableEngine, folder: Path) -> Transport:
    """Return the transport that brings the learner's weights to the engine; its `start` starts both."""
    # Weights of one process need no transport: they are copied from tensor to tensor.
    if in_memory := memory_engine(engine):
        return InProcessTransport(learner.learner, in_memory)
    servers = servers_of(engine)
    if servers is None:
        return DiskTransport(learner.learner, engine, folder / "sync")
    merged = servers_transport(config.engine, learner, servers, folder / "sync")
    return adapters_alone(merged, config.engine.sync, trains_adapters=config.learner.lora_rank > 0)


def adapters_alone(merged: ServersTransport, sync: str, trains_adapters: bool) -> Transport:
    """Return the transport of the learner's adapters, or `merged` where there are none or servers cannot take them.

    Raises:
        UserError: `--sync adapter` cannot work here.
    """
    if not trains_adapters:
        if sync == "adapter":
            raise UserError("--sync adapter", "needs adapters to send", "all weights are trained", "give --lora-rank")
        return merged
    # Asked for all weights: the adapters are merged into them.
    if sync not in WITH_ADAPTERS:
        return merged
    adapter = merged.learner.adapter()
    if reason := merged.engine.why_no_adapter(adapter.layers):
        if sync == "adapter":
            # Asked for by name, so a slower way in its place would be a surprise.
            raise refused(reason)
        note_merged(merged.engine, reason)
        return merged
    merged.engine.adapt(adapter.rank, adapter.targets)
    return AdapterTransport(merged, is_required=sync == "adapter")


def build_engine(
    config: ServersConfig,
    model: ModelConfig,
    chosen: str,
    source: OpenedModel,
    folder: Path,
    protocol: type[E],
    room: EngineRoom,
) -> E | HFEngine | SGLangEngine:
    """Return the embedded engine with the checkpoint's weights, or servers that are not started yet, or a user's own.

    The logs of an engine go into a folder of `folder`; a user's engine has what `protocol` promises.
    """
    image_token_id = source.renderer.image_token_id
    if chosen == "hf":
        network = PolicyModel.load(source.path, getattr(torch, model.dtype))
        device = torch.device(model.device)
        return HFEngine(network, model.context_length, room.max_batch, device, config.batch_wait_s, room.keeps_kv_cache)
    if chosen == "sglang":
        settings = server_settings(
            config, model, source.path, room.first_gpu, room.max_sessions, folder / "servers", room.shares_gpus
        )
        routes = room.routes if room.routes and give_routes(config) else None
        settings = replace(settings, frees_memory=room.frees_memory, keeps_kv_cache=room.keeps_kv_cache, routes=routes)
        return SGLangEngine(settings, image_token_id, model.context_length, room.launcher)
    setup = EngineSetup(
        model_path=str(source.path),
        dtype=model.dtype,
        device=model.device,
        context_length=model.context_length,
        max_batch=room.max_batch,
        image_token_id=image_token_id,
        log_folder=folder / "engine",
    )
    return make_engine(chosen, setup, protocol)


def servers_transport(
    config: EngineConfig, learner: StartedLearner, engine: ServersEngine, folder: Path
) -> ServersTransport:
    """Return the transport of all weights to servers, as `--sync` says: by itself the fastest that can work here.

    Raises:
        UserError: `--sync` cannot work here.
    """
    got = f"a learner on {learner.learner.device}"
    on_gpu = learner.learner.device.type == "cuda"
    able = engine.capabilities.weights
    if "ipc" in able:
        share_weights = learner.share_weights
    else:
        share_weights = None
    if config.sync == "ipc" and share_weights is None:
        rule = "needs servers that are started here, and a learner on a GPU here"
        raise UserError("--sync ipc", rule, got, "give --sync disk")
    has_group = "nccl" in able
    if config.sync == "nccl" and not has_group:
        rule = "needs servers that join a process group"
        raise UserError("--sync nccl", rule, got, "give --sync disk")
    # IPC needs both processes on one node; apart on a cluster, they may be on several.
    if share_weights and (config.sync == "ipc" or (config.sync in WITH_ADAPTERS and not learner.is_apart)):
        return IpcTransport(learner.learner, engine, folder, share_weights, learner.node)
    if config.sync == "nccl" or (config.sync != "disk" and on_gpu and has_group):
        return GroupTransport(learner.learner, engine, folder, learner.sender, is_required=config.sync == "nccl")
    # The folder always works, as long as both sides see it.
    return ServersTransport(learner.learner, engine, folder)


def check_engine(config: ServersConfig, chosen: str, facts: ModelFacts) -> None:
    """Raise `UserError` if the chosen engine cannot run here, or a running server cannot be used."""
    config.check(chosen)
    check_servers(config, facts)
