"""Plays the scripted episodes of one environment in a worker process, which they may hang or end."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from envs.checking.call_timer import GRACE_S, CallTimer, LostCall
from envs.checking.episodes import Fault, PlayedEpisode, PlayOptions, Script, checked_prompt
from envs.checking.findings import quoted
from envs.checking.leftovers import ProcessState
from envs.checking.players import LocalPlayer, Player
from envs.env import EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.process_env import IMPORT_LIMIT_S
from envs.spec import EnvSpec
from envs.tool_calls import ToolCall, find_tool_calls
from envs.types import Sample
from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerTimeout

MAX_SHOWN_OUTPUT = 1000

_NO_SAMPLE = Sample("", ())  # the program has it
#: In the traceback of an interrupt, which the runner lets pass: the call of the runner that it came from.
_RAISED = re.compile(r'[/\\]runner\.py", line \d+, in _(open|step|reward|close)$', re.MULTILINE)


def longest_episode_s(spec: EnvSpec) -> float:
    """Return the time after which an episode has ended, whatever its environment does: all of its calls hang."""
    num_steps = spec.max_turns + 3  # the reward, closing and closing again
    resets_s = (spec.retries + 1) * (spec.reset_timeout_s + GRACE_S) + spec.retry_backoff_s * 2**spec.retries
    return resets_s + num_steps * (spec.step_timeout_s + GRACE_S)


def open_player(spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample]) -> Player:
    """Return a player in a worker, or one in this program if the worker cannot import the environment.

    An environment with `isolation: process` has its own worker.

    Raises:
        UserError: the environment cannot be imported.
    """
    if spec.isolation == "process":
        return LocalPlayer(spec, args, samples, load_env(spec))
    try:
        return WorkerPlayer(spec, args, samples)
    except _NotInAWorker as error:
        return LocalPlayer(spec, args, samples, load_env(spec), note=str(error))


def _files(folder: Path) -> tuple[Path, Path]:
    """Return where a worker keeps temporary files, and where its output is."""
    return folder / "temporary", folder / "output"


class _NotInAWorker(Exception):
    """The environment cannot be played in a worker; the message says why."""


class WorkerPlayer:
    """Plays in a worker, with the isolation of the entry. A call that hangs or ends the worker is a fault as any other.

    A `CallTimer` ends the worker where no time limit acts. The next episode gets a new one.
    """

    note = ""
    outlives_hangs = True

    def __init__(self, spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample]) -> None:
        """Raises `_NotInAWorker` if the worker cannot import the environment, or cannot be sent what it needs."""
        self._spec = spec
        self._args = args
        self._samples = samples
        self._prompts = [checked_prompt(sample) for sample in samples]
        self._temporary = tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        temporary, output = _files(self._folder)
        temporary.mkdir()
        output.touch()
        self._bound_s = longest_episode_s(spec) + IMPORT_LIMIT_S
        self._start()

    def _start(self) -> None:
        self._worker = Worker()
        place = _Place(str(Path.cwd()), dict(os.environ), [*sys.path], self._folder)
        try:
            self.start = self._worker.call(
                _open, self._spec, self._args, self._samples, place, timeout_s=IMPORT_LIMIT_S
            )
        except (WorkerDied, WorkerTimeout) as error:
            rule = f"'{self._spec.entry_point.partition(':')[0]}' must import"
            field = f"environment '{self._spec.id}' entry_point"
            raise UserError(field, rule, f"the process ended: {error}", "fix the module") from error
        except Exception as error:  # of importing there, or of pickling here
            self.close()
            raise _NotInAWorker(str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)) from error

    def play(self, place: int, script: Script, options: PlayOptions | None = None) -> PlayedEpisode:
        """Play an episode of the sample at a place."""
        if not self._worker.is_alive:
            self._start()
        sample = self._samples[place]
        prompt = self._prompts[place]
        try:
            data = self._worker.call(_play, place, script, options, timeout_s=self._bound_s)
        except (WorkerDied, WorkerTimeout, WorkerError) as error:
            episode = self._lost(script, error)
        else:
            episode = pickle.loads(data)
        if episode.has_hung:
            self._worker.kill()  # with the thread that hangs
        return replace(episode, sample=sample, prompt=prompt)

    def _lost(self, script: Script, error: Exception) -> PlayedEpisode:
        """Return the record of an episode that its worker did not survive."""
        self._worker.kill()
        call = LostCall.read(self._folder)
        if raised := _RAISED.findall(str(error)):  # the environment was closed after it
            call = replace(call, name=raised[-1].replace("open", "reset"))
        has_hung = isinstance(error, WorkerTimeout) or call.timed_out
        if has_hung:
            what = self._hang(call, script)
        elif isinstance(error, WorkerError):  # an interrupt that an inline environment raised
            what = str(error).strip()
        else:
            what = f"the environment ended the process: {error}; with `isolation: process` it ends its own alone"
        text = f"{call.frames}{what}"
        is_closing = call.name == "close"
        if call.name == "step":
            name = f"step {call.num_steps}"
        else:
            name = call.name
        if is_closing:
            fault = None
        else:
            fault = Fault(name, text, has_hung, process_ended=True)
        return PlayedEpisode(
            sample=_NO_SAMPLE,
            prompt=(),
            script=script,
            tools=(),
            solution=(),
            opening=(),
            steps=(),
            reward=None,
            fault=fault,
            close_error=text if is_closing else None,
            reset_s=None,
            steps_s=(),
            has_hung=has_hung,
            runs_tools=False,
        )

    def _hang(self, call: LostCall, script: Script) -> str:
        """Return what is said of a call that only the end of its process could stop."""
        turn = max(call.num_steps, 1)
        limit_s = call.limit_s
        if script.texts and call.name in ("step", "reward"):
            given = script.texts[turn - 1]
        else:
            given = None
        if given:
            found = find_tool_calls(given, self._args.tool_format)
        else:
            found = []
        tools = dict.fromkeys(call.name for call in found[:3] if isinstance(call, ToolCall))
        if tools:
            of_tool = f" in {', '.join(tools)}"
        else:
            of_tool = ""
        if given is not None:
            text = f", given {quoted(given)}"
        else:
            text = ""
        if self._spec.isolation == "inline":
            return (
                f"took longer than {limit_s:g} s{of_tool}{text}; under `isolation: inline` no time limit acts: "
                "write `isolation: thread`, or `process` if it keeps the interpreter"
            )
        return (
            f"kept the interpreter for more than {limit_s:g} s{of_tool}{text}; under `isolation: thread` no time limit "
            "acts on that and the whole program stands still: write `isolation: process`, or bound the time of what "
            "it calls, such as a regular expression"
        )

    def state(self) -> ProcessState:
        """Return the state of the worker, of a new one if there is none."""
        if self._worker.is_alive:
            try:
                return self._worker.call(_state, timeout_s=self._bound_s)
            except (WorkerDied, WorkerTimeout, WorkerError):  # of what an episode has left
                self._worker.kill()
        self._start()
        return self.start

    def changed(self) -> list[int]:
        """Return the places of the samples that episodes have changed."""
        try:
            return self._worker.call(_changed, timeout_s=self._bound_s)
        except (WorkerDied, WorkerTimeout, WorkerError):
            return []

    def close(self) -> None:
        """End the worker; show the beginning of what the environment has printed."""
        self._worker.kill()
        output = _files(self._folder)[1].read_bytes()
        if output:
            print(output[:MAX_SHOWN_OUTPUT].decode(errors="replace").rstrip("\n"))
        if len(output) > MAX_SHOWN_OUTPUT:
            print(f"... and {len(output) - MAX_SHOWN_OUTPUT:,} bytes more that the environment has printed")
        self._temporary.cleanup()


# In the worker --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where the program is, so that the worker is there too; and the folder that they share."""

    directory: str
    variables: Mapping[str, str]
    path: Sequence[str]
    folder: Path


