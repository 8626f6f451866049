"""Claims about playing a set of problems: what the first turn was worth, what breaks, and what is kept of it."""

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
from envs.tool_calls.thinking import Thinking
from envs.types import Sample
from tests.builders import sampling
from tests.prompts import question
from trainer.evaluation.episodes import EvaluationOptions, ProblemPlayer, ways
from trainer.evaluation.results import EvaluatedEpisode, summarise
from trainer.evaluation.statistics import Intervals

CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "%s"}}</tool_call>'
LOOK = EvaluationOptions(grades_first_turn=True)


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
    options: EvaluationOptions = LOOK,
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


def played(*args: Any, **options: Any) -> list[EvaluatedEpisode]:
    """Play; return the only episode of each problem."""
    play = play_of(*args, **options)
    asyncio.run(play.run())
    assert [result.number for result in play.results] == list(range(len(play.samples)))
    return [episode for result in play.results for episode in result.episodes]


TURNS: Mapping[str, tuple[tuple[str, str], bool, bool]] = {
    # what the model writes in two turns, right after the first, right in the end
    "right by the tool": ((CALL % 5, r"\boxed{5}"), True, True),
    "right by the tool, then talked out of it": ((CALL % 5, r"\boxed{6}"), True, False),
    "wrong, then right": ((CALL % 6, r"\boxed{5}"), False, True),
    "a box in turn 1 ends it": ((r"\boxed{5}", "never asked"), True, True),
    "a wrong box in turn 1 ends it": ((r"\boxed{6}", "never asked"), False, False),
    "a box beside a call that failed": ((r"\boxed{5} <tool_call>{</tool_call>", r"\boxed{6}"), True, False),
    "a call that failed": (("<tool_call>{</tool_call>", r"\boxed{5}"), False, True),
    "a call alone": ((CALL % 5, CALL % 5), True, False),
}


def test_the_first_turn_is_worth_what_the_tool_or_else_the_reward_says(renderer: Renderer) -> None:
    texts = [turns for turns, _, _ in TURNS.values()]
    episodes = played(renderer, lambda problem, turn: texts[problem][turn], problems(len(TURNS)))
    for name, (_, first, final), e in zip(TURNS, (v for v in TURNS.values()), episodes, strict=True):
        assert (e.is_first_turn_right, e.is_right) == (first, final), name


def test_attempts_are_the_answers_that_turns_score_then_the_answer_at_the_end(renderer: Renderer) -> None:
    texts = [turns for turns, _, _ in TURNS.values()]
    episodes = played(renderer, lambda problem, turn: texts[problem][turn], problems(len(TURNS)))
    expected = {
        "right by the tool": (True, True),
        "right by the tool, then talked out of it": (True, False),
        "wrong, then right": (False, True),
        "a box in turn 1 ends it": (True,),
        "a wrong box in turn 1 ends it": (False,),
        "a box beside a call that failed": (False,),
        "a call that failed": (True,),
        "a call alone": (True, True),
    }
    assert {name: e.attempts for name, e in zip(TURNS, episodes, strict=True)} == expected


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


def test_a_first_turn_that_only_the_environment_can_judge_is_replayed_in_a_fresh_one(renderer: Renderer) -> None:
    make = counting()
    (e,) = played(renderer, lambda *_: "go", problems(1), make=make)
    assert (e.is_right, e.is_first_turn_right, e.num_turns, make.built) == (False, True, 2, 2)


@pytest.mark.parametrize(("thinking", "first"), [(Thinking("<think>", "</think>"), False), (None, True)])
def test_a_replayed_first_turn_is_worth_what_it_says_outside_of_its_thinking(
    renderer: Renderer, thinking: Thinking | None, first: bool
) -> None:
    thinks = "<think>\\boxed{5}?</think> <tool_call>{</tool_call>"
    play = play_of(renderer, lambda _, turn: (thinks, "\\boxed{6}")[turn], problems(1))
    play.episode.thinking = thinking
    asyncio.run(play.run())
    assert play.results[0].episodes[0].is_first_turn_right is first


def test_nothing_is_replayed_unless_asked(renderer: Renderer) -> None:
    make = counting()
    (e,) = played(renderer, lambda *_: "go", problems(1), make=make, options=EvaluationOptions())
    assert (e.is_first_turn_right, make.built) == (None, 1)


def test_a_fault_of_the_replay_makes_the_first_turn_wrong(renderer: Renderer) -> None:
    for fault in ("build", "step"):
        (e,) = played(renderer, lambda *_: "go", problems(1), make=counting(n2=fault))
        assert (e.end_reason.value, e.is_first_turn_right) == ("completed", False)


def test_broken_environments_are_counted_as_wrong_and_stop_nothing(renderer: Renderer) -> None:
    make = counting(n1="step", n3="build")
    play = play_of(renderer, lambda *_: "go", problems(4), make=make, options=EvaluationOptions(), max_turns=1)
    asyncio.run(play.run())
    e = summarise(play.results, (1,), Intervals(resamples=100))
    assert (e.accuracy.value, e.num_broken, e.ends["env_error"].num_episodes) == (0.5, 2, 2)
    assert e.mean_reward is not None and (e.mean_reward.value, e.mean_reward.num_problems) == (1.0, 2)
    broken = [r.episodes[0] for r in play.results if not r.episodes[0].end_reason.is_valid]
    assert [(b.is_right, b.is_first_turn_right) for b in broken] == [(False, None)] * 2


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
    play._on_episode = lambda t: ended.append(len(samples.reads))
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
    play = play_of(renderer, lambda *_: "", problems(2), EvaluationOptions(num_samples=2, grades_first_turn=True))
    stop = renderer.stop_ids[-1]

    class GivesUp(ScriptedEngine):
        @asynccontextmanager
        async def session(self) -> AsyncIterator[Any]:
            async with super().session() as session:

                async def generate(request: GenerateRequest) -> Completion:
                    return Completion((stop,), (0.0,), "abort", len(request.ids), ((0, 1),))

                session.generate = generate
                yield session

    play.episode.engine = GivesUp(renderer.tokenizer, lambda *_: "")
    asyncio.run(play.run())
    assert [(e.end_reason.value, e.is_first_turn_right) for r in play.results for e in r.episodes] == [
        ("aborted", False)
    ] * 4


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
    play = play_of(renderer, write, problems(2), LOOK, lambda sample, args: Shaped(), max_turns=1, success=success)
    asyncio.run(play.run())
    episodes = [episode for result in play.results for episode in result.episodes]
    assert [e.is_right for e in episodes] == right
    found = summarise(play.results, (1,), Intervals())
    assert found.mean_reward is not None and found.mean_reward.value == pytest.approx(0.5275)
    assert found.main == ("mean_reward" if success == "none" else "accuracy")
    if success == "none":
        assert (found.accuracy, found.first_turn, found.second_attempts, found.pass_at) == (None, None, None, {})
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


@pytest.mark.parametrize(("score", "first"), [(0.95, True), (0.5, False), (10**400, True), (float("nan"), False)])
def test_an_answer_that_a_step_scored_is_right_by_the_same_rule(renderer: Renderer, score: Any, first: bool) -> None:
    class Scored(Shaped):
        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            return {}, self.is_done(response_text), {"tool_score": score}

        def is_done(self, text: str) -> bool:
            self.is_good = text == "good"
            return self.is_good

    write = lambda number, turn: "bad" if turn == 0 else "good"  # noqa: E731
    (e,) = played(renderer, write, problems(1), make=lambda sample, args: Scored(), success=0.9)
    assert (e.is_right, e.is_first_turn_right, e.attempts[0]) == (True, first, first)
