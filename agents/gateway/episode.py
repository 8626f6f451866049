"""Plays the episodes of an agent: each of its requests is a turn of the model, in a stream that it extends or begins.

A request extends a stream if it begins with all that the stream says; what the model wrote there stays as it was
sampled. Any other request begins a stream of its own, rendered once: that of another conversation, of an edited or a
cut history, or of one that was sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agents.engines.base import Session
from agents.gateway.chat import Asked, Choice, Images, Refusal, says, write_call
from agents.gateway.server import open_endpoint
from agents.rollout.assistant_turn import TurnWriter
from agents.rollout.episode import Episode
from agents.rollout.episode_state import EpisodeState
from agents.rollout.stream import first_turn
from agents.types import EndReason, Turn
from envs.agent_program import agent_call
from envs.contract import EnvFault, ToolFault
from envs.errors import UserError, first_line
from envs.execution.runner import StepResult
from envs.spec import EnvSpec
from envs.tool_calls import (
    ToolCallError,
    ToolFormat,
    detect_format,
    find_tool_calls,
    outside_tool_calls,
    write_tool_call,
)
from envs.types import Message

#: So many refused requests end an episode: its agent asks again and again.
MAX_REFUSED = 100
#: What a client is told of each limit, and the code of it. That of the context is one that clients of OpenAI know.
_BEYOND = {
    EndReason.MAX_TURNS: ("the model has taken all turns of the episode", "max_turns"),
    EndReason.TOKEN_BUDGET: ("the tokens of the episode are spent", "token_budget"),
    EndReason.CONTEXT_FULL: ("the conversation has more tokens than the model may read", "context_length_exceeded"),
}


class AgentEpisode(Episode):
    """What all episodes of an agent share; `run` plays one. The environment of the entry runs the agent.

    The episode has ended when the agent has; the reward is that of its result. Where the last request ran into a limit,
    the end reason is that limit.

    Example::

        episode = AgentEpisode(spec, engine, renderer, limits, sampling)
        trajectory = await episode.run(sample, lambda: build_env(sample, args), seed=7)
        len(trajectory.streams), trajectory.turns[-1].info["result"]      # (2, "68")
    """

    def __init__(self, spec: EnvSpec, *args: Any, **kwargs: Any) -> None:
        """Set up the entry's episodes; all else is as for `Episode`."""
        super().__init__(*args, **kwargs)
        # Every stream is compared with the template: what an agent sends was written by nobody here.
        self.limits = replace(self.limits, check_template_every=1)
        # The program gets no turn of the model, so nothing is taken out of what it is sent.
        self.said_outside = self.thinking
        self.thinking = None
        self.tool_format: ToolFormat = spec.args(tool_format=detect_format(self.renderer.chat_template)).tool_format
        self.writer = TurnWriter(self.renderer, self.tool_format, spec.thinking)

    def _read_prompt(self, state: EpisodeState) -> None:
        """Read nothing: the agent decides what the model reads."""

    async def _step(self, state: EpisodeState, text: str) -> StepResult:
        # The agent answers with its next request, if it has one.
        return StepResult((), False, {})

    def _final_text(self, state: EpisodeState) -> str:
        return state.turns[-1].info["result"]

    async def _alternate(self, session: Session, state: EpisodeState) -> EndReason:
        """Run the agent, and answer its requests, until it ends."""
        endpoint = EpisodeEndpoint(self, session, state)
        with open_endpoint(endpoint) as address:
            running = asyncio.ensure_future(state.env.step(agent_call(*address)))
            try:
                await asyncio.wait([running, endpoint.ended], return_when=asyncio.FIRST_COMPLETED)
            finally:
                running.cancel()
                await asyncio.wait([running])
                await endpoint.close()
                # The agent has waited for the engine meanwhile.
                state.env.seconds = max(0.0, state.env.seconds - sum(turn.engine_s for turn in state.turns))
        if endpoint.ended.cancelled():
            reason = endpoint.limit or EndReason.COMPLETED
            result = _result(endpoint, running)
        else:
            reason = endpoint.ended.result()
            result = ""
        if isinstance(reason, Exception):
            raise reason
        if not state.turns:
            raise EnvFault(f"the agent ended without a turn of the model{endpoint.complaint}")
        last = state.turns[-1]
        state.turns[-1] = replace(last, info={"result": result}, done=reason is EndReason.COMPLETED)
        return reason


