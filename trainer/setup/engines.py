"""Builds the engine of a run or an evaluation, and the transport that brings it the learner's weights.

Only here, and where servers are placed (`trainer.setup.servers`, `trainer.setup.ray_servers`), has an engine a name.
Everything else asks an engine what it can do.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from agents.engines.base import Engine, EngineSetup, TrainableEngine, memory_engine
from agents.engines.hf import HFEngine
from agents.engines.own import make_engine
from agents.engines.sglang import SGLangEngine
from agents.engines.weight_servers import ServersEngine, kinds_of, servers_of
from agents.model.architectures import ModelFacts, read_config
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from envs.errors import UserError
from trainer.config.inputs import ModelConfig
from trainer.config.learner import ClusterConfig
from trainer.config.rollout import EngineConfig, ServersConfig
from trainer.config.run import RunConfig
from trainer.learner.lora import adapted_layers
from trainer.learner.weight_group import SHARED_VARIABLES
from trainer.learner.weights_io import meta_model
from trainer.setup.components import StartedLearner, learner_device
from trainer.setup.servers import place_servers, server_settings, shared_gpus
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

#: The values of `--sync` with which servers get adapters alone.
WITH_ADAPTERS = ("auto", "adapter")

E = TypeVar("E", bound=Engine)


def own_servers(
    config: RunConfig,
    model_path: Path | str,
    renderer: Renderer,
    folder: Path,
    room: ClusterRoom | None,
    cleanup: ExitStack,
) -> ServersEngine | None:
    """Return an engine of servers, which `launch` starts beside the learner; None if the run starts none.

    They take the learner's adapters, if it trains some that servers can take. `cleanup` ends their processes.
    """
    engine = config.engine
    learner = config.learner
    num_gpus = config.cluster.num_gpus
    if not config.starts_servers:
        return None
    gpus = tuple(range(num_gpus or int(learner_device(config).type == "cuda")))
    if room:
        first_gpu = 0
    else:
        first_gpu = place_servers(engine, gpus, engine.placement)
    most = config.rollout.max_sessions(config.data.eval_size or 0)
    colocated = engine.placement == "colocate"
    if room:
        shares = not room.is_split
    else:
        shares = colocated or bool(shared_gpus(engine, gpus, torch.cuda.device_count()))
    settings = server_settings(engine, config.model, model_path, first_gpu, most, folder / "servers", shares)
    settings = replace(settings, frees_memory=colocated, keeps_kv_cache=config.rollout.keep_kv_cache)
    launcher = room.launcher if room else None
    servers = SGLangEngine(settings, renderer.image_token_id, config.model.context_length, launcher)
    if learner.lora_rank and engine.sync in WITH_ADAPTERS:
        layers = adapted_layers(meta_model(read_config(model_path)), learner)
        if not servers.why_no_adapter(layers):
            servers.adapt(learner.lora_rank, kinds_of(layers))
    cleanup.callback(servers.servers.end)
    return servers


def build_transport(
    config: RunConfig,
    model_path: Path | str,
    facts: ModelFacts,
    renderer: Renderer,
    learner: StartedLearner,
    folder: Path,
    servers: ServersEngine | None = None,
) -> Transport:
    """Return the transport that brings the learner's weights to the engine, with the engine; its `start` starts both.

    The engine is `servers`, if the run starts some, else it is built.
    """
    engine = servers or _other_engine(config, model_path, renderer, learner, folder)
    if in_memory := memory_engine(engine):
        return InProcessTransport(learner.learner, in_memory)
    servers = servers_of(engine)
    if servers is None:
        return DiskTransport(learner.learner, engine, folder / "sync")
    merged = servers_transport(config.engine, facts, learner, servers, folder / "sync")
    return adapters_alone(merged, config.engine.sync, trains_adapters=config.learner.lora_rank > 0)


def _other_engine(
    config: RunConfig,
    model_path: Path | str,
    renderer: Renderer,
    learner: StartedLearner,
    folder: Path,
) -> TrainableEngine:
    """Return an engine whose servers, if it has any, the run does not start."""
    first_gpu = place_servers(config.engine, learner.gpus_here)
    if config.cluster.num_gpus:
        device = f"cuda:{first_gpu}"
    else:
        device = config.model.device
    return build_engine(
        config.engine,
        config.model.model_copy(update={"device": device}),
        config.engine_choice[0],
        model_path,
        renderer,
        first_gpu,
        config.rollout.max_batch,
        config.rollout.max_sessions(config.data.eval_size or 0),
        folder,
        TrainableEngine,
        config.rollout.keep_kv_cache,
    )


def adapters_alone(merged: ServersTransport, sync: str, trains_adapters: bool) -> Transport:
    """Return the transport of the learner's adapters, or `merged` where there are none or servers cannot take them.

    Raises:
        UserError: `--sync adapter` cannot work here.
    """
    if not trains_adapters:
        if sync == "adapter":
            raise UserError("--sync adapter", "needs adapters to send", "all weights are trained", "give --lora-rank")
        return merged
    if sync not in WITH_ADAPTERS:
        return merged
    adapter = merged.learner.adapter()
    if reason := merged.engine.why_no_adapter(adapter.layers):
        if sync == "adapter":
            raise refused(reason)
        note_merged(merged.engine, reason)
        return merged
    merged.engine.adapt(adapter.rank, adapter.targets)
    return AdapterTransport(merged, is_required=sync == "adapter")


def build_engine(
    config: ServersConfig,
    model: ModelConfig,
    chosen: str,
    model_path: Path | str,
    renderer: Renderer,
    first_gpu: int,
    max_batch: int,
    max_sessions: int,
    folder: Path,
    protocol: type[E],
    keeps_kv_cache: bool = False,
) -> E | HFEngine | SGLangEngine:
    """Return the embedded engine with the checkpoint's weights, or servers that are not started yet, or a user's own.

    The logs of an engine go into a folder of `folder`; a user's engine has what `protocol` promises.
    """
    if chosen == "hf":
        network = PolicyModel.load(model_path, getattr(torch, model.dtype))
        device = torch.device(model.device)
        return HFEngine(network, model.context_length, max_batch, device, config.batch_wait_s, keeps_kv_cache)
    if chosen == "sglang":
        settings = server_settings(config, model, model_path, first_gpu, max_sessions, folder / "servers")
        settings = replace(settings, keeps_kv_cache=keeps_kv_cache)
        return SGLangEngine(settings, renderer.image_token_id, model.context_length)
    setup = EngineSetup(
        model_path=str(model_path),
        dtype=model.dtype,
        device=model.device,
        context_length=model.context_length,
        max_batch=max_batch,
        image_token_id=renderer.image_token_id,
        log_folder=folder / "engine",
    )
    return make_engine(chosen, setup, protocol)


def servers_transport(
    config: EngineConfig, facts: ModelFacts, learner: StartedLearner, engine: ServersEngine, folder: Path
) -> ServersTransport:
    """Return the transport of all weights to servers, as `--sync` says: by itself the fastest that can work here.

    Raises:
        UserError: `--sync` cannot work here.
    """
    got = f"{facts.model_type} on {learner.learner.device}"
    has_names = facts.names_are_saved
    on_gpu = learner.learner.device.type == "cuda"
    able = engine.capabilities.weights
    if has_names and "ipc" in able:
        share_weights = learner.share_weights
    else:
        share_weights = None
    if config.sync == "ipc" and share_weights is None:
        rule = "needs servers that are started here, a learner on a GPU here, and a network saved under its own names"
        raise UserError("--sync ipc", rule, got, "give --sync disk")
    has_group = has_names and "nccl" in able
    if config.sync == "nccl" and not has_group:
        rule = "needs a network saved under its own names, and servers that join a process group"
        raise UserError("--sync nccl", rule, got, "give --sync disk")
    if share_weights and (config.sync == "ipc" or (config.sync in WITH_ADAPTERS and not learner.is_apart)):
        return IpcTransport(learner.learner, engine, folder, share_weights, learner.node)
    if config.sync == "nccl" or (config.sync != "disk" and on_gpu and has_group):
        return GroupTransport(learner.learner, engine, folder, learner.sender, is_required=config.sync == "nccl")
    return ServersTransport(learner.learner, engine, folder)


def match_servers(engine: EngineConfig, cluster: ClusterConfig) -> None:
    """Set what NCCL must read alike in learner and servers, if weights may travel between them over it.

    Call it before any process uses NCCL.
    """
    is_elsewhere = bool(engine.engine_url or cluster.ray_address)
    if engine.sync == "nccl" or (engine.sync != "disk" and is_elsewhere):
        for name, value in SHARED_VARIABLES.items():
            os.environ.setdefault(name, value)
