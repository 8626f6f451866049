"""From a configuration to the objects of a run; everything that a user can have got wrong is found before step 0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.engine import Engine
from agents.episode import Episode, Limits
from agents.recording import Recorder
from agents.recording.manifest import describe
from agents.recording.schema import TRAIN
from agents.renderer import Renderer
from agents.types import SamplingParams
from envs.data import filter_overlong, load_samples
from envs.env import EnvArgs
from envs.errors import UserError
from envs.problems import RowsConfig, with_system_prompt
from envs.runner import EnvFault, EnvLimits, EnvRunner, last_line
from envs.spec import BuildEnv, EnvSpec
from envs.tool_calls import ToolFormat, detect_format
from envs.types import Sample, SampleSource
from trainer.checkpoint import Checkpoint, newest_whole
from trainer.config import DataConfig, EnvConfig, LearnerPlan, ModelConfig, PromptsConfig, RunConfig
from trainer.evaluation import ways
from trainer.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, EPISODES, MODEL, found_folder, locked, make_folder
from trainer.layers import write_config
from trainer.parts import Parts
from trainer.processes import StartedLearner, build_carrier, check_processes, start_learner
from trainer.starter import STARTER_PATH
from trainer.trainer import ModelFacts
from trainer.weight_sync import WeightSync

if TYPE_CHECKING:
    from trainer.supervised.config import SftConfig

#: How many samples' environments are tried before an environment counts as broken.
NUM_PROBED = 4


@dataclass(frozen=True, eq=False)
class RunParts(Parts):
    """The parts of a run that plays its episodes."""

    build_env: BuildEnv
    has_tools: bool
    train_samples: SampleSource
    eval_samples: SampleSource | None
    num_overlong: int
    sync: WeightSync

    @property
    def engine(self) -> Engine:
        """What writes the model's turns."""
        return self.sync.engine

    def env_args(self, max_turns: int) -> EnvArgs:
        """Return what `build_env` is told of an episode."""
        return self.spec.args(max_turns, detect_format(self.renderer.chat_template))

    def episode(self, max_turns: int, temperature: float, use_tools: bool = True) -> Episode:
        """Return the agent loop with this run's limits."""
        max_new_tokens = self.config.env.max_new_tokens
        return build_episode(self.engine, self.renderer, self.spec, max_turns, max_new_tokens, temperature, use_tools)

    def recorder(self) -> Recorder | None:
        """Return what records the run's episodes; None where none is to be recorded."""
        config, turns = self.config, self.spec.max_turns
        if not config.log.record:
            return None
        played = {TRAIN: self.episode(turns, config.rollout.temperature)}
        for way in ways(turns, self.has_tools):
            played[way.name] = self.episode(way.max_turns, config.rollout.eval_temperature, way.use_tools)
        manifest = describe(self.spec, self.renderer, str(self.model_path), played)
        return Recorder(self.folder / EPISODES, manifest, self.renderer.encoder.spell, config.log.record)

    def notes(self) -> list[str]:
        """Return what is said of the run before it begins."""
        notes, data = [], self.config.data
        if self.num_overlong:
            notes.append(f"left out {self.num_overlong} problems whose prompt is over {data.max_prompt_tokens} tokens")
        if self.config.trains and self.eval_samples is None and data.eval_size:
            notes.append("no held-out evaluation: give --eval-data")
        return [*notes, f"{len(self.train_samples)} training problems"]

    def closing_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return what is said of it at its end: how to go on where nothing was trained."""
        if self.config.trains or not rows or self.config.log.record < 1:
            return []
        return [f"train on them: python -m trainer.run --replay-rollouts {self.folder} --steps {len(rows)}"]

    def close(self) -> None:
        """End learner processes, and delete what was written for servers."""
        self.sync.close()
        super().close()


def sampling_params(renderer: Renderer, temperature: float) -> SamplingParams:
    """Return a sampling that stops at the model's own stop tokens and never draws one of its image tokens."""
    return SamplingParams(temperature, renderer.stop_ids, renderer.suppressed_ids)


