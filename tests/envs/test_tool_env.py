"""Claims about environments made of tools: which calls are made, what the model is told, when the episode ends."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from envs.contract import EnvFault, ToolFault
from envs.env import EnvArgs
from envs.execution.runner import EnvRunner
from envs.spec import EnvLimits
from envs.tool_env import ToolEnv
from envs.tools import MAX_FAULT_CHARS, ToolError, tool
from envs.types import Sample

SAMPLE = Sample(id="0", prompt=(), label="3")
IMAGE = Image.new("RGB", (4, 3))


class Shop(ToolEnv):
    """A shop whose every call is noted."""

    aliases = {"cost": "price"}  # noqa: RUF012

    def __init__(self, sample: Sample = SAMPLE, args: EnvArgs | None = None) -> None:
        super().__init__(sample, args or EnvArgs(max_turns=3))
        self.asked: list[str] = []

    @tool
    def price(self, fruit: str) -> int:
        """Return a price."""
        self.asked.append(fruit)
        if fruit == "stone":
            raise ToolError("A stone is no fruit.")
        return len(fruit)

    @tool
    def buy(self, fruit: str) -> str:
        """Buy a fruit; this ends the task."""
        self.done = True
        self.info["bought"] = fruit
        return f"You have a {fruit}."

    @tool
    async def wait(self, s: float) -> str:
        """Wait."""
        await asyncio.sleep(s)
        return f"{s} s"

    @tool
    def look(self) -> list[Any]:
        """Look around."""
        return ["This:", IMAGE]

    @tool
    def explode(self) -> None:
        """Fail."""
        raise OSError("boom")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def shop(**args: Any) -> Shop:
    return Shop(args=EnvArgs(max_turns=3, **args))


def test_a_first_observation_of_its_own_is_shown_as_that_of_any_environment() -> None:
    class Opened(Shop):
        def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
            super().reset()
            return {"obs_str": "Which fruit?", "role": "user"}, {}

    env = Opened()
    assert env.format_observation(env.reset()[0]) == [{"role": "user", "content": "Which fruit?"}]


def test_a_call_is_answered_with_what_the_tool_returned() -> None:
    env = Shop()
    observation, done, info = env.step(f"How much? {call('price', fruit='apple')}")
    assert env.format_observation(observation) == [{"role": "tool", "content": "5"}]
    assert (observation["obs_str"], done) == ("5", False)
    assert info == {"tool_calls": [{"name": "price", "arguments": {"fruit": "apple"}, "outcome": "ok"}]}


def test_a_turn_without_a_call_ends_the_episode() -> None:
    assert Shop().step("\\boxed{3}") == ({}, True, {"tool_calls": []})


def test_an_environment_may_answer_a_turn_without_a_call() -> None:
    class Strict(Shop):
        def no_call(self, response_text: str) -> str:
            return "Call a tool."

    observation, done, _ = Strict().step("hello")
    assert not done
    assert Strict().format_observation(observation) == [{"role": "user", "content": "Call a tool."}]


def test_without_tools_nothing_is_a_call() -> None:
    env = ToolEnv(SAMPLE, EnvArgs(max_turns=1))
    text = f"\\boxed{{3}} {call('price')}"
    assert (env.tools, env.step(text), env.reward(text)) == ([], ({}, True, {"tool_calls": []}), 1.0)


def test_images_become_parts_of_the_message() -> None:
    env = Shop()
    observation, _, _ = env.step(call("look"))
    parts = [{"type": "text", "text": "This:"}, {"type": "image", "image": IMAGE}]
    assert env.format_observation(observation) == [{"role": "tool", "content": parts}]
    assert observation["obs_str"] == "This:<image>"


def test_a_tool_may_end_the_task_and_leave_facts() -> None:
    env = Shop()
    observation, done, info = env.step(call("buy", fruit="pear"))
    assert (observation["obs_str"], done, info["bought"]) == ("You have a pear.", True, "pear")
    assert env.reset() == ({}, {}) and not env.done
    assert "bought" not in env.step(call("price", fruit="pear"))[2]


def test_a_tool_error_is_told_to_the_model_and_so_is_any_other_exception_unless_it_is_worth_something_else() -> None:
    observation, done, info = Shop().step(call("price", fruit="stone"))
    assert (observation["obs_str"], done, info["tool_calls"][0]["outcome"]) == (
        "A stone is no fruit.",
        False,
        "tool_error",
    )
    observation, done, info = Shop().step(call("explode") + call("price", fruit="fig"))
    assert (observation["obs_str"], done) == ("explode failed. OSError: boom\n3", False)
    faulty = {"name": "explode", "arguments": {}, "outcome": "tool_fault", "reason": "OSError: boom"}
    assert info["tool_calls"] == [faulty, {"name": "price", "arguments": {"fruit": "fig"}, "outcome": "ok"}]
    with pytest.raises(OSError, match="boom"):
        shop(on_tool_fault="drop").step(call("explode"))
    with pytest.raises(ToolFault, match="OSError: boom") as caught:
        shop(on_tool_fault="reward_min").step(call("explode") + call("price", fruit="fig"))
    assert caught.value.info == {"tool_calls": [faulty]}
    again = pickle.loads(pickle.dumps(caught.value))  # as a worker process sends it
    assert (str(again), again.info) == (str(caught.value), caught.value.info)


@dataclass
class Inverse:
    """A type of an argument that not every number has."""

    of: float

    def __post_init__(self) -> None:
        self.value = 1 / self.of


class Strange(ToolEnv):
    """Fails before a tool runs, and after it."""

    @tool
    def invert(self, x: Inverse) -> float:
        """Invert."""
        return x.value

    @tool
    def cut(self, width: int) -> Image.Image:
        """Cut an image."""
        return Image.new("RGB", (width, 1))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (("invert", {"x": {"of": 0}}), "invert failed. ZeroDivisionError: "),
        (("cut", {"width": 0}), "cut failed. envs.errors.UserError: image: must have pixels, got 0x1"),
        (("cut", {"width": 201}), "cut failed. envs.errors.UserError: image: must have no side over 200 times"),
        (("cut", {"width": 16_000_001}), "cut failed. envs.errors.UserError: image: must have at most 16000000"),
    ],
)
def test_the_model_is_told_what_its_arguments_break_before_and_after_a_tool_runs(
    made: tuple[str, dict[str, Any]], told: str
) -> None:
    name, arguments = made
    text = call(name, **arguments)
    observation, _, info = Strange(SAMPLE).step(text)
    assert observation["obs_str"].startswith(told)
    assert info["tool_calls"][0]["outcome"] == "tool_fault"
    with pytest.raises(ToolFault):
        Strange(SAMPLE, EnvArgs(max_turns=1, on_tool_fault="reward_min")).step(text)


class Odd(ToolEnv):
    """Raises what the model writes."""

    @tool
    def fail(self, text: str) -> Any:
        """Fail."""
        if text == "value":
            return object()
        raise SystemExit(text) if text == "quit" else Empty(text)


class Empty(Exception):
    """An exception that counts as false."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("no\n  such\r\n\tthing", "fail failed. tests.envs.test_tool_env.Empty: no such thing"),
        ("x" * 100_000, f"fail failed. tests.envs.test_tool_env.Empty: {'x' * 160}"),
        ("quit", "fail failed. SystemExit: quit"),
        ("value", "fail failed. TypeError: a tool must return text, numbers, images, or lists and dicts of text"),
    ],
)
def test_the_model_reads_an_exception_in_one_short_line_without_its_traceback(text: str, line: str) -> None:
    shown = Odd(SAMPLE).step(call("fail", text=text))[0]["obs_str"]
    assert shown.startswith(line) and len(shown) <= len("fail failed. ") + MAX_FAULT_CHARS
    assert "\n" not in shown and "Traceback" not in shown and ".py" not in shown


