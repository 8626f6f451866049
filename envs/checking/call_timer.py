"""The call of an environment that a process did not survive: a timer that ends the process, and what it leaves to read.

No time limit acts on code that keeps the interpreter, nor on an inline environment. `faulthandler` can: its timer is a
thread of C, which writes down where all threads stand and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.execution.watchdog import Watchdog

#: How much longer than its limit a call may take before its process is ended: the runner's own limit acts before.
GRACE_S = 2.0
CALLS = "calls"
TRACES = "traces"

_TIMEOUT = "Timeout ("
_FRAME = re.compile(r'^  File "[^"]+", line \d+ in .*$', re.MULTILINE)
_RUNNER = re.compile(r'[/\\]execution[/\\]runner\.py"')


@dataclass(frozen=True)
class LostCall:
    """The last call of a process: its name ("reset", "step", "reward", "close"), and the number of steps until then.

    `limit_s` is its time limit and `timed_out` whether it ran over that. `frames` is where the environment's code
    stood, outermost call first, as a traceback writes it; empty if the process ended without a word.
    """

    name: str
    num_steps: int
    limit_s: float
    timed_out: bool
    frames: str

    @classmethod
    def read(cls, folder: Path) -> LostCall:
        """Read what a `CallTimer` has left."""
        # The first call is written before any code of the environment runs; without one the worker itself was killed.
        lines = (folder / CALLS).read_text().splitlines() or ["0 reset"]
        names = [line.split()[1] for line in lines]
        traces = (folder / TRACES).read_text(errors="replace")
        return cls(
            name=names[-1],
            num_steps=names.count("step"),
            limit_s=float(lines[-1].split()[0]),
            timed_out=traces.startswith(_TIMEOUT),
            frames=_frames(traces),
        )


def _frames(traces: str) -> str:
    """Return the frames of the environment's call from the traces of all threads, in which the last call is first."""
    for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", traces):
        frames = _FRAME.findall(block)
        ours = next((place for place, frame in enumerate(frames) if _RUNNER.search(frame)), 0)
        if ours:
            return "".join(f"{frame}\n" for frame in reversed(frames[:ours]))
    return ""


class CallTimer(Watchdog):
    """Ends this process when a call takes longer than its limit and `GRACE_S`, whatever keeps the interpreter.

    What it leaves in its folder is read with `LostCall.read`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.calls = (folder / CALLS).open("w")
        self.traces = (folder / TRACES).open("w")
        faulthandler.enable(self.traces)

    def begin_episode(self) -> None:
        """Forget the calls before."""
        self.calls.seek(0)
        self.calls.truncate()

    @contextlib.contextmanager
    def watch(self, label: str, limit_s: float, inline: bool = False, is_isolated: bool = True) -> Iterator[None]:
        """Time the code of a `with` block. One that runs on after its limit is timed until the next call begins."""
        if not is_isolated:  # such as a data set that is opened during a call, whose timer must stay
            yield
            return
        self.calls.write(f"{limit_s} {label.split()[0].replace('open', 'reset')}\n")
        self.calls.flush()  # the process may not live to close the file
        # One timer serves all: the episodes are played one at a time, and so are their calls.
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=self.traces)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
