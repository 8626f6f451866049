"""Lets a person play in place of a model: shows the new part of the stream and reads the next turn from a terminal.

`agents.play` and `agents.replaying.continuation` use it. A terminal is anything with lines, also a file of turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from PIL import Image

from agents.cli.text import counted, path_text
from agents.rendering.renderer import Renderer
from agents.types import EndReason, GenerateRequest, Trajectory, Turn
from envs.checking.hostile import write_call
from envs.contract import EpisodeEnv, checked_messages
from envs.datasets.rows import json_fault
from envs.env import ToolFormat
from envs.errors import UserError
from envs.images import image_digest
from envs.safe_text import escape_lines
from envs.tool_calls.thinking import Thinking
from envs.types import Message, content_parts, message_images
from envs.wrapper import Wrapper, can_be_wrapped

T = TypeVar("T")
HELP = """Write a turn and end it with a line that is only a dot, or with Ctrl-D.
An empty first line is an empty turn. :call NAME {"json": "arguments"} writes a tool call; :quit ends."""


class PlayerQuit(Exception):
    """The person has quit."""


class InputEnded(PlayerQuit):
    """A pipe or a file of turns has ended before the episode."""


class PlayerInterrupted(PlayerQuit):
    """The person has pressed Ctrl-C. Unlike KeyboardInterrupt, this passes through an event loop."""


@dataclass
class Terminal:
    """Where the person reads and writes: anything with lines, also a pipe."""

    source: TextIO
    target: TextIO
    mark = "> "

    @classmethod
    def standard(cls) -> Terminal:
        """Return the terminal of the command; characters that it cannot decode or show are replaced."""
        # A terminal that knows ASCII alone must end no episode with an encoding error.
        for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)
        return cls(sys.stdin, sys.stdout)

    def say(self, text: str) -> None:
        """Print text; control characters are shown and have no effect."""
        print(escape_lines(text), file=self.target, flush=True)

    def ask(self, tool_format: ToolFormat) -> str:
        """Return a turn that the person wrote.

        Raises:
            PlayerQuit: at `:quit`, Ctrl-D and Ctrl-C.
            InputEnded: at the end of a pipe or a file.
        """
        lines: list[str] = []
        while True:
            line = self._read()
            # An empty read is the end of the input; after text of a turn, it ends the turn.
            if not line and not lines:
                raise PlayerQuit if self.source.isatty() else InputEnded
            if not line:
                break
            # Files of Windows end their lines with both.
            line = line.removesuffix("\n").removesuffix("\r")
            if line == "." or (not line and not lines):
                break
            if line == ":quit":
                raise PlayerQuit
            if re.match(r":call(\s|$)", line):
                try:
                    lines.append(expand_call(line, tool_format))
                except ValueError as error:
                    self.say(f'not understood: {error}; write :call NAME {{"argument": "value"}}')
                continue
            # A mistyped command must not become a turn of the episode.
            if not lines and (unknown := re.match(r":[A-Za-z]\w*", line)):
                self.say(f"not understood: {unknown[0]} is no command, :call and :quit are; a space in front sends it")
                continue
            lines.append(line)
        return "\n".join(lines)

    def _read(self) -> str:
        """Return a line after the prompt "> "; a line from a pipe is printed, as a terminal prints what is typed."""
        is_typed = self.source.isatty()
        if is_typed:
            print(self.mark, end="", file=self.target, flush=True)
        try:
            line = self.source.readline()
        # asyncio would take a KeyboardInterrupt for its own and leave the environment open.
        except KeyboardInterrupt as pressed:
            raise PlayerInterrupted from pressed
        if line and not is_typed:
            self.say(self.mark + line.removesuffix("\n").removesuffix("\r"))
        return line


def expand_call(line: str, tool_format: ToolFormat) -> str:
    """Return the tool call that a line such as `:call zoom {"left": 0}` stands for.

    Raises:
        ValueError: there is no name, or the arguments are not a JSON object.
    """
    _, name, body, *_ = [*line.split(maxsplit=2), "", ""]
    if not name:
        raise ValueError("no name")
    try:
        arguments = json.loads(body or "{}")
    # RecursionError: a line may be nothing but opening brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON ({json_fault(error)})") from error
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no JSON object")
    return write_call(name, arguments, tool_format)


@dataclass
class Gallery:
    """Saves images as PNG files, named after the episode and the turn that showed them."""

    folder: Path
    stem: str
    saved: list[str] = field(default_factory=list)
    #: The same by the hash of the pixels: a later stream shows images again.
    by_digest: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Remember where the folder is: code of the environment may change the working directory."""
        self._place = self.folder.absolute()

    @classmethod
    def named(cls, folder: Path, name: str) -> Gallery:
        """Return a gallery for an episode; characters of its name that a file name must not have become "_"."""
        # Ids come from data sets and recordings: they may hold slashes.
        return cls(folder, re.sub(r"[^A-Za-z0-9_.-]", "_", name))

    def save(self, images: Sequence[Image.Image], where: str) -> None:
        """Save the images of one place in order, as `play/geo3k-0-prompt-1.png`."""
        for number, image in enumerate(images, start=1):
            name = f"{self.stem}-{where}-{number}.png"
            try:
                self._place.mkdir(parents=True, exist_ok=True)
                image.save(self._place / name)
            except OSError as error:
                fix = f"give another folder ({error.strerror})"
                raise UserError("--images", "must be writable", str(self.folder), fix) from error
            shown = f"{self.folder / name} {image.width}x{image.height}"
            self.saved.append(shown)
            self.by_digest.setdefault(image_digest(image.convert("RGB")), []).append(shown)


