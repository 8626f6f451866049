"""Turns a finished conversation into the stream of an episode with the same messages, for supervised fine-tuning.

The prompt is rendered as an episode's. Each turn is what the model would have had to write
(`agents.rollout.assistant_turn`), followed by what the agent loop would have shown. The same renderer writes this
append-only stream and the same invariants check it, so supervised and reinforcement learning see identical streams.

Legend: T tokens of one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from agents.rendering.renderer import Renderer
from agents.rollout.assistant_turn import TurnWriter
from agents.rollout.invariants import Vocabulary, broken_invariant
from agents.rollout.stream import Stream
from agents.rollout.template_check import template_mismatch
from agents.types import Completion, EndReason, Trajectory, Turn
from envs.datasets.conversations import Conversation
from envs.errors import UserError, first_line
from envs.tool_calls import ToolFormat, detect_format, find_tool_calls
from envs.tool_calls.thinking import ThinkingSetting
from envs.types import Message, bare_text

_ROLES = ("system", "user", "assistant", "tool")
#: The fields of a message that leave it out of the loss: ours, those of ms-swift, and that of OpenAI.
_FLAGS = ("train", "loss")
_WEIGHTS = ("loss_scale", "weight")
LOSS_MARKS = (*_FLAGS, *_WEIGHTS)


@dataclass(frozen=True, eq=False)
class ConversationStream:
    """A conversation as a trajectory that was never sampled, and the tokens to learn.

    `mask_T` is True on the tokens of the assistant's turns to learn, the closing token included.

    Example: a prompt of 4 tokens, a turn of 3 that is not to be learnt, 2 tokens between, a turn of 2::

        ids_T       p p p p m m m e e m m
        mask_T      0 0 0 0 0 0 0 0 0 1 1
    """

    trajectory: Trajectory
    mask_T: NDArray[np.bool_]

    @property
    def ids_T(self) -> NDArray[np.int64]:
        """The ids, image placeholders expanded."""
        return self.trajectory.ids_T

    @property
    def num_taught(self) -> int:
        """Tokens that count in the loss."""
        return int(self.mask_T.sum())


class ConversationRenderer:
    """Makes the streams of conversations for one model.

    Example::

        conversations = ConversationRenderer(renderer, context_length=4096)
        stream = conversations.stream(conversation)
        stream.ids_T[stream.mask_T]             # all that the assistant says, closing tokens included

    `tool_format` is how the model writes calls; None takes it from the model's template. `thinking` is the setting of
    the environment that the model is to play. The first stream, and every
    `check_template_every`-th after it, is compared with the template's own rendering of the whole conversation.
    """

    def __init__(
        self,
        renderer: Renderer,
        context_length: int,
        tool_format: ToolFormat | None = None,
        check_template_every: int = 128,
        thinking: ThinkingSetting = "auto",
    ) -> None:
        self.renderer = renderer
        self.context_length = context_length
        self.check_template_every = check_template_every
        self._writer = TurnWriter(renderer, tool_format or detect_format(renderer.chat_template), thinking)
        self._vocabulary = Vocabulary.of(renderer)
        self._num_made = 0

    def stream(self, conversation: Conversation) -> ConversationStream:
        """Return the stream of a conversation.

        Raises:
            UserError: the messages are not in the order of an episode, there is nothing to learn, the template cannot
                write a message, or there are more tokens than the model may read. Names the conversation and the rule.
        """
        where = conversation.where
        # A column of Arrow gives each message the keys of all messages, with None for those that it lacks.
        given = [{k: v for k, v in message.items() if v is not None} for message in conversation.messages]
        learnt = [_is_learnt(message, f"{where} messages[{place}]") for place, message in enumerate(given)]
        # Marks are ours: a template must not see them.
        messages = tuple({k: v for k, v in message.items() if k not in LOSS_MARKS} for message in given)
        _check_order(messages, where, self._writer.tool_format)
        if not any(learnt):
            raise UserError(where, "must have a turn to learn from", '"train": false in all', "leave the row out")
        texts = [
            self._writer.text(message, f"{where} messages[{place}]") if message["role"] == "assistant" else ""
            for place, message in enumerate(messages)
        ]
        messages = tuple(
            {"role": "assistant", "content": text} if message["role"] == "assistant" else message
            for message, text in zip(messages, texts, strict=True)
        )
        try:
            trajectory, stream = self._trajectory(conversation, messages)
        except UserError as error:
            raise UserError(f"{where}: {error.field}", error.rule, error.got, error.fix) from error
        except Exception as error:  # a template raises what it likes
            rule = "must be a conversation that the model's chat template can write"
            raise UserError(where, rule, first_line(error), "fix the messages") from error
        if len(stream.ids) > self.context_length:
            fix = "raise --context-length, or leave the row out"
            raise UserError(where, f"must have at most {self.context_length} tokens", len(stream.ids), fix)
        rule = broken_invariant(trajectory.streams[0], self._vocabulary, stream.pieces)
        if rule is None and self.check_template_every and self._num_made % self.check_template_every == 0:
            rule = template_mismatch(trajectory.streams[0], self.renderer)
        self._num_made += 1
        if rule is not None:
            raise UserError(where, "must make a sound stream", rule, "use another chat template, or report this")
        turns = [
            is_learnt for is_learnt, message in zip(learnt, messages, strict=True) if message["role"] == "assistant"
        ]
        return _with_mask(trajectory, turns)

    def _trajectory(self, conversation: Conversation, messages: tuple[Message, ...]) -> tuple[Trajectory, Stream]:
        """Return the trajectory of an episode with these messages, and its stream."""
        renderer = self.renderer
        stream = Stream([*messages], conversation.tools)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        stream.read(renderer.prompt(messages[: places[0]], conversation.tools))
        turns: list[Turn] = []
        for place, following in zip(places, [*places[1:], len(messages)], strict=True):
            text = messages[place]["content"]
            answers = messages[place + 1 : following]
            ids = (*renderer.encoder.encode(text), renderer.closer_id)
            # As if written by one engine under its first weights, so that the same rules hold.
            versions = ((0, len(ids)),)
            start, end = stream.write(Completion(ids, (0.0,) * len(ids), "stop", len(stream.ids), versions))
            turns.append(Turn(start, end, text, "stop", versions, 0, answers, {}, 0.0, 0.0))
            # An engine would have stopped there, so no episode can look like this.
            if stops := set(ids[:-1]) & set(renderer.stop_ids):
                rule = "must not end before its closing token"
                got = renderer.decode(sorted(stops))
                raise UserError(f"messages[{place}]", rule, got, "leave the stop token out")
            if answers:
                stream.read(renderer.suffix(answers, last_id=renderer.closer_id, has_tools=bool(conversation.tools)))
        trajectory = Trajectory.of_streams(
            [stream.frozen(turns)],
            sample_id=conversation.where,
            sample_index=0,
            seed=0,
            turns=tuple(turns),
            reward=0.0,
            end_reason=EndReason.COMPLETED,
            num_prompt_messages=places[0],
            tools=tuple(conversation.tools),
        )
        return trajectory, stream

    def spans(self, stream: ConversationStream) -> Iterator[tuple[bool, str]]:
        """Yield (is learnt, text) for each run of the stream; an image's placeholders are shown once."""
        ids = stream.ids_T.tolist()
        image = self.renderer.image_token_id
        # Runs of tokens that are learnt, or not, alternate.
        edges = [0, *(np.flatnonzero(np.diff(stream.mask_T)) + 1).tolist(), len(ids)]
        for start, end in pairwise(edges):
            kept = [t for k, t in enumerate(ids[start:end]) if t != image or k == 0 or ids[start + k - 1] != image]
            yield bool(stream.mask_T[start]), self.renderer.encoder.decode(kept)