def build_episode(
    engine: Engine,
    renderer: Renderer,
    spec: EnvSpec,
    max_turns: int,
    max_new_tokens: int,
    temperature: float,
    use_tools: bool = True,
) -> Episode:
    """Return the agent loop of an environment."""
    limits = Limits(max_turns, max_new_tokens, EnvLimits.of(spec))
    return Episode(engine, renderer, limits, sampling_params(renderer, temperature), use_tools)


def prepare(config: RunConfig, say: Callable[[str], None] = print) -> RunParts:
    """Check everything and build the parts of a run, or of one that goes on from its newest whole checkpoint.

    `say` is told of checkpoints that are damaged.

    Raises:
        UserError: environment, data, model, device or output folder cannot be used; says which and how to mend it.
    """
    spec = config.env.resolve()
    build_env = spec.load()
    model_path = resolve_model(config.model.model)
    facts = ModelFacts.load(model_path)
    check_fit(config.model, config.data.max_prompt_tokens, facts)
    check_processes(config, facts)
    renderer = Renderer.from_checkpoint(model_path, template_options(config.model))
    train, evaluation = load_problems(spec, config.data, config.seed, with_held_out=config.trains)
    check = check_command(config.env, config.data)
    tools = probe_tools(spec, build_env, detect_format(renderer.chat_template), train, check)
    train, num_overlong = filter_overlong(
        train, lambda sample: len(renderer.prompt(sample.prompt, tools).ids), config.data.max_prompt_tokens
    )
    sampling = sampling_params(renderer, config.rollout.temperature)
    with ExitStack() as cleanup:
        label = f"{config.env.env}-{'' if config.trains else 'rollouts-'}seed{config.seed}"
        plan = config if config.trains else plan_to_read(config)
        learner, folder, checkpoint = begin_or_resume(config, plan, label, model_path, sampling, cleanup, say)
        (folder / ENVIRONMENT).write_text(spec.model_dump_json(indent=1) + "\n", encoding="utf-8")
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
            checkpoint=checkpoint,
            cleanup=cleanup.pop_all(),
        )


def plan_to_read(config: RunConfig) -> RunConfig:
    """Return what a learner is started with whose weights are only read: for the probe, and for servers."""
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.0})  # no second network to stay close to
    return config.model_copy(update={"steps": 0, "algorithm": algorithm})


def begin_or_resume(
    config: RunConfig | SftConfig,
    plan: LearnerPlan,
    label: str,
    model_path: Path | str,
    sampling: SamplingParams,
    cleanup: ExitStack,
    say: Callable[[str], None],
) -> tuple[StartedLearner, Path, Checkpoint | None]:
    """Return the learner of a run, its folder, new or found, with the configuration in it, and what it goes on from.

    A new folder is named after `label`. The folder is held, and processes run, until `cleanup` is closed.

    Raises:
        UserError: processes or folder cannot be had, or the checkpoint is of another network.
    """
    folder, checkpoint = None, None
    if config.checkpoint.resume:
        folder = cleanup.enter_context(locked(found_folder(config.checkpoint.resume)))
        checkpoint = found_checkpoint(folder, say)
    learner = start_learner(plan, model_path, sampling, cleanup)
    if checkpoint:
        learner.trainer.restore(checkpoint.learner)
    if folder is None:  # only now, so that what cannot run leaves nothing behind
        folder = cleanup.enter_context(locked(make_folder(config.log, label)))
    write_config(config, folder / CONFIG)
    return learner, folder, checkpoint


def load_problems(
    spec: EnvSpec, data: DataConfig, seed: int, with_held_out: bool = True
) -> tuple[SampleSource, SampleSource | None]:
    """Return the problems to train on, and held-out ones where there are any and they are wanted."""
    train = load_rows(spec, data, data.data) if data.data else own_problems(spec, data, "train", data.train_size, seed)
    if not (with_held_out and data.eval_size):
        return train, None
    if data.eval_data:
        return train, load_rows(spec, data, data.eval_data)
    if not data.data:
        # The same for every seed, so that runs can be compared.
        return train, own_problems(spec, data, "heldout", data.eval_size, 0)
    return train, None


