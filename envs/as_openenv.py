"""Serves an environment of the registry as an OpenEnv server (https://github.com/meta-pytorch/OpenEnv).

A client of OpenEnv opens a websocket, which is a session, and plays episodes in it, one after the other::

    async with GenericEnvClient("http://127.0.0.1:8000/TOKEN") as env:
        result = await env.reset(index=3)                  # or seed=3; without either the next problem
        result.observation["messages"]                     # the prompt, images as data URIs
        result = await env.step({"text": "\\\\boxed{68}"})    # what the model says in one turn
        result.reward, result.done                         # 1.0, True

The rewards of an episode's steps add up to its reward. Every path begins with a token, because any page in a browser of
this machine could open a websocket to it.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from envs.contract import EnvFault, ToolFault, checked_messages, shown
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner, StepResult, last_line
from envs.spec import EnvLimits, EnvSpec
from envs.tool_calls.thinking import TAGS, Thinking
from envs.types import Message, SampleSource, openai_message

POLICY_VIOLATION = 1008
_OBJECT = {"type": "object"}


class Turn(BaseModel):
    """A step: what the model says in one turn. A client that reads "68" as JSON sends the number."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    text: str = Field(description="what the model says in this turn")


class Reset(BaseModel):
    """The problem of an episode: its index, else by a seed, else the next one."""

    index: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class SessionError(Exception):
    """What a session answers in place of an observation; `code` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """The episodes of one connection.

    Example::

        session = Session(served)
        await session.answer({"type": "reset", "data": {"index": 3}})
        await session.answer({"type": "step", "data": {"text": "\\\\boxed{68}"}})["data"]["reward"]     # 1.0
        await session.close()
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._runner: EnvRunner | None = None
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}
        self._earned = 0.0
        self._max_turns = 1

    async def answer(self, message: Any) -> dict[str, Any]:
        """Return the answer to a message. Raises `SessionError`, after which the session goes on."""
        try:
            match message:
                case {"type": "reset"}:
                    data = await self._reset(Reset.model_validate(message.get("data") or {}))
                case {"type": "step"}:
                    data = await self._step(Turn.model_validate(message.get("data")).text)
                case {"type": "state"}:
                    return {"type": "state", "data": self._state}
                case _:
                    raise SessionError("UNKNOWN_TYPE", "the type must be reset, step, state or close")
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise SessionError("VALIDATION_ERROR", f"{place}: {first['msg']}") from error
        except (EnvFault, UserError) as fault:
            await self.close()
            raise SessionError("EXECUTION_ERROR", last_line(str(fault))) from fault
        return {"type": "observation", "data": data}

    async def close(self) -> None:
        """End the episode, if one is played."""
        runner = self._runner
        self._runner = None
        if runner is not None:
            await runner.close()

    async def _reset(self, wanted: Reset) -> dict[str, Any]:
        await self.close()
        served = self._served
        sample = served.samples[served.place(wanted)]
        spec = served.spec.part(sample.metadata)
        self._state = {
            "episode_id": wanted.episode_id or uuid.uuid4().hex,
            "step_count": 0,
            "sample_id": sample.id,
        }
        self._earned = 0.0
        self._max_turns = spec.max_turns
        thinking = None
        if spec.thinking not in ("auto", "keep"):
            thinking = Thinking(*TAGS[spec.thinking])
        make_env = functools.partial(served.build, sample, spec.args())
        runner = self._runner = EnvRunner(make_env, EnvLimits.of(spec), sample.id, thinking)
        opening = await runner.open()
        messages = [*checked_messages(list(sample.prompt)), *opening]
        observation = {"messages": to_openai(messages), "tools": runner.tools, "sample_id": sample.id}
        return {"observation": observation, "reward": None, "done": False}

    async def _step(self, text: str) -> dict[str, Any]:
        runner = self._runner
        if runner is None:
            raise SessionError("EXECUTION_ERROR", "no episode is played: send a reset first")
        self._state["step_count"] += 1
        try:
            result = await runner.step(text)
        except ToolFault as fault:  # the model's own action: the episode counts, with the lowest reward
            end = "tool_fault"
            result = StepResult((), True, fault.info)
            total = runner.limits.reward_min_val
        else:
            end = self._end(result)
            total = await runner.reward(text) if end else self._earned + result.reward
        if end:
            await self.close()
        reward = total - self._earned
        self._earned = total
        observation = {"messages": to_openai(result.messages), "info": result.info, "end": end}
        return {"observation": observation, "reward": reward, "done": bool(end)}

    def _end(self, result: StepResult) -> str:
        """Return why the episode ends with a step; empty if it goes on."""
        if result.done:
            return "completed"
        return "max_turns" * (self._state["step_count"] >= self._max_turns)


