"""Checks whether a learner can run, with what `--backend megatron` needs, before anything is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from agents.model.architectures import read_config
from envs.errors import UserError
from trainer.config.inputs import ModelConfig
from trainer.config.learner import ClusterConfig, LearnerConfig
from trainer.config.run import RunConfig
from trainer.config.sft import SftConfig
from trainer.learner.layout import Layout
from trainer.learner.layout_rules import check_layout

#: What the backend needs: the import, and the package that brings it.
PACKAGES = {
    "megatron.core": "megatron-core",
    "megatron.bridge": "megatron-bridge",
    "transformer_engine": "transformer-engine",
}
#: The bridge comes without its requirements, which contradict those of TransformerEngine and of the graders.
INSTALL = "pip install 'trueturn[megatron]' && pip install --no-deps megatron-bridge==0.6.2 hydra-core==1.3.8"


def check_learner(config: RunConfig | SftConfig, path: Path | str) -> None:
    """Check that a learner can run here and train the checkpoint in `path`.

    Raises:
        UserError: no such device, no Ray, few GPUs, or the backend cannot train the checkpoint as configured.
    """
    if config.cluster.backend == "megatron":
        check_backend(config.cluster, config.model, config.learner, read_config(path))
    config.cluster.check(config.model.device)


def check_backend(cluster: ClusterConfig, model: ModelConfig, learner: LearnerConfig, network: Any) -> None:
    """Raise `UserError` if the backend cannot train the network of a Transformers configuration as configured here."""
    if cluster.backend != "megatron":
        return
    flag = "--num-learners" if cluster.num_learners else "--num-gpus"
    check_layout(Layout.of(cluster), max(1, cluster.num_ranks), network, flag)
    # Megatron's distributed optimizer keeps its state where it computes.
    if learner.offload != "none":
        fix = "leave it out: the optimizer's state is spread over all ranks with the same weights"
        raise UserError("--offload", "must be none with --backend megatron", learner.offload, fix)
    _check_host(cluster, model)


def _check_host(cluster: ClusterConfig, model: ModelConfig) -> None:
    if missing := [package for name, package in PACKAGES.items() if not _is_installed(name)]:
        rule = f"needs the packages {', '.join(PACKAGES.values())}"
        found = f"no {' and no '.join(missing)}"
        raise UserError("--backend megatron", rule, found, INSTALL)
    if cluster.num_learners or not (cluster.num_gpus or model.device.split(":")[0] == "cuda"):
        got = f"--num-learners {cluster.num_learners}" if cluster.num_learners else f"--device {model.device}"
        raise UserError("--backend megatron", "needs GPUs", got, "give --num-gpus, or --device cuda for one GPU")
    if not cluster.num_gpus and not torch.cuda.is_available():
        raise UserError("--backend megatron", "needs a GPU that torch sees", "none", "leave it out: FSDP2 runs on CPUs")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # no package around it
        return False
