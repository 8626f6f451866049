"""What computes, and where: learner and engine, from a configuration, with every check that needs neither data nor run.

The learner is an object of this process, or a group of processes (`trainer.cluster`); the engine is embedded in this
process, or servers. Ray is imported only where there is a group.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import shlex
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model import PolicyModel
from agents.renderer import Renderer
from agents.types import SamplingParams
from envs.errors import UserError
from trainer.carriers import Carrier, FromDisk, InPlace, Lend, OverIpc
from trainer.config import LearnerPlan, ModelConfig, RunConfig, ServersConfig
from trainer.ipc import lend_weights
from trainer.learner import build_learner
from trainer.trainer import ModelFacts, Trainer


@dataclass(frozen=True, eq=False)
class StartedLearner:
    """A learner that is ready, and where it is.

    `lend` hands its weights to other processes of this host; None where they are not on a GPU of this host. `gpus_here`
    are the GPUs of this host that it uses.
    """

    trainer: Trainer
    lend: Lend | None
    gpus_here: tuple[int, ...]


def check_processes(config: RunConfig, facts: ModelFacts) -> None:
    """Raise where learner and engine cannot be had here as they were asked for."""
    check_learner(config)
    if check_engine(config.engine, config.cluster.num_gpus) == "hf" and config.cluster.num_gpus:
        check_device("cuda")
    for url in config.engine.engine_url:
        check_server(url, facts)


def check_learner(config: LearnerPlan) -> None:
    """Raise where the learner cannot be had here as it was asked for."""
    check_cluster(config)
    if not config.cluster.num_ranks:
        check_device(config.model.device)


def check_cluster(config: LearnerPlan) -> None:
    """Raise where the processes that were asked for cannot be started, or the device is not theirs."""
    cluster, device = config.cluster, config.model.device
    if not cluster.num_ranks:
        return
    flag = "--num-gpus" if cluster.num_gpus else "--num-learners"
    if importlib.util.find_spec("ray") is None:
        raise UserError(flag, "needs the package ray", cluster.num_ranks, "pip install 'trueturn[cluster]'")
    if cluster.num_learners and device.split(":")[0] != "cpu":
        raise UserError("--device", "must be cpu with --num-learners", device, "give --num-gpus instead")
    if cluster.num_gpus and "device" in config.model.model_fields_set and device.split(":")[0] != "cuda":
        raise UserError("--device", "must be cuda with --num-gpus", device, "leave it out, or give --num-learners")
    there = torch.cuda.device_count()
    if cluster.num_gpus > there and not cluster.ray_address:
        fix = f"give {there} or less, or the --ray-address of a cluster" if there else "give --num-learners for CPUs"
        raise UserError("--num-gpus", f"must be at most the {there} GPUs of this host", cluster.num_gpus, fix)


def check_device(name: str) -> torch.device:
    """Return the device, or say why it cannot be used."""
    try:
        device = torch.device(name)
        if device.index:
            fix = f"set CUDA_VISIBLE_DEVICES={device.index} and give cuda"
            raise UserError("--device", "must be the first GPU that the process sees", name, fix)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError("--device", "must be usable by torch", name, f"give cpu or cuda ({reason})") from error
    return device


def chosen_engine(config: RunConfig) -> Literal["hf", "sglang"]:
    """Return which engine writes."""
    return config.engine.chosen(config.cluster.num_gpus)


def check_engine(engine: ServersConfig, num_gpus: int = 0) -> Literal["hf", "sglang"]:
    """Return which engine writes; raise where it cannot be had here."""
    if engine.engine == "hf" and engine.engine_url:
        raise UserError("--engine-url", "is for --engine sglang", "hf", "leave one of the two out")
    if engine.chosen(num_gpus) == "hf":
        return "hf"
    if not engine.engine_url and importlib.util.find_spec("sglang") is None:
        fix = "pip install 'trueturn[sglang]', give the --engine-url of a server that runs elsewhere, or --engine hf"
        raise UserError("--engine", "needs the package sglang to start a server", "sglang", fix)
    return "sglang"


def check_server(url: str, facts: ModelFacts) -> None:
    """Raise where a server does not answer, or serves a network of another kind."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/model_info", timeout=10) as answer:
            served = tuple(dict(json.load(answer)).get("architectures") or ())
    except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
        raise UserError("--engine-url", "must be a running SGLang server", url, f"start it ({error})") from error
    if served and facts.architectures and served != facts.architectures:
        fix = f"serve the checkpoint that is trained, of {', '.join(facts.architectures)}"
        raise UserError("--engine-url", "must serve the kind of network that --model is", ", ".join(served), fix)


