"""Makes environments written for verifiers (packages of the Environments Hub) available as those of the registry.

One line in a registry file is enough::

    haiku: {verifiers: stardata.envs.constraint_gym, description: Write a poem., max_turns: 1}

`VerifiersOptions` lists the keys of `options`. Our loop plays; theirs, with its client and its limits, never runs.
Of their environment we use the data set, `setup_state`, `env_response`, the stop conditions and the rubric.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from pydantic import Field

from envs.bridges import BridgeOptions, check_split
from envs.config.plugins import import_cause
from envs.contract import checked_number, plain
from envs.env import EnvArgs
from envs.errors import CODE_FAULTS, UserError, first_line, quoted
from envs.images import load_image
from envs.tool_calls import ToolCall, ToolCallError, find_tool_calls, outside_tool_calls
from envs.tool_env import ToolEnv
from envs.tools import Tool
from envs.types import MadeSamples, Message, Sample, bare_text, plain_text

#: Without a data set for evaluations, every so many rows are held out.
HELDOUT_EVERY = 8
#: What an environment cannot have of its own, because our loop plays and never rewrites what was said.
_LOOP = ("rollout", "init_state", "is_completed", "get_model_response")
_MESSAGES = ("get_prompt_messages", "add_model_response", "render_completion")
#: Classes that bring a loop, a sandbox or a model of their own, and what to do about it.
_REFUSED = {
    "EnvGroup": "register each environment of the group, and mix the entries with `mixture`",
    "SandboxEnv": "its tools run on hosts of Prime; take one without sandboxes",
    "SandboxMixin": "its tools run on hosts of Prime; take one without sandboxes",
    "CliAgentEnv": "its agent is a program of its own; take one whose model our loop plays",
}
#: Their limits; those of our loop count, and tell a task that ended from one that was cut.
_LIMITS = ("max_turns_reached", "max_total_completion_tokens_reached", "prompt_too_long")

_loaded: dict[str, Any] = {}
_loading = threading.Lock()


def _vf() -> Any:
    """Return the package verifiers, which takes seconds to import and is there only with the extra."""
    # It takes one function from this package of openai-agents, which has the name of one of ours. The name stands in
    # two parts because a test takes it for an import of our package, which nothing in `envs` may do.
    package = "agents"
    stand_in = ModuleType(f"{package}.function_schema")
    vars(stand_in)["function_schema"] = _function_schema
    sys.modules.setdefault(stand_in.__name__, stand_in)
    return importlib.import_module("verifiers")


def _function_schema(function: Any) -> SimpleNamespace:
    shown = Tool.of(function).schema["function"]
    return SimpleNamespace(
        description=shown["description"], params_json_schema=shown["parameters"], strict_json_schema=None
    )


class VerifiersOptions(BridgeOptions):
    """A registry entry's settings for verifiers: `verifiers` gives the module or package, `options` the rest.

    Example::

        VerifiersOptions(id="stardata.envs.constraint_gym", kwargs={"topics_per_form": 2})
    """

    framework = "verifiers"

    id: str = Field(min_length=1, description="module with load_environment, or the name of its package")
    kwargs: Mapping[str, Any] = Field(default={}, description="keywords for load_environment")
    description: str = ""

    def load(self) -> Any:
        """Return their environment, which all episodes of this process share.

        Raises:
            UserError: a package is missing, the environment cannot be loaded, or our loop cannot play it.
        """
        key = f"{self.id} {self.kwargs!r}"
        with _loading:
            if key not in _loaded:
                _loaded[key] = self._load()
            return _loaded[key]

    def _load(self) -> Any:
        field = f"verifiers '{self.id}'"
        try:
            base = _vf().Environment
        except (ImportError, AttributeError) as error:
            # Version 0.4 has tasksets and harnesses in place of environments.
            rule = "needs the package verifiers with vf.Environment"
            raise UserError(field, rule, first_line(error), "pip install 'trueturn[verifiers]'") from error
        try:
            module = importlib.import_module(self.id.replace("-", "_").split("/")[-1])
            # Their environments take over Ctrl-C, which fails on threads and would end a run in the midst of a step.
            with mock.patch.object(sys.modules[base.__module__], "signal"):
                env = module.load_environment(**self.kwargs)
        except CODE_FAULTS as error:  # a stranger's code
            rule = "must be a module, or an installed package, whose load_environment works"
            raise UserError(field, rule, import_cause(error), "install the package, or correct kwargs") from error
        _check(field, env, base)
        return env


def _check(field: str, env: Any, base: type) -> None:
    """Raise `UserError` for an environment that our loop cannot play."""
    vf = _vf()
    if not isinstance(env, vf.MultiTurnEnv):
        rule = "load_environment must return a vf.MultiTurnEnv"
        raise UserError(field, rule, type(env).__name__, "give an environment of one or several turns, or of tools")
    for name in [each.__name__ for each in type(env).__mro__]:
        if name in _REFUSED:
            raise UserError(field, "must be played by our loop", name, _REFUSED[name])
    own = {base.__module__, vf.MultiTurnEnv.__module__, vf.SingleTurnEnv.__module__}
    for name in (*_LOOP, *_MESSAGES):
        if getattr(type(env), name).__module__ not in own:
            fix = "take an environment that only defines setup_state, env_response and stop conditions"
            raise UserError(field, "must leave the loop to us", f"a {name} of its own", fix)
    for rubric in _rubrics(env.rubric):
        if isinstance(rubric, vf.JudgeRubric):
            fix = "write the rubric without it, and give the entry a judge in `reward`"
            raise UserError(field, "must not ask a model of its own", "a JudgeRubric", fix)
        if type(rubric).score_rollout is not vf.Rubric.score_rollout or rubric.has_group_rewards:
            fix = "give the rubric functions of a single episode"
            raise UserError(field, "must score every episode by itself", type(rubric).__name__, fix)


def _rubrics(rubric: Any) -> list[Any]:
    """Return a rubric, or the rubrics of a group of them."""
    if hasattr(rubric, "rubrics"):
        return [inner for each in rubric.rubrics for inner in _rubrics(each)]
    return [rubric]


class VerifiersSamples(MadeSamples):
    """The rows of their data set; each sample's metadata holds its row.

    `heldout` is their data set for evaluations, or else every eighth row, which no other split then has. Training rows
    are shuffled by the seed. There may be fewer rows than asked for.
    """

    def __init__(self, split: str, size: int, seed: int = 0, **options: Any) -> None:
        """Read every row that there will be.

        Raises:
            UserError: the split is unknown, the environment cannot be loaded, or a row has no prompt that can be shown.
        """
        check_split(split)
        options_read = VerifiersOptions.read(options)
        self.name = options_read.id
        self.split = split
        env = options_read.load()
        has_own = env.eval_dataset is not None or env.eval_dataset_source is not None
        is_heldout = split == "heldout"
        self.rows = env.get_eval_dataset() if is_heldout and has_own else env.get_dataset()
        self.places = list(range(len(self.rows)))
        if not has_own:
            self.places = [place for place in self.places if (place % HELDOUT_EVERY == 0) == is_heldout]
        if not is_heldout:
            Random(seed).shuffle(self.places)
        if not self.places:
            rule = f"must have rows for the split {split}"
            raise UserError(f"verifiers '{self.name}'", rule, len(self.rows), "give it a larger data set")
        super().__init__(min(size, len(self.places)))
        for place in range(self.size):
            self.make(place)

    def make(self, place: int) -> Sample:
        """Return the sample at a place."""
        number = self.places[place]
        row = {key: value for key, value in self.rows[number].items() if value is not None}
        where = f"verifiers '{self.name}' row {number} prompt"
        prompt = row.get("prompt")
        if isinstance(prompt, str) and prompt:
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not prompt:
            raise UserError(where, "must be a text or messages", quoted(prompt), "correct the data set")
        answer = row.get("answer")
        return Sample(
            id=f"{self.name}-{self.split}-{number}",
            prompt=tuple(_shown(message, where) for message in prompt),
            label=answer if isinstance(answer, str) and answer else None,
            metadata={"row": plain({**row, "prompt": prompt})},
        )


def _shown(message: Any, where: str) -> Message:
    """Return one of their messages, a dict or an object, as ours: its role, texts and images."""
    given = message if isinstance(message, Mapping) else message.model_dump()
    content = given.get("content")
    if given.get("tool_calls"):
        raise UserError(where, "must not show tool calls of an example", "tool_calls", "write the example as a text")
    if isinstance(content, str):
        return {"role": given.get("role"), "content": content}
    if not isinstance(content, Sequence):
        raise UserError(where, "must have contents that are texts or parts", quoted(content), "correct the message")
    parts = []
    for part in content:
        if part.get("type") == "text":
            parts.append({"type": "text", "text": part["text"]})
        else:
            parts.append({"type": "image", "image": load_image(part, where)})
    return {"role": given.get("role"), "content": parts}


class _NoModel:
    """Stands for the client of a model, which our loop does not have."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the environment asks for a model of its own, which TrueTurn does not give it")


