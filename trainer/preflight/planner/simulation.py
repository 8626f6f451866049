"""Plays a run event by event, with SimPy: problems begin, servers write turns, the learner takes groups in order.

A problem begins only while fewer than (staleness + 1) * problems_per_step begun ones are not yet trained on. So no
older token trains, and with staleness 0 a step collects, then learns. While weights are pushed, and with `colocate`
while the learner trains, servers pause; then turns go on where they stood. Turns wait for others as SGLang's
do with `--turn-wait-s`, and all streams stand still whenever their server begins to read.

Legend: a server's clock counts the tokens that it has written in each of its streams since the start.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agents.engines.sglang.server_arguments import WRITTEN_FOR_ONE
from envs.errors import UserError
from trainer.preflight.planner.costs import Costs
from trainer.preflight.planner.layout import Layout
from trainer.preflight.planner.workload import EpisodeShape, GroupShape

if TYPE_CHECKING:
    import simpy

    Process = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True)
class Schedule:
    """How much a run plays, and how far rollouts may be ahead of the learner."""

    problems_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 0
    max_concurrent: int = 1024
    steps: int = 6
    turn_wait_s: float = 0.2
    keep_kv_cache: bool = False


@dataclass(frozen=True)
class StepTimes:
    """One step: when it began and ended, and the seconds in which the learner waited, trained and pushed."""

    began: float
    waited_s: float
    train_s: float
    sync_s: float
    ended: float
    groups: tuple[GroupShape, ...]
    ages: tuple[int, ...]


@dataclass(frozen=True)
class Forecast:
    """What a simulated run did. `busy` are shares of the time: of the servers on average, of the busiest tokenizer
    process, of the driver's event loop, of the learner and of pushes. Servers wrote `tokens_written`, of which
    `tokens_ahead` were not trained on when the last step ended. Their decode steps took `slowdown` times as long as
    those of a single stream.

    With staleness, the first `1 + max_staleness` steps fill the queue and count in no rate.
    """

    steps: tuple[StepTimes, ...]
    warm_up: int
    busy: Mapping[str, float]
    tokens_written: float
    tokens_ahead: float
    slowdown: float

    @property
    def counted(self) -> tuple[StepTimes, ...]:
        """The steps after the first ones."""
        return self.steps[self.warm_up :]

    @property
    def seconds(self) -> float:
        """The time that the counted steps took."""
        return self.steps[-1].ended - self.steps[self.warm_up - 1].ended if self.warm_up else self.steps[-1].ended

    def mean(self, name: str) -> float:
        """Return the mean seconds of a part of a step: "waited_s", "train_s", "sync_s"."""
        return sum(getattr(step, name) for step in self.counted) / len(self.counted)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / len(self.counted)

    @property
    def samples_per_s(self) -> float:
        """Episodes trained on in a second."""
        return sum(len(group.episodes) for step in self.counted for group in step.groups) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """The model's tokens trained on in a second."""
        return sum(group.model_tokens for step in self.counted for group in step.groups) / self.seconds

    @property
    def limit(self) -> str:
        """What the run waits for most: its busiest part, or the time that an episode takes by itself."""
        name, share = max(self.busy.items(), key=lambda item: item[1])
        is_latency = share < 0.5 or (name == "servers" and self.slowdown < 1.5)  # more servers would be no faster
        return "episode latency" if is_latency else name


class _Line:
    """A serial resource, such as a process: work waits for what came before."""

    def __init__(self, sim: simpy.Environment) -> None:
        self._sim, self._free_at, self.busy_s = sim, 0.0, 0.0

    def work(self, seconds: float) -> simpy.Event:
        """Return the event of the end of some work that is asked for now."""
        begins = max(self._sim.now, self._free_at)
        self._free_at, self.busy_s = begins + seconds, self.busy_s + seconds
        return self._sim.timeout(self._free_at - self._sim.now)