def test_a_fault_that_the_model_reads_is_logged_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    class Loud(Shop):
        pass

    for _ in range(3):
        Loud().step(call("explode"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("tool explode of ")
    assert message.endswith(f"the model is told: OSError: boom (test_tool_env.py:{line_of('boom')})")


def line_of(word: str) -> int:
    """Return the first line of this file that raises an error with this text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if f'raise OSError("{word}")' in line)


def test_an_async_tool_that_hangs_is_cancelled_in_time_and_the_episode_goes_on() -> None:
    cancelled: list[str] = []

    class Slow(Shop):
        @tool
        async def hang(self) -> None:
            """Never return."""
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append("hang")
                raise

    args = EnvArgs(max_turns=3, tools_timeout_s=0.3)
    runner = EnvRunner(lambda: Slow(SAMPLE, args), EnvLimits(step_timeout_s=20))

    async def play() -> list[str]:
        await runner.open()
        first = await runner.step(call("hang") + call("price", fruit="fig"))
        second = await runner.step(call("wait", s=0.01))
        await runner.close()
        return [str(message["content"]) for message in (*first.messages, *second.messages)]

    assert asyncio.run(play()) == ["hang failed. TimeoutError: the calls of a turn may take 0.3 s", "3", "0.01 s"]
    assert cancelled == ["hang"]


def test_a_timeout_of_a_tools_own_keeps_its_text() -> None:
    class Remote(ToolEnv):
        @tool
        async def ask(self) -> None:
            """Ask a server."""
            raise TimeoutError("no answer")

    env = Remote(SAMPLE, EnvArgs(max_turns=1, tools_timeout_s=20))
    assert env.step(call("ask"))[0]["obs_str"] == "ask failed. TimeoutError: no answer"
    env.close()


@pytest.mark.parametrize(
    ("text", "outcome", "told"),
    [
        ("<tool_call>{", "truncated", 'The JSON ends too early. Tools: price, buy, wait, look, explode. Call {"name"'),
        ('<tool_call>{"name": 5}</tool_call>', "malformed", '"name" must be a string. Tools:'),
        (call("prices", fruit="a"), "unknown_tool", "Unknown tool. Did you mean 'price'? Tools: price, buy"),
        (call("price"), "bad_arguments", '"fruit" is missing. Call {"name": "price", "arguments": {"fruit": "..."}}.'),
        (call("price", fruit=[1]), "bad_arguments", '"fruit" must be a valid string. Call'),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_how_to_make_it(text: str, outcome: str, told: str) -> None:
    observation, done, info = Shop().step(text)
    assert not done
    assert info["tool_calls"][0]["outcome"] == outcome
    assert observation["obs_str"].startswith(told)


def test_the_answer_shows_the_format_that_the_model_writes() -> None:
    observation, _, _ = shop(tool_format="qwen_xml").step("<tool_call><function=price></function></tool_call>")
    assert observation["obs_str"].startswith('"fruit" is missing. Call <function=price><parameter=fruit>...')


def test_an_alias_is_accepted_and_not_shown() -> None:
    env = Shop()
    assert env.step(call("cost", fruit="pear"))[0]["obs_str"] == "4"
    assert "cost" not in json.dumps(env.tools)


TWO = call("price", fruit="fig") + " and " + call("price", fruit="pear")


@pytest.mark.parametrize(
    ("policy", "asked"),
    [("last", ["pear"]), ("sequential", ["fig", "pear"])],
)
def test_the_policy_says_which_calls_of_a_turn_are_made(policy: str, asked: list[str]) -> None:
    env = shop(tool_calls=policy)
    observation, _, _ = env.step(TWO)
    assert env.asked == asked
    assert len(env.format_observation(observation)) == len(asked)


def test_each_call_of_a_turn_is_answered_by_a_message_of_its_own() -> None:
    env = shop()
    observation, _, info = env.step(f"{TWO} {call('nothing')} <tool_call>[]</tool_call>")
    assert [m["content"][:14] for m in env.format_observation(observation)] == [
        "3",
        "4",
        "Unknown tool. ",
        "The call must ",
    ]
    assert [r["outcome"] for r in info["tool_calls"]] == ["ok", "ok", "unknown_tool", "malformed"]


def test_what_follows_the_call_that_ended_the_task_is_not_done() -> None:
    env = shop()
    _, done, info = env.step(call("buy", fruit="fig") + call("price", fruit="pear"))
    assert (done, env.asked, len(info["tool_calls"])) == (True, [], 1)


def test_async_tools_keep_their_event_loop_from_turn_to_turn() -> None:
    loops = []

    class Loops(ToolEnv):
        @tool
        async def note(self) -> None:
            """Note the loop."""
            loops.append(asyncio.get_running_loop())

    env = Loops(SAMPLE, EnvArgs(max_turns=2))
    env.step(call("note"))
    env.step(call("note"))
    assert loops[0] is loops[1] and not loops[0].is_closed()
    env.close()
    assert loops[0].is_closed()


def test_async_tools_work_where_a_loop_runs_already() -> None:
    async def outer() -> str:
        env = Shop()
        text = env.step(call("wait", s=0.01))[0]["obs_str"]
        env.close()
        return text

    assert asyncio.run(outer()) == "0.01 s"


def test_a_tool_may_be_added_for_one_episode() -> None:
    class Rooms(ToolEnv):
        def __init__(self, rooms: list[str]) -> None:
            super().__init__(SAMPLE)

            def enter(room: str) -> str:
                """Enter a room."""
                return f"In {room}." if room in rooms else "No such room."

            self.add_tool(enter)

    env = Rooms(["hall"])
    assert env.step(call("enter", room="hall"))[0]["obs_str"] == "In hall."
    assert [t["function"]["name"] for t in env.tools] == ["enter"]


def test_more_than_sixteen_calls_of_a_turn_are_not_made() -> None:
    env = shop()
    env.step(call("price", fruit="fig") * 40)
    assert len(env.asked) == 16


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("\\boxed{3}", 1.0),
        ("Answer: 3", 1.0),
        ("\\boxed{4}", 0.0),
        ("3", 0.0),
        (call("price", fruit="\\boxed{3}"), 0.0),
        (f"Answer: 3 {call('price', fruit='fig')}", 0.0),
        (f"\\boxed{{3}} {call('price', fruit='fig')}", 1.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_grade_of_what_stands_outside_of_calls(text: str, reward: float) -> None:
    assert Shop().reward(text) == reward


def test_the_reward_has_the_scale_of_the_entry() -> None:
    env = shop(reward_max_val=2.0, reward_min_val=-1.0)
    assert (env.reward("\\boxed{3}"), env.reward("\\boxed{4}")) == (2.0, -1.0)


def test_the_grader_is_that_of_the_entry() -> None:
    env = Shop(Sample("0", (), label="100"), EnvArgs(max_turns=1, grader="geo3k_tolerance"))
    assert (env.reward("\\boxed{104}"), env.reward("\\boxed{106}")) == (1.0, 0.0)


def test_a_sample_without_a_label_needs_a_reward_of_the_environments_own() -> None:
    with pytest.raises(ValueError, match=r"has no label; give it one, or define reward\(\)"):
        ToolEnv(Sample("0", ())).reward("3")


def test_what_an_environment_is_written_with_can_be_imported_from_the_package() -> None:
    import envs

    assert (envs.ToolEnv, envs.tool, envs.ToolError) == (ToolEnv, tool, ToolError)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = envs.nothing  # type: ignore[attr-defined]


def test_a_tool_must_not_have_the_name_of_a_method_of_the_contract() -> None:
    with pytest.raises(TypeError, match="tool 'step' has the name of a method of ToolEnv"):

        class Steps(ToolEnv):
            @tool
            def step(self, n: int) -> str:  # type: ignore[override]
                """Take steps."""
                return str(n)


def test_two_tools_must_not_have_one_name() -> None:
    class Twice(ToolEnv):
        @tool
        def look(self) -> None:
            """Look."""

        @tool(name="look")
        def watch(self) -> None:
            """Watch."""

    with pytest.raises(ValueError, match="there is already a tool 'look'"):
        Twice(SAMPLE)


def test_a_forgotten_super_init_is_named() -> None:
    class Forgets(ToolEnv):
        def __init__(self, sample: Sample, args: EnvArgs) -> None:
            self.state = 0

    with pytest.raises(EnvFault, match=r"__init__ of a ToolEnv must begin with super\(\).__init__\(sample, args\)"):
        asyncio.run(EnvRunner(lambda: Forgets(SAMPLE, EnvArgs(1)), EnvLimits()).open())


def test_an_answer_to_a_turn_without_a_call_that_is_no_text_is_the_authors_error() -> None:
    class Counts(Shop):
        def no_call(self, response_text: str) -> Any:
            return 3

    with pytest.raises(TypeError, match="no_call must return a text, or None to end the episode, got 3"):
        Counts().step("hello")
