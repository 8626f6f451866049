"""Plays the episodes of an agent: each of its requests is a turn of the model, in a stream that it extends or begins.

A request extends a stream if it begins with all that the stream says; what the model wrote there stays as it was
sampled. Any other request begins a stream of its own, rendered once: that of another conversation, of an edited or a
cut history, or of one that was sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agents.engines.base import Session
from agents.gateway.chat import Asked, Choice, ImageShelf, read_turn, says_same
from agents.gateway.server import Refusal, open_endpoint
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
from envs.tool_calls import ToolCall, ToolFormat, detect_format, write_tool_call
from envs.types import Message

#: So many refused requests end an episode: its agent asks again and again.
MAX_REFUSED = 100
RESULT = "result"
_BEYOND = {
    EndReason.MAX_TURNS: "the model has taken all turns of the episode",
    EndReason.TOKEN_BUDGET: "the tokens of the episode are spent",
    EndReason.CONTEXT_FULL: "the conversation has more tokens than the model may read",
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
        return state.turns[-1].info.get(RESULT, "") if state.turns else ""

    async def _alternate(self, session: Session, state: EpisodeState) -> EndReason:
        """Run the agent, and answer its requests, until it ends."""
        endpoint = EpisodeEndpoint(self, session, state)
        async with open_endpoint(endpoint) as address:
            running = asyncio.ensure_future(state.env.step(agent_call(*address)))
            try:
                await asyncio.wait([running, endpoint.ended], return_when=asyncio.FIRST_COMPLETED)
            finally:
                running.cancel()
                await asyncio.wait([running])
                await endpoint.close()
                # The agent has waited for the engine meanwhile.
                state.env.seconds = max(0.0, state.env.seconds - sum(turn.engine_s for turn in state.turns))
        if endpoint.ended.done():
            reason = endpoint.ended.result()
            result = ""
        else:
            reason = endpoint.limit or EndReason.COMPLETED
            result = _result(endpoint, running)
        if not state.turns:
            raise EnvFault(f"the agent ended without a turn of the model{endpoint.complaint}")
        is_done = reason is EndReason.COMPLETED
        state.turns[-1] = replace(state.turns[-1], info={RESULT: result}, done=is_done)
        return reason


def _result(endpoint: EpisodeEndpoint, running: asyncio.Future[StepResult]) -> str:
    """Return the result of an agent that has ended: none where it failed after a limit. Raises its fault else."""
    try:
        return running.result().info.get(RESULT, "")
    except ToolFault:  # the entry says that a fault counts
        raise
    except EnvFault as fault:
        if endpoint.limit and not fault.timed_out:
            return ""
        raise EnvFault(f"{fault}{endpoint.complaint}", fault.timed_out, fault.process_ended) from fault


class LimitReached(Refusal):
    """A request that ran into a limit of the episode."""

    def __init__(self, limit: EndReason) -> None:
        # The code by which clients of OpenAI know that they must send less.
        code = "context_length_exceeded" if limit is EndReason.CONTEXT_FULL else limit.value
        super().__init__(_BEYOND[limit], code)
        self.limit = limit


class EpisodeEndpoint:
    """Answers the requests of one episode, one after the other.

    `ended` is done where the episode has to end although its agent goes on: with the end reason, or with a fault.
    `limit` is that which the last request ran into.
    """

    def __init__(self, loop: AgentEpisode, session: Session, state: EpisodeState) -> None:
        self.loop = loop
        self.session = session
        self.state = state
        self.shelf = ImageShelf()
        self.limit: EndReason | None = None
        self.ended: asyncio.Future[EndReason] = asyncio.get_running_loop().create_future()
        self._lock = asyncio.Lock()
        self._writing: asyncio.Future[Sequence[Choice]] | None = None
        self._is_closed = False
        self._num_refused = 0
        self._refused = ""
        #: The message of each turn of the model, by its id, and what the agent was answered.
        self._answers: dict[int, tuple[Message, Message]] = {}
        #: What was answered, by the digest of what was asked.
        self._answered: dict[bytes, Sequence[Choice]] = {}

    @property
    def complaint(self) -> str:
        """What was refused last, for the error of an agent that may have failed for it."""
        if self._refused:
            return f"\n\nThe last request that was refused: {self._refused}"
        return ""

    def refuse(self, error: Exception) -> None:
        """Count a request that is not answered."""
        self._refused = str(error)
        self._num_refused += 1
        if isinstance(error, LimitReached):
            self.limit = error.limit
        if self._num_refused < MAX_REFUSED:
            return
        if self.limit is None:
            self._end(EnvFault(f"{MAX_REFUSED} requests of the agent were refused{self.complaint}"))
        else:
            self._end(self.limit)

    def _end(self, how: EndReason | Exception) -> None:
        if self.ended.done() or self._is_closed:
            return
        if isinstance(how, Exception):
            self.ended.set_exception(how)
        else:
            self.ended.set_result(how)

    async def answer(self, asked: Asked, digest: bytes = b"", is_retry: bool = False) -> Sequence[Choice]:
        """Let the model write what a request asks for.

        A client that got no answer in time sends the same request again: with `is_retry`, it gets the answer that the
        model has written to the request of the same `digest`.

        Raises:
            Refusal: the request ran into a limit, or the episode has ended.
            UserError: the model's template cannot write the conversation.
        """
        async with self._lock:
            if self._is_closed or self.ended.done():
                raise ended()
            if is_retry and digest in self._answered:
                return self._answered[digest]
            writing = self._writing = asyncio.ensure_future(self._choices(asked))
            await asyncio.wait([writing])
            self._writing = None
            if writing.cancelled():
                raise ended()
            self._answered[digest] = writing.result()
            return writing.result()

    async def close(self) -> None:
        """Stop what is being written, and refuse everything from now on."""
        self._is_closed = True
        if self._writing:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        streams = self.state.streams
        if streams[0].ids:
            self.state.num_prompt = streams[0].num_opening

    async def _choices(self, asked: Asked) -> Sequence[Choice]:
        if len(self.state.turns) + asked.n > self.loop.limits.max_turns:
            raise LimitReached(EndReason.MAX_TURNS)
        return [await self._choice(asked, number) for number in range(asked.n)]

    async def _choice(self, asked: Asked, number: int) -> Choice:
        """Write one turn; each choice but the first begins a stream."""
        state = self.state
        try:
            place, messages = self._find(asked)
            if number or place is None or not self._extend(place, messages):
                self._begin(messages, asked)
        except (Refusal, UserError):
            raise
        except Exception as error:  # a template raises what it likes
            rule = "must be a conversation that the model's chat template can write"
            raise UserError("messages", rule, first_line(error), "send another order or other roles") from error
        room, limit = self.loop._room(state)
        if asked.max_new_tokens and asked.max_new_tokens < room:
            room = asked.max_new_tokens
            limit = None
        try:
            await self.loop._turn(self.session, state, len(state.turns) + 1, room)
        except Exception as fault:  # of the engine, or a stream that breaks a rule
            self._end(fault)
            raise ended() from fault
        turn = state.turns[-1]
        if turn.finish == "abort":
            self._end(EndReason.ABORTED)
            raise ended()
        # A turn that the loop's own limit has cut is the end, unless the agent finds a way to go on.
        self.limit = limit if turn.finish == "length" else None
        choice = self._read(turn, asked)
        written = state.stream.messages[-1]
        self._answers[id(written)] = (written, choice.message)
        return choice

    def _find(self, asked: Asked) -> tuple[int | None, list[Message]]:
        """Return the place of the stream that a request extends, None where there is none, and its messages there.

        A message of the assistant that equals an answer stands for the turn that the model wrote.
        """
        plain = [self._own(m) or self._written(m, place) for place, m in enumerate(asked.messages)]
        for place in reversed(range(len(self.state.streams))):
            stream = self.state.streams[place]
            # Two turns may have the same answer; here it is this stream's own.
            own = [
                written if self._is_answer(message, written) else other
                for message, written, other in zip(asked.messages, stream.messages, plain, strict=False)
            ]
            messages = [*own, *plain[len(own) :]]
            if list(stream.tools) == asked.tools and stream.extended_by(messages):
                return place, messages
        return None, plain

    def _is_answer(self, message: Message, written: Message) -> bool:
        """Return whether a message is what the agent was answered for a turn of the model."""
        if message["role"] != "assistant" or id(written) not in self._answers:
            return False
        return says_same(message, self._answers[id(written)][1])

    def _own(self, message: Message) -> Message | None:
        """Return the message of the model's turn whose answer the message is, the latest one; None where it is none."""
        turns = (written for written, _ in reversed(self._answers.values()))
        return next((written for written in turns if self._is_answer(message, written)), None)

    def _written(self, message: Message, place: int) -> Message:
        """Return a message with its calls as the model would have written them; the prompt breaks control tokens."""
        calls: Sequence[ToolCall] = message.get("tool_calls", ())
        if not calls:
            return message
        given = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        try:
            text = self.loop.writer.text({**message, "tool_calls": given}, f"messages[{place}]")
        except UserError:  # such as a call that has control tokens
            texts = [message["content"], *(write_tool_call(call, self.loop.tool_format) for call in calls)]
            text = "\n".join(filter(None, texts))
        return {"role": "assistant", "content": text}

    def _extend(self, place: int, messages: Sequence[Message]) -> bool:
        """Go on in a stream with what a request adds; return False where the template cannot write that after a turn.

        Raises:
            Refusal: it does not fit.
        """
        state = self.state
        state.place = place
        added = messages[len(state.stream.messages) :]
        try:
            limit = self.loop._append(state, added)
        except Exception:  # a template raises what it likes; as a whole it may write the conversation
            return False
        if limit is not None:
            raise LimitReached(limit)
        last = max(number for number, turn in enumerate(state.turns) if turn.stream == place)
        state.turns[last] = replace(state.turns[last], observations=tuple(added))
        return True

    def _begin(self, messages: Sequence[Message], asked: Asked) -> None:
        """Begin a stream whose prompt is a whole conversation.

        Raises:
            Refusal: it does not fit.
            UserError: the template cannot write it.
        """
        state = self.state
        if state.num_appended >= self.loop.limits.max_new_tokens:
            raise LimitReached(EndReason.TOKEN_BUDGET)
        num_given = first_turn(messages, self._answers)
        limit = self.loop._begin_stream(state, list(messages), asked.tools, num_given)
        if limit is not None:
            raise LimitReached(limit)
        if len(state.streams) == 1:
            state.tools = asked.tools

    def _read(self, turn: Turn, asked: Asked) -> Choice:
        """Return a turn as the agent reads it."""
        state = self.state
        finish = "length" if turn.finish == "length" else "stop"
        text, calls, finish = read_turn(turn.text, finish, asked, self.loop.tool_format, self.loop.said_outside)
        written = state.stream.last_turn
        assert written is not None, "the turn was written in this stream"
        spell = self.loop.renderer.encoder.spell
        tokens = [
            (spell(token) if asked.logprobs else b"", logprob)
            for token, logprob in zip(written.ids, written.logprobs, strict=True)
        ]
        return Choice(text, calls, finish, written.prompt_length, turn.num_cached, tuple(tokens))


def ended() -> Refusal:
    """Return the refusal of all that comes after the end of an episode."""
    return Refusal("the episode of this key has ended", "episode_ended")