_player: LocalPlayer | None = None
_timer: CallTimer | None = None


def _open(spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample], place: _Place) -> ProcessState:
    """Import the environment where the program is; nobody types anything, and the output is in a file."""
    global _player, _timer
    temporary, output = _files(place.folder)
    sys.path[:] = place.path
    os.chdir(place.directory)
    os.environ.clear()
    os.environ.update({**place.variables, "TMPDIR": str(temporary)})
    tempfile.tempdir = str(temporary)
    silence, _ = os.pipe()  # the other end stays open: there is always more to wait for
    os.dup2(silence, 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _timer = CallTimer(place.folder)
    build_env = load_env(spec)
    gc.freeze()  # what is loaded now is not looked at each time that memory is measured
    _player = LocalPlayer(spec, args, samples, build_env, _timer, temporary=temporary, printed=output)
    return _player.start


def _play(place: int, script: Script, options: PlayOptions | None) -> bytes:
    """Return the episode as bytes that the program can read without the environment's own modules."""
    assert _player is not None and _timer is not None
    _timer.begin_episode()
    episode = _player.play(place, script, options)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return pickle.dumps(replace(_portable_episode(episode), sample=_NO_SAMPLE, prompt=()))


def _state() -> ProcessState:
    assert _player is not None
    return _player.state()


def _changed() -> list[int]:
    assert _player is not None
    return _player.changed()


class Foreign:
    """Stands for a value of an environment's own type; it cannot be written as JSON either."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _portable_episode(episode: PlayedEpisode) -> PlayedEpisode:
    steps = [replace(s, messages=_portable(s.messages), info=_portable(dict(s.info))) for s in episode.steps]
    return replace(
        episode,
        tools=_portable(episode.tools),
        solution=_portable(episode.solution),
        opening=_portable(episode.opening),
        steps=tuple(steps),
    )


def _portable(value: Any) -> Any:
    """Return a value with plain types in place of an environment's own."""
    if isinstance(value, dict):
        return {_portable(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(map(_portable, value))
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, Image.Image) or type(value) in (bool, int, float, bytes):
        return value
    return Foreign(repr(value)[:200])