def to_openai(messages: Sequence[Message]) -> list[Message]:
    """Return messages as OpenAI's protocol has them."""
    return [openai_message(message) for message in messages]


@dataclass
class Served:
    """An environment with its problems, the token of its paths, and the limits of its sessions."""

    spec: EnvSpec
    samples: SampleSource
    token: str
    max_sessions: int = 64
    idle_s: float = 600.0
    _num_sessions: int = 0
    _places: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.spec.check_has_no_loop("environment")
        self.build = load_env(self.spec)

    def place(self, wanted: Reset) -> int:
        """Return the place of a problem. Raises `SessionError` if there is none at this index."""
        size = len(self.samples)
        if wanted.index is not None and wanted.index >= size:
            raise SessionError("VALIDATION_ERROR", f"index: must be below {size}, got {wanted.index}")
        if wanted.index is not None:
            return wanted.index
        if wanted.seed is not None:
            return wanted.seed % size
        return next(self._places) % size

    def app(self) -> Starlette:
        """Return the application for a server of ASGI."""
        answers = {
            "health": {"status": "healthy"},
            "metadata": {"name": self.spec.id, "description": self.spec.description},
            "schema": {"action": Turn.model_json_schema(), "observation": _OBJECT, "state": _OBJECT},
        }

        async def answer(request: Request) -> JSONResponse:
            name = request.path_params["name"]
            if name not in answers or not self._is_known(request):
                raise HTTPException(404)
            return JSONResponse(answers[name])

        return Starlette(routes=[Route("/{token}/{name}", answer), WebSocketRoute("/{token}/ws", self._serve)])

    def _is_known(self, connection: HTTPConnection) -> bool:
        # Takes equally long for every wrong token, so that its letters cannot be found one by one.
        return hmac.compare_digest(connection.path_params["token"].encode(), self.token.encode())

    async def _serve(self, socket: WebSocket) -> None:
        if not self._is_known(socket):
            await socket.close(POLICY_VIOLATION)
            return
        await socket.accept()
        if self._num_sessions >= self.max_sessions:
            await _send_error(socket, SessionError("CAPACITY_REACHED", f"at most {self.max_sessions} sessions"))
            await socket.close()
            return
        session = Session(self)
        self._num_sessions += 1
        try:
            await self._play(socket, session)
        except WebSocketDisconnect:  # the client has gone
            pass
        except TimeoutError:  # it says nothing
            await socket.close(POLICY_VIOLATION)
        finally:
            self._num_sessions -= 1
            await session.close()

    async def _play(self, socket: WebSocket, session: Session) -> None:
        while True:
            try:
                async with asyncio.timeout(self.idle_s):
                    message = await _message(socket)
                if message == {"type": "close"}:
                    await socket.close()
                    return
                answer = await session.answer(message)
                await socket.send_text(json.dumps(answer, default=shown, skipkeys=True))
            except SessionError as error:
                await _send_error(socket, error)


async def _message(socket: WebSocket) -> Any:
    try:
        return json.loads(await socket.receive_text())
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # the first two for bytes in place of text
        raise SessionError("INVALID_JSON", "a message must be JSON") from error


async def _send_error(socket: WebSocket, error: SessionError) -> None:
    data = {"message": str(error), "code": error.code}
    await socket.send_text(json.dumps({"type": "error", "data": data}))
