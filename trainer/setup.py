"""From a configuration to the objects of a run; everything that a user can have got wrong is found before step 0."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.engine import Engine
from agents.episode import Episode, Limits
from agents.renderer import Renderer
from agents.types import SamplingParams
from envs.data import filter_overlong, load_samples
from envs.env import EnvArgs
from envs.errors import UserError
from envs.problems import with_system_prompt
from envs.runner import EnvFault, EnvLimits, EnvRunner, last_line
from envs.spec import BuildEnv, EnvSpec
from envs.tool_calls import detect_format
from envs.types import Sample, SampleSource
from trainer.config import RunConfig
from trainer.processes import build_carrier, check_processes, start_learner
from trainer.starter import STARTER_PATH
from trainer.trainer import ModelFacts, Trainer
from trainer.weight_sync import WeightSync

#: How many samples' environments are tried before an environment counts as broken.
NUM_PROBED = 4


@dataclass(frozen=True, eq=False)
class RunParts:
    """The checked, ready parts of a run; `cleanup` ends the processes that were started for it."""

    config: RunConfig
    folder: Path
    spec: EnvSpec
    build_env: BuildEnv
    has_tools: bool
    train_samples: SampleSource
    eval_samples: SampleSource | None
    num_overlong: int
    model_path: Path | str
    facts: ModelFacts
    renderer: Renderer
    learner: Trainer
    sync: WeightSync
    cleanup: ExitStack

    @property
    def engine(self) -> Engine:
        """What writes the model's turns."""
        return self.sync.engine

    def env_args(self, max_turns: int) -> EnvArgs:
        """Return what `build_env` is told of an episode."""
        return self.spec.args(max_turns, detect_format(self.renderer.chat_template))

    def episode(self, max_turns: int, temperature: float, use_tools: bool = True) -> Episode:
        """Return the agent loop with this run's limits."""
        limits = Limits(max_turns, self.config.env.max_new_tokens, EnvLimits.of(self.spec))
        sampling = sampling_params(self.renderer, temperature)
        return Episode(self.engine, self.renderer, limits, sampling, use_tools)

    def save_model(self, folder: Path) -> None:
        """Write the learner's weights, with everything else of the checkpoint, as a Hugging Face folder."""
        self.learner.save(folder)
        if not (folder / "config.json").exists():  # written on another host, into a folder of its own
            fix = "give a folder that all hosts see; the weights are there, on rank 0's host"
            raise UserError("--out", "must be shared with the host of learner rank 0", str(folder), fix)
        self.renderer.save(folder)

    def close(self) -> None:
        """End learner processes, and delete what was written for servers."""
        self.sync.close()
        self.cleanup.close()


def sampling_params(renderer: Renderer, temperature: float) -> SamplingParams:
    """Return a sampling that stops at the model's own stop tokens and never draws one of its image tokens."""
    return SamplingParams(temperature, renderer.stop_ids, renderer.suppressed_ids)


def prepare(config: RunConfig) -> RunParts:
    """Check everything and build the parts of a run.

    Raises:
        UserError: environment, data, model, device or output folder cannot be used; says which and how to mend it.
    """
    spec = config.env.resolve()
    build_env = spec.load()
    system_prompt = config.data.system_prompt or spec.load_system_prompt()
    model_path = resolve_model(config.model.model)
    facts = ModelFacts.load(model_path)
    check_fit(config, facts)
    check_processes(config, facts)
    renderer = Renderer.from_checkpoint(model_path, template_options(config))

    def load(name: str, split: str, size: int, seed: int) -> SampleSource:
        if name:
            outside = config.data.allow_outside_images
            return load_samples(name, keys=config.data.keys, system_prompt=system_prompt, allow_outside_images=outside)
        return with_system_prompt(spec.load_dataset(split, size, seed), system_prompt)

    train = load(config.data.data, "train", config.data.train_size, config.seed)
    evaluation = None
    if config.data.eval_size and (config.data.eval_data or not config.data.data):
        # Held-out problems are the same for every seed, so that runs can be compared.
        evaluation = load(config.data.eval_data, "heldout", config.data.eval_size, 0)
    tools = probe_tools(config, spec, build_env, spec.args(tool_format=detect_format(renderer.chat_template)), train)
    train, num_overlong = filter_overlong(
        train, lambda sample: len(renderer.prompt(sample.prompt, tools).ids), config.data.max_prompt_tokens
    )
    sampling = sampling_params(renderer, config.rollout.temperature)
    with ExitStack() as cleanup:
        learner = start_learner(config, model_path, sampling, cleanup)
        folder = make_folder(config)
        carrier = build_carrier(config, model_path, facts, renderer, learner, folder)
        probed = renderer.prompt(train[0].prompt, tools)
        sync = WeightSync(
            learner.trainer,
            carrier,
            probed.ids,
            probed.images,
            facts.image_token_id,
            config.engine.probe_tolerance,
        )
        return RunParts(
            config=config,
            folder=folder,
            spec=spec,
            build_env=build_env,
            has_tools=bool(tools),
            train_samples=train,
            eval_samples=evaluation,
            num_overlong=num_overlong,
            model_path=model_path,
            facts=facts,
            renderer=renderer,
            learner=learner.trainer,
            sync=sync,
            cleanup=cleanup.pop_all(),
        )


