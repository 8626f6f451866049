"""Recorded rollouts: a run folder takes the place of engine and environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from agents.cli.text import path_text
from agents.model.architectures import read_config as read_network
from agents.recording import Recording
from agents.recording.json_values import json_text
from agents.recording.run_files import CONFIG
from agents.rollout.groups import ManagerState, StepRollout
from agents.types import TrajectoryGroup
from envs.config.settings import FieldPath, changed, flag_of, is_under, leaves
from envs.errors import UserError
from envs.safe_text import write_text
from trainer.checkpoint.run_dir import ENVIRONMENT, found_folder
from trainer.config.run import RunConfig
from trainer.config.sources import INHERITED, read_config
from trainer.evaluation.results import Evaluation
from trainer.metrics.console import Display
from trainer.rollouts.compare_runs import Comparison, compare
from trainer.rollouts.protocol import FREE_ROUTING, OnEpisode, OnEvaluated
from trainer.rollouts.recorded_groups import RecordedSteps
from trainer.rollouts.recording_check import RecordingCheck
from trainer.setup.backend import check_learner
from trainer.setup.components import sampling_params
from trainer.setup.model_source import open_model
from trainer.setup.plugins import check_algorithm
from trainer.setup.problems import check_evaluations
from trainer.setup.run_context import RunContext, begin_or_resume, open_run
from trainer.setup.start import Start
from trainer.weight_sync.sync import NoWeightSync

#: Sections that only live rollouts read, and the fields of them that training reads too.
_PLAYED = ("env", "data", "rollout")
_READ: tuple[FieldPath, ...] = (
    ("env", "max_new_tokens"),
    ("rollout", "temperature"),
    ("rollout", "max_invalid_frac"),
    ("rollout", "routing"),
)


@dataclass(frozen=True, eq=False)
class RecordedContext(RunContext):
    """The context of a run that trains on the episodes of a recorded run, whose settings are `base`."""

    recorded: RecordedSteps
    base: RunConfig

    def notes(self) -> list[str]:
        """Return the messages to print before the first step."""
        recorded = self.recorded
        steps = f"{recorded.num_episodes} episodes of {len(recorded.steps)} steps"
        notes = [f"{steps} recorded in {path_text(recorded.run)}"]
        if self.facts.routes and self.config.reads_routes and not recorded.has_routes:
            notes.append(f"the recording does not say which experts each token took: {FREE_ROUTING}")
        return notes

    def closing_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return how the steps compare with those of the recorded run."""
        return [self.compared(rows).line(path_text(self.recorded.run))]

    def compared(self, rows: Sequence[Mapping[str, Any]]) -> Comparison:
        """Return how the metrics of this run compare with those of the recorded one."""
        return compare(self.recorded.rows, rows)


def prepare_replay(config: RunConfig, start: Start) -> RecordedContext:
    """Check everything and build the context of a run without engine and environment, new or resumed.

    All streams and images of the steps are checked before anything is loaded.

    Raises:
        UserError: recording, model, device or output folder cannot be used; the message says which and how to fix it.
    """
    run = config.stages.replay_rollouts
    assert run is not None, "--replay-rollouts names a run"
    recording = Recording.open(run)
    spec = recording.manifest.env
    check_evaluations(config.evaluation, None, spec)
    found_folder(run, "--replay-rollouts")
    # A stranger's settings may name code and places: here they are compared, and nothing of them is executed.
    base = read_config(run / CONFIG)
    # All checks come first: a model takes minutes to load.
    check_read(config, base)
    check_algorithm(config.algorithm)
    check_model_given(config, base)
    model = open_model(config.model)
    config.check()
    check_learner(config, model.path)
    # The network's own size: a tokenizer may know fewer ids.
    vocab_size = int(read_network(model.path).get_text_config().vocab_size)
    check = RecordingCheck(recording, model.renderer, model.facts, vocab_size, base.rollout.top_k)
    check.model()
    recorded = RecordedSteps.open(run, config.steps, base.rollout.group_size, check.episode)
    recorded = replace(recorded, gives_routes=config.reads_routes)
    sampling = sampling_params(model.renderer, config.rollout.temperature)
    with ExitStack() as cleanup:
        opened = open_run(config, f"{run.absolute().name}-replay", cleanup)
        folder = opened.folder
        with start.clock.stage("the learner"):
            learner = begin_or_resume(config, config, opened, model.path, sampling, cleanup)
        # So that viewers know the rules of the episodes, as in any run folder.
        write_text(folder / ENVIRONMENT, json_text(spec))
        return RecordedContext(
            config=config,
            folder=folder,
            spec=spec,
            model_path=model.path,
            facts=model.facts,
            renderer=model.renderer,
            learner=learner.learner,
            weight_sync=NoWeightSync(),
            checkpoint=opened.checkpoint,
            cleanup=cleanup.pop_all(),
            start=start,
            recorded=recorded,
            base=base,
        )


def check_read(config: RunConfig, base: RunConfig) -> None:
    """Raise `UserError` where a setting was given that only live rollouts read, and the recorded run has another one.

    Example: `--group-size 4` cannot change groups that were played with 8.
    """
    by_path = dict(leaves(RunConfig))
    for path, (old, new) in changed(config, base).items():
        # A default is no wish: it was not given.
        is_given = is_under(path, INHERITED) or new != by_path[path].get_default()
        if path[0] in _PLAYED and path not in _READ and is_given:
            rule = f"must stay as in the recorded run, which has {'nothing' if old in (None, '', ()) else old}"
            fix = "leave it out: groups are those that were played"
            raise UserError(flag_of(path[-1], by_path[path]), rule, new, fix)


def check_model_given(config: RunConfig, base: RunConfig) -> None:
    """Raise `UserError` where no model is given, and the recorded run had one of its own: a path is never taken."""
    if base.model.model != "starter" and "model" not in config.model.model_fields_set:
        rule = "must be given: no path is taken from a recording"
        raise UserError("--model", rule, "nothing", f"the recorded run had {base.model.model}")


class RecordedRollouts:
    """The groups that each step of a recorded run took; nothing is played."""

    events: Sequence[str] = ()

    def __init__(self, context: RecordedContext) -> None:
        self.context = context
        self._step = 0

    async def start(self, version: int, state: ManagerState, on_episode: OnEpisode) -> None:
        """Continue after step `version`."""
        self._step = version

    async def collect(self, num_groups: int) -> StepRollout:
        """Return the groups that the next step took, however many that were."""
        version = self._step
        self._step = self._step + 1
        images = self.context.renderer.images
        # Images are decoded; Ctrl-C must be heard meanwhile.
        rollout = await asyncio.to_thread(self.context.recorded.rollout, self._step, images)
        # The learner's, not the recorded one: it says how old the tokens are for this run.
        return replace(rollout, weight_version=version)

    def idle_fracs(self) -> Mapping[str, float]:
        """Return nothing: no server is needed."""
        return {}

    def state(self) -> ManagerState:
        """Return that nothing is in flight."""
        return ManagerState()

    async def drain(self) -> tuple[TrajectoryGroup, ...]:
        """Return that nothing was begun."""
        return ()

    async def evaluate(self, name: str, display: Display, on_episode: OnEvaluated) -> dict[str, Evaluation]:
        """Return nothing: nothing is played."""
        return {}

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return how the steps compare with those of the recorded run."""
        return {"replayed": str(self.context.recorded.run), "compared": asdict(self.context.compared(rows))}

    async def close(self) -> None:
        """Do nothing."""
