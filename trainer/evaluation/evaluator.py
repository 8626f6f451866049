"""Runs an evaluation: checks its configuration, plays every way, and writes the report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import platform
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from agents.engines.base import Engine
from agents.engines.weight_servers import servers_of
from agents.recording import Recorder
from agents.recording.manifest import build_manifest
from agents.recording.schema import EVALUATE
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode
from agents.rollout.groups import derive_seed
from agents.types import Trajectory
from envs.checking.error_location import located_line
from envs.datasets.samples import Subset, filter_overlong
from envs.errors import UserError, did_you_mean
from envs.execution.load import load_env
from envs.spec import BuildEnv, EnvSpec
from envs.tool_calls import ToolFormat, detect_format
from envs.types import Sample
from trainer.checkpoint.cancel import cancel_on_request
from trainer.checkpoint.run_dir import EPISODES, make_folder
from trainer.config.evaluation import EvaluateConfig, MeasurementConfig
from trainer.config.inputs import NUM_HELD_OUT, check_device
from trainer.evaluation.episodes import EvaluationOptions, ProblemPlayer, Way, ways
from trainer.evaluation.results import Evaluation, ProblemResult, compare, summarise
from trainer.evaluation.statistics import Estimate, Intervals
from trainer.metrics.console import Display
from trainer.setup.components import build_episode, sampling_params
from trainer.setup.engines import EngineRoom, build_engine, check_engine
from trainer.setup.model_source import open_model
from trainer.setup.problems import check_command, load_rows, own_problems, probe_tools, prompt_length
from trainer.setup.scripted_episode import try_functions
from trainer.setup.servers import place_servers

logger = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
#: Packages whose versions the report names.
VERSIONED = ("torch", "transformers", "numpy")
REPORT = "evaluation.json"
RESULTS = "results.jsonl"


@dataclass(frozen=True, eq=False)
class EvaluationContext:
    """The checked, ready context of an evaluation: what is played, and by whom.

    `model` is the name in the report, `model_path` the one in the recording.
    """

    config: EvaluateConfig
    folder: Path
    spec: EnvSpec
    build_env: BuildEnv
    samples: Subset
    num_overlong: int
    ways: tuple[Way, ...]
    model: str
    model_path: Path | str
    tool_format: ToolFormat
    engine: Engine

    @property
    def num_episodes(self) -> int:
        """How many episodes all ways have together."""
        return len(self.ways) * len(self.samples) * self.config.measurement.samples

    @abstractmethod
    def episode(self, way: Way) -> Episode:
        """Return the agent loop of a way."""

    @abstractmethod
    def recorder(self, ways: Mapping[str, Episode]) -> Recorder:
        """Open the recording of these agent loops."""

    @property
    def note(self) -> str:
        """What to print with the time that the evaluation took."""
        return ""

    def cost(self, usage: Mapping[str, int]) -> float | None:
        """Return what tokens that a server has counted cost; None where that is not known."""
        return None


@dataclass(frozen=True, eq=False)
class ModelContext(EvaluationContext):
    """The context of a model that an engine of ours serves."""

    renderer: Renderer

    def episode(self, way: Way) -> Episode:
        """Return the agent loop of a way."""
        config = self.config
        return build_episode(
            self.engine,
            self.renderer,
            self.spec,
            way.max_turns,
            config.env.max_new_tokens,
            sampling_params(self.renderer, config.measurement.eval_temperature),
            way.use_tools,
        )

    def recorder(self, ways: Mapping[str, Episode]) -> Recorder:
        """Open the recording of these agent loops."""
        manifest = build_manifest(self.spec, self.renderer, str(self.model_path), ways)
        spell = self.renderer.encoder.spell
        return Recorder(self.folder / EPISODES, manifest, spell, self.config.measurement.record)


@dataclass(frozen=True)
class Report:
    """The results of an evaluation; `ways` leaves out a way in which nothing was played.

    `partial` says why problems are missing; it is empty if none is missing. `usage` has the tokens of each way that a
    server has counted, and their cost where prices are known.
    """

    env: str
    model: str
    num_problems: int
    num_overlong: int
    num_samples: int
    temperature: float
    confidence: float
    partial: str
    seconds: float
    ways: Mapping[str, Evaluation]
    difference: Estimate | None
    usage: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_interrupted(self) -> bool:
        """Whether the user stopped the evaluation."""
        return self.partial == INTERRUPTED

    @property
    def has_scores(self) -> bool:
        """Whether any episode was scored."""
        return any(found.mean_reward for found in self.ways.values())


def prepare(config: EvaluateConfig) -> ModelContext:
    """Check everything and build the context of a model that is served here.

    Raises:
        UserError: environment, data, model, device or output folder cannot be used; says which, and how to fix it.
    """
    spec = config.env.resolve()
    build_env = load_env(spec)
    data = config.data
    model = open_model(config.model)
    renderer = model.renderer
    config.model.check_room(data.max_prompt_tokens)
    check_device(config.model.device)
    chosen, _ = config.engine.choice(config.model.device)
    check_engine(config.engine, chosen, model.facts)
    tool_format = detect_format(renderer.chat_template)
    problems = read_problems(config, spec, build_env, tool_format, renderer)
    samples = problems[0]
    try_functions(spec, build_env, spec.args(tool_format=tool_format), renderer, samples)
    # Before the folder is made: this host may have too few GPUs.
    first_gpu = place_servers(config.engine)
    own = config.measurement
    folder = make_folder(own.out, own.name, f"{spec.id}-evaluation", can_resume=False)
    # No more sessions than episodes: a server reserves memory for each.
    room = EngineRoom(first_gpu, own.max_batch, min(own.max_concurrent, own.samples * len(samples)))
    try:
        engine = build_engine(config.engine, config.model, chosen, model, folder, Engine, room)
    except BaseException:  # an evaluation that cannot run leaves no folder
        folder.rmdir()
        raise
    name = config.model.model
    return ModelContext(config, folder, spec, build_env, *problems, name, model.path, tool_format, engine, renderer)


def read_problems(
    config: EvaluateConfig, spec: EnvSpec, build_env: BuildEnv, tool_format: ToolFormat, renderer: Renderer | None
) -> tuple[Subset, int, tuple[Way, ...]]:
    """Return the problems, how many have too long a prompt and are left out, and the ways to play them.

    The environment is tried on the first ones. Without a renderer, no prompt is too long.

    Raises:
        UserError: environment or data cannot be used.
    """
    data = config.data
    if data.data:
        samples = load_rows(spec, data, data.data, data.split or "train", data.size)
    else:
        samples = own_problems(spec, data, data.split or "heldout", data.size or NUM_HELD_OUT, data.problem_seed)
    tools = probe_tools(spec, build_env, tool_format, samples, check_command(config.env, data))
    played = ways(spec.max_turns, any(tools.values()), config.measurement.tools, spec.tools == "required")
    # The longest prompt counts: schemas of tools are part of it.
    shown = tools if played[0].use_tools else dict.fromkeys(tools, ())
    count = prompt_length(spec, renderer, shown) if renderer else lambda sample: 0
    keys: set[str] = set()

    def length(sample: Sample) -> int:
        keys.update(sample.metadata)
        return count(sample)

    # Before tags are checked: the loop reads each sample's metadata once.
    kept, num_overlong = filter_overlong(samples, length, data.max_prompt_tokens)
    check_tags(config.measurement, keys)
    return kept, num_overlong, played


def check_tags(config: MeasurementConfig, keys: Collection[str]) -> None:
    """Raise `UserError` if `--tag` names a metadata key that no problem has."""
    unknown = [tag for tag in config.tag if tag not in keys]
    # The default tags are those of one environment; others need not have them.
    if unknown and "tag" in config.model_fields_set:
        raise UserError("--tag", "must be in a problem's metadata", unknown[0], did_you_mean(unknown[0], keys))


class Evaluator:
    """Plays every way and writes the report, also if an error or the user ends the playing.

    Example::

        evaluator = Evaluator(prepare(config), display)
        asyncio.run(run_all([evaluator], display))
        evaluator.report.ways["with_tool"].accuracy      # Estimate(0.25, 0.201, 0.306, 256, "wilson")
    """

    def __init__(
        self,
        context: EvaluationContext,
        display: Display,
        on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Calls `on_episode(trajectory)` when an episode ends."""
        self._on_episode = on_episode
        self.context = context
        self.config = context.config
        self.display = display
        self._players: dict[str, ProblemPlayer] = {}
        self._usage: dict[str, Counter[str]] = {}
        self._recorder: Recorder | None = None
        if self.config.measurement.record:
            self._recorder = context.recorder({way.name: context.episode(way) for way in context.ways})
        self._faults: set[str] = set()
        #: How many episodes broke, by the line of the error that says why.
        self.causes = Counter[str]()
        self._started = time.perf_counter()
        # An error in the first session still leaves a report.
        self.report = self._make_report("nothing was played")

    async def run(self) -> None:
        """Play and write the report; a cancellation ends the playing. Raises what the engine raises."""
        context = self.context
        partial = ""
        try:
            await start_engine(context.engine, context.model_path)
            for way in context.ways:
                await self._play(way)
        except asyncio.CancelledError:
            partial = INTERRUPTED
            logger.info("interrupted: reporting what there is")
        except Exception as error:
            partial = f"{type(error).__name__}: {error}"
            raise
        finally:
            try:
                # Also after an error: hours of playing must not be lost with it.
                self.report = self._make_report(partial)
                self._write()
                for name, found in self.report.ways.items():
                    if doubt := self._players[name].doubt(found):
                        logger.warning(doubt)
            finally:
                # Last, even where the disk is full: servers must not outlive the command.
                await context.engine.close()

    async def _play(self, way: Way) -> None:
        context = self.context
        own = self.config.measurement
        options = EvaluationOptions(
            num_samples=own.samples,
            # The same seeds in every way and for every model, so that differences are paired.
            seed=derive_seed(own.seed, "evaluate"),
            max_concurrent=own.max_concurrent,
            tags=own.tag,
        )
        args = context.spec.args(way.max_turns, context.tool_format)
        # Here before anything is played: an interrupted way has tokens too.
        usage = self._usage[way.name] = Counter[str]()

        def on_episode(trajectory: Trajectory) -> None:
            self.display.advance()
            self.display.fault(trajectory, self._faults)
            if not trajectory.end_reason.is_valid:
                self.causes[located_line(trajectory.error or trajectory.end_reason.value)] += 1
            for turn in trajectory.turns:
                usage.update(turn.usage)
            self._on_episode(trajectory)
            if self._recorder:
                self._recorder.write(trajectory, step=0, phase=EVALUATE, way=way.name)

        player = self._players[way.name] = ProblemPlayer(
            context.episode(way), context.samples, context.build_env, args, context.spec, options, on_episode
        )
        try:
            await player.run()
        finally:
            if servers := servers_of(context.engine):
                self.display.events(servers.servers.events)

    def _make_report(self, partial: str) -> Report:
        context = self.context
        own = self.config.measurement
        how = Intervals(own.confidence, own.bootstrap, own.seed, context.spec.total_bounds)
        # A way in which nothing was played has no statistics.
        results = {name: player.results for name, player in self._players.items() if player.results}
        pair = tuple(results.values())
        return Report(
            env=context.spec.id,
            model=context.model,
            num_problems=len(context.samples),
            num_overlong=context.num_overlong,
            num_samples=own.samples,
            temperature=own.eval_temperature,
            confidence=own.confidence,
            partial=partial,
            seconds=round(time.perf_counter() - self._started, 1),
            ways={name: summarise(found, own.all_ks, how) for name, found in results.items()},
            # Paired by problem: two separate intervals would hide what one way gains.
            difference=compare(pair[0], pair[1], how) if len(pair) == 2 else None,
            usage={name: self._with_cost(usage) for name, usage in self._usage.items() if usage},
        )

    def _with_cost(self, usage: Mapping[str, int]) -> dict[str, float]:
        cost = self.context.cost(usage)
        if cost is None:
            return dict(usage)
        return {**usage, "cost": cost}

    def _write(self) -> None:
        """Write the report and a line for each problem, and close the recording."""
        if self._recorder:
            self._recorder.close()
        folder = self.context.folder
        with (folder / RESULTS).open("w", encoding="utf-8") as file:
            for name, player in self._players.items():
                # A line for each problem, so that others can compute what is not here.
                file.writelines(json.dumps(result_line(name, result)) + "\n" for result in player.results)
        written = {
            **asdict(self.report),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONED},
            "config": self.config.model_dump(mode="json"),
            "registry_entry": self.context.spec.model_dump(mode="json"),
        }
        (folder / REPORT).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def result_line(way: str, result: ProblemResult) -> dict[str, Any]:
    """Return the line of a problem for `results.jsonl`; its lists have an item for each sample."""
    episodes = result.episodes
    return {
        "number": result.number,
        "sample_id": result.sample_id,
        "way": way,
        **({"env": result.env} if result.env else {}),
        "tags": dict(result.tags),
        "rewards": [episode.reward for episode in episodes],
        "right": [episode.is_right for episode in episodes],
        "turns": [episode.num_turns for episode in episodes],
        "tokens": [episode.num_tokens for episode in episodes],
        "end_reasons": [episode.end_reason.value for episode in episodes],
    }


async def run_all(evaluators: Sequence[Evaluator], display: Display) -> None:
    """Run evaluations at the same time; Ctrl-C or SIGTERM ends their playing, and each reports what it has."""
    cancel_on_request()
    display.begin("evaluate", sum(evaluator.context.num_episodes for evaluator in evaluators))
    # Each evaluator has reported what it has by then.
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(evaluator.run() for evaluator in evaluators))


async def start_engine(engine: Engine, model_path: Path | str) -> None:
    """Start the engine. External servers may serve any model, so they load this one.

    Raises:
        UserError: a server cannot be started or found.
    """
    servers = servers_of(engine)
    if servers is None:
        await engine.start()
        return
    folder = Path(model_path)
    if not folder.is_dir():  # a hub id; its configuration is in the cache already
        folder = Path(str(cached_file(str(model_path), "config.json"))).parent
    # A server that comes back later loads them again.
    servers.current_weights = lambda: folder
    await servers.start()
    if not servers.are_started_here:
        # Whatever they serve now: the report is about this model.
        await servers.update_from_disk(folder, version=0)