def template_options(config: RunConfig) -> dict[str, Any]:
    """Return what the chat template is told."""
    try:
        options = json.loads(config.model.template_options or "{}")
    except json.JSONDecodeError as error:
        options = str(error)
    if not isinstance(options, dict):
        fix = "write it as '{\"enable_thinking\": false}'"
        raise UserError("--template-options", "must be a JSON object", config.model.template_options, fix)
    return options


def resolve_model(name: str) -> Path | str:
    """Return the folder of the bundled model, or the name as given."""
    if name != "starter":
        return name
    if not (STARTER_PATH / "model.safetensors").exists():
        fix = "run `python -m trainer.sft --recipe starter` and give its folder"
        raise UserError("--model", "the bundled starter weights are missing", str(STARTER_PATH), fix)
    return STARTER_PATH


def check_command(config: RunConfig) -> str:
    """Return the command that checks a run's environment without a model."""
    words = [config.env.env, *(f"--registry {file}" for file in config.env.registry)]
    words += [f"--data {config.data.data}"] if config.data.data else []
    return f"python -m envs.check {' '.join(words)}"


def probe_tools(
    config: RunConfig, spec: EnvSpec, build_env: BuildEnv, args: EnvArgs, samples: SampleSource
) -> Sequence[dict[str, Any]]:
    """Play an empty turn of the first few samples until one is played to its reward; return that environment's tools.

    Raises:
        UserError: none of them is; says why.
    """

    async def probe(sample: Sample) -> Sequence[dict[str, Any]]:
        runner = EnvRunner(lambda: build_env(sample, args), EnvLimits.of(spec))
        try:
            await runner.open()
            await runner.step("")
            await runner.reward("")
            return runner.tools
        finally:
            await runner.close()

    fault = None
    for index in range(min(NUM_PROBED, len(samples))):
        try:
            return asyncio.run(probe(samples[index]))
        except EnvFault as error:
            fault = fault or error
    if fault is None:
        return ()
    rule, reason = "must play a turn and give a reward", last_line(str(fault))
    raise UserError(f"environment '{spec.id}'", rule, reason, f"see {check_command(config)}") from fault


def check_fit(config: RunConfig, facts: ModelFacts) -> None:
    """Raise where streams could become longer than the model's positions reach."""
    reach = facts.max_positions
    if config.model.context_length > reach:
        rule = f"must be at most the model's {reach} positions"
        raise UserError("--context-length", rule, config.model.context_length, f"give {reach} or less")
    if config.data.max_prompt_tokens >= config.model.context_length:
        fix = f"give less than the --context-length of {config.model.context_length}"
        raise UserError("--max-prompt-tokens", "must leave room to answer", config.data.max_prompt_tokens, fix)


def make_folder(config: RunConfig) -> Path:
    """Create the run folder; an existing one is never written into."""
    name = config.log.name or f"{config.env.env}-{time.strftime('%Y%m%d-%H%M%S')}-seed{config.seed}-{os.getpid()}"
    folder = (config.log.out / name).absolute()  # an environment may change the working directory
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UserError("--name", "must name a new run folder", str(folder), "choose another name") from None
    except OSError as error:
        raise UserError("--out", "must be writable", str(folder), f"give another folder ({error.strerror})") from error
    return folder
