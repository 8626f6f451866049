"""Live rollouts: the engine plays episodes of the run's environment."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

from PIL import Image

from agents.cli.text import counted
from agents.engines.base import Engine, capabilities_of
from agents.engines.weight_servers import servers_of
from agents.model.architectures import NO_IMAGE_TOKEN
from agents.recording import Recorder
from agents.recording.json_values import json_text
from agents.recording.manifest import build_manifest
from agents.recording.schema import TRAIN
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode
from agents.rollout.groups import GroupProblem, ManagerState, RolloutOptions, StepRollout, derive_seed
from agents.rollout.manager import RolloutManager
from agents.types import TrajectoryGroup
from envs.datasets.samples import filter_overlong
from envs.env import EnvArgs
from envs.execution.load import load_env
from envs.safe_text import write_text
from envs.spec import BuildEnv, EnvSpec
from envs.tool_calls import detect_format
from envs.types import Message, SampleSource, content_parts, message_images
from trainer.checkpoint.run_dir import ENVIRONMENT, EPISODES
from trainer.config.run import RunConfig
from trainer.evaluation.curve import title
from trainer.evaluation.episodes import EvaluationOptions, ProblemPlayer, Way, ways
from trainer.evaluation.results import Evaluation
from trainer.metrics.console import Display
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.protocol import FREE_ROUTING, OnEpisode, OnEvaluated
from trainer.setup.backend import check_learner
from trainer.setup.components import (
    build_episode,
    connect_workers,
    reserve_room,
    sampling_params,
    training_sampling,
)
from trainer.setup.engines import build_transport, check_engine, run_engine
from trainer.setup.model_source import open_model
from trainer.setup.plugins import check_algorithm, own_filter, problem_order
from trainer.setup.problems import (
    check_command,
    check_curriculum,
    check_evaluations,
    load_problems,
    probe_tools,
    prompt_length,
)
from trainer.setup.resumed_inputs import changed_data, changed_environment
from trainer.setup.run_context import RunContext, begin_or_resume, open_run
from trainer.setup.scripted_episode import try_functions
from trainer.setup.start import Start
from trainer.weight_sync.sync import WeightSync

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LiveContext(RunContext):
    """The context of a run with live rollouts."""

    build_env: BuildEnv
    ways: tuple[Way, ...]
    train_samples: SampleSource
    eval_samples: SampleSource | None
    num_overlong: int
    weight_sync: WeightSync

    @property
    def engine(self) -> Engine:
        """The engine that writes the model's turns."""
        return self.weight_sync.engine

    def env_args(self, max_turns: int) -> EnvArgs:
        """Return the arguments of `build_env`."""
        return self.spec.args(max_turns, detect_format(self.renderer.chat_template))

    @property
    def gives_routes(self) -> bool:
        """Whether the engine says which experts each token took."""
        return capabilities_of(self.engine).gives_routes

    def episode(self) -> Episode:
        """Return the agent loop of episodes to train on."""
        max_new_tokens = self.config.env.max_new_tokens
        sampling = training_sampling(self.renderer, self.config.rollout)
        routes = self.facts.routes if self.config.reads_routes and self.gives_routes else None
        return build_episode(
            self.engine, self.renderer, self.spec, self.spec.max_turns, max_new_tokens, sampling, routes=routes
        )

    def evaluated(self, way: Way) -> Episode:
        """Return the agent loop of a way of evaluation, which draws from all tokens."""
        max_new_tokens = self.config.env.max_new_tokens
        sampling = sampling_params(self.renderer, self.config.rollout.eval_temperature)
        return build_episode(
            self.engine, self.renderer, self.spec, way.max_turns, max_new_tokens, sampling, way.use_tools
        )

    def recorder(self) -> Recorder | None:
        """Return a recorder of the run's episodes; None with `--record 0`."""
        config = self.config
        if not config.log.record:
            return None
        played = {TRAIN: self.episode(), **{way.name: self.evaluated(way) for way in self.ways}}
        manifest = build_manifest(self.spec, self.renderer, str(self.model_path), played)
        spell = self.renderer.encoder.spell
        return Recorder(self.folder / EPISODES, manifest, spell, config.log.record, config.log.record_routes)

    def notes(self) -> list[str]:
        """Return the messages to print before the first step."""
        notes = []
        data = self.config.data
        if self.num_overlong:
            notes.append(f"left out {self.num_overlong} problems whose prompt is over {data.max_prompt_tokens} tokens")
        if self.config.trains and self.config.rollout.max_staleness and self.config.algorithm.correction == "none":
            notes.append(
                "--correction none trains on tokens of older weights as if the newest had written them: see tis"
            )
        if self.config.trains and self.eval_samples is None and data.eval_size != 0:
            notes.append("no held-out evaluation: give --eval-data")
        engine, why = self.config.engine_choice
        notes.append(f"engine: {engine} ({why})")
        if self.facts.routes and self.config.reads_routes and not self.gives_routes:
            notes.append(f"the engine does not say which experts each token took: {FREE_ROUTING}")
        return [*notes, counted(len(self.train_samples), "training problem")]

    def close(self) -> None:
        """Stop the processes of learner and servers, and delete the weights written for servers."""
        self.weight_sync.close()
        super().close()


