"""Reads the groups that each step of a recorded run trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agents.cli.text import counted
from agents.recording import EpisodeRecord, Recording
from agents.recording.run_files import METRICS
from agents.recording.schema import TRAIN
from agents.rendering.images import ImageStore
from agents.rollout.groups import StepRollout
from agents.types import Trajectory, TrajectoryGroup
from envs.errors import UserError
from trainer.metrics.log import read_rows

DISCARDED = "discarded"


@dataclass(frozen=True)
class RecordedEpisode:
    """Where an episode stands in the file of episodes, the number of its group, and its outcome.

    `has_routes`: the experts of its tokens are recorded.

    Example: `RecordedEpisode(group=12, fate="train", start=0, end=1450)`.
    """

    group: int
    fate: str
    start: int
    end: int
    has_routes: bool = False


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """The episodes of each step of a run; `rows` are the lines of its metrics. Experts are read if it `gives_routes`.

    Example::

        recorded = RecordedSteps.open(Path("runs/x"), num_steps=6, group_size=8)
        recorded.rollout(3, renderer.images).groups     # the 8 groups of 8 episodes of step 3
    """

    run: Path
    recording: Recording
    rows: Sequence[Mapping[str, float | None]]
    steps: Mapping[int, Sequence[RecordedEpisode]]
    gives_routes: bool = True

    @classmethod
    def open(
        cls,
        run: Path,
        num_steps: int,
        group_size: int,
        check: Callable[[EpisodeRecord], None] = lambda episode: None,
    ) -> RecordedSteps:
        """Find the episodes of the first `num_steps` steps; `check` raises `UserError` for one that cannot be used.

        Raises:
            UserError: there is no recording, it has fewer steps, or groups of a step are not in it.
        """
        recording = Recording.open(run)
        rows = read_rows(run / METRICS)
        if num_steps > len(rows):
            # A run that was stopped early may have recorded nothing to train on.
            fix = f"give --steps {len(rows)}" if rows else "give a run that has taken a step"
            rule = f"must be at most the {counted(len(rows), 'step')} that {run} has recorded"
            raise UserError("--steps", rule, num_steps, fix)
        outcomes = {id: outcome for id, outcome in recording.outcomes().items() if 1 <= outcome.step <= num_steps}
        found = dict[str, RecordedEpisode]()
        start = 0
        # One pass: only places are kept, since the episodes may not fit into memory.
        for end, episode in recording.episodes_from(0):
            outcome = outcomes.get(episode.id)
            if outcome:
                check(episode)
                # An episode that a resumed run has played again has the outcome of its last line.
                has_routes = episode.routes is not None
                found[episode.id] = RecordedEpisode(episode.group, outcome.fate, start, end, has_routes)
            start = end
        steps: dict[int, list[RecordedEpisode]] = {step: [] for step in range(1, num_steps + 1)}
        for id, episode in found.items():
            steps[outcomes[id].step].append(episode)
        recorded = cls(run, recording, rows[:num_steps], steps)
        recorded._check_whole(group_size)
        return recorded

    def _check_whole(self, group_size: int) -> None:
        """Raise where the recording lacks a group, or an episode of one, that a step trained on."""
        for step, (row, episodes) in enumerate(zip(self.rows, self.steps.values(), strict=True), 1):
            sizes: dict[int, int] = defaultdict(int)
            for episode in episodes:
                sizes[episode.group] += episode.fate == TRAIN
            # A group that lacks an episode would have other advantages.
            num_whole = sum(size == group_size for size in sizes.values())
            wanted = row.get("groups_trained")
            if num_whole != wanted:
                fix = "record all of them (--record 1)" + (f", or give --steps {step - 1}" if step > 1 else "")
                if wanted is not None:
                    got = f"{num_whole} of {wanted:g} in step {step}"
                else:
                    got = f"no count in step {step}"
                raise UserError(str(self.run), "must have recorded every group that was trained on", got, fix)

    @property
    def num_episodes(self) -> int:
        """The number of episodes of all steps, including those that no step trained on."""
        return sum(map(len, self.steps.values()))

    @property
    def has_routes(self) -> bool:
        """Whether any episode says which experts its tokens took."""
        return any(episode.has_routes for episodes in self.steps.values() for episode in episodes)

    def rollout(self, step: int, images: ImageStore | None) -> StepRollout:
        """Return the groups of a step, used and unused; only images of used ones are processed."""
        coming = {episode.end: episode for episode in self.steps[step]}
        by_fate: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
        # The file is compressed in members: what lies before need not be unpacked.
        first = min((episode.start for episode in coming.values()), default=0)
        for end, record in self.recording.episodes_from(first):
            if not coming:
                break
            if episode := coming.pop(end, None):
                if episode.fate == TRAIN:
                    shown = images
                else:
                    shown = None
                # Only trained groups need pixels; cutting images is the slow part.
                trajectory = self.recording.trajectory(record, shown)
                if not self.gives_routes:
                    later = tuple(replace(stream, routes_RLK=None) for stream in trajectory.later)
                    trajectory = replace(trajectory, routes_RLK=None, later=later)
                by_fate[episode.fate][episode.group].append(trajectory)
        discarded = by_fate[DISCARDED]
        return StepRollout(
            groups=tuple(_group(t, discarded[number]) for number, t in sorted(by_fate[TRAIN].items())),
            filtered=_unused(by_fate["filtered"]),
            surplus=_unused(by_fate["surplus"]),
            aborted=_unused(by_fate["aborted"]),
        )


def _group(trajectories: Iterable[Trajectory], discarded: Iterable[Trajectory]) -> TrajectoryGroup:
    """Return some episodes as one group, in order."""
    first, last = (tuple(sorted(some, key=lambda t: (t.attempt, t.sample_index))) for some in (discarded, trajectories))
    return TrajectoryGroup((*last, *first)[0].sample_id, last, first)


def _unused(groups: Mapping[int, Sequence[Trajectory]]) -> tuple[TrajectoryGroup, ...]:
    """Return the groups that no step trained on, in order of number; the last attempt of each counts."""
    found = []
    for _, played in sorted(groups.items()):
        # A group that was played again keeps what was discarded beside it.
        last = max(t.attempt for t in played)
        before = [t for t in played if t.attempt < last]
        found.append(_group([t for t in played if t.attempt == last], before))
    return tuple(found)
