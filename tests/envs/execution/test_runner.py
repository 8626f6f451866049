"""Claims about an environment behind its limits, on a thread and in a process: a fault is data, close always runs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.contract import EnvFault, ToolFault
from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.process_env import ProcessEnv
from envs.execution.runner import EnvRunner, StepResult
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample

MODULE = '''
import asyncio, os, sys, time, ctypes
from pathlib import Path
from tests.faulty_env import png_header
from envs.env import Env

class Own:
    """Notes where it is unpickled."""
    def __init__(self, options): self.options = options
    def __repr__(self): return "own"
    def __setstate__(self, state): Path(state["options"]["closed"]).with_name("opened").write_text("")

class Odd(Env):
    """Does what its label says, in the method that its label names: "step:sleep"."""

    tools = ({"type": "function", "function": {"name": "f"}},)

    def __init__(self, sample, args):
        self.method, _, self.deed = sample.label.partition(":")
        self.options = args.options
        self.do("build")

    def do(self, method):
        if method != self.method:
            return
        if self.deed == "raise": raise ValueError("boom")
        if self.deed == "sleep": time.sleep(60)
        if self.deed == "exit": os._exit(3)
        if self.deed == "crash": ctypes.string_at(0)
        if self.deed.startswith("run "): exec(self.deed[4:])
        if self.deed == "allocate": self.hog = bytearray(4 * 2**30)
        if self.deed == "count":
            path = Path(self.options["counter"])
            count = int(path.read_text() or 0) + 1
            path.write_text(str(count))
            if count < 3: raise OSError("not yet")

    def reset(self):
        self.do("reset")
        return ({"obs_str": "hello", "role": "user"}, {}) if self.method == "greet" else ({}, {})

    def step(self, text):
        self.do("step")
        if self.deed == "object":
            own = Own(self.options)
            return {"own": own}, False, {"own": own, "key": {own: 1}}
        if self.deed == "header":
            return {"obs_str": "big", "multi_modal_data": {"image": [HEADER]}}, False, {}
        return {"obs_str": f"{text} {os.getpid()}"}, False, {"n": 1}

    def format_observation(self, observation):
        if "own" in observation:
            return {"role": "user", "content": repr(observation["own"]) * isinstance(observation["own"], Own)}
        return super().format_observation(observation)

    def reward(self, text):
        self.do("reward")
        return self.later() if self.method == "later" else 0.5

    async def later(self):
        await asyncio.sleep(float(self.deed))
        return 0.25

    def close(self):
        if "closed" in self.options:
            Path(self.options["closed"]).write_text(str(os.getpid()))
        self.do("close")

HEADER = png_header(50_000, 50_000)
'''


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a maker of runners for environments that do odd things, and note where they run."""
    (tmp_path / "odd_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(label: str, isolation: str = "thread", **limits: Any) -> EnvRunner:
        options = {"closed": str(tmp_path / "closed"), "counter": str(tmp_path / "counter")}
        (tmp_path / "counter").write_text("")
        spec = EnvSpec.model_validate(
            {
                "id": "odd",
                "entry_point": "odd_env:Odd",
                "description": "",
                "max_turns": 3,
                "isolation": isolation,
                "options": options,
                "memory_limit_gib": 2.0 if isolation == "process" else 0.0,
            }
        )
        build = load_env(spec)
        bounds = EnvLimits(**{"reset_timeout_s": 20.0, "step_timeout_s": 20.0, **limits})
        return EnvRunner(lambda: build(Sample("0", (), label=label), spec.args()), bounds)

    return make


async def play(runner: EnvRunner) -> tuple[tuple, StepResult, float]:
    try:
        return await runner.open(), await runner.step("hi"), await runner.reward("hi")
    finally:
        await runner.close()


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_a_good_episode_is_the_same_wherever_it_runs(odd: Any, tmp_path: Path, isolation: str) -> None:
    runner = odd("greet", isolation, inline=isolation == "inline")
    messages, result, reward = asyncio.run(play(runner))
    pid = int(result.messages[0]["content"].split()[1])
    assert messages == ({"role": "user", "content": "hello"},)
    assert (result.done, result.info, reward) == (False, {"n": 1}, 0.5)
    assert [tool["function"]["name"] for tool in runner.tools] == ["f"]
    assert (pid == os.getpid()) == (isolation != "process")
    assert (tmp_path / "closed").read_text() == str(pid)


@pytest.mark.parametrize(("isolation", "inline"), [("thread", False), ("thread", True), ("process", False)])
def test_an_async_reward_is_awaited_wherever_the_environment_runs(isolation: str, inline: bool, odd: Any) -> None:
    _, _, reward = asyncio.run(play(odd("later:0.01", isolation, inline=inline)))
    assert reward == 0.25


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_async_reward_that_hangs_is_a_fault_in_time(isolation: str, odd: Any) -> None:
    with pytest.raises(EnvFault, match="reward took longer than 1 s") as caught:
        asyncio.run(play(odd("later:60", isolation, step_timeout_s=1.0)))
    assert caught.value.timed_out


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("method", ["build", "reset", "step", "reward"])
def test_an_exception_is_a_fault_with_the_environments_traceback(odd: Any, isolation: str, method: str) -> None:
    with pytest.raises(EnvFault, match="ValueError: boom") as caught:
        asyncio.run(play(odd(f"{method}:raise", isolation)))
    assert "odd_env.py" in str(caught.value) and "/envs/execution/runner.py" not in str(caught.value)
    assert not caught.value.timed_out


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("method", ["build", "reset", "step", "reward"])
def test_a_call_over_its_limit_is_a_timeout(odd: Any, isolation: str, method: str) -> None:
    runner, started = odd(f"{method}:sleep", isolation, reset_timeout_s=0.5, step_timeout_s=0.5), time.perf_counter()
    with pytest.raises(EnvFault, match=r"took longer than 0\.5 s") as caught:
        asyncio.run(play(runner))
    assert caught.value.timed_out
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(("deed", "said"), [("exit", "exit code 3"), ("crash", "signal SIGSEGV")])
@pytest.mark.parametrize("method", ["build", "reset", "step", "reward"])
def test_a_process_that_ends_is_a_fault_of_that_episode_alone(odd: Any, method: str, deed: str, said: str) -> None:
    with pytest.raises(EnvFault, match=f"the environment's process ended: {said}"):
        asyncio.run(play(odd(f"{method}:{deed}", "process")))
    assert asyncio.run(play(odd("", "process")))[2] == 0.5


def test_memory_beyond_the_limit_is_a_fault(odd: Any) -> None:
    with pytest.raises(EnvFault, match="MemoryError"):
        asyncio.run(play(odd("step:allocate", "process")))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_header_that_claims_too_many_pixels_is_a_fault_before_they_are_read(odd: Any, isolation: str) -> None:
    with pytest.raises(EnvFault, match="must have at most"):
        asyncio.run(play(odd("step:header", isolation)))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_building_is_tried_again_as_often_as_declared(odd: Any, isolation: str, tmp_path: Path) -> None:
    runner = odd("build:count", isolation, retries=2, retry_backoff_s=0.1)
    started = time.perf_counter()
    assert asyncio.run(play(runner))[2] == 0.5
    assert time.perf_counter() - started >= 0.1 + 0.2
    assert (tmp_path / "counter").read_text() == "3"
    with pytest.raises(EnvFault, match="not yet"):
        asyncio.run(play(odd("reset:count", isolation, retries=1, retry_backoff_s=0.0)))
    assert (tmp_path / "counter").read_text() == "2"


def test_a_fault_in_closing_is_returned(odd: Any) -> None:
    async def story() -> str | None:
        runner = odd("close:raise")
        await runner.open()
        return await runner.close()

    assert "ValueError: boom" in (asyncio.run(story()) or "")


def test_an_environment_that_was_built_too_late_is_closed_all_the_same() -> None:
    closed = threading.Event()

    class Late(Env):
        def __init__(self) -> None:
            time.sleep(0.4)

        def reset(self) -> Any: ...
        def step(self, response_text: str) -> Any: ...
        def reward(self, final_text: str) -> float:
            return 0.0

        def close(self) -> None:
            closed.set()

    async def story() -> None:
        runner = EnvRunner(Late, EnvLimits(reset_timeout_s=0.1))
        with pytest.raises(EnvFault, match="took longer"):
            await runner.open()
        assert await runner.close() is None
        assert not closed.is_set()

    asyncio.run(story())
    assert closed.wait(20)


def test_closing_twice_closes_once(odd: Any, tmp_path: Path) -> None:
    async def story() -> None:
        runner = odd("")
        await runner.open()
        await runner.close()
        (tmp_path / "closed").unlink()
        await runner.close()

    asyncio.run(story())
    assert not (tmp_path / "closed").exists()


class Shows(Env):
    """Shows what it is given."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return {"obs_str": "x"}, False, {}

    def format_observation(self, observation: dict[str, Any]) -> Any:
        return self.shown

    def reward(self, final_text: str) -> float:
        return 0.0


def shown(value: Any) -> tuple:
    return asyncio.run(play(EnvRunner(lambda: Shows(value), EnvLimits(inline=True))))[1].messages


def test_an_observation_may_be_several_messages() -> None:
    two = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    assert shown(two) == tuple(two)


def test_images_are_decoded_from_what_an_environment_may_have(tmp_path: Path) -> None:
    image = Image.new("RGBA", (40, 30), (255, 0, 0, 255))
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    parts = [{"type": "image", "image": value} for value in (image, data, {"bytes": data})]
    (message,) = shown({"role": "tool", "content": [*parts, {"type": "text", "text": "t"}]})
    images = [part["image"] for part in message["content"] if part["type"] == "image"]
    assert [(i.mode, i.size, i.getpixel((0, 0))) for i in images] == [("RGB", (40, 30), (255, 0, 0))] * 3


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        ({"obs_str": "hello", "images": []}, "images must stand in multi_modal_data, got 'images'; write"),
        ({"text": "hello", "image": 1}, "must hold obs_str or multi_modal_data, or format_observation be defined, got"),
        ({"obs_str": "x", "multi_modal_data": [1]}, 'multi_modal_data must be like {"image": [image]}, got [1]'),
        ({"obs_str": "x", "multi_modal_data": {"image": 1}}, "must be like {\"image\": [image]}, got {'image': 1}"),
    ],
)
def test_an_observation_that_would_be_shown_as_nothing_is_a_fault(observation: dict[str, Any], said: str) -> None:
    class Plain(Shows):
        format_observation = Env.format_observation

        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            return observation, False, {}

    with pytest.raises(EnvFault) as caught:
        asyncio.run(play(EnvRunner(lambda: Plain(None), EnvLimits(inline=True))))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"), [(True, "write float(...)"), (None, "does it return?"), ("1", "got '1'"), (float("nan"), "nan")]
)
def test_a_reward_that_is_no_number_is_a_fault(value: Any, said: str) -> None:
    class Paid(Shows):
        def reward(self, final_text: str) -> float:
            return value

    with pytest.raises(EnvFault, match="reward must be a finite number") as caught:
        asyncio.run(play(EnvRunner(lambda: Paid({"role": "tool", "content": "a"}), EnvLimits(inline=True))))
    assert said in str(caught.value)


def test_an_array_in_the_place_of_a_image_is_told_what_to_do() -> None:
    array = np.zeros((4, 3, 3), dtype=np.uint8)
    with pytest.raises(EnvFault, match=r"got ndarray of shape \(4, 3, 3\); use PIL.Image.fromarray"):
        shown({"role": "tool", "content": [{"type": "image", "image": array}]})


@pytest.mark.parametrize(
    "value",
    [
        "text",
        {"content": "a"},
        {"role": 1, "content": "a"},
        {"role": "tool", "content": None},
        [{"role": "tool", "content": "a"}, "b"],
        {"role": "tool", "content": ["text"]},
        {"role": "tool", "content": [{"type": "text"}]},
        {"role": "tool", "content": [{"type": "video", "video": "a"}]},
    ],
)
def test_a_message_that_is_none_is_a_fault(value: Any) -> None:
    with pytest.raises(EnvFault, match="must"):
        shown(value)


def test_an_entry_point_that_kills_its_process_when_imported_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly_env.py").write_text("import os; os._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = {"id": "deadly", "entry_point": "deadly_env:f", "description": "", "max_turns": 1, "isolation": "process"}
    with pytest.raises(UserError, match="environment 'deadly' entry_point: 'deadly_env' must import, got exit code 7"):
        load_env(EnvSpec.model_validate(entry))
    (tmp_path / "deadly_env.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UserError, match="'deadly_env' must import, got ModuleNotFoundError"):
        load_env(EnvSpec.model_validate(entry))


def test_an_environment_without_reward_and_tools_is_pointed_to_the_adapter() -> None:
    class Theirs:
        def reset(self) -> None: ...
        def step(self) -> None: ...
        def format_observation(self) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(EnvFault, match=r"add `compat: slime` to its entry"):
        asyncio.run(EnvRunner(Theirs, EnvLimits()).open())  # type: ignore[arg-type]


def test_a_process_env_is_an_env_of_its_own(odd: Any) -> None:
    spec = EnvSpec(id="guess", entry_point="envs.guess:GuessEnv", description="", max_turns=3, isolation="process")
    env = ProcessEnv(spec, Sample("0", (), label="7"), EnvArgs(3))
    assert env.reset() == ({}, {})
    assert env.step("9")[0]["obs_str"] == "Lower."
    assert (env.reward("7"), list(env.solution()), list(env.tools)) == (1.0, ["7"], [])
    env.close()


def test_a_process_env_that_is_closed_twice_gives_its_worker_back_once() -> None:
    spec = EnvSpec(id="guess", entry_point="envs.guess:GuessEnv", description="", max_turns=3, isolation="process")
    first = ProcessEnv(spec, Sample("0", (), label="7"), EnvArgs(3))
    first.reset()
    first.close()
    first.close()
    others = [ProcessEnv(spec, Sample("0", (), label=label), EnvArgs(3)) for label in ("1", "2")]
    assert [list(env.solution()) for env in others] == [["1"], ["2"]]
    with pytest.raises(EnvFault, match="was closed before the call of step"):
        first.step("7")
    for env in others:
        env.close()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_step_that_blocks_does_not_stall_the_event_loop(odd: Any, isolation: str) -> None:
    async def story() -> float:
        runner = odd("step:sleep", isolation, step_timeout_s=1.0)
        await runner.open()
        beats = [time.perf_counter()]

        async def heart() -> None:
            while True:
                await asyncio.sleep(0.01)
                beats.append(time.perf_counter())

        heartbeat = asyncio.create_task(heart())
        with pytest.raises(EnvFault, match="took longer than 1 s"):
            await runner.step("hi")
        heartbeat.cancel()
        await runner.close()
        assert len(beats) > 20
        return max(later - earlier for earlier, later in itertools.pairwise(beats))

    assert asyncio.run(story()) < 0.4


@pytest.mark.parametrize("label", ["build:raise", "build:sleep"])
def test_the_worker_of_an_environment_that_was_never_built_is_given_back(odd: Any, label: str) -> None:
    async def story() -> ProcessEnv:
        runner = odd(label, "process", reset_timeout_s=1.0)
        with pytest.raises(EnvFault):
            await runner.open()
        env = runner._slot.env
        await runner.close()
        return env

    env = asyncio.run(story())
    assert env._worker.is_idle == (label == "build:raise")  # the one that hung was killed
    assert env._is_closed


def test_what_an_episode_leaves_behind_in_its_process_is_not_left_to_the_next(tmp_path: Path) -> None:
    spec = EnvSpec(id="r", entry_point=f"{__name__}:Restless", description="", max_turns=1, isolation="process")
    pids = []
    for _ in range(2):
        env = ProcessEnv(spec, Sample("0", (), label=str(tmp_path)), EnvArgs(1))
        pids.append(env.reset()[1]["pid"])
        env.close()
    assert pids[0] != pids[1]


class Restless(Env):
    """Changes the directory of its process."""

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        os.chdir(str(sample.label))

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"pid": os.getpid()}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return {}, True, {}

    def reward(self, final_text: str) -> float:
        return 0.0


@pytest.mark.parametrize(("low", "high"), [(-0.2, 0.5), (-1.0, 0.9), (-0.3, 2.0)])
def test_the_best_and_the_worst_reward_are_exact(low: float, high: float) -> None:
    args = EnvArgs(1, reward_min_val=low, reward_max_val=high)
    assert (args.reward(0.0), args.reward(1.0)) == (low, high)


def test_a_hanging_tool_does_not_keep_the_program_from_ending() -> None:
    code = """
        import asyncio, time
        from envs import EnvArgs, Sample, ToolEnv, tool
        from envs.execution.runner import EnvFault, EnvLimits, EnvRunner
        class Hangs(ToolEnv):
            @tool
            def wait(self) -> None:
                time.sleep(60)
        async def main():
            make = lambda: Hangs(Sample("0", ()), EnvArgs(1))
            runner = EnvRunner(make, EnvLimits(step_timeout_s=0.3))
            await runner.open()
            try:
                await runner.step('<tool_call>{"name": "wait", "arguments": {}}</tool_call>' * 2)
            except EnvFault as fault:
                print(fault.timed_out)
            await runner.close()
        asyncio.run(main())
    """
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50)
    assert done.stdout == "True\n", done.stderr
    assert time.perf_counter() - started < 20


class Notes(Env):
    """Shows `shown` and puts one object into every info, which it goes on changing."""

    def __init__(self, shown: Any = "again", opening: Any = None, tools: Any = ()) -> None:
        self.shown, self.opening, self.tools = shown, opening, tools
        self.notes: dict[str, Any] = {"calls": [{"tries": 0}], "lock": threading.Lock()}
        self.notes["notes"] = self.notes

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return ({"message": self.opening} if self.opening else {}), {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.notes["calls"][0]["tries"] += 1
        return {"message": self.shown}, False, {"calls": self.notes["calls"], "notes": self.notes}

    def format_observation(self, observation: dict[str, Any]) -> Any:
        return observation["message"]

    def reward(self, final_text: str) -> float:
        return 0.0


def open_and_step(env: Notes, num_steps: int = 1) -> list[StepResult]:
    async def story() -> list[StepResult]:
        runner = EnvRunner(lambda: env, EnvLimits())
        await runner.open()
        return [await runner.step("x") for _ in range(num_steps)]

    return asyncio.run(story())


class Narrow(Notes):
    def reward(self, final_text: str) -> float:
        return np.float32(0.9)  # type: ignore[return-value]


def test_a_reward_of_a_narrow_float_is_its_shortest_decimal() -> None:
    async def story() -> float:
        runner = EnvRunner(Narrow, EnvLimits())
        await runner.open()
        return await runner.reward("x")

    assert asyncio.run(story()) == 0.9


USER, MODEL = {"role": "user", "content": "again"}, {"role": "assistant", "content": "I am the model."}


def test_the_info_of_a_turn_does_not_change_with_later_turns() -> None:
    env = Notes(shown=USER)
    infos = [result.info for result in open_and_step(env, num_steps=3)]
    assert [info["calls"] for info in infos] == [[{"tries": 1}], [{"tries": 2}], [{"tries": 3}]]
    copies = [info["notes"] for info in infos]
    assert [notes["notes"]["calls"] for notes in copies] == [info["calls"] for info in infos]
    assert all("lock object at 0x" in notes["lock"] for notes in copies)


@pytest.mark.parametrize("shown", [MODEL, [USER, MODEL], [MODEL, USER]])
def test_an_answer_that_passes_for_a_turn_of_the_model_is_a_fault_in_every_episode(shown: Any) -> None:
    for _ in range(3):
        with pytest.raises(EnvFault, match='must not have the role "assistant", in which only the model writes'):
            open_and_step(Notes(shown))


def test_the_first_observation_may_show_an_example_but_not_end_with_its_answer() -> None:
    assert len(open_and_step(Notes(USER, opening=[USER, MODEL, USER]))) == 1
    with pytest.raises(EnvFault, match='must not end with the role "assistant"'):
        open_and_step(Notes(USER, opening=[USER, MODEL]))


@pytest.mark.parametrize("tools", ['[{"type": "function"}]', ["zoom"], {"type": "function"}])
def test_tools_that_are_no_list_of_schemas_are_a_fault(tools: Any) -> None:
    with pytest.raises(EnvFault, match="tools must be a list of schemas"):
        open_and_step(Notes(USER, tools=tools))


class Slow(str):
    def __repr__(self) -> str:
        time.sleep(60)
        return "slow"

    __str__ = __repr__


class SlowToTell(Exception):
    def __str__(self) -> str:
        time.sleep(60)
        return "slow"


class Object:
    __repr__ = Slow.__repr__


class SlowZone(datetime.tzinfo):
    __repr__ = Slow.__repr__


class SlowFault(EnvFault):
    __str__ = SlowToTell.__str__


class SlowToEnd(Exception):
    def __del__(self) -> None:
        time.sleep(60)


def _raises(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    "give",
    [
        lambda: ({}, True, {"x": Object()}),
        lambda: ({}, True, {Object(): 1}),
        lambda: ({}, True, {"x": datetime.datetime(2020, 1, 1, tzinfo=SlowZone())}),
        lambda: _raises(SlowToTell()),
        lambda: _raises(SlowFault("")),
        lambda: _raises(SlowToEnd()),
        lambda: _raises(ToolFault("", {"x": Object()})),
    ],
    ids=["info", "key of an info", "time zone", "error", "own fault", "end of an error", "info of a fault"],
)
def test_code_behind_a_value_counts_as_the_call_that_gave_it(give: Callable[[], Any]) -> None:
    class Gives(Notes):
        def step(self, response_text: str) -> Any:
            return give()

    async def play() -> None:
        runner = EnvRunner(lambda: Gives(), EnvLimits(step_timeout_s=0.2))
        await runner.open()
        await runner.step("x")

    started = time.monotonic()
    with pytest.raises(EnvFault, match=r"step took longer than 0\.2 s"):
        asyncio.run(play())
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("method", ["__del__", "called_tools"])
def test_no_method_of_an_environment_holds_up_the_event_loop(method: str) -> None:
    class Raises(Notes):
        def step(self, response_text: str) -> Any:
            raise ValueError

    setattr(Raises, method, lambda *_: time.sleep(2))
    gaps = [0.0]

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            gaps.append(time.monotonic() - before)

    async def main() -> None:
        beating = asyncio.create_task(beat())
        runner = EnvRunner(Raises, EnvLimits(reset_timeout_s=0.3, step_timeout_s=0.3))
        with contextlib.suppress(EnvFault):
            await runner.open()
            await runner.step("x")
        await runner.close()
        beating.cancel()

    asyncio.run(main())
    assert max(gaps) < 1.5


def test_an_interrupt_that_executed_code_raises_does_not_end_the_program_as_ctrl_c_does() -> None:
    code = """
        import asyncio
        from envs.execution.runner import EnvRunner
        from envs.spec import EnvLimits
        runner = EnvRunner(lambda: exec("raise KeyboardInterrupt"), EnvLimits())
        try:
            asyncio.run(runner.open())
        except Exception as fault:
            print(str(fault).splitlines()[-1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "KeyboardInterrupt\n", "")


@pytest.mark.parametrize(
    ("isolation", "deed"),
    [
        *itertools.product(("thread", "process"), ("sys.exit(3)", "raise KeyboardInterrupt")),
        *itertools.product(("process",), ("os.abort()", "os._exit(3)")),  # on a thread: see `test_watchdog`
    ],
)
def test_whatever_ends_a_program_ends_the_episode_alone(odd: Any, isolation: str, deed: str) -> None:
    with pytest.raises(EnvFault):
        asyncio.run(play(odd(f"step:run {deed}", isolation)))


def test_no_object_of_an_author_leaves_its_worker(odd: Any, tmp_path: Path) -> None:
    runner = odd("step:object", "process")
    _, result, reward = asyncio.run(play(runner))
    assert (result.messages[0]["content"], reward) == ("own", 0.5)  # formatted in the worker, from the object
    assert result.info == {"own": "own", "key": {"own": 1}}
    assert not (tmp_path / "opened").exists()


def test_what_an_environment_shows_runs_no_code_of_it_later() -> None:
    message = {"role": "user", "content": Slow("again"), Slow("name"): Slow("me"), "extra": [Slow("a")]}
    (result,) = open_and_step(Notes(shown=message), num_steps=1)
    assert result.messages == ({"role": "user", "content": "again", "name": "me", "extra": ["a"]},)
    assert {type(value) for value in result.messages[0].values()} == {str, list}
    assert {type(key) for key in result.messages[0]} == {str}


@pytest.mark.parametrize("inline", [False, True])
def test_a_call_that_forks_goes_on_in_one_process_alone(inline: bool) -> None:
    class Forks(Notes):
        def step(self, response_text: str) -> Any:
            return {}, True, {"child": os.fork()}

    async def play() -> Any:
        runner = EnvRunner(Forks, EnvLimits(step_timeout_s=20, inline=inline))
        await runner.open()
        return (await runner.step("x")).info["child"]

    child = asyncio.run(play())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
