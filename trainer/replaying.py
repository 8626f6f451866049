"""Training on recorded rollouts: a run folder in place of engine and environment; prepared parts and a side out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agents.architectures import read_config as read_network
from agents.recording import Recording
from agents.renderer import Renderer
from agents.rollout import ManagerState, StepRollout
from agents.types import Trajectory, TrajectoryGroup
from envs.errors import UserError
from envs.settings import FieldPath, changed, flag_of, leaves
from trainer.comparison import Comparison, compare, other_settings
from trainer.config import RunConfig
from trainer.display import Display
from trainer.figures import Evaluation
from trainer.fit import Fit
from trainer.folder import CONFIG, ENVIRONMENT
from trainer.layers import read_config
from trainer.parts import Parts
from trainer.processes import check_learner
from trainer.recorded import RecordedSteps
from trainer.setup import begin_or_resume, check_reach, resolve_model, sampling_params, template_options
from trainer.sides import OnEvaluated
from trainer.trainer import ModelFacts
from trainer.weight_sync import Probe

#: Packages on whose versions it depends what a step computes.
COMPUTING = ("torch", "transformers")
#: Sections of which nothing is read where nothing is played, but for these fields.
_PLAYED = ("env", "data", "rollout")
_READ: tuple[FieldPath, ...] = (
    ("env", "max_new_tokens"),
    ("rollout", "temperature"),
    ("rollout", "max_invalid_frac"),
)


@dataclass(frozen=True, eq=False)
class ReplayParts(Parts):
    """The checked, ready parts of a run that trains on what another has recorded; `base` are the other's settings."""

    recorded: RecordedSteps
    base: RunConfig

    def notes(self) -> list[str]:
        """Return what is said of the run before it begins."""
        other, steps = _shown(self.recorded.run), len(self.recorded.steps)
        settings = other_settings(self.config, self.base)
        recorded = self.recorded.recording.manifest.versions
        here = {name: version(name) for name in COMPUTING}
        differing = [
            f"{name} {own} (there {recorded.get(name)})" for name, own in here.items() if own != recorded.get(name)
        ]
        notes = [f"settings other than in {other}: {', '.join(settings)}"] if settings else []
        notes += [f"versions other than in {other}: {', '.join(differing)}"] if differing else []
        return [*notes, f"{self.recorded.num_episodes} episodes of {steps} steps recorded in {other}"]

    def closing_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return how the steps compare with those of the recorded run."""
        return self.compared(rows).lines(_shown(self.recorded.run))

    def compared(self, rows: Sequence[Mapping[str, Any]]) -> Comparison:
        """Return how the metrics of this run compare with those of the recorded one."""
        return compare(self.recorded.rows, rows)


def _shown(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def prepare_replay(config: RunConfig, say: Callable[[str], None] = print) -> ReplayParts:
    """Check everything and build the parts of a run without engine and environment, or of one that goes on.

    All streams and pictures of the steps are looked at before anything is loaded.

    Raises:
        UserError: recording, model, device or output folder cannot be used; says which and how to mend it.
    """
    run = config.sides.replay_rollouts
    assert run is not None, "a run that replays names what"
    recording = Recording.open(run)
    base = recorded_settings(run)
    check_read(config, base)
    model_path = resolve_model(config.model.model)
    facts = ModelFacts.load(model_path)
    check_reach(config.model, facts)
    check_learner(config)
    renderer = Renderer.from_checkpoint(model_path, template_options(config.model))
    fit = Fit(recording, renderer, facts, int(read_network(model_path).get_text_config().vocab_size))
    fit.check_model()
    recorded = RecordedSteps.open(run, config.steps, base.rollout.group_size, fit.check)
    sampling, spec = sampling_params(renderer, config.rollout.temperature), recording.manifest.env
    with ExitStack() as cleanup:
        label = f"{run.absolute().name}-replay"
        learner, folder, checkpoint = begin_or_resume(config, config, label, model_path, sampling, cleanup, say)
        (folder / ENVIRONMENT).write_text(spec.model_dump_json(indent=1) + "\n", encoding="utf-8")
        return ReplayParts(
            config=config,
            folder=folder,
            spec=spec,
            model_path=model_path,
            facts=facts,
            renderer=renderer,
            learner=learner.trainer,
            checkpoint=checkpoint,
            cleanup=cleanup.pop_all(),
            recorded=recorded,
            base=base,
        )


def recorded_settings(run: Path) -> RunConfig:
    """Return the settings of a recorded run. Raises `UserError` where the folder has none."""
    if not (run / CONFIG).is_file():
        rule = f"must be a run folder, with {CONFIG}"
        raise UserError("--replay-rollouts", rule, str(run), "give the folder that the run has printed")
    return read_config(run / CONFIG)


def check_read(config: RunConfig, base: RunConfig) -> None:
    """Raise `UserError` where a setting differs from the recorded run's that nothing reads without an engine.

    Example: `--group-size 4` changes nothing of groups that were played with 8.
    """
    by_path = dict(leaves(RunConfig))
    for path, (old, new) in changed(config, base).items():
        if path[0] in _PLAYED and path not in _READ:
            rule = f"must stay as in the recorded run, which has {'nothing' if old in (None, '', ()) else old}"
            fix = "leave it out: groups are those that were played"
            raise UserError(flag_of(path[-1], by_path[path]), rule, new, fix)


class RecordedRollouts:
    """Hands out the groups of recorded steps, from the one after `step` on."""

    def __init__(self, parts: ReplayParts, step: int) -> None:
        self.parts, self.step = parts, step

    async def collect(self, num_groups: int) -> StepRollout:
        """Return the groups that the next step took, however many that were."""
        self.step += 1
        return await asyncio.to_thread(self.parts.recorded.rollout, self.step, self.parts.renderer.images)

    def state(self) -> ManagerState:
        """Return that nothing is in flight."""
        return ManagerState()

    async def close(self) -> tuple[TrajectoryGroup, ...]:
        """Return that nothing was begun."""
        return ()


class Replaying:
    """The rollout side of a run that plays nothing."""

    events: Sequence[str] = ()

    def __init__(self, parts: ReplayParts) -> None:
        self.parts = parts
        self.weight_version = 0

    async def start(self, version: int) -> None:
        """Note which step's groups come next."""
        self.weight_version = version

    async def push(self, version: int) -> tuple[float, Probe | None]:
        """Note the version: nobody needs the weights."""
        self.weight_version = version
        return 0.0, None

    def rollouts(self, on_episode: Callable[[Trajectory], None], state: ManagerState) -> RecordedRollouts:
        """Return what reads the steps after the one at hand."""
        return RecordedRollouts(self.parts, self.weight_version)

    async def evaluate(self, phase: str, display: Display, on_episode: OnEvaluated) -> dict[str, Evaluation]:
        """Return nothing: nothing is played."""
        return {}

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return how the steps compare with those of the recorded run."""
        return {"replayed": str(self.parts.recorded.run), "compared": asdict(self.parts.compared(rows))}

    async def close(self) -> None:
        """Do nothing."""