def start_learner(
    config: LearnerPlan, model_path: Path | str, sampling: SamplingParams, cleanup: ExitStack
) -> StartedLearner:
    """Return the learner, in this process or in others; what was started is ended by `cleanup`.

    Raises:
        UserError: the cluster is too small or not there, or the checkpoint cannot be trained.
    """
    if not config.cluster.num_ranks:
        device = torch.device(config.model.device)
        learner = build_learner(config, model_path, sampling, device)
        on_gpu = device.type == "cuda"
        gpus = (torch.cuda.current_device(),) if on_gpu else ()
        return StartedLearner(learner, partial(lend_weights, learner) if on_gpu else None, gpus)
    from trainer.cluster.group import LearnerGroup

    group = LearnerGroup(config, model_path, sampling)
    cleanup.callback(group.close)
    can_lend = group.is_here and group.device.type == "cuda"
    return StartedLearner(group, group.lend if can_lend else None, group.gpus_here)


def build_carrier(
    config: RunConfig,
    model_path: Path | str,
    facts: ModelFacts,
    renderer: Renderer,
    learner: StartedLearner,
    folder: Path,
) -> Carrier:
    """Return the engine, and the way by which it gets the learner's weights; servers are started by its `start`."""
    first_gpu = place_servers(config.engine, learner.gpus_here)
    device = f"cuda:{first_gpu}" if config.cluster.num_gpus else config.model.device
    engine = build_engine(
        config.engine,
        config.model.model_copy(update={"device": device}),
        chosen_engine(config),
        model_path,
        renderer,
        first_gpu,
        config.rollout.max_batch,
        folder / "servers",
    )
    if isinstance(engine, HFEngine):
        return InPlace(learner.trainer, engine)
    lend = check_sync(config, facts, learner)
    sync_folder = folder / "sync"
    return (
        OverIpc(learner.trainer, engine, sync_folder, lend) if lend else FromDisk(learner.trainer, engine, sync_folder)
    )


def build_engine(
    config: ServersConfig,
    model: ModelConfig,
    chosen: Literal["hf", "sglang"],
    model_path: Path | str,
    renderer: Renderer,
    first_gpu: int,
    max_batch: int,
    log_folder: Path,
) -> HFEngine | SGLangEngine:
    """Return the embedded engine with the checkpoint's weights, on the model's device, or servers to be started."""
    if chosen == "hf":
        network = PolicyModel.load(model_path, getattr(torch, model.dtype))
        return HFEngine(network, model.context_length, max_batch, torch.device(model.device), config.batch_wait_s)
    settings = server_settings(config, model.dtype, model_path, first_gpu, log_folder)
    return SGLangEngine(settings, renderer.image_token_id, model.context_length)


def place_servers(config: ServersConfig, learner_gpus: Sequence[int] = ()) -> int:
    """Return the first GPU of the first server; raise where this host has too few for it."""
    here, places = torch.cuda.device_count(), config.tensor_parallel
    first_gpu = first_server_gpu(config.first_gpu, learner_gpus, here, places)
    if here and not config.engine_url and first_gpu + places > here:
        flag, given = ("--tensor-parallel", places) if places > here else ("--first-gpu", first_gpu)
        raise UserError(flag, f"must leave a server its {places} of this host's {here} GPUs", given, "give less")
    return first_gpu


def first_server_gpu(given: int | None, learner_gpus: Sequence[int], num_gpus: int, places: int = 1) -> int:
    """Return the first GPU of the first server, which takes `places`: the one given, else the one after the learners',
    else a shared one.

    >>> first_server_gpu(None, (0, 1), num_gpus=4), first_server_gpu(None, (0, 1), num_gpus=2)
    (2, 0)
    """
    if given is not None:
        return given
    after = max(learner_gpus, default=-1) + 1
    return after if after + places <= num_gpus else 0


def server_settings(
    engine: ServersConfig, dtype: str, model_path: Path | str, first_gpu: int, log_folder: Path
) -> SGLangSettings:
    """Return what servers are started with, or found by."""
    return SGLangSettings(
        model_path=str(model_path),
        urls=engine.engine_url,
        num_servers=engine.num_servers,
        tensor_parallel=engine.tensor_parallel,
        first_gpu=first_gpu,
        mem_fraction=engine.mem_fraction,
        dtype=dtype,
        arguments=tuple(shlex.split(engine.engine_args)),
        log_folder=log_folder,
        request_timeout_s=engine.request_timeout_s,
    )


def check_sync(config: RunConfig, facts: ModelFacts, learner: StartedLearner) -> Lend | None:
    """Return what lends weights to servers, None where they read them from disk; raise where `--sync` cannot work."""
    lend = learner.lend if facts.names_are_saved and not config.engine.engine_url else None
    if config.engine.sync == "ipc" and lend is None:
        rule = "needs servers that are started here, a learner on a GPU here, and a network saved under its own names"
        raise UserError("--sync ipc", rule, f"{facts.model_type} on {learner.trainer.device}", "give --sync disk")
    return None if config.engine.sync == "disk" else lend
