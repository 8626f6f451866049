"""An evaluation from its configuration to its files: what is to be played, the playing of every way, the report."""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine
from agents.episode import Episode
from agents.recording import Recorder
from agents.recording.manifest import describe
from agents.recording.schema import EVALUATE
from agents.renderer import Renderer
from agents.rollout import derive_seed
from agents.types import Trajectory
from envs.data import Subset, filter_overlong
from envs.errors import UserError, did_you_mean
from envs.spec import BuildEnv, EnvSpec
from envs.tool_calls import detect_format
from envs.types import Sample
from trainer.config import FolderConfig
from trainer.display import Display
from trainer.evaluate import EvaluateConfig, FiguresConfig
from trainer.evaluation import Play, PlayOptions, Way, ways
from trainer.figures import Difference, Evaluation, ProblemResult, compare, summarise
from trainer.folder import EPISODES, make_folder
from trainer.interrupt import cancel_on_sigterm
from trainer.processes import build_engine, check_device, check_engine, check_server, place_servers
from trainer.setup import (
    build_episode,
    check_command,
    check_fit,
    load_rows,
    own_problems,
    probe_tools,
    resolve_model,
    template_options,
)
from trainer.statistics import Intervals
from trainer.trainer import ModelFacts

OWN_SIZE = 256
INTERRUPTED = "interrupted"
#: Packages whose versions the report names.
VERSIONED = ("torch", "transformers", "numpy")
REPORT, RESULTS = "evaluation.json", "results.jsonl"


@dataclass(frozen=True, eq=False)
class EvaluationParts:
    """The checked, ready parts of an evaluation."""

    config: EvaluateConfig
    folder: Path
    spec: EnvSpec
    build_env: BuildEnv
    ways: tuple[Way, ...]
    samples: Subset
    num_overlong: int
    model_path: Path | str
    renderer: Renderer
    engine: HFEngine | SGLangEngine


@dataclass(frozen=True)
class Report:
    """What an evaluation found; a way in which nothing was played has no figures.

    `partial` says why problems are missing, and is empty where none is.
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
    difference: Difference | None

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody stopped it."""
        return self.partial == INTERRUPTED


def prepare(config: EvaluateConfig) -> EvaluationParts:
    """Check everything and build the parts.

    Raises:
        UserError: environment, data, model, device or output folder cannot be used; says which and how to mend it.
    """
    spec = config.env.resolve()
    build_env, data = spec.load(), config.data
    model_path = resolve_model(config.model.model)
    facts = ModelFacts.load(model_path)
    check_fit(config.model, data.max_prompt_tokens, facts)
    check_device(config.model.device)
    chosen = check_engine(config.engine)
    for url in config.engine.engine_url:
        check_server(url, facts)
    renderer = Renderer.from_checkpoint(model_path, template_options(config.model))
    if data.data:
        samples = load_rows(spec, data, data.data, data.split or "train", data.size)
    else:
        samples = own_problems(spec, data, data.split or "heldout", data.size or OWN_SIZE, data.problem_seed)
    tool_format = detect_format(renderer.chat_template)
    tools = probe_tools(spec, build_env, tool_format, samples, check_command(config.env, data))
    every = ways(spec.max_turns, bool(tools))
    played = {"both": every, "on": every[:1], "off": every[-1:]}[config.figures.tools]
    shown = tools if played[0].use_tools else ()
    keys: set[str] = set()

    def length(sample: Sample) -> int:
        keys.update(sample.metadata)
        return len(renderer.prompt(sample.prompt, shown).ids)

    samples, num_overlong = filter_overlong(samples, length, data.max_prompt_tokens)
    check_tags(config.figures, keys)
    first_gpu = place_servers(config.engine)
    own = config.figures
    folder = make_folder(FolderConfig(out=own.out, name=own.name), f"{spec.id}-evaluation", can_resume=False)
    try:
        engine = build_engine(
            config.engine, config.model, chosen, model_path, renderer, first_gpu, own.max_batch, folder / "servers"
        )
    except BaseException:  # what cannot run leaves nothing behind
        folder.rmdir()
        raise
    return EvaluationParts(config, folder, spec, build_env, played, samples, num_overlong, model_path, renderer, engine)


def check_tags(config: FiguresConfig, keys: Collection[str]) -> None:
    """Raise where a metadata key was asked for that no problem has."""
    unknown = [tag for tag in config.tag if tag not in keys]
    if unknown and "tag" in config.model_fields_set:
        raise UserError("--tag", "must be in a problem's metadata", unknown[0], did_you_mean(unknown[0], keys))


