"""The process that `watchdog` starts: `python watchdog_process.py PID MEMORY TRACES SHORTEST_S`.

It imports nothing of ours.

If the watched process stops counting for as long as a call under way may take, or an inline call does not return, it is
asked for the traceback of its threads, which needs no interpreter. The message names the call and where it stands, then
the process is killed. What it had recorded until then is on disk.

If the watched process ends during a call and has not said that it will, as after `os._exit`, a crash in C or SIGKILL,
the message names the call.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

BEAT_S = 0.2
LABEL_SIZE = 1000
#: The fields of `Call`.
CALL = struct.Struct(f"<QdQQ?{LABEL_SIZE}s")
#: Places of records: what the thread counts up; the call on the event loop; whether the program ends by itself, with
#: what to do where it does not; calls for which no place is left. Then the calls on threads.
BEAT, INLINE, ENDING, SPARE, FIRST = range(5)
NUM_RECORDS = 1024
SIZE = NUM_RECORDS * CALL.size
#: No code of ours or of a library listens to it: it makes `faulthandler` write the traceback of all threads.
SIGNAL = getattr(signal, "SIGRTMAX", 64) - 3
#: The number of calls that a message names.
NUM_NAMED = 3
#: Ticks of a second, of which a busy thread uses up more than a few even on a host that is overloaded.
_BUSY = 5
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")


class Call(NamedTuple):
    """A record. `thread` is the thread's number in the system, `ident` the one in Python."""

    number: int
    limit_s: float  # 0: no call
    thread: int
    ident: int
    is_isolated: bool
    label: bytes

    @property
    def text(self) -> str:
        """The label without the zeros that fill it up."""
        return self.label.rstrip(bytes(1)).decode(errors="replace")