@dataclass(eq=False)
class _Turn:
    group: _Group
    new: int
    before: int
    tokens: float
    done: simpy.Event
    written: float = 0.0


class _Server:
    """Continuous batching: whoever waits and fits into the cache is read first, then all streams get a token a step."""

    def __init__(self, sim: simpy.Environment, run: _Run) -> None:
        self.run, self.sim = run, sim
        self.line = _Line(sim)
        self.sessions = 0
        self.busy_s = 0.0
        self.written = self.decode_s = 0.0
        self._waiting: deque[_Turn] = deque()
        self._wait_s = 0.0 if run.is_lockstep else run.schedule.turn_wait_s
        self._opens_at = 0.0
        self._writing: list[tuple[float, int, _Turn]] = []
        self._clock, self._cached, self._cut, self._order = 0.0, 0.0, 0.0, itertools.count()
        self._is_paused = False
        self._known: set[_Group] = set()
        self._wake = sim.event()
        self._sleeps = self._decodes = False
        self._process = sim.process(self._serve())

    def submit(self, turn: _Turn) -> None:
        """Queue a turn."""
        if not self._waiting:
            self._opens_at = self.sim.now + self._wait_s
            self.sim.process(self._open())
        self._waiting.append(turn)
        if self._is_open():
            self._notify()

    def _open(self) -> Process:
        yield self.sim.timeout(self._wait_s)
        self._notify()

    def _is_open(self) -> bool:
        """Whether turns that wait for others go now."""
        return self.sim.now >= self._opens_at or len(self._waiting) >= len(self._writing) // WRITTEN_FOR_ONE

    def pause(self, is_paused: bool) -> None:
        """Stop writing, or go on."""
        self._is_paused = is_paused
        self._notify()

    def forget(self) -> None:
        """Take new weights. Turns in flight are sent again, and read again unless the cache is kept."""
        if not self.run.schedule.keep_kv_cache:
            self._known.clear()
        cut, self._writing, self._cached = self._writing, [], 0.0
        for end, _, turn in cut:
            left = end - self._clock
            written = turn.tokens - left
            stream = turn.before + turn.new + round(written)
            turn.new = 1 if self.run.schedule.keep_kv_cache else stream
            turn.before, turn.tokens = stream - turn.new, left
            turn.written, self._cut = turn.written + written, self._cut + written
            self.sim.process(self._send_again(turn))

    def _send_again(self, turn: _Turn) -> Process:
        if not self.run.is_lockstep:
            yield self.line.work(self.run.costs.request_s(turn.group.shape.images))
        self.submit(turn)

    @property
    def num_steps(self) -> float:
        """Decode steps so far."""
        return self._clock

    @property
    def in_progress(self) -> float:
        """Tokens of turns that are not done."""
        return self._cut + sum(turn.tokens - (end - self._clock) for end, _, turn in self._writing)

    def _notify(self) -> None:
        if self._sleeps:
            self._sleeps = False
            self._wake.succeed()
            self._wake = self.sim.event()
        elif self._decodes:
            self._decodes = False
            self._process.interrupt()

    def _ready(self) -> list[_Turn]:
        """Return the waiting turns that begin now. The embedded engine begins when all open sessions wait."""
        run, taken, room = self.run, [], self.run.layout.cache_tokens - self._cached
        if not self._is_open():
            return []
        if run.is_lockstep and (self._writing or len(self._waiting) < run.num_open):
            return []
        while self._waiting:
            turn = self._waiting[0]
            size = turn.before + turn.new + turn.tokens
            if size > room and (self._writing or taken):
                break
            room -= size
            taken.append(self._waiting.popleft())
        return taken

    def _read_s(self, turns: list[_Turn]) -> float:
        seconds = self.run.costs.hardware.read_s
        for turn in turns:
            new, images, shape = turn.new, 0, turn.group.shape
            if turn.before == 0:
                if turn.group in self._known:  # another sample has read the prompt
                    new = max(1, new - shape.prompt)
                elif shape.images:
                    images = shape.images
                    seconds += self.run.costs.hardware.picture_s
                self._known.add(turn.group)
            before = turn.before + turn.new - new
            seconds += self.run.costs.prefill_s(new, before, images, self.run.layout.tensor_parallel)
        return seconds

    def _serve(self) -> Process:
        import simpy

        while True:
            turns = [] if self._is_paused else self._ready()
            if self._is_paused or not (turns or self._writing):
                self._sleeps = True
                yield self._wake
                continue
            if turns:
                seconds = self._read_s(turns)
                yield self.sim.timeout(seconds)
                self.busy_s += seconds
                for turn in turns:
                    heapq.heappush(self._writing, (self._clock + turn.tokens, next(self._order), turn))
                    self._cached += turn.before + turn.new
                continue
            rows, steps = len(self._writing), self._writing[0][0] - self._clock
            step_s = self.run.costs.decode_step_s(
                rows, self._cached + rows * steps / 2, self.run.layout.tensor_parallel
            )
            began, self._decodes = self.sim.now, True
            try:
                yield self.sim.timeout(steps * step_s)
                self._decodes = False
            except simpy.Interrupt:
                steps = min(steps, (self.sim.now - began) / step_s)
            self.busy_s += self.sim.now - began
            self.decode_s += self.sim.now - began
            self._clock, self._cached, self.written = (
                self._clock + steps,
                self._cached + rows * steps,
                self.written + rows * steps,
            )
            while self._writing and self._writing[0][0] <= self._clock + 1e-6:
                _, _, turn = heapq.heappop(self._writing)
                self._cached -= turn.before + turn.new + turn.tokens
                self._cut -= turn.written
                turn.done.succeed()