class Evaluator:
    """Plays every way and writes the report, which is there whatever ends the playing.

    Example::

        evaluator = Evaluator(prepare(config), Display())
        asyncio.run(evaluator.run())
        evaluator.report.ways["with_tool"].accuracy      # Estimate(0.25, 0.201, 0.306, 256, "wilson")
    """

    def __init__(self, parts: EvaluationParts, display: Display) -> None:
        self.parts, self.config, self.display = parts, parts.config, display
        self._plays: dict[str, Play] = {}
        self._recorder = self._make_recorder()
        self._faults: set[str] = set()
        self._started = time.perf_counter()
        self.report = self._make_report("nothing was played")

    async def run(self) -> None:
        """Play and write; on Ctrl-C or SIGTERM, what was played until then. Raises what the engine raises."""
        parts, partial = self.parts, ""
        cancel_on_sigterm()
        self.display.begin("evaluate", len(parts.ways) * len(parts.samples) * self.config.figures.samples)
        try:
            if isinstance(parts.engine, SGLangEngine):
                await start_servers(parts.engine, parts.model_path)
            for way in parts.ways:
                await self._play(way)
        except asyncio.CancelledError:
            partial = INTERRUPTED
            self.display.say("interrupted: reporting what there is")
        except Exception as error:
            partial = f"{type(error).__name__}: {error}"
            raise
        finally:
            try:
                self.report = self._make_report(partial)
                self._write()
            finally:
                await parts.engine.close()

    def _make_recorder(self) -> Recorder | None:
        parts, config = self.parts, self.config
        if not config.figures.record:
            return None
        manifest = describe(
            parts.spec, parts.renderer, str(parts.model_path), {way.name: self._episode(way) for way in parts.ways}
        )
        return Recorder(parts.folder / EPISODES, manifest, parts.renderer.encoder.spell, config.figures.record)

    def _episode(self, way: Way) -> Episode:
        parts, config = self.parts, self.config
        return build_episode(
            parts.engine,
            parts.renderer,
            parts.spec,
            way.max_turns,
            config.env.max_new_tokens,
            config.figures.eval_temperature,
            way.use_tools,
        )

    async def _play(self, way: Way) -> None:
        parts, own = self.parts, self.config.figures
        options = PlayOptions(
            num_samples=own.samples,
            seed=derive_seed(own.seed, "evaluate"),
            right_reward=parts.spec.reward_max_val,
            max_concurrent=own.max_concurrent,
            looks_at_first_turn=way.max_turns > 1,
            tags=own.tag,
        )
        args = parts.spec.args(way.max_turns, detect_format(parts.renderer.chat_template))

        def note(trajectory: Trajectory) -> None:
            self.display.advance()
            self.display.fault(trajectory, self._faults)
            if self._recorder:
                self._recorder.write(trajectory, step=0, phase=EVALUATE, way=way.name)

        play = self._plays[way.name] = Play(self._episode(way), parts.samples, parts.build_env, args, options, note)
        try:
            await play.run()
        finally:
            if isinstance(parts.engine, SGLangEngine):
                self.display.events(parts.engine.servers.events)

    def _make_report(self, partial: str) -> Report:
        parts, own = self.parts, self.config.figures
        how = Intervals(own.confidence, own.bootstrap, own.seed)
        bounds = parts.spec.reward_min_val, parts.spec.reward_max_val
        results = {name: play.results for name, play in self._plays.items() if play.results}
        pair = tuple(results.values())
        return Report(
            env=parts.spec.id,
            model=self.config.model.model,
            num_problems=len(parts.samples),
            num_overlong=parts.num_overlong,
            num_samples=own.samples,
            temperature=own.eval_temperature,
            confidence=own.confidence,
            partial=partial,
            seconds=round(time.perf_counter() - self._started, 1),
            ways={name: summarise(found, own.all_ks, how, bounds) for name, found in results.items()},
            difference=compare(pair[0], pair[1], how) if len(pair) == 2 else None,
        )

    def _write(self) -> None:
        """Write the report and a line for each problem, and close the recording."""
        if self._recorder:
            self._recorder.close()
        folder = self.parts.folder
        with (folder / RESULTS).open("w", encoding="utf-8") as file:
            for name, play in self._plays.items():
                file.writelines(json.dumps(line_of(name, result)) + "\n" for result in play.results)
        written = {
            **asdict(self.report),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONED},
            "config": self.config.model_dump(mode="json"),
            "registry_entry": self.parts.spec.model_dump(mode="json"),
        }
        (folder / REPORT).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def line_of(way: str, result: ProblemResult) -> dict[str, Any]:
    """Return the line of a problem in `results.jsonl`; lists have an item for each sample."""
    episodes = result.episodes
    return {
        "number": result.number,
        "sample_id": result.sample_id,
        "way": way,
        "tags": dict(result.tags),
        "rewards": [episode.reward for episode in episodes],
        "right": [episode.is_right for episode in episodes],
        "first_turn_right": [episode.is_first_turn_right for episode in episodes],
        "turns": [episode.num_turns for episode in episodes],
        "tokens": [episode.num_tokens for episode in episodes],
        "end_reasons": [episode.end_reason.value for episode in episodes],
    }


async def start_servers(engine: SGLangEngine, model_path: Path | str) -> None:
    """Start or find the servers. Those of others may serve anything, so they are told to load the model.

    Raises:
        UserError: one cannot be started or found.
    """
    folder = Path(model_path)
    if not folder.is_dir():  # a hub id, whose configuration has been read already
        folder = Path(str(cached_file(str(model_path), "config.json"))).parent
    engine.current_weights = lambda: folder
    await engine.start()
    if engine.settings.urls:
        await engine.update_from_disk(folder, version=0)