def _is_learnt(message: Message, where: str) -> bool:
    """Return whether a message counts in the loss: an assistant's does, unless one of `LOSS_MARKS` leaves it out.

    Raises:
        UserError: a mark has another value, two marks disagree, or a mark wants to teach what someone else says.
    """
    marks = {name: message[name] for name in LOSS_MARKS if name in message}
    is_assistant = message.get("role") == "assistant"
    fix = 'give "train": false to leave the turn out of the loss'
    for name, value in marks.items():
        if name in _FLAGS and not isinstance(value, bool):
            raise UserError(f"{where} {name}", "must be true or false", value, fix)
        if name in _WEIGHTS and value not in (0, 1):
            raise UserError(f"{where} {name}", "must be 0 or 1", value, fix)
    # Two data sets joined may carry both kinds of marks.
    if len({bool(value) for value in marks.values()}) > 1:
        raise UserError(where, f"must agree in {' and '.join(marks)}", str(marks), "keep one of them")
    if marks and all(marks.values()) and not is_assistant:
        fix = f"remove {' and '.join(marks)}: only the assistant's turns are learnt"
        raise UserError(where, "must not be learnt unless it is the assistant's", f"role {message.get('role')}", fix)
    return is_assistant and all(marks.values())


def _with_mask(trajectory: Trajectory, learnt: list[bool]) -> ConversationStream:
    """Add the loss mask; `learnt` says of each turn whether it is to be learnt."""
    mask_T = np.zeros_like(trajectory.mask_T)
    for turn, is_learnt in zip(trajectory.turns, learnt, strict=True):
        mask_T[turn.start : turn.end] = is_learnt
    return ConversationStream(trajectory, mask_T)