class _ObservedEnv(Wrapper):
    """Keeps what the environment answers. It also checks the messages, because their images are saved from here."""

    def __init__(self, env: EpisodeEnv) -> None:
        super().__init__(env)
        self.info: dict[str, Any] = {}
        #: Observations, at the start and after each turn, whose images are not saved yet.
        self.unsaved: list[tuple[str, tuple[Message, ...]]] = []
        self._num_steps = 0

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self._num_steps += 1
        result = super().step(response_text)
        # A step of another form is a fault, which the agent loop reports.
        if isinstance(result, tuple) and len(result) == 3:
            self.info = result[2]
        return result

    def format_observation(self, observation: dict[str, Any]) -> Sequence[Message]:
        # Checked as the agent loop does it, because images are saved from here before it sees them.
        messages = checked_messages(super().format_observation(observation))
        self.unsaved.append((f"turn{self._num_steps}" if self._num_steps else "start", messages))
        return messages


class TerminalPlayer:
    """The person in place of the network: shows the new part of the stream, and asks for the next turn.

    Example::

        player = TerminalPlayer(Terminal(sys.stdin, sys.stdout), Gallery(Path("play"), "geo3k-0"), renderer, "hermes")
        engine = ScriptedEngine(renderer.tokenizer, player.take_turn)
        Episode(engine, ...).run(sample, player.watch(make_env), seed=0)
    """

    def __init__(
        self,
        terminal: Terminal,
        gallery: Gallery,
        renderer: Renderer,
        tool_format: ToolFormat,
        thinking: Thinking | None = None,
    ) -> None:
        """`thinking` is that of the agent loop: where the template opens a thought, the person's turn closes it."""
        self.terminal = terminal
        self.gallery = gallery
        self.renderer = renderer
        self.thinking = thinking
        self.tool_format: ToolFormat = tool_format
        self.env: _ObservedEnv | None = None
        self._stream = 0
        self._num_read = 0
        self._num_images = 0

    def watch(self, env: EpisodeEnv) -> EpisodeEnv:
        """Return the environment wrapped, so that the player sees its answers."""
        # The agent loop names the missing method better than an error of the wrapper.
        if not can_be_wrapped(env):
            return env
        self.env = _ObservedEnv(env)
        return self.env

    def take_turn(self, turn: int, request: GenerateRequest) -> str:
        """Show what the model would read now, and return what the person writes; `turn` counts from 0."""
        assert self.env is not None, "the environment is built before the first turn"
        if turn > 0:
            self.terminal.say(f"--- the environment answers turn {turn}: done False, {format_info(self.env.info)}")
        # Saved only now: an episode that ends in its reset shows no image to anybody.
        for where, messages in self.env.unsaved:
            self.gallery.save(message_images(messages), where)
        self.env.unsaved = []
        if request.stream != self._stream:
            self._stream = request.stream
            self._num_read = 0
            self._num_images = 0
            self.terminal.say("--- the history is cut: from here on the model sees this")
        self.terminal.say(self._new_text(request))
        self.terminal.say(f"--- turn {turn + 1}, {request.max_new_tokens} tokens left")
        text = self.terminal.ask(self.tool_format)
        if self.thinking:
            # A template may open a thought; the environment only gets what follows its end.
            text = self.thinking.without_thought(text)
        written = self.renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._num_read = len(request.ids) + len(written) + 1  # the engine adds the stop token
        return text

    def _new_text(self, request: GenerateRequest) -> str:
        """Return the part of the stream that was not shown yet, with the names of images for their placeholders."""
        digests = [image.digest for image in request.images]

        def name(num_tokens: int) -> str:
            digest = digests[self._num_images]
            place = digests[: self._num_images].count(digest)
            self._num_images += 1
            # Of equal images, those that left the history are the earlier ones.
            names = self.gallery.by_digest.get(digest, ["an image"])[-digests.count(digest) :]
            # Code that edits the history may show one image several times.
            return f"[{names[min(place, len(names) - 1)]}, {num_tokens} tokens]"

        return self.renderer.shown(request.ids[self._num_read :], name).strip("\n")