class FromVerifiers(ToolEnv):
    """One episode of an environment written for verifiers.

    Its tools are theirs, called by their `env_response`. When the task has ended, or the turns are used up, the step's
    info holds under "rubric" what each function of the rubric gave, by its name; the reward is their weighted sum. A
    function with a weight that raises, or gives no finite number, is a fault of the environment (`env_error`), where
    verifiers counts it as 0. One of weight 0 is a metric: it may fail, and give several numbers.
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        super().__init__(sample, args)
        self.theirs = VerifiersOptions.read(args.options).load()
        self.state: Any = None
        self.messages: list[Any] = []
        self.num_prompt = 0
        self.scores: dict[str, Any] | None = None
        self.score = 0.0

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        """The schemas of their tools; a row may have its own."""
        if self.state is None:
            return ()
        return [
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
            for tool in self.state["tool_defs"]
        ]

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Set their state up; the observation shows what `setup_state` adds to the prompt."""
        super().reset()
        self.scores = None
        added = self._run(self._set_up())
        return _observation(added), {}

    async def _set_up(self) -> list[Message]:
        """Create their state; return the messages that they add to the prompt."""
        prompt = [{"role": message["role"], "content": bare_text(message)} for message in self.sample.prompt]
        # Samples of other data sets have no row of theirs.
        row = {"prompt": prompt, "answer": self.sample.label or "", **self.sample.metadata, "example_id": 0}
        row |= self.sample.metadata.get("row", {})
        # A client is required; this one opens no connection.
        state = await self.theirs.init_state(row, _vf().ClientConfig(), "")
        state["client"] = _NoModel()
        given = list(state["prompt"])
        self.state = await self.theirs.setup_state(state) or state
        self.messages = list(self.state["prompt"])
        self.num_prompt = len(self.messages)
        if self.messages[: len(given)] != given:
            raise ValueError("setup_state must leave the prompt, or add messages to it: the model has read it")
        return [_shown(message, "setup_state") for message in self.messages[len(given) :]]

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Give them one model turn and return their answer to it."""
        self.turn += 1
        found = find_tool_calls(response_text, self.args.tool_format) if self.tools else []
        broken = next((call for call in found if isinstance(call, ToolCallError)), None)
        if broken is not None:  # theirs has no such thing: its servers read the calls
            self._say(response_text, ())
            answer = [{"role": "user", "content": f"No call was made. {broken.reason}"}]
            self.messages = [*self.messages, _vf().UserMessage(**answer[0])]
        else:
            answer = self._run(self._answer(response_text, found))
        self.info = {"tool_calls": [_record(call, broken) for call in found]}
        if self.done or self.turn >= self.args.max_turns:
            self._run(self._rate())
            self.info["rubric"] = self.scores
        return _observation(answer), self.done, self.info

    def _say(self, text: str, calls: Sequence[Any]) -> Any:
        """Add a turn of the model to the messages and return their form of it."""
        made = [
            _vf().ToolCall(id=f"call_{self.turn}_{number}", name=call.name, arguments=json.dumps(call.arguments))
            for number, call in enumerate(calls)
        ]
        said = outside_tool_calls(text, self.args.tool_format) if made else text
        message = _vf().AssistantMessage(content=said, tool_calls=made or None)
        self.messages = [*self.messages, message]
        return message

    async def _answer(self, text: str, calls: Sequence[Any]) -> list[Message]:
        before = self.messages
        step = {
            "prompt": before,
            "completion": [self._say(text, calls)],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": self.state["trajectory_id"],
            "extras": {},
        }
        await self.theirs.add_trajectory_step(self.state, step)
        if isinstance(self.theirs, _vf().SingleTurnEnv) or await self._has_stopped():
            self.done = True
            return []
        answer = await self.theirs.env_response(self.messages, self.state)
        if isinstance(answer, str):
            answer = [{"role": "user", "content": answer}]
        # Many give dicts, and their rubrics read objects.
        normalized = sys.modules[_vf().MultiTurnEnv.__module__].maybe_normalize_messages
        answer = normalized(answer, field_name="env_response")
        self.messages = [*self.messages, *answer]
        # Their loop asks the conditions again before the model's next turn.
        self.done = await self._has_stopped()
        return [_shown(message, "env_response") for message in answer]

    async def _has_stopped(self) -> bool:
        for condition in self.theirs._stop_conditions:
            if condition.__name__ not in _LIMITS and await condition(self.state):
                return True
        return False

    async def _rate(self) -> None:
        """Call the functions of the rubric, in order."""
        state = self.state
        state["completion"] = self.messages[self.num_prompt :]
        self.scores = {}
        self.score = 0.0
        for rubric in _rubrics(self.theirs.rubric):
            known = {**state["input"], "task": state.get("task"), "state": state, "answer": "", "info": {}}
            known |= {key: state[key] for key in ("prompt", "completion", "answer", "info") if state.get(key)}
            known |= rubric.class_objects
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                name = getattr(function, "__name__", type(function).__name__)
                try:
                    value = await _called(function, known)
                    if isinstance(value, bool):
                        value = float(value)
                    if weight or not isinstance(value, Mapping):
                        value = checked_number(value, f"{name} of the rubric must return")
                except Exception as error:
                    if weight:
                        raise
                    value = first_line(error)
                self.scores[name] = value
                self.score += weight * value if weight else 0.0

    def reward(self, final_text: str) -> float:
        """Return the weighted sum of what the functions of the rubric gave."""
        if self.scores is None:  # the episode was cut before its last turn
            if not self.messages[self.num_prompt :] or self.messages[-1].role != "assistant":
                self._say(final_text, ())
            self._run(self._rate())
        return self.score

    def close(self) -> None:
        """Run their cleanup, unless a call of theirs still hangs."""
        hangs = self._runner is not None and self._runner.get_loop().is_running()
        if self.state is not None and not hangs:
            state = self.state
            self.state = None
            self._run(self.theirs.cleanup(state))
        super().close()


async def _called(function: Any, known: Mapping[str, Any]) -> Any:
    """Call a function with those of the known arguments that it takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    value = function(**{name: each for name, each in known.items() if takes_all or name in parameters})
    return await value if inspect.isawaitable(value) else value


def _observation(messages: Sequence[Message]) -> dict[str, Any]:
    if not messages:
        return {}
    return {"obs_str": "\n".join(map(plain_text, messages)), "messages": list(messages)}


def _record(call: ToolCall | ToolCallError, broken: ToolCallError | None) -> dict[str, Any]:
    if isinstance(call, ToolCallError):
        return {"name": None, "arguments": None, "outcome": call.kind, "reason": call.reason}
    return {"name": call.name, "arguments": call.arguments, "outcome": "skipped" if broken else "ok"}