@dataclass(eq=False)
class _Group:
    shape: GroupShape
    version: int
    done: simpy.Event
    left: int
    written: int = 0
    home: _Server | None = None


class _Run:
    def __init__(self, costs: Costs, layout: Layout, schedule: Schedule, groups: Iterator[GroupShape]) -> None:
        self.costs, self.layout, self.schedule, self._shapes = costs, layout, schedule, groups
        self.is_lockstep = layout.num_servers == 0
        self.sim = _environment()
        self.servers = [_Server(self.sim, self) for _ in range(max(1, layout.num_servers))]
        self.driver = _Line(self.sim)
        self.num_open = self.version = self.trained = 0
        self._at_warm_up: dict[str, float] = {}
        self.groups: list[_Group] = []
        self.steps: list[StepTimes] = []
        self._queue: deque[tuple[_Group, EpisodeShape]] = deque()
        self.learner = self.sim.process(self._learn())

    def play(self) -> Forecast:
        """Run to the end of the last step."""
        self.sim.run(until=self.learner)
        then, spent = self._at_warm_up, self._spent()
        busy = {name: (seconds - then[name]) / (self.sim.now - then["now"]) for name, seconds in spent.items()}
        ahead = sum(group.written for group in self.groups[self.trained :])
        written = sum(server.written for server in self.servers)
        ahead += sum(server.in_progress for server in self.servers)
        del busy["now"]
        alone = self.costs.decode_step_s(1, 0, self.layout.tensor_parallel)
        num_steps = sum(server.num_steps for server in self.servers)
        slowdown = sum(server.decode_s for server in self.servers) / num_steps / max(alone, 1e-12)
        return Forecast(tuple(self.steps), self.warm_up, busy, written, ahead, slowdown)

    def _spent(self) -> dict[str, float]:
        """Return the seconds that each part has worked so far."""
        return {
            "now": self.sim.now,
            "servers": sum(server.busy_s for server in self.servers) / len(self.servers),
            "tokenizer process": max(server.line.busy_s for server in self.servers),
            "driver": self.driver.busy_s,
            "learner": sum(step.train_s for step in self.steps),
            "sync": sum(step.sync_s for step in self.steps),
        }

    @property
    def warm_up(self) -> int:
        """The steps before the queue is as full as it gets."""
        return min(self.schedule.steps - 1, 1 + self.schedule.max_staleness) if self.schedule.max_staleness else 0

    def _begin_groups(self) -> None:
        ahead = (self.schedule.max_staleness + 1) * self.schedule.problems_per_step
        while len(self.groups) - self.trained < ahead:
            shape = next(self._shapes)
            group = _Group(shape, self.version, self.sim.event(), len(shape.episodes))
            self.groups.append(group)
            self._queue.extend((group, episode) for episode in shape.episodes)
        self._begin_episodes()

    def _begin_episodes(self) -> None:
        while self._queue and self.num_open < self.schedule.max_concurrent:
            self.num_open += 1
            self.sim.process(self._episode(*self._queue.popleft()))

    def _episode(self, group: _Group, episode: EpisodeShape) -> Process:
        machine, line = self.costs.hardware, self.driver
        server = self._choose(group)
        server.sessions += 1
        yield line.work(machine.episode_s)
        read, version, stream = 0, self.version, episode.prompt
        for shape in episode.turns:
            yield line.work(machine.turn_s)
            if not self.is_lockstep:
                yield server.line.work(self.costs.request_s(group.shape.images))
            if version != self.version and not self.schedule.keep_kv_cache:
                read, version = 0, self.version
            turn = _Turn(group, stream - read, read, shape.tokens, self.sim.event())
            server.submit(turn)
            yield turn.done
            group.written += shape.tokens
            read = stream + shape.tokens
            stream = read + shape.observation
            if shape.tool_s:
                yield self.sim.timeout(shape.tool_s)
        server.sessions -= 1
        self.num_open -= 1
        group.left -= 1
        if not group.left:
            group.done.succeed()
        self._begin_episodes()
        server._notify()

    def _choose(self, group: _Group) -> _Server:
        """Return the server of the group's prompt, unless it has many more sessions than others have."""
        fewest = min(self.servers, key=lambda server: server.sessions)
        if group.home is None or group.home.sessions > 16 + 1.25 * (self.num_open / len(self.servers)):
            group.home = fewest
        return group.home

    def _pause(self, is_paused: bool) -> None:
        for server in self.servers:
            server.pause(is_paused)

    def _learn(self) -> Process:
        size, shares = self.schedule.problems_per_step, self.layout.placement == "colocate"
        for step in range(self.schedule.steps):
            if step == self.warm_up:
                self._at_warm_up = self._spent()
            began = self.sim.now
            self._begin_groups()
            taken = self.groups[step * size : (step + 1) * size]
            for group in taken:
                yield group.done
            waited = self.sim.now - began
            shapes = tuple(group.shape for group in taken)
            train_s = self.costs.train_s(shapes, self.layout.learner)
            if shares:
                self._pause(True)
                yield self.sim.timeout(self.costs.hardware.release_s)
            yield self.sim.timeout(train_s)
            self._pause(True)
            sync_s = self.costs.sync_s(self.layout.transport, self.layout.learner.num_ranks)
            yield self.sim.timeout(sync_s)
            ages = tuple(self.version - group.version for group in taken)
            self.version += 1
            for server in self.servers:
                server.forget()
            self._pause(False)
            self.trained += len(taken)
            self.steps.append(StepTimes(began, waited, train_s, sync_s, self.sim.now, shapes, ages))


def simulate(costs: Costs, layout: Layout, schedule: Schedule, groups: Iterator[GroupShape]) -> Forecast:
    """Return what a run does with this layout, schedule and workload.

    Raises:
        UserError: SimPy is not installed.
    """
    return _Run(costs, layout, schedule, groups).play()


def _environment() -> simpy.Environment:
    try:
        import simpy
    except ImportError as error:
        raise UserError("trainer.plan", "needs SimPy", "no such package", 'pip install "trueturn[plan]"') from error
    return simpy.Environment()