class LiveRollouts:
    """Episodes of the run's environment, played by its engine."""

    def __init__(self, context: LiveContext) -> None:
        self.context, self.config = context, context.config
        self._manager: RolloutManager | None = None
        self._curriculum: Curriculum | None = None
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch, and the order of its problems
        self._step = 0
        self._has_doubted = False
        self._step_began = 0.0
        self._busy_before_s = tuple[float, ...]()

    @property
    def events(self) -> Sequence[str]:
        """What has happened to servers so far."""
        return self.context.weight_sync.transport.events

    async def start(self, version: int, state: ManagerState, on_episode: OnEpisode) -> None:
        """Start the engine, prove that it runs the learner's weights, and continue from `state`."""
        start = self.context.start
        with start.shown(self.events), start.clock.stage("the engine and its probe"):
            await self.context.weight_sync.start(version)
        config = self.config
        context = self.context
        self._step = version
        if config.rollout.curriculum:
            samples = context.train_samples
            self._curriculum = Curriculum(
                config.rollout, config.seed, len(samples), functools.cache(self._environment), state.problems
            )
        # The configuration has the same names; a filter is code and is loaded apart.
        names = {field.name for field in fields(RolloutOptions)} - {"group_filter"}
        self._manager = RolloutManager(
            context.episode(),
            context.build_env,
            context.env_args(context.spec.max_turns),
            self._problem,
            RolloutOptions(
                **config.rollout.model_dump(include=names), group_filter=own_filter(config.rollout.group_filter)
            ),
            on_episode=on_episode,
            state=state,
        )

    @property
    def _started(self) -> RolloutManager:
        assert self._manager is not None, "start comes first"
        return self._manager

    async def collect(self, num_groups: int) -> StepRollout:
        """Play the groups of the next step."""
        self._step_began = time.perf_counter()
        # Counted since the start of the servers, so a step needs the difference.
        self._busy_before_s = tuple(self.context.weight_sync.transport.busy_s)
        self._step += 1
        rollout = await self._started.collect(num_groups, steps_to_come=self.config.steps - self._step)
        success = self.context.spec.success_rule
        if self._curriculum and success:
            self._curriculum.update(rollout, success, self._started.in_flight)
            rollout = replace(rollout, pools=self._curriculum.sizes())
        return replace(rollout, weight_version=self.context.engine.weight_version)

    def idle_fracs(self) -> Mapping[str, float]:
        """Return the share of the time since `collect` was called in which a server wrote nothing, over all servers."""
        passed_s = time.perf_counter() - self._step_began
        busy_s = self.context.weight_sync.transport.busy_s
        shares = [1 - (now - then) / passed_s for now, then in zip(busy_s, self._busy_before_s, strict=False)]
        if shares:
            return {"idle/servers_time_frac": sum(shares) / len(shares)}
        return {}

    def state(self) -> ManagerState:
        """Return the number of the next problem, and the groups in flight."""
        state = self._started.state()
        if self._curriculum:
            return replace(state, problems=self._curriculum.state())
        return state

    def _environment(self, index: int) -> str:
        spec = self.context.spec
        if not spec.parts:
            return ""
        return spec.part(self.context.train_samples[index].metadata).id

    async def drain(self) -> tuple[TrajectoryGroup, ...]:
        """Stop all episodes and return the groups that were begun and never handed out."""
        return await self._started.close()

    def _problem(self, number: int) -> GroupProblem:
        """Return the problem of a number: epoch after epoch, each in a seeded order of its own.

        Its seed is that of the step that takes it when every step takes `problems_per_step` problems.
        """
        samples = self.context.train_samples
        # Problems are numbered without end, over epochs and resumed runs.
        epoch, place = divmod(number, len(samples))
        if self._order[0] != epoch:
            self._order = epoch, problem_order(samples, self.config.rollout.sampler, self.config.seed, epoch)
        # Seeds of the step and the place in it: the same whatever is played again.
        step, index = divmod(number, self.config.rollout.problems_per_step)
        chosen = self._order[1][place]
        if self._curriculum:
            chosen = self._curriculum.draw(number, chosen)
        return GroupProblem(samples[chosen], derive_seed(self.config.seed, "train", step + 1), index)

    async def evaluate(self, name: str, display: Display, on_episode: OnEvaluated) -> dict[str, Evaluation]:
        """Return the evaluations on held-out problems by way: over all turns and, with tools, in one turn without."""
        source = self.context.eval_samples
        # All held-out prompts may have been too long.
        if source is None or not len(source):
            return {}
        all_ways = self.context.ways
        spec = self.context.spec
        options = EvaluationOptions(
            seed=derive_seed(self.config.seed, "evaluate"),
            max_concurrent=self.config.rollout.max_concurrent,
        )
        results = {}
        with display.aside(name, len(all_ways) * len(source)):
            for way in all_ways:
                player = ProblemPlayer(
                    self.context.evaluated(way),
                    source,
                    self.context.build_env,
                    self.context.env_args(way.max_turns),
                    spec,
                    options,
                    on_episode=functools.partial(on_episode, way.name),
                )
                results[way.name] = await player.evaluate()
                self._report(name, way, player, results[way.name])
        return results

    def _report(self, name: str, way: Way, player: ProblemPlayer, found: Evaluation) -> None:
        estimate = found.estimate(found.main)
        if estimate:
            value = f"{estimate.value:.3f}"
        else:
            value = "no valid episode"
        logger.info(f"{name}: {'' if found.accuracy else 'mean reward '}{value} {title(way.name)}")
        doubt = player.doubt(found)
        if doubt and not self._has_doubted:
            logger.warning(doubt)
        # Once a run: it is the same entry in every evaluation.
        self._has_doubted = self._has_doubted or bool(doubt)

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the number of problems left out."""
        return {"num_overlong": self.context.num_overlong}

    async def close(self) -> None:
        """Stop the engine."""
        await self.context.engine.close()


def prepare(config: RunConfig, start: Start | None = None, with_engine: bool = True) -> LiveContext:
    """Check everything and build the context of a run, new or resumed from its newest whole checkpoint.

    Servers are launched before anything is loaded, unless `with_engine` is False; the engine's start waits for them.

    Raises:
        UserError: environment, data, model, device or output folder cannot be used.
    """
    start = start or Start()
    spec = config.env.resolve()
    check_curriculum(config.rollout, spec)
    with ExitStack() as cleanup:
        # Before the environment is imported, which may start workers itself.
        connect_workers(config.cluster, spec, cleanup)
        build_env = load_env(spec)
        check_algorithm(config.algorithm)
        model = open_model(config.model)
        config.check()
        check_learner(config, model.path)
        check_engine(config.engine, config.engine_choice[0], model.facts)
        label = f"{config.env.name}-{'' if config.trains else 'rollouts-'}seed{config.seed}"
        opened = open_run(config, label, cleanup, keeps=lambda: start.failure is not None)
        folder = opened.folder
        # Before servers and ranks: they must not take each other's GPUs.
        room = reserve_room(config, cleanup)
        engine = None
        if config.starts_servers:
            engine = run_engine(config, model, folder, room, cleanup)
            servers = servers_of(engine)
            # On GPUs of the learner they start after it.
            if servers and with_engine and (room is None or room.is_split):
                start.launch(servers)
        with start.clock.stage("the problems"):
            problems = _load_problems(config, spec, build_env, model.renderer)
        with start.clock.stage("the learner"):
            sampling = sampling_params(model.renderer, config.rollout.temperature)
            if config.trains:
                plan = config
            else:
                plan = plan_to_read(config)
            learner = begin_or_resume(config, plan, opened, model.path, sampling, cleanup, room)
        write_text(folder / ENVIRONMENT, json_text(spec))
        data = {"--data": config.data.data, "--eval-data": config.data.eval_data}
        # Said, not refused: a repaired row is a good reason to go on.
        changes = changed_data(folder, data)
        if opened.checkpoint:
            changes += changed_environment(folder, spec, model.renderer)
        for change in changes:
            logger.warning(f"not as when the run began: {change}")
        with start.clock.stage("the engine's weights"):
            # Without servers it comes last: nothing else can fail then and leave a user's engine open.
            engine = engine or run_engine(config, model, folder, room, cleanup)
            transport = build_transport(config, learner, engine, folder)
        first = problems.train[0]
        prompt = first.prompt
        # Only servers keep what older weights made of an image.
        if servers_of(engine) and model.facts.image_token_id != NO_IMAGE_TOKEN:
            prompt = with_image(prompt)
        probed = model.renderer.prompt(prompt, problems.tools[spec.part(first.metadata).id])
        tolerance = config.engine.probe_tolerance
        return LiveContext(
            config=config,
            folder=folder,
            spec=spec,
            build_env=build_env,
            ways=problems.ways,
            train_samples=problems.train,
            eval_samples=problems.held_out,
            num_overlong=problems.num_overlong,
            model_path=model.path,
            facts=model.facts,
            renderer=model.renderer,
            learner=learner.learner,
            weight_sync=WeightSync(
                learner.learner, transport, probed.ids, probed.images, model.facts.image_token_id, tolerance
            ),
            checkpoint=opened.checkpoint,
            cleanup=cleanup.pop_all(),
            start=start,
        )


def with_image(prompt: Sequence[Message]) -> Sequence[Message]:
    """Return a prompt that shows an image: its own, or a gradient behind its last message, if that is a user's."""
    if message_images(prompt) or prompt[-1]["role"] != "user":
        return prompt
    shown = {"type": "image", "image": Image.linear_gradient("L").resize((128, 128)).convert("RGB")}
    return (*prompt[:-1], {**prompt[-1], "content": [*content_parts(prompt[-1]), shown]})


