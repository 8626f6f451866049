"""The checks that need only a configuration: they run before a network is loaded or a folder is made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agents.model.architectures import read_config
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from envs.checks import Verdict, combine, ok
from trainer.config.run import RunConfig
from trainer.learner.weights_io import meta_model
from trainer.planning.memory import MetaNetworks, Parameters
from trainer.preflight.checks.chat_template import check_conventions
from trainer.preflight.checks.free_memory import FreeMemory
from trainer.preflight.checks.memory import check_memory, on_gpu
from trainer.preflight.checks.storage import check_folder, disk_need
from trainer.preflight.checks.versions import check_versions, read_versions
from trainer.setup.backend import check_backend
from trainer.setup.model_source import resolve_model, template_options


@dataclass
class ConfigChecks:
    """Checks a configuration, with what is known of its model without weights.

    Example::

        ConfigChecks(config).memory()     # Verdict("ok", "the learner and the engine may take 2.4 GiB, ...")
    """

    config: RunConfig

    @cached_property
    def model_path(self) -> Path | str:
        """Folder or hub id of the checkpoint."""
        return resolve_model(self.config.model.model)

    @cached_property
    def network_config(self) -> Any:
        """The Transformers configuration of the checkpoint."""
        return read_config(self.model_path)

    @cached_property
    def network(self) -> PolicyModel:
        """The network without weights."""
        return meta_model(self.network_config)

    @cached_property
    def networks(self) -> MetaNetworks:
        """The network as configurations train it, without weights."""
        return MetaNetworks(self.network)

    @cached_property
    def renderer(self) -> Renderer:
        """Tokenizer, template and image processor."""
        return Renderer.from_checkpoint(self.model_path, template_options(self.config.model))

    def versions(self) -> Verdict:
        """Check the versions of packages."""
        config = self.config
        used = ["torch", "transformers"]
        if config.uses_servers and config.starts_servers:
            used.append("sglang")
        if config.cluster.num_ranks:
            used.append("ray")
        if config.learner.lora_rank:
            used.append("peft")
        return check_versions(read_versions(), used)

    def run_folder(self) -> Verdict:
        """Check the permissions and the free space for what a run writes."""
        config = self.config
        num_trained = Parameters.of(self.networks.trained(config.learner)).trained
        return check_folder(config.log.out, disk_need(config, self.networks.num_parameters, num_trained))

    def memory(self) -> Verdict:
        """Compare the memory that learner and engine need with what is free."""
        config = self.config
        # Before the estimate, which would add adapters that the network cannot have.
        check_backend(config.cluster, config.model, config.learner, self.network_config)
        return check_memory(config, self.networks, FreeMemory.measure(on_gpu(config)))

    def chat_template(self) -> Verdict:
        """Check the chat template: whether the renderer accepts it, and whether it follows its family's conventions."""
        departures = check_conventions(self.renderer, self.network_config.model_type)
        if self.renderer.teaches_tools:
            teaches = "teaches tools"
        else:
            teaches = "knows no tools, which are described for it"
        return combine([ok(f"closes a turn with {self.renderer.closer}, {teaches}"), *departures])