def format_info(info: Any) -> str:
    """Return a step's info for a person: outcomes of calls first."""
    if isinstance(info, Mapping):
        calls = info.get("tool_calls")
    else:
        calls = None
    # An environment may put anything there, so no form is relied upon.
    if not isinstance(calls, list) or not calls or not all(isinstance(call, Mapping) for call in calls):
        return f"info {info}"
    rest = {key: value for key, value in info.items() if key != "tool_calls"}
    outcomes = ", ".join(f"{call.get('name') or 'a call'}: {call.get('outcome')}" for call in calls)
    return f"{outcomes}{f', info {rest}' if rest else ''}"


def show_answer(turn: Turn, number: int, done: bool, terminal: Terminal, gallery: Gallery) -> None:
    """Show the environment's answer to a turn; `number` counts from 1."""
    terminal.say(f"--- the environment answers turn {number}: done {done}, {format_info(turn.info)}")
    show_messages(turn.observations, f"turn{number}", terminal, gallery)


def show_messages(shown: Sequence[Mapping[str, Any]], where: str, terminal: Terminal, gallery: Gallery) -> None:
    """Show messages of the problem or the environment, and save their images under the name of their place."""
    first_new = len(gallery.saved)
    messages = [dict(message) for message in shown]
    gallery.save(message_images(messages), where)
    for message in messages:
        terminal.say(f"{message['role']}: {''.join(part.get('text', '<image>') for part in content_parts(message))}")
    for image in gallery.saved[first_new:]:
        terminal.say(f"[{image}]")


def show_episode(
    trajectory: Trajectory, opening: str, terminal: Terminal, gallery: Gallery, num_recorded: int = 0
) -> int:
    """Print an episode that has ended as a person sees it while playing, and how it ended; return the exit code.

    `opening` names what is before the first turn; the first `num_recorded` turns are called recorded.
    """
    show_messages(trajectory.opening, opening, terminal, gallery)
    for number, turn in enumerate(trajectory.turns, 1):
        note = ", recorded" if number <= num_recorded else ""
        terminal.say(f"--- turn {number}{note}\n{turn.text}")
        if number < len(trajectory.turns):
            show_answer(turn, number, turn.done, terminal, gallery)
    return print_summary(trajectory, terminal, gallery)


def print_summary(trajectory: Trajectory, terminal: Terminal, gallery: Gallery) -> int:
    """Print how the episode ended; return the exit code."""
    t = trajectory
    if t.turns:
        show_answer(t.turns[-1], len(t.turns), t.end_reason is EndReason.COMPLETED, terminal, gallery)
    if t.error:
        terminal.say(t.error)
    read = sum(int((~stream.mask_T).sum()) for stream in t.streams)
    read += sum(turn.usage.get("prompt_tokens", 0) for turn in t.turns)
    terminal.say(
        f"--- end: {t.end_reason}, reward {t.reward:g}, {counted(len(t.turns), 'turn')}, {t.num_model_tokens} tokens "
        f"written, {read} read{f' in {len(t.streams)} streams' * bool(t.later)}"
    )
    if t.end_reason.is_valid:
        return 0
    return 1


def print_early_end(quit_by: PlayerQuit | KeyboardInterrupt, terminal: Terminal, record: Path | None) -> int:
    """Print why an episode did not end, and that `record`, if any, has nothing of it; return the exit code."""
    # 130: what shells report for a program that Ctrl-C ended.
    code = 130
    said = "interrupted"
    if isinstance(quit_by, InputEnded):
        code = 1
        said = "end: the input ends here, the episode does not: no reward"
    elif isinstance(quit_by, PlayerQuit) and not isinstance(quit_by, PlayerInterrupted):
        code = 0
        said = "quit"
    if record:
        said += f"; nothing is recorded in {path_text(record)}: the episode did not end"
    terminal.say(f"--- {said}")
    return code


def run_interruptible(playing: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. `asyncio.run` would not let Ctrl-C interrupt a read from the terminal."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(playing)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        if not task.done():  # raised outside the episode, which must still close its environment
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        raise
    finally:
        # Such as the server that an agent has asked.
        left = asyncio.all_tasks(loop)
        for other in left:
            other.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