def load_rows(
    spec: EnvSpec, data: PromptsConfig, source: str, split: str = "train", limit: int | None = None
) -> SampleSource:
    """Return the problems of a data set, under the system prompt that was asked for or the environment's."""
    return load_samples(
        source,
        keys=data.keys,
        system_prompt=data.system_prompt or spec.load_system_prompt(),
        allow_outside_images=data.allow_outside_images,
        limit=limit,
        split=split,
    )


def own_problems(spec: EnvSpec, data: PromptsConfig, split: str, size: int, seed: int) -> SampleSource:
    """Return problems of the environment's own, likewise."""
    return with_system_prompt(spec.load_dataset(split, size, seed), data.system_prompt or spec.load_system_prompt())


def found_checkpoint(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run folder; None where there is none yet, which `say` is told."""
    checkpoint = newest_whole(folder / CHECKPOINTS, say)
    start = f"goes on after step {checkpoint.step}" if checkpoint else "begins anew: there is no whole checkpoint"
    say(f"the run in {folder} {start}")
    return checkpoint


def template_options(config: ModelConfig) -> dict[str, Any]:
    """Return what the chat template is told."""
    try:
        options = json.loads(config.template_options or "{}")
    except json.JSONDecodeError as error:
        options = str(error)
    if not isinstance(options, dict):
        fix = "write it as '{\"enable_thinking\": false}'"
        raise UserError("--template-options", "must be a JSON object", config.template_options, fix)
    return options


def resolve_model(name: str) -> Path | str:
    """Return the folder of the bundled model or of a run's trained one, or the name as given."""
    run = Path(name)
    if (run / CONFIG).is_file() and not (run / "config.json").is_file():
        if (run / MODEL / "config.json").is_file():
            return run / MODEL
        fix = f"write them with `python -m trainer.export {name}` and give the folder that it prints"
        raise UserError("--model", "must hold weights; this run folder has none yet", name, fix)
    if name != "starter":
        return name
    if not (STARTER_PATH / "model.safetensors").exists():
        fix = "run `python -m trainer.starter --recipe starter` and give its folder"
        raise UserError("--model", "the bundled starter weights are missing", str(STARTER_PATH), fix)
    return STARTER_PATH


def check_command(env: EnvConfig, data: RowsConfig) -> str:
    """Return the command that checks an environment without a model."""
    words = [env.env, *(f"--registry {file}" for file in env.registry)]
    words += [f"--data {data.data}"] if data.data else []
    return f"python -m envs.check {' '.join(words)}"


def probe_tools(
    spec: EnvSpec, build_env: BuildEnv, tool_format: ToolFormat, samples: SampleSource, check: str
) -> Sequence[dict[str, Any]]:
    """Play an empty turn of the first few samples until one is played to its reward; return that environment's tools.

    `check` is the command that shows more.

    Raises:
        UserError: none of them is; says why.
    """

    async def probe(sample: Sample) -> Sequence[dict[str, Any]]:
        runner = EnvRunner(lambda: build_env(sample, spec.args(tool_format=tool_format)), EnvLimits.of(spec))
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
    raise UserError(f"environment '{spec.id}'", rule, reason, f"see {check}") from fault


def check_reach(config: ModelConfig, facts: ModelFacts) -> None:
    """Raise where streams could become longer than the model's positions reach."""
    reach = facts.max_positions
    if config.context_length > reach:
        rule = f"must be at most the model's {reach} positions"
        raise UserError("--context-length", rule, config.context_length, f"give {reach} or less")


def check_fit(config: ModelConfig, max_prompt_tokens: int, facts: ModelFacts) -> None:
    """Raise where streams could become longer than the model's positions reach, or prompts leave no room."""
    check_reach(config, facts)
    if max_prompt_tokens >= config.context_length:
        fix = f"give less than the --context-length of {config.context_length}"
        raise UserError("--max-prompt-tokens", "must leave room to answer", max_prompt_tokens, fix)