def _check_order(messages: tuple[Message, ...], where: str, tool_format: ToolFormat) -> None:
    """Raise `UserError` where the messages are not in the order of an episode."""
    roles = [str(message.get("role")) for message in messages]
    if unknown := [role for role in roles if role not in _ROLES]:
        raise UserError(where, f"must have roles among {', '.join(_ROLES)}", unknown[0], "rename the role")
    if "assistant" not in roles:
        raise UserError(where, "must have an assistant's turn", f"roles {', '.join(roles)}", "add the answer")
    # What follows the last turn would be read by nobody.
    if roles[-1] != "assistant":
        raise UserError(where, "must end with an assistant's turn", f"the role {roles[-1]}", "drop what follows it")
    if "user" not in roles[: roles.index("assistant")]:
        rule = "must have a user's message before the first assistant's turn"
        raise UserError(where, rule, f"roles {', '.join(roles)}", "add the question")
    for place, (before, role) in enumerate(pairwise(roles), 1):
        if before == role == "assistant":
            rule = "must have an answer between two turns of the assistant"
            raise UserError(f"{where} messages[{place}]", rule, "none", "join the turns, or add what was said between")
    _check_results(messages, where, tool_format)


def _check_results(messages: tuple[Message, ...], where: str, tool_format: ToolFormat) -> None:
    """Raise `UserError` where a tool's message answers no call; the answer to a malformed call is allowed."""
    waiting = 0
    known = set()
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            # Ids are optional: without them only the number of results counts.
            known = {call.get("id") for call in calls if isinstance(call, dict)} - {None}
            waiting = len(calls) or len(find_tool_calls(bare_text(message), tool_format))
        elif message["role"] == "tool":
            waiting -= 1
            call_id = message.get("tool_call_id")
            if waiting < 0 or (known and call_id is not None and call_id not in known):
                if call_id:
                    got = f"an answer to {call_id}"
                else:
                    got = "one answer more than calls"
                fix = "add the call to the turn before, or drop the message"
                raise UserError(f"{where} messages[{place}]", "must answer a tool call", got, fix)
        else:
            waiting = 0
