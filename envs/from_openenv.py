"""Makes environments behind OpenEnv servers available as environments of the registry.

One line in a registry file is enough if the model acts by calls::

    maze: {openenv: "http://localhost:8000", description: Leave the maze., max_turns: 20}

`OpenEnvOptions` lists the keys of `options`. An episode is one session of the server.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from envs.bridges import ActionEnv, BridgeOptions, SeededSamples, check_split, user_observation
from envs.contract import checked_number
from envs.env import EnvArgs
from envs.errors import UserError, first_line
from envs.images import load_image
from envs.safe_text import well_formed
from envs.tools import Tool, ToolError, to_content
from envs.types import Sample

_SCHEMA_TIMEOUT_S = 10.0
#: Between two questions for a session of a server that is full.
_WAIT_S = 0.05
_MAX_SCHEMA_BYTES = 2**22

#: Of each server, who asks it for a session again.
_asking: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


class OpenEnvOptions(BridgeOptions):
    """A registry entry's settings for an OpenEnv server: `openenv` gives the URL, `options` the rest.

    Example::

        OpenEnvOptions(id="http://localhost:8000", action="message", texts=["echoed_message"])
    """

    framework = "openenv"

    id: str = Field(min_length=1, description="URL of the server")
    action: str = Field(default="", description="field of the action that gets the model's text; empty: it makes calls")
    texts: Sequence[str] = Field(
        default=(), description="fields of the observation that are read; none: all but images"
    )
    images: Sequence[str] = Field(default=(), description="fields of the observation that hold an image or several")
    reset: Mapping[str, Any] = Field(default={}, description="keywords for the reset, beside the seed")
    max_message_mb: float = Field(default=16.0, gt=0, strict=False, description="the largest answer of the server")
    description: str = Field(default="", description="what the model reads about the task; empty: that of the entry")
    prompt: str = Field(default="", description="instructions for the model; empty: derived from the description")

    def schemas(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the JSON schemas of the server's actions and observations.

        Raises:
            UserError: the server does not answer, or its actions and observations have no such fields.
        """
        if not re.match("(http|ws)s?://", self.id):
            fix = "give it as http://localhost:8000; start a docker image with `docker run -p 8000:8000 IMAGE`"
            raise UserError("openenv", "must be the URL of a server", self.id, fix)
        action, observation = _schemas(self.id)
        for key, names, schema in (
            ("action", [self.action] if self.action else [], action),
            ("texts", self.texts, observation),
            ("images", self.images, observation),
        ):
            known = schema.get("properties", {})
            if missing := [name for name in names if name not in known]:
                fix = f"known: {', '.join(known)}"
                raise UserError(f"openenv options {key}", "must name fields that the server has", missing[0], fix)
        return action, observation

    def instructions(self) -> str:
        """Return the prompt: the given one, or the description and how to act."""
        if self.prompt:
            return self.prompt
        how = "Act with calls of the tools."
        if self.action:
            how = "Answer with your next action and nothing else."
        return f"{self.description} Every message shows you the state. {how}".strip()


@functools.cache
def _schemas(url: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    field = f"openenv '{url}'"
    address = f"{re.sub('^ws', 'http', url).rstrip('/')}/schema"
    try:
        with urllib.request.urlopen(address, timeout=_SCHEMA_TIMEOUT_S) as answer:
            found = json.loads(answer.read(_MAX_SCHEMA_BYTES))
        return dict(found["action"]), dict(found["observation"])
    except Exception as error:  # a stranger's server answers anything
        rule = "must be a server whose /schema tells its actions and observations"
        raise UserError(field, rule, first_line(error), "start the server, or correct the URL") from error


class OpenEnvSamples(SeededSamples):
    """Episodes of an OpenEnv server: the instructions as prompt, and the seed of the reset."""

    def __init__(self, split: str, size: int, seed: int = 0, **options: Any) -> None:
        """Ask the server once, to test that it answers and has the fields that the options name.

        Raises:
            UserError: the split is unknown, the size is negative, or an option is wrong; see `OpenEnvOptions.schemas`.
        """
        check_split(split)
        checked = OpenEnvOptions.read(options)
        checked.schemas()
        _client_class()
        name = re.sub(r"\W+", "-", checked.id.partition("//")[2])
        super().__init__(split, size, seed, name, checked.instructions())


class _AnyArguments(BaseModel):
    """The server checks the arguments, by rules that a JSON schema may not tell."""


@dataclass(frozen=True)
class _ServerTool(Tool):
    """A tool of the server: what the model wrote is the action."""

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"action": dict(arguments)}


