"""`ToolEnv`: an environment whose methods marked with `tool` are the model's tools."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.config.plugins import import_cause
from envs.contract import TOOL_FAULT, ToolFault
from envs.env import Env, EnvArgs
from envs.errors import did_you_mean
from envs.grading import extract_boxed, score_text
from envs.off_loop import off_loop
from envs.tool_calls import ToolCall, ToolCallError, call_example, find_tool_calls, outside_tool_calls
from envs.tools import BadArgumentsError, Tool, ToolError, fault_line, marked_methods
from envs.types import Content, Message, Sample, plain_text

MAX_CALLS_PER_TURN = 16

logger = logging.getLogger(__name__)
_reported: set[tuple[type, str]] = set()


@dataclass(frozen=True)
class _CallResult:
    """The result of a call: the content for the model, the outcome, and the exception of a tool that failed."""

    content: Content
    outcome: str
    error: BaseException | None = None


class ToolEnv(Env):
    """An environment whose tools are its methods; a turn without a call ends the episode.

    Example::

        class Shop(ToolEnv):
            prices = {"apple": 3, "pear": 2}

            @tool
            def price(self, fruit: str) -> int:
                '''Return the price of a fruit.'''
                if fruit not in self.prices:
                    raise ToolError(f"There is no {fruit}.")
                return self.prices[fruit]

        env = Shop(Sample(id="0", prompt=(), label="3"), EnvArgs(max_turns=3))
        env.step('<tool_call>{"name": "price", "arguments": {"fruit": "apple"}}</tool_call>')[0]["obs_str"]     # "3"
        env.reward("\\\\boxed{3}")                                                                                # 1.0

    The class itself is the entry point of its registry entry. A broken call gets an answer that names the error and
    shows a correct call. A tool may set `self.done` (the task has ended) and put facts for the recording into
    `self.info`. A step's info also holds `tool_calls`, a list with name, arguments and outcome of each call. The
    outcome is "ok", "malformed", "truncated", "unknown_tool", "bad_arguments", that of a `ToolError`,
    or "tool_fault" for any other exception. With `args.on_tool_fault` "observe" the model reads such an exception in
    one line, with "drop" `step` raises it, with "reward_min" `step` raises a `ToolFault`.
    """

    #: Maps hidden names, which the model may also call, to names of tools.
    aliases: Mapping[str, str] = {}
    _runner: asyncio.Runner | None = None

    def __init_subclass__(cls) -> None:
        """Refuse a tool whose name is a method of the contract."""
        super().__init_subclass__()
        if taken := [name for name in marked_methods(cls) if hasattr(ToolEnv, name)]:
            raise TypeError(f"tool {taken[0]!r} has the name of a method of ToolEnv; rename the method")

    def __init__(self, sample: Sample, args: EnvArgs | None = None) -> None:
        self.sample = sample
        self.args = args or EnvArgs(max_turns=1)
        self.turn = 0
        self.done = False
        self.info: dict[str, Any] = {}
        self._step_began = 0.0
        self._tools: dict[str, Tool] = {}
        for method, name in marked_methods(type(self)).items():
            self.add_tool(getattr(self, method), name)

    def add_tool(self, function: Callable[..., Any], name: str = "") -> None:
        """Offer a function with typed parameters as a tool in this episode only."""
        made = Tool.of(function, name)
        if made.name in self._tools:
            raise ValueError(f"there is already a tool {made.name!r}; give this one another name with @tool(name=...)")
        self._tools[made.name] = made

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        """The tools' schemas, for the chat template."""
        if "_tools" not in vars(self):
            raise AttributeError("__init__ of a ToolEnv must begin with super().__init__(sample, args)")
        return [each.schema for each in self._tools.values()]

    @property
    def turns_left(self) -> int:
        """How many turns the model may still take after this one."""
        return self.args.max_turns - self.turn

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start over; the task is in the prompt, so the observation is empty."""
        self.turn = 0
        self.done = False
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Run the calls of one model turn by the policy `args.tool_calls`, and return their results."""
        self.turn += 1
        self.info = {}
        self._step_began = time.monotonic()
        found = self._find_calls(response_text)
        if not found:
            answer = self.no_call(response_text)
            if not (answer is None or isinstance(answer, str)):
                raise TypeError(f"no_call must return a text, or None to end the episode, got {answer!r:.200}")
            self.done = self.done or answer is None
            contents = [] if answer is None else [answer]
            records = []
        else:
            contents, records = self._make(found)
        messages = [{"role": "tool" if found else "user", "content": content} for content in contents]
        if messages:
            observation = {"obs_str": "\n".join(map(plain_text, messages)), "messages": messages}
        else:
            observation = {}
        return observation, self.done, {"tool_calls": records, **self.info}

    def format_observation(self, observation: dict[str, Any]) -> Sequence[Message]:
        """Return a message for the result of each call; an observation of a subclass is shown as `Env` does it."""
        if "messages" in observation:
            return observation["messages"]
        shown = super().format_observation(observation)
        return [shown] if isinstance(shown, dict) else shown

    def called_tools(self, response_text: str) -> Sequence[str]:
        """Return the names of the tools that a text calls."""
        return [call.name for call in self._find_calls(response_text) if isinstance(call, ToolCall)]

    def no_call(self, response_text: str) -> str | None:
        """Return the answer to a turn without a call; None, the default, ends the episode."""
        return None

    def reward(self, final_text: str) -> float | None:
        r"""Return the reward of the model's last text: the entry's grader compares its answer with the sample's label.

        A sample without a label has none, where the turns have rewards (``self.info["reward"]`` in a tool).

        Text inside a call is never the answer: in a text with calls, only a `\boxed{...}` outside of them counts.
        """
        if self.sample.label is None and "reward" in self.info:
            return None
        if self.sample.label is None:
            raise ValueError(
                f"sample {self.sample.id!r} has no label; give it one, or define reward() in the environment"
            )
        text = final_text
        if self._find_calls(final_text):
            text = outside_tool_calls(final_text, self.args.tool_format)
            # "Answer:" in a turn that still calls a tool may announce what the tool will say.
            if extract_boxed(text) is None:
                return self.args.reward(0.0)
        return self.args.reward(score_text(text, str(self.sample.label), self.args.grader))

    def close(self) -> None:
        """Release the event loop of async tools; a subclass with its own `close` must call this one."""
        runner = self._runner
        self._runner = None
        if runner is None:
            return
        loop = runner.get_loop()
        if loop.is_running():  # a tool hangs: cancel it on the thread that runs it
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        else:
            off_loop(runner.close)

    def explain(self, call: ToolCall | ToolCallError, problem: str) -> str:
        """Return the answer to a broken call: the sentence `problem`, and an example of a correct call."""
        named = self._tool(call.name) if isinstance(call, ToolCall) else None
        example = named or next(iter(self._tools.values()))
        names = f" Tools: {', '.join(self._tools)}." if len(self._tools) > 1 and named is None else ""
        return f"{problem}{names} Call {call_example(example.name, example.example, self.args.tool_format)}."

    def _find_calls(self, text: str) -> list[ToolCall | ToolCallError]:
        if self._tools:
            return find_tool_calls(text, self.args.tool_format)
        return []

    def _tool(self, name: str) -> Tool | None:
        return self._tools.get(self.aliases.get(name, name))

    def _make(self, found: Sequence[ToolCall | ToolCallError]) -> tuple[list[Content], list[dict[str, Any]]]:
        """Run the calls that the policy allows; return the content and the record of each."""
        on_fault = self.args.on_tool_fault
        chosen = found[-1:] if self.args.tool_calls == "last" else found[:MAX_CALLS_PER_TURN]
        results: list[_CallResult] = []
        for call in chosen:
            run = self._run if self._is_async(call) else _finish  # most tools need no event loop
            results.append(run(self._call(call)))
            if self.done or (results[-1].error is not None and on_fault != "observe"):  # skip calls after the end
                break
        records = [_record(call, result) for call, result in zip(chosen, results, strict=False)]
        error = next((result.error for result in results if result.error is not None), None)
        if error is not None and on_fault == "drop":
            raise error
        if error is not None and on_fault == "reward_min":
            trace = "".join(traceback.format_exception(error)).strip()
            raise ToolFault(f"a tool raised: {trace}", {"tool_calls": records, **self.info}) from error
        return [result.content for result in results], records

    def _is_async(self, call: ToolCall | ToolCallError) -> bool:
        return isinstance(call, ToolCall) and (named := self._tool(call.name)) is not None and named.is_async

    async def _call(self, call: ToolCall | ToolCallError) -> _CallResult:
        """Run one call, whatever the tool raises. Awaits nothing unless the tool is async."""
        if isinstance(call, ToolCallError):
            return _CallResult(self.explain(call, call.reason), call.kind)
        chosen = self._tool(call.name)
        if chosen is None:
            # All tools follow in the text anyway, so only a near name is worth a sentence.
            hint = did_you_mean(call.name, self._tools)
            known = f" D{hint[1:]}" if hint.startswith("did") else ""
            return _CallResult(self.explain(call, f"Unknown tool.{known}"), "unknown_tool")
        try:
            value = chosen.function(**chosen.check(call.arguments))
            if chosen.is_async:
                value = await self._in_time(value)
            return _CallResult(chosen.content(value), "ok")
        except BadArgumentsError as error:
            return _CallResult(self.explain(call, str(error)), "bad_arguments")
        except ToolError as error:
            return _CallResult(str(error), error.outcome)
        except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit, and what native code raises, too
            if self.args.on_tool_fault == "observe" and (type(self), chosen.name) not in _reported:
                _reported.add((type(self), chosen.name))  # once: the model may call it in every episode
                env = type(self).__qualname__
                logger.warning("tool %s of %s failed, the model is told: %s", chosen.name, env, import_cause(error))
            return _CallResult(f"{chosen.name} failed. {fault_line(error)}", TOOL_FAULT, error)

    async def _in_time(self, awaitable: Awaitable[Any]) -> Any:
        """Cancel an async tool in time for its error to be shown, before the whole step is over its limit."""
        # With the other policies the limit of the whole step ends the episode in the right way.
        limit_s = self.args.tools_timeout_s if self.args.on_tool_fault == "observe" else None
        left_s = None if limit_s is None else max(0.0, self._step_began + limit_s - time.monotonic())
        limit = asyncio.timeout(left_s)
        try:
            async with limit:
                return await awaitable
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"the calls of a turn may take {limit_s:g} s") from error
            raise

    def _run(self, coroutine: Awaitable[Any]) -> Any:
        """Run on this environment's own event loop, so that tools can keep connections between turns."""
        # Made at the first async tool: most environments have none, and a loop holds file descriptors.
        runner = self._runner = self._runner or asyncio.Runner()
        try:
            return off_loop(runner.run, coroutine)
        finally:
            if self._runner is not runner:  # closed by another thread
                off_loop(runner.close)


def _finish(coroutine: Any) -> Any:
    """Run a coroutine that never waits, and return its value."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise AssertionError("a tool that is not async must not wait")


def _record(call: ToolCall | ToolCallError, result: _CallResult) -> dict[str, Any]:
    if isinstance(call, ToolCallError):
        return {"name": None, "arguments": None, "outcome": result.outcome, "reason": call.reason}
    reason = {} if result.error is None else {"reason": fault_line(result.error)}
    return {"name": call.name, "arguments": call.arguments, "outcome": result.outcome, **reason}
