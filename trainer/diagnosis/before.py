"""The checks that need a configuration and nothing else: they run before a network is loaded or a folder made."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.architectures import architecture_of, read_config
from agents.model import PolicyModel
from agents.renderer import Renderer
from trainer.config import RunConfig
from trainer.diagnosis.finding import Verdict, together
from trainer.diagnosis.free import Free
from trainer.diagnosis.memory import Shapes, check_memory, on_gpu
from trainer.diagnosis.storage import DiskNeed, check_folder
from trainer.diagnosis.template import check_habits, check_tokens
from trainer.diagnosis.versions import Uses, check_versions, read_versions
from trainer.loading import meta_model
from trainer.memory import Parameters
from trainer.setup import resolve_model, template_options

_LOCAL = ("127.0.0.1", "localhost", "::1")


class Before:
    """A configuration, and what of its model can be known without weights.

    Example::

        Before(config).memory()     # Verdict("ok", "the learner and the engine may take 2.4 GiB, ...")
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

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
    def shapes(self) -> Shapes:
        """The network as it is trained, likewise."""
        return Shapes(self.network)

    @cached_property
    def renderer(self) -> Renderer:
        """Tokenizer, template and image processor."""
        return Renderer.from_checkpoint(self.model_path, template_options(self.config.model))

    @property
    def uses_servers(self) -> bool:
        """Whether SGLang writes."""
        return self.config.plays and self.config.engine.chosen(self.config.cluster.num_gpus) == "sglang"

    def versions(self) -> Verdict:
        """Packages, CUDA and driver."""
        config, starts_servers = self.config, self.uses_servers and not self.config.engine.engine_url
        packages = ["torch", "transformers"]
        packages += ["sglang"] if starts_servers else []
        packages += ["ray"] if config.cluster.num_ranks else []
        packages += ["peft"] if config.learner.lora_rank else []
        uses = Uses(
            packages=tuple(packages),
            model_type=self.network_config.model_type,
            has_vision=architecture_of(self.network_config).vision,
            on_gpu=on_gpu(config),
            dtype=config.model.dtype,
        )
        return check_versions(read_versions(), uses)

    def folder(self) -> Verdict:
        """Room and permissions for what a run writes."""
        config = self.config
        trained = Parameters.of(self.shapes.trained(config.learner)).trained
        need = DiskNeed.of(config, self.shapes.num_parameters, trained, self.uses_servers)
        urls = config.engine.engine_url if config.plays else ()
        others = [urlsplit(url).hostname or url for url in urls]
        others = [host for host in others if host not in _LOCAL]
        others += [f"the cluster at {config.cluster.ray_address}"] if config.cluster.ray_address else []
        return check_folder(config.log.out, need, tuple(dict.fromkeys(others)))

    def memory(self) -> Verdict:
        """What learner and engine take against what is free."""
        return check_memory(self.config, self.shapes, Free.now(on_gpu(self.config)))

    def template(self) -> Verdict:
        """What the renderer refuses, and what departs from the family."""
        habits = check_habits(self.renderer, self.network_config.model_type)
        teaches = "teaches tools" if self.renderer.teaches_tools else "knows no tools, which are described for it"
        found = f"closes a turn with {self.renderer.closer}, {teaches}"
        return together([Verdict("ok", found), *habits, *check_tokens(self.renderer, self.model_path)])
