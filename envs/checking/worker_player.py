"""Plays the scripted episodes of one environment in a worker process, which they may hang or end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.checking.call_timer import GRACE_S, CallTimer, LostCall
from envs.checking.episodes import Fault, PlayedEpisode, Script, checked_prompt, play_episode
from envs.checking.findings import fingerprint, quoted
from envs.checking.leftovers import Generators, ProcessState
from envs.env import EnvArgs
from envs.errors import UserError
from envs.execution import watchdog
from envs.execution.process_env import IMPORT_LIMIT_S, check_import, limit_memory
from envs.spec import EnvLimits, EnvSpec
from envs.tool_calls import ToolCall, find_tool_calls
from envs.types import Sample
from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerTimeout

MAX_SHOWN_OUTPUT = 1000
#: In the folder that the program shares with its worker: the worker's output, and where it keeps temporary files.
OUTPUT = "output"
TEMPORARY = "temporary"
#: The program has it; it is not sent back with every episode.
_NO_SAMPLE = Sample("", ())
#: In the traceback of an interrupt, which the runner lets pass: the call of the runner that it came from.
_RAISED = re.compile(r'[/\\]runner\.py", line \d+, in _(open|step|reward|close)$', re.MULTILINE)
_LOST = (WorkerDied, WorkerTimeout, WorkerError)


def longest_episode_s(spec: EnvSpec) -> float:
    """Return the time after which an episode has ended, whatever its environment does: all of its calls hang."""
    num_steps = spec.max_turns + 3  # the reward, closing and closing again
    resets_s = (spec.retries + 1) * (spec.reset_timeout_s + GRACE_S) + spec.retry_backoff_s * 2**spec.retries
    return resets_s + num_steps * (spec.step_timeout_s + GRACE_S)


class WorkerPlayer:
    """Plays in a worker. A call that hangs or ends the worker is a fault as any other.

    A `CallTimer` ends the worker where no time limit acts. The next episode gets a new one. An environment with
    `isolation: process` is played on a thread of the worker, which is such a process.
    """

    def __init__(self, spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample]) -> None:
        """Raises `UserError` if the worker cannot import the environment, or cannot be sent what it needs."""
        self._spec = spec
        self._args = args
        self._samples = samples
        self._prompts = [checked_prompt(sample) for sample in samples]
        self._temporary = tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        (self._folder / TEMPORARY).mkdir()
        (self._folder / OUTPUT).touch()
        self._bound_s = longest_episode_s(spec) + IMPORT_LIMIT_S
        try:
            self._start()
        except UserError:
            self.close()
            raise

    def _start(self) -> None:
        self._worker = Worker()
        try:
            self._worker.call(_enter, str(Path.cwd()), dict(os.environ), self._folder)
            check_import(self._worker, self._spec)
            #: The state of the program that plays, before the first episode.
            self.start = self._worker.call(_open, self._spec, self._args, self._samples, self._folder)
        except UserError:
            raise
        except Exception as error:  # of pickling, which may run an author's code
            field = f"environment '{self._spec.id}' samples"
            raise UserError(field, "must be such as another process can read", str(error), "fix them") from error

    def play(self, place: int, script: Script) -> PlayedEpisode:
        """Play an episode of the sample at a place."""
        if not self._worker.is_alive:
            self._start()
        try:
            episode = self._worker.call(_ask, "play", place, script, timeout_s=self._bound_s)
        except _LOST as error:
            episode = self._lost(script, error)
        if episode.has_hung:
            self._worker.kill()  # with the thread that hangs
        return replace(episode, sample=self._samples[place], prompt=self._prompts[place], place=place)

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
        episode = PlayedEpisode(_NO_SAMPLE, script, has_hung=has_hung)
        if call.name == "close":
            return replace(episode, close_error=text)
        name = f"step {call.num_steps}" if call.name == "step" else call.name
        return replace(episode, fault=Fault(name, text, process_ended=True))

    def _hang(self, call: LostCall, script: Script) -> str:
        """Return what is said of a call that only the end of its process could stop."""
        given = ""
        if script.texts and call.name in ("step", "reward"):
            text = script.texts[max(call.num_steps, 1) - 1]
            calls = find_tool_calls(text, self._args.tool_format)
            tools = dict.fromkeys(each.name for each in calls[:3] if isinstance(each, ToolCall))
            of_tools = f" in {', '.join(tools)}" if tools else ""
            given = f"{of_tools}, given {quoted(text)}"
        if self._spec.isolation == "process":
            return f"took longer than {call.limit_s:g} s{given}"
        if self._spec.isolation == "inline":
            return (
                f"took longer than {call.limit_s:g} s{given}; under `isolation: inline` no time limit acts: "
                "write `isolation: thread`, or `process` if it keeps the interpreter"
            )
        return (
            f"kept the interpreter for more than {call.limit_s:g} s{given}; under `isolation: thread` no time limit "
            "acts on that and the whole program stands still: write `isolation: process`, or bound the time of what "
            "it calls, such as a regular expression"
        )

    def state(self) -> ProcessState:
        """Return the state of the worker, of a new one if there is none."""
        if self._worker.is_alive:
            try:
                return self._worker.call(_ask, "state", timeout_s=self._bound_s)
            except _LOST:  # of what an episode has left
                self._worker.kill()
        self._start()
        return self.start

    def changed(self) -> list[int]:
        """Return the places of the samples that episodes have changed."""
        try:
            return self._worker.call(_ask, "changed", timeout_s=self._bound_s)
        except _LOST:
            return []

    def close(self) -> None:
        """End the worker; show the beginning of what the environment has printed."""
        self._worker.kill()  # it may still print
        output = (self._folder / OUTPUT).read_bytes()
        if output:
            print(output[:MAX_SHOWN_OUTPUT].decode(errors="replace").rstrip("\n"))
        if len(output) > MAX_SHOWN_OUTPUT:
            print(f"... and {len(output) - MAX_SHOWN_OUTPUT:,} bytes more that the environment has printed")
        self._temporary.cleanup()


# In the worker --------------------------------------------------------------------------------------------------------


class _Playing:
    """An environment that is played in this process, and counts what its episodes leave."""

    def __init__(self, spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample], folder: Path) -> None:
        self._args = args
        self._samples = samples
        self._folder = folder
        self._timer = CallTimer(folder)
        watchdog.WATCHDOG = self._timer  # it ends a call by itself, where the program's watchdog needs another process
        self._build_env = spec.load_here()
        self._limits = replace(EnvLimits.of(spec), on_tool_fault=args.on_tool_fault)
        self._fingerprints = self._states()
        self._loop = asyncio.Runner()
        self._num_played = 0

    def play(self, place: int, script: Script) -> PlayedEpisode:
        self._timer.begin_episode()
        self._num_played += 1
        # Another seed each time, so that two plays leave the generators alike only if the environment seeds them.
        Generators.seed(self._num_played)
        sample = self._samples[place]
        # A fault that is made on purpose comes again in every retry.
        limits = replace(self._limits, retries=0) if script.kind == "closing" else self._limits
        episode = self._loop.run(
            play_episode(
                lambda: self._build_env(sample, self._args),
                sample,
                script,
                limits,
                self._args.max_turns,
            )
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the environment may have closed it
                stream.flush()
        return replace(episode, sample=_NO_SAMPLE, generators=Generators.states())

    def state(self) -> ProcessState:
        return ProcessState.now(self._folder / TEMPORARY, self._folder / OUTPUT)

    def changed(self) -> list[int]:
        return [place for place, state in enumerate(self._states()) if state != self._fingerprints[place]]

    def _states(self) -> list[object]:
        return [(fingerprint(sample), repr(sample.metadata)) for sample in self._samples]


_playing: _Playing


def _enter(directory: str, variables: dict[str, str], folder: Path) -> None:
    """Be where the program is; nobody types anything, and the output is in a file."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update({**variables, "TMPDIR": str(folder / TEMPORARY)})
    tempfile.tempdir = str(folder / TEMPORARY)
    silence, _ = os.pipe()  # the other end stays open: there is always more to wait for
    os.dup2(silence, 0)
    descriptor = os.open(folder / OUTPUT, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _open(spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample], folder: Path) -> ProcessState:
    global _playing
    _playing = _Playing(spec, args, samples, folder)
    gc.freeze()  # what is loaded now is not looked at each time that memory is measured
    if spec.isolation == "process":
        limit_memory(spec.memory_limit_gib)
    return _playing.state()


def _ask(method: str, *args: object) -> Any:
    return getattr(_playing, method)(*args)
