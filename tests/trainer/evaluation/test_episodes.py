"""Claims about playing a set of problems: what breaks, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import Completion, GenerateRequest
from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.geo3k.env import build_env
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample
from tests.builders import sampling
from tests.prompts import question
from trainer.evaluation.episodes import EvaluationOptions, ProblemPlayer, ways
from trainer.evaluation.results import summarise
from trainer.evaluation.statistics import Intervals

ONCE = EvaluationOptions()


def problems(count: int, label: str = "5") -> list[Sample]:
    """Return problems that say which they are; all have one id, as rows of a careless data set may."""
    return [Sample("same", question(f"Problem {n}."), label, {"level": n % 2}) for n in range(count)]


def number_in(renderer: Renderer, request: GenerateRequest) -> int:
    text = renderer.tokenizer.decode(request.ids)
    return int(text.split("Problem")[1].split(".")[0].replace(" ", ""))


def play_of(
    renderer: Renderer,
    script: Callable[[int, int], str],
    samples: Any,
    options: EvaluationOptions = ONCE,
    make: Callable[..., Any] = build_env,
    max_turns: int = 2,
    **entry: Any,
) -> ProblemPlayer:
    """Return a play in which the model writes `script(problem, turn)`."""
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: script(number_in(renderer, request), turn))
    limits = Limits(max_turns, 256, EnvLimits(inline=True))
    episode = Episode(engine, renderer, limits, sampling(renderer))
    spec = EnvSpec(id="x", entry_point="a:b", description="x", max_turns=max_turns, **entry)
    return ProblemPlayer(episode, samples, make, EnvArgs(max_turns, tool_calls="last"), spec, options)


class Counting(Env):
    """Worth 1 after one step, 0 after more; ends with its second."""

    built = 0
    faults: Mapping[int, str] = {}

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        type(self).built += 1
        self.number, self.steps = type(self).built, 0
        if self.faults.get(self.number) == "build":
            raise RuntimeError("no room")

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.steps += 1
        if self.faults.get(self.number) == "step":
            raise RuntimeError("no such file")
        return {"obs_str": "on"}, self.steps == 2, {}

    def reward(self, final_text: str) -> float:
        return float(self.steps == 1)


def counting(**faults: str) -> type[Counting]:
    """Return an environment class of which the n-th one built has the fault named `nN`."""
    by_number = {int(name[1:]): fault for name, fault in faults.items()}
    return type("Case", (Counting,), {"built": 0, "faults": by_number})


def test_broken_environments_are_counted_as_wrong_and_stop_nothing(renderer: Renderer) -> None:
    make = counting(n1="step", n3="build")
    play = play_of(renderer, lambda *_: "go", problems(4), make=make, options=EvaluationOptions(), max_turns=1)
    asyncio.run(play.run())
    e = summarise(play.results, (1,), Intervals(resamples=100))
    assert (e.accuracy.value, e.num_broken, e.ends["env_error"].num_episodes) == (0.5, 2, 2)
    assert e.mean_reward is not None and (e.mean_reward.value, e.mean_reward.num_problems) == (1.0, 2)
    broken = [r.episodes[0] for r in play.results if not r.episodes[0].end_reason.is_valid]
    assert [b.is_right for b in broken] == [False, False]


def test_samples_of_a_problem_stay_together_and_metadata_is_kept(renderer: Renderer) -> None:
    options = EvaluationOptions(num_samples=3, tags=("level", "colour"))
    play = play_of(renderer, lambda problem, _: rf"\boxed{{{problem + 4}}}", problems(3), options)
    asyncio.run(play.run())
    assert [[e.is_right for e in r.episodes] for r in play.results] == [[False] * 3, [True] * 3, [False] * 3]
    assert [r.tags for r in play.results] == [{"level": "0"}, {"level": "1"}, {"level": "0"}]


class Read(list[Sample]):
    """Samples that note which are read."""

    reads: list[int]

    def __getitem__(self, index: Any) -> Any:
        self.reads = [*getattr(self, "reads", []), index]
        return super().__getitem__(index)


def test_problems_are_read_when_their_turn_comes(renderer: Renderer) -> None:
    """So that the images of a large set are not in memory all at once."""
    samples = Read(problems(5))
    ended: list[int] = []
    play = play_of(renderer, lambda *_: r"\boxed{5}", samples, EvaluationOptions(max_concurrent=2))
    play.on_episode = lambda t: ended.append(len(samples.reads))
    asyncio.run(play.run())
    assert samples.reads == [0, 1, 2, 3, 4] and len(play.results) == 5
    assert ended[0] <= 2 and ended[2] <= 4


class Stuck(ScriptedEngine):
    """Writes for the first few problems; for the others it waits for ever, or fails."""

    def __init__(self, renderer: Renderer, num_written: int, error: Exception | None = None) -> None:
        super().__init__(renderer.tokenizer, lambda turn, request: r"\boxed{5}")
        self.renderer, self.num_written, self.error = renderer, num_written, error
        self.reached = asyncio.Event()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        async with super().session() as session:
            write = session.generate

            async def generate(request: GenerateRequest) -> Completion:
                if number_in(self.renderer, request) >= self.num_written:
                    self.reached.set()
                    if self.error:
                        await asyncio.sleep(0.01)
                        raise self.error
                    await asyncio.Event().wait()
                return await write(request)

            session.generate = generate
            yield session


def stuck(renderer: Renderer, **options: Any) -> tuple[Stuck, ProblemPlayer]:
    play = play_of(renderer, lambda *_: "", problems(6), EvaluationOptions(num_samples=2))
    play.episode.engine = engine = Stuck(renderer, **options)
    return engine, play


def test_what_is_done_is_kept_when_the_playing_is_cancelled(renderer: Renderer) -> None:
    async def interrupted() -> ProblemPlayer:
        engine, play = stuck(renderer, num_written=3)
        task = asyncio.create_task(play.run())
        await engine.reached.wait()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return play

    play = asyncio.run(interrupted())
    assert [(r.number, r.num_right) for r in play.results] == [(0, 2), (1, 2), (2, 2)]


def test_what_is_done_is_kept_when_the_engine_fails(renderer: Renderer) -> None:
    async def failing() -> ProblemPlayer:
        _, play = stuck(renderer, num_written=2, error=ConnectionError("the network is gone"))
        with pytest.raises(ConnectionError, match="the network is gone"):
            await play.run()
        return play

    assert [r.number for r in asyncio.run(failing()).results] == [0, 1]


def test_a_turn_that_the_engine_gave_up_is_a_wrong_episode_of_a_whole_problem(renderer: Renderer) -> None:
    play = play_of(renderer, lambda *_: "", problems(2), EvaluationOptions(num_samples=2))
    stop = renderer.stop_ids[-1]

    class GivesUp(ScriptedEngine):
        @asynccontextmanager
        async def session(self) -> AsyncIterator[Any]:
            async def generate(request: GenerateRequest) -> Completion:
                return Completion((stop,), (0.0,), "abort", len(request.ids), ((0, 1),))

            async with super().session() as session:
                session.generate = generate
                yield session

    play.episode.engine = GivesUp(renderer.tokenizer, lambda *_: "")
    asyncio.run(play.run())
    assert [e.end_reason.value for r in play.results for e in r.episodes] == ["aborted"] * 4


def test_an_environment_without_tools_is_evaluated_in_one_way() -> None:
    assert [(w.name, w.max_turns, w.use_tools) for w in ways(3, True)] == [
        ("with_tool", 3, True),
        ("without_tool", 1, False),
    ]
    assert [(w.name, w.max_turns) for w in ways(6, False)] == [("no_tools", 6)]


def test_where_tools_are_required_nothing_is_played_without_them() -> None:
    for tools in ("both", "on"):
        assert [w.name for w in ways(3, True, tools, required=True)] == ["with_tool"]
    with pytest.raises(UserError, match="--tools: cannot be off where the environment's entry says tools: required"):
        ways(3, True, "off", required=True)
    assert [w.name for w in ways(3, True, "off")] == ["without_tool"]
    assert [w.name for w in ways(3, False, "off", required=True)] == ["no_tools"]  # text is all there is


class Shaped(Env):
    """Rewards 0.955 for "good" and 0.1 for all else; its last info says which."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.is_good = response_text == "good"
        return {}, True, {"is_success": self.is_good}

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {"role": "user", "content": ""}

    def reward(self, final_text: str) -> float:
        return 0.955 if self.is_good else 0.1

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("success", "right"),
    [
        (1.0, [False, False]),
        (0.9, [True, False]),
        ("is_success", [True, False]),
        ("none", [None, None]),
    ],
)
def test_the_environments_success_decides_what_is_right(
    renderer: Renderer, success: Any, right: list[bool | None]
) -> None:
    write = lambda number, turn: "good" if number == 0 else "bad"  # noqa: E731
    play = play_of(renderer, write, problems(2), make=lambda sample, args: Shaped(), max_turns=1, success=success)
    asyncio.run(play.run())
    episodes = [episode for result in play.results for episode in result.episodes]
    assert [e.is_right for e in episodes] == right
    found = summarise(play.results, (1,), Intervals())
    assert found.mean_reward is not None and found.mean_reward.value == pytest.approx(0.5275)
    assert found.main == ("mean_reward" if success == "none" else "accuracy")
    if success == "none":
        assert (found.accuracy, found.pass_at) == (None, {})
        assert found.by_tag["level"]["1"].value == 0.1 and found.ends["completed"].accuracy is None


@pytest.mark.parametrize(
    ("keys", "doubt"),
    [
        ({}, "the mean reward is 0.1, and a success is a reward of at least 1"),
        ({"reward_max_val": 0.05}, "the mean reward is 0.1, and a success is a reward of at least 0.05"),
        ({"success": "is_sucess"}, "'is_sucess', a key that no episode's info has; did you mean 'is_success'?"),
        ({"success": "is_success"}, ""),
        ({"success": 1.0}, ""),
        ({"success": "none"}, ""),
    ],
)
def test_a_success_that_the_rewards_do_not_fit_is_doubted(renderer: Renderer, keys: dict[str, Any], doubt: str) -> None:
    entry = {"reward_min_val": 0.0, **keys}
    make = lambda sample, args: Shaped()  # noqa: E731
    play = play_of(renderer, lambda *_: "bad", problems(2), EvaluationOptions(), make, max_turns=1, **entry)
    asyncio.run(play.run())
    said = play.doubt(summarise(play.results, (1,), Intervals()))
    assert doubt in said and bool(doubt) is bool(said)