def _result(endpoint: EpisodeEndpoint, running: asyncio.Future[StepResult]) -> str:
    """Return the result of an agent that has ended: none where it failed after a limit. Raises its fault else."""
    try:
        return running.result().info["result"]
    except ToolFault:  # the entry says that a fault counts
        raise
    except EnvFault as fault:
        if endpoint.limit and not fault.timed_out:
            return ""
        raise EnvFault(f"{fault}{endpoint.complaint}", fault.timed_out, fault.process_ended) from fault


class EpisodeEndpoint:
    """Answers the requests of one episode, one after the other.

    `ended` has the end reason, or a fault, where the episode has to end although its agent goes on. It is cancelled
    once the agent has ended. `limit` is that which the last request ran into, `complaint` what was refused last, for
    the error of an agent that may have failed for it.
    """

    def __init__(self, loop: AgentEpisode, session: Session, state: EpisodeState) -> None:
        self.loop = loop
        self.session = session
        self.state = state
        self.images: Images = {}
        self.limit: EndReason | None = None
        self.complaint = ""
        self.ended: asyncio.Future[EndReason | Exception] = asyncio.get_running_loop().create_future()
        self._lock = asyncio.Lock()
        self._writing: asyncio.Future[Sequence[Choice]] | None = None
        self._num_refused = 0
        #: The message of each turn of the model, by its id, and what its answer says.
        self._answers: dict[int, tuple[Message, object]] = {}
        #: What was answered, by the digest of what was asked.
        self._answered: dict[int, Sequence[Choice]] = {}

    def refuse(self, error: UserError | Refusal) -> Refusal:
        """Count a request that is not answered; return its refusal."""
        self.complaint = f"\n\nThe last request that was refused: {error}"
        self._num_refused += 1
        if self._num_refused == MAX_REFUSED:
            self._end(self.limit or EnvFault(f"{MAX_REFUSED} requests of the agent were refused{self.complaint}"))
        if isinstance(error, UserError):
            return Refusal(str(error), "invalid_value", param=error.field)
        return error

    def _end(self, how: EndReason | Exception) -> Refusal:
        """End the episode unless it has ended; return the refusal of all that comes after."""
        if not self.ended.done():
            self.ended.set_result(how)
        return ended()

    async def answer(self, asked: Asked, digest: int, is_retry: bool) -> Sequence[Choice]:
        """Let the model write what a request asks for.

        A client that got no answer in time sends the same request again: with `is_retry`, it gets the answer that the
        model has written to the request of the same `digest`.

        Raises:
            Refusal: the request ran into a limit, or the episode has ended.
            UserError: the model's template cannot write the conversation.
        """
        async with self._lock:
            if self.ended.done():
                raise ended()
            if not is_retry or digest not in self._answered:
                self._writing = asyncio.ensure_future(self._choices(asked))
                await asyncio.wait([self._writing])
                if self._writing.cancelled():
                    raise ended()
                self._answered[digest] = self._writing.result()
            return self._answered[digest]

    async def close(self) -> None:
        """Stop what is being written, and refuse everything from now on."""
        self.ended.cancel()
        if self._writing:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def _choices(self, asked: Asked) -> Sequence[Choice]:
        return [await self._choice(asked, number) for number in range(asked.n)]

    async def _choice(self, asked: Asked, number: int) -> Choice:
        """Write one turn; each choice but the first begins a stream."""
        state = self.state
        limit = self._show(asked, number)
        if limit is not None:
            self.limit = limit
            raise Refusal(*_BEYOND[limit])
        room, limit = self.loop._room(state)
        asked_room = asked.max_completion_tokens or asked.max_tokens or room
        if asked_room < room:
            room = asked_room
            limit = None
        try:
            await self.loop._turn(self.session, state, len(state.turns) + 1, room)
        except Exception as fault:  # of the engine, or a stream that breaks a rule
            raise self._end(fault) from fault
        turn = state.turns[-1]
        if turn.finish == "abort":
            raise self._end(EndReason.ABORTED)
        # A turn that the loop's own limit has cut is the end, unless the agent finds a way to go on.
        self.limit = limit if turn.finish == "length" else None
        return self._read(turn, asked)

    def _show(self, asked: Asked, number: int) -> EndReason | None:
        """Write a conversation into the stream that it extends, or into one that begins.

        A message of the assistant that equals an answer stands for the turn that the model wrote. Return the end reason
        where the conversation does not fit. Raises `UserError` where the template cannot write it.
        """
        state = self.state
        limits = self.loop.limits
        if len(state.turns) - number + asked.n > limits.max_turns:
            return EndReason.MAX_TURNS
        try:
            said = [says(message) for message in asked.messages]
            plain = list(map(self._written, asked.messages, said))
            for place, stream in reversed(list(enumerate(state.streams))):
                messages = list(plain)
                # Two turns may have the same answer; here it is this stream's own.
                for position, known in enumerate(stream.messages[: len(plain)]):
                    if self._answers.get(id(known)) == (known, said[position]):
                        messages[position] = known
                if number == 0 and stream.tools == asked.tools and stream.extended_by(messages):
                    # What the template cannot write after a turn, it may write as a whole.
                    with suppress(Exception):
                        return self._extend(place, messages)
            if state.num_appended >= limits.max_new_tokens:
                return EndReason.TOKEN_BUDGET
            return self.loop._begin_stream(state, plain, asked.tools, first_turn(plain, self._answers))
        except UserError:
            raise
        except Exception as error:  # a template raises what it likes
            rule = "must be a conversation that the model's chat template can write"
            raise UserError("messages", rule, first_line(error), "send another order or other roles") from error

    def _written(self, message: Message, said: object) -> Message:
        """Return a message as the model wrote it, or would have written it.

        What it never wrote may hold control tokens, which the prompt breaks.
        """
        for written, answer in reversed(self._answers.values()):
            if said == answer:
                return written
        if not message.get("tool_calls"):
            return message
        try:
            text = self.loop.writer.text(message, "messages")
        except UserError:  # such as a call that has control tokens
            texts = [
                message["content"],
                *(write_tool_call(call, self.loop.tool_format) for call in message["tool_calls"]),
            ]
            text = "\n".join(filter(None, texts))
        return {"role": "assistant", "content": text}

    def _extend(self, place: int, messages: Sequence[Message]) -> EndReason | None:
        """Go on in a stream with what a request adds; return the end reason where it does not fit."""
        state = self.state
        state.place = place
        added = messages[len(state.stream.messages) :]
        limit = self.loop._append(state, added)
        if limit is None:
            last = max(number for number, turn in enumerate(state.turns) if turn.stream == place)
            state.turns[last] = replace(state.turns[last], observations=tuple(added))
        return limit

    def _read(self, turn: Turn, asked: Asked) -> Choice:
        """Return a turn as the agent reads it.

        Thoughts are left out, and what follows a stop string. Where a call is broken, or was cut off, the text is left
        as it is: the agent shows it to the model, or explains.
        """
        text = turn.text
        finish = turn.finish
        if self.loop.said_outside:
            text = self.loop.said_outside.said(text)
        stops = asked.stop if isinstance(asked.stop, list) else [asked.stop]
        cuts = [text.index(word) for word in stops if word in text]
        if cuts:
            text = text[: min(cuts)]
            finish = "stop"
        calls: list[Any] = []
        if asked.tools:
            calls = find_tool_calls(text, self.loop.tool_format)
        if any(isinstance(call, ToolCallError) for call in calls):
            calls = []
        if calls:
            text = outside_tool_calls(text, self.loop.tool_format).strip()
            finish = "tool_calls"
            if not asked.parallel_tool_calls:
                calls = calls[:1]
        message = self.state.stream.messages[-1]
        self._answers[id(message)] = (message, ("assistant", text.strip(), calls))
        written = self.state.stream.last_turn
        assert written is not None, "the turn was written in this stream"
        tokens = []
        if asked.logprobs:
            spelled = map(self.loop.renderer.encoder.spell, written.ids)
            tokens = list(zip(spelled, written.logprobs, strict=True))
        shown = [write_call(call) for call in calls]
        return Choice(text, shown, finish, written.prompt_length, turn.num_cached, len(written.ids), tokens)


def ended() -> Refusal:
    """Return the refusal of all that comes after the end of an episode."""
    return Refusal("the episode of this key has ended", "episode_ended")