@dataclass(frozen=True, eq=False)
class _Problems:
    """The problems of a run without those whose prompt is too long, the environment's tools, and ways to evaluate."""

    train: SampleSource
    held_out: SampleSource | None
    num_overlong: int
    tools: Mapping[str, Sequence[dict[str, Any]]]
    ways: tuple[Way, ...]


def _load_problems(config: RunConfig, spec: EnvSpec, build_env: BuildEnv, renderer: Renderer) -> _Problems:
    """Load the problems, and try the environment on one of them. Raises `UserError` where they cannot be used."""
    train, held_out = load_problems(spec, config.data, config.seed, with_held_out=config.trains)
    check = check_command(config.env, config.data)
    tools = probe_tools(spec, build_env, detect_format(renderer.chat_template), train, check)
    check_evaluations(config.evaluation, held_out, spec)
    args = spec.args(tool_format=detect_format(renderer.chat_template))
    rollout = config.rollout
    try_functions(spec, build_env, args, renderer, train, config.algorithm, rollout.group_filter, rollout.group_size)
    # A sampler is tried once here; a run asks it again for each epoch.
    problem_order(train, config.rollout.sampler, config.seed, 0)
    played = ways(spec.max_turns, any(tools.values()), config.evaluation.tools, spec.tools == "required")
    longest = config.data.max_prompt_tokens
    train, num_overlong = filter_overlong(train, prompt_length(spec, renderer, tools), longest)
    return _Problems(train, held_out, num_overlong, tools, played)


def plan_to_read(config: RunConfig) -> RunConfig:
    """Return the plan of a learner whose weights are only read: by the probe, and for servers."""
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.0})  # needs no reference network
    return config.model_copy(update={"steps": 0, "algorithm": algorithm})