class FromOpenEnv(ActionEnv):
    """One episode of an OpenEnv server, whose rewards are those of the turns, on the entry's scale.

    The model acts by calls of the tool `act`, whose arguments are the fields of the action, or of the server's own
    tools if its actions call tools (MCP). With the option `action` its text is that field of the action. An action
    that the server refuses as invalid gets the server's words and costs only the turn.

    A step's info holds `tool_calls` and "reward", where the server gives one.
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        super().__init__(sample, args)
        self.options = OpenEnvOptions.read(args.options)
        self.takes_text = bool(self.options.action)
        self._closed = threading.Event()
        self._action_schema = self.options.schemas()[0]
        # The limits of reset and step are the registry entry's: this one only ends a thread that nobody waits for.
        self._client = _client_class()(
            base_url=self.options.id, message_timeout_s=3600.0, max_message_size_mb=self.options.max_message_mb
        ).sync()

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode of the server with the sample's seed; the observation shows its first state."""
        super().reset()
        seed = self.episode_seed
        result = self._begin({"seed": seed, **self.options.reset})
        if not self.takes_text:
            self._offer_tools()
        self.info = {}
        content = to_content(self._show(result.observation))
        return user_observation(content) if result.observation else {}, {"seed": seed}

    def _begin(self, keywords: Mapping[str, Any]) -> Any:
        """Begin an episode; wait for a session of a server that has none left, until the entry's limit of the reset."""
        if (result := self._try_reset(keywords)) is not None:
            return result
        # One thread asks at a time: hundreds would keep the server busy with refusals.
        with _asking[self.options.id]:
            while not self._closed.wait(_WAIT_S):
                if (result := self._try_reset(keywords)) is not None:
                    return result
        raise RuntimeError("the episode was closed while it waited for a session of the server")

    def _try_reset(self, keywords: Mapping[str, Any]) -> Any:
        """Return the first result of an episode; None where the server has no session left."""
        try:
            return self._client.reset(**keywords)
        except Exception as error:
            # A full server tells its code and hangs up; the client may notice only the latter.
            if "(code: CAPACITY_REACHED)" not in str(error) and type(error).__name__ != "ConnectionClosedOK":
                raise
        self._client.disconnect()
        return None

    def _offer_tools(self) -> None:
        self._tools = {}
        properties = self._action_schema.get("properties", {})
        if "tool_name" not in properties:
            fields = {name: schema for name, schema in properties.items() if name != "metadata"}
            self._offer("act", "Take an action.", {**self._action_schema, "properties": fields}, self.take)
            return
        for tool in self._client.step({"type": "list_tools"}).observation["tools"]:
            call = functools.partial(self._call_tool, tool["name"])
            self._offer(tool["name"], tool.get("description") or "", tool["input_schema"], call)

    def _offer(self, name: str, description: str, parameters: Mapping[str, Any], function: Any) -> None:
        kept = {key: value for key, value in parameters.items() if key not in ("title", "additionalProperties")}
        shown = {"type": "object", "properties": {}, **kept}
        schema = {"type": "function", "function": {"name": name, "description": description, "parameters": shown}}
        self._tools[name] = _ServerTool(name, function, _AnyArguments, schema, False, None)

    def _call_tool(self, name: str, action: Mapping[str, Any]) -> Any:
        return self.take({"type": "call_tool", "tool_name": name, "arguments": action})

    def take(self, action: Any) -> Any:
        """Take one action; return what the model sees of the next state."""
        if self.done:
            raise ToolError("The episode has ended.", "ended")
        if self.takes_text:
            action = {self.options.action: action}
        # Servers in Python fail at half of a surrogate pair, which a model may write.
        sent = json.loads(well_formed(json.dumps(action, ensure_ascii=False)))
        try:
            result = self._client.step(sent)
        except RuntimeError as error:
            # The client tells the server's error codes in its message alone.
            if "(code: VALIDATION_ERROR)" in str(error):
                raise ToolError(f"No action was taken: {first_line(error)}", "illegal_action") from error
            raise
        self.done = result.done
        if not isinstance(self.done, bool):
            raise TypeError(f"the server's done must be true or false, got {self.done!r:.200}")
        if result.reward is not None:
            score = float(result.reward) if isinstance(result.reward, bool) else result.reward
            self.earn(checked_number(score, "the server's reward must be"))
        return self._show(result.observation)

    def _show(self, observation: Any) -> Any:
        """Return what the model sees of an observation: its texts, a single one as it is, and its images."""
        if not isinstance(observation, Mapping):
            raise TypeError(f"the server's observation must be an object, got {observation!r:.200}")
        result = observation.get("result")
        if "tool_name" in observation and isinstance(result, Mapping) and result.get("content"):
            return _of_mcp(result["content"])
        held = [observation[name] for name in self.options.images if observation.get(name)]
        images = [
            load_image(image, "observation")
            for group in held
            for image in (group if isinstance(group, list) else [group])
        ]
        names = self.options.texts or [name for name in observation if name not in self.options.images]
        texts = {name: observation[name] for name in names}
        [*shown] = texts.values()
        text = shown[0] if len(shown) == 1 and isinstance(shown[0], str) else json.dumps(texts, ensure_ascii=False)
        return [text, *images] if images else text

    def close(self) -> None:
        """End the session."""
        self._closed.set()
        super().close()
        self._client.close()


def _of_mcp(parts: Sequence[Mapping[str, Any]]) -> Any:
    """Return what the model sees of the result of an MCP tool, which is a list of parts."""
    shown = [load_image(part["data"], "observation") if "data" in part else part["text"] for part in parts]
    return shown[0] if len(shown) == 1 else shown


def _client_class() -> Any:
    try:
        return importlib.import_module("openenv.core").GenericEnvClient
    except ImportError as error:
        fix = "pip install 'trueturn[openenv]'"
        raise UserError("openenv", "needs the package openenv-core", first_line(error), fix) from error
