"""Finds and opens the model that a run starts from, and checks that token streams fit into it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.model.architectures import ModelFacts
from agents.recording.run_files import CONFIG
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from envs.config.commands import command_line
from envs.errors import UserError
from trainer.config.inputs import ModelConfig


def template_options(config: ModelConfig) -> dict[str, Any]:
    """Return the options that the chat template is called with; raise `UserError` if they are no JSON object."""
    try:
        options = json.loads(config.template_options or "{}")
    except (ValueError, RecursionError) as error:
        options = str(error)
    # A list or a number is JSON too, and would fail inside the template.
    if not isinstance(options, dict):
        fix = "write it as '{\"enable_thinking\": false}'"
        raise UserError("--template-options", "must be a JSON object", config.template_options, fix)
    return options


def resolve_model(name: str) -> str:
    """Return the folder of the bundled model or of a run's trained model, or the name as given."""
    found = model_folder(name)
    # A run folder has config.yaml at its top, a model folder config.json.
    if (Path(found) / CONFIG).is_file() and not (Path(found) / "config.json").is_file():
        export = command_line("trainer.export", [name])
        fix = f"write them with `{export}` and give the folder that it prints"
        raise UserError("--model", "must hold weights; this run folder has none yet", name, fix)
    return found


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A checkpoint without its weights: where it is, what its configuration says, its tokenizer and template."""

    path: str
    facts: ModelFacts
    renderer: Renderer


def open_model(config: ModelConfig) -> OpenedModel:
    """Return the checkpoint of a configuration.

    Raises:
        UserError: there is none, or it cannot be rendered for, or a stream could be longer than its largest position.
    """
    path = resolve_model(config.model)
    facts = ModelFacts.load(path)
    reach = facts.max_positions
    # Positions beyond it were never trained, and some kernels index a table by them.
    if config.context_length > reach:
        rule = f"must be at most the model's {reach} positions"
        raise UserError("--context-length", rule, config.context_length, f"give {reach} or less")
    return OpenedModel(path, facts, Renderer.from_checkpoint(path, template_options(config)))