def main(pid: int, memory: mmap.mmap, traces: int, shortest_s: float) -> None:
    """Watch until the process has ended, or has to be killed."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the run answers to them, and this process ends with it
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended in between
        watch(pid, memory, traces, shortest_s)
    report_end(memory, traces)


def watch(pid: int, memory: mmap.mmap, traces: int, shortest_s: float) -> None:
    """Return when the process has ended. No limit is shorter than `shortest_s`."""
    last = [read(memory, BEAT), read(memory, INLINE)]
    unchanged_s = [0.0, 0.0]
    asked: Call | None = None
    while os.getppid() == pid:
        time.sleep(BEAT_S)
        # Its own rounds are counted, not the clock: a program that was stopped and continued is not late.
        if fields(f"/proc/{pid}/stat")[0] in "Tt":
            continue
        for place in (BEAT, INLINE):
            now = read(memory, place)
            unchanged_s[place] = unchanged_s[place] + BEAT_S if now == last[place] else 0.0
            last[place] = now
        silent_s, inline_s = unchanged_s
        beat, inline = last
        limits_s = [call.limit_s for call in under_way(memory)] if silent_s >= shortest_s else []
        if inline.limit_s and inline_s >= max(shortest_s, inline.limit_s):
            stacks = ask(pid, traces)
            if read(memory, INLINE) == inline and not any(name in stacks for name in _DEBUGGERS):
                rule = f"must return within its limit of {inline.limit_s:g} s, got no answer for {inline_s:g} s"
                end(pid, memory, inline, f"{rule}, and nothing else can run", "thread", stacks)
        elif beat != asked and silent_s >= max(shortest_s, min(limits_s, default=math.inf)):
            asked = beat  # once: code outside of environments may take its time
            call, stacks = keeper(pid, memory, traces)
            if call and read(memory, BEAT) == beat:  # it has not gone on while it was asked
                rule = f"must let other code run within its limit of {call.limit_s:g} s, got nothing of the interpreter"
                end(pid, memory, call, f"{rule} for {silent_s:g} s", "process", stacks)


def keeper(pid: int, memory: mmap.mmap, traces: int) -> tuple[Call | None, str]:
    """Return the call that keeps the interpreter, and where all threads stand; None if no call does."""
    folder = Path(f"/proc/{pid}/task")
    before = {path.name: used(path) for path in folder.iterdir()}
    stacks = ask(pid, traces)
    took = {int(path.name): used(path) - before.get(path.name, 0) for path in folder.iterdir()}
    busiest = max(took, key=lambda thread: took[thread])
    calls = [call for call in under_way(memory) if call.limit_s < math.inf]
    if took[busiest] >= _BUSY:  # else it sleeps in C, and holds the lock
        calls = [call for call in calls if call.thread == busiest]
    return next(iter(calls), None), stacks


def report_end(memory: mmap.mmap, traces: int) -> None:
    """Say during which calls a process has ended, unless it has said that it ends by itself."""
    calls = under_way(memory)
    if read(memory, ENDING).number or not calls:
        return
    _, crashed, crash = os.pread(traces, 1 << 20, 0).decode(errors="replace").rpartition("Fatal Python error: ")
    cause = "by os._exit, or by a signal such as SIGKILL where memory is short"
    if crashed:
        cause = crash.partition("\n")[0]
        current = re.search(r"^Current thread 0x([0-9a-f]+)", crash, flags=re.MULTILINE)
        calls = [call for call in calls if current and call.ident == int(current[1], 16)] or calls
    named = ", ".join(call.text for call in calls[:NUM_NAMED])
    if len(calls) > NUM_NAMED:
        named += f" and {len(calls) - NUM_NAMED} more calls"
    what = "write `isolation: process` in the registry entry, which then ends its episode alone"
    say(f"the program has ended during {named} ({cause})", calls[0], what, memory, crash)


def end(pid: int, memory: mmap.mmap, call: Call, rule: str, isolation: str, stacks: str) -> None:
    """Say which call it was and where it stands, then kill the process."""
    what = f"write `isolation: {isolation}` in the registry entry, which ends such a call alone"
    say(f"{call.text}: {rule}, so the program is ended", call, what, memory, stacks)
    os.kill(pid, signal.SIGKILL)
    sys.exit()


def say(found: str, call: Call, fix: str, memory: mmap.mmap, stacks: str) -> None:
    """Write what was found, what to do and where a call stands; where nobody reads, give up after a few seconds."""
    parts = [found, "everything recorded until now is on disk"]
    parts.append(fix if call.is_isolated else "fix it")
    if advice := read(memory, ENDING).text:
        parts.append(advice)
    text = "\n".join([f"error: {'; '.join(parts)}", *stack_of(stacks, call.ident), ""])
    # So much never waits for a reader once there is room.
    shown = text.encode()[: select.PIPE_BUF].decode(errors="ignore")
    with contextlib.suppress(OSError):
        if select.select([], [sys.stderr], [], 5.0)[1]:
            print(shown, end="", file=sys.stderr, flush=True)


def read(memory: mmap.mmap, place: int) -> Call:
    """Return a record; one that was freed, or is being written, has no limit."""
    return Call(*CALL.unpack_from(memory, place * CALL.size))


def under_way(memory: mmap.mmap) -> list[Call]:
    """Return the calls that have begun and are not over."""
    calls = (read(memory, place) for place in (INLINE, *range(FIRST, NUM_RECORDS)))
    return [call for call in calls if call.limit_s]


def ask(pid: int, traces: int) -> str:
    """Return the tracebacks of all threads of a process, empty where it does not answer within a second."""
    start = os.fstat(traces).st_size
    os.kill(pid, SIGNAL)
    time.sleep(1.0)
    return os.pread(traces, 1 << 20, start).decode(errors="replace")


def stack_of(stacks: str, ident: int) -> list[str]:
    """Return where a thread stands, the innermost call first, without the frames that run every call."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", stacks, flags=re.MULTILINE)
    found = {int(number, 16): block for number, block in zip(blocks[1::2], blocks[2::2], strict=True)}
    ours = ("envs/execution/", "envs/contract.py", "/threading.py")
    return [line for line in found.get(ident, "").splitlines() if line and not any(name in line for name in ours)][:12]


def used(thread: Path) -> int:
    """Return the processor time of a thread so far, in ticks; one that waits for a disk counts as busy."""
    found = fields(thread / "stat")
    if found[0] == "D":
        return time.monotonic_ns() // 10_000_000
    return int(found[11]) + int(found[12])


def fields(file: Path | str) -> list[str]:
    """Return what a stat file of /proc tells from the state on: "T" is stopped by a signal, "t" by a debugger."""
    try:
        return Path(file).read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return ["X", *"0" * 20]


if __name__ == "__main__":
    main(int(sys.argv[1]), mmap.mmap(int(sys.argv[2]), SIZE), int(sys.argv[3]), float(sys.argv[4]))
