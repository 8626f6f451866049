"""The process that `watchdog` starts: `python watchdog_process.py PID SIGNAL MEMORY TRACES`. Imports nothing of ours.

If the watched process stops counting for as long as a call under way may take, or an inline call does not return, it is
asked for the traceback of its threads, which needs no interpreter. The message names the call and where it stands, then
the process is killed. What it had recorded until then is on disk.

If the watched process ends during a call and has not said that it will, as after `os._exit`, a crash in C or SIGKILL,
the message names the call.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

BEAT_S = 0.2
#: A pause that an honest program may need to import a library or to copy a network: no limit is shorter.
SHORTEST_S = 10.0
#: How long code that no environment's call runs may keep the interpreter, such as the writing of a large file: until a
#: note (with no call under way), and until the end.
NO_CALL_S = 3 * SHORTEST_S
LONGEST_S = 60 * SHORTEST_S
LABEL_SIZE = 400
NUM_CALLS = 1024
#: What a thread counts up; then the inline call under way (0: none), as its number and the place of its entry plus 1.
BEAT = struct.Struct("<QQQ")
COUNT = struct.Struct("<Q")
INLINE = struct.Struct("<QQ")
#: Limit in seconds (0: no call), the thread's number in the system and in Python, whether an entry's `isolation` says
#: where it runs, and what is called.
CALL = struct.Struct(f"<dQQ?{LABEL_SIZE}s")
SLOT_SIZE = CALL.size
#: Behind the calls: whether the program is about to end by itself, and what to do where it does not.
ENDING = struct.Struct("<?1000s")
ENDING_AT = BEAT.size + NUM_CALLS * SLOT_SIZE
SIZE = ENDING_AT + ENDING.size
#: The number of calls that a message names.
NUM_NAMED = 3
#: Ticks of a second, of which a busy thread uses up more than a few.
_BUSY = 20
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")


class Call(NamedTuple):
    """A call under way, as `WatchedCall.begin` wrote it down."""

    limit_s: float
    thread: int
    ident: int
    is_isolated: bool
    label: bytes

    @property
    def name(self) -> str:
        """What is called, as text."""
        return text_of(self.label)


def main(pid: int, number: int, memory: mmap.mmap, traces: int) -> None:
    """Watch until the process has ended, or has to be killed."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the run answers to them, and this process ends with it
        signal.signal(ignored, signal.SIG_IGN)
    last = -1
    inline = (0, 0)
    silent_s = 0.0
    inline_s = 0.0
    stopped_s = 0.0
    is_told = False
    while os.getppid() == pid:
        time.sleep(BEAT_S)
        # Its own rounds are counted, not the clock: a program that was stopped and continued is not late.
        if state(pid) in ("T", "t"):
            stopped_s += BEAT_S
            if SHORTEST_S <= stopped_s < SHORTEST_S + BEAT_S:
                say(f"note: the program is stopped; `kill -CONT {pid}` continues it")
            continue
        stopped_s = 0.0
        beat, *place = BEAT.unpack_from(memory)
        if beat == last:
            silent_s = silent_s + BEAT_S
        else:
            silent_s = 0.0
        if place[1] and tuple(place) == inline:
            inline_s = inline_s + BEAT_S
        else:
            inline_s = 0.0
        last = beat
        inline = (place[0], place[1])
        if max(silent_s, inline_s) < SHORTEST_S:
            is_told = False
            continue
        calls = [call for call in under_way(memory) if call.limit_s < math.inf]
        if inline[1]:
            hung = read(memory, inline[1] - 1)
        else:
            hung = None
        if hung and inline_s >= max(SHORTEST_S, hung.limit_s):
            stacks = ask(pid, number, traces)
            if BEAT.unpack_from(memory)[1:] == inline and not any(name in stacks for name in _DEBUGGERS):
                rule = "must return within its limit of {0:g} s, got no answer for {1:g} s, and nothing else can run"
                end(pid, hung, inline_s, rule, "thread", stack_of(stacks, hung.ident), advice(memory))
        elif silent_s >= max(SHORTEST_S, min((call.limit_s for call in calls), default=NO_CALL_S)) and not is_told:
            before = {thread: used(pid, thread) for thread in threads(pid)}
            stacks = ask(pid, number, traces)
            if BEAT.unpack_from(memory)[0] != last:  # it goes on after all
                continue
            took = {thread: used(pid, thread) - before.get(thread, 0) for thread in threads(pid)}
            busiest = max(took, key=lambda thread: took[thread], default=0)
            if took.get(busiest, 0) >= _BUSY:
                found = [call for call in calls if call.thread == busiest]
            else:
                found = calls
            if found:
                rule = "must let other code run within its limit of {0:g} s, got nothing of the interpreter for {1:g} s"
                end(pid, found[0], silent_s, rule, "process", stack_of(stacks, found[0].ident), advice(memory))
            say(f"note: code outside of environments has kept the interpreter for {silent_s:g} s", *stacks.splitlines())
            is_told = True
        if silent_s >= LONGEST_S:
            os.kill(pid, signal.SIGKILL)
    report_end(memory, traces)


def report_end(memory: mmap.mmap, traces: int) -> None:
    """Say during which calls a process has ended, unless it has said that it ends by itself."""
    calls = under_way(memory)
    if ENDING.unpack_from(memory, ENDING_AT)[0] or not calls:
        return
    _, crashed, crash = os.pread(traces, 1 << 20, 0).decode(errors="replace").rpartition("Fatal Python error: ")
    if crashed:
        cause = crash.partition("\n")[0]
    else:
        cause = "by os._exit, or by a signal such as SIGKILL where memory is short"
    current = re.search(r"^Current thread 0x([0-9a-f]+)", crash, flags=re.MULTILINE)
    ident = int(current[1], 16) if current else 0
    calls = [call for call in calls if call.ident == ident] or calls
    named = ", ".join(call.name for call in calls[:NUM_NAMED])
    if len(calls) > NUM_NAMED:
        more = f" and {len(calls) - NUM_NAMED} more calls"
    else:
        more = ""
    fix = "write `isolation: process` in the registry entry, which then ends its episode alone"
    said = f"everything recorded until now is on disk; {fix if calls[0].is_isolated else 'fix it'}{advice(memory)}"
    say(f"error: the program has ended during {named}{more} ({cause}); {said}", *stack_of(crash, ident))


def end(pid: int, call: Call, late_s: float, rule: str, isolation: str, stack: list[str], advice: str = "") -> None:
    """Say which call it was and where it stands, then kill the process."""
    try:
        fix = f"write `isolation: {isolation}` in the registry entry, which ends such a call alone"
        fix = fix if call.is_isolated else "fix it"
        said = f"so the program is ended; everything recorded until now is on disk; {fix}{advice}"
        say(f"error: {call.name}: {rule.format(call.limit_s, max(SHORTEST_S, late_s))}, {said}", *stack)
    finally:
        os.kill(pid, signal.SIGKILL)
        sys.exit()


def say(*lines: str) -> None:
    """Print; where nobody reads, give up after a few seconds."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    try:
        print(*lines[:40], sep="\n", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # a TimeoutError too
        pass
    finally:
        signal.alarm(0)


def under_way(memory: mmap.mmap) -> list[Call]:
    """Return the calls that have begun and are not over."""
    return [call for slot in range(NUM_CALLS) if (call := read(memory, slot)).limit_s]


def advice(memory: mmap.mmap) -> str:
    """Return what the program has written down to be said where it is ended, such as how to resume it."""
    text = text_of(ENDING.unpack_from(memory, ENDING_AT)[1])
    if text:
        return f"; {text}"
    return ""


def text_of(field: bytes) -> str:
    """Return a text that is filled up with zeros."""
    return field.rstrip(bytes(1)).decode(errors="replace")


def read(memory: mmap.mmap, slot: int) -> Call:
    """Return an entry; one that was freed, or is being written, has no limit."""
    return Call(*CALL.unpack_from(memory, BEAT.size + slot * SLOT_SIZE))


def ask(pid: int, number: int, traces: int) -> str:
    """Return the tracebacks of all threads of a process, empty where it does not answer within a second."""
    start = os.fstat(traces).st_size
    os.kill(pid, number)
    time.sleep(1.0)
    return os.pread(traces, 1 << 20, start).decode(errors="replace")


def stack_of(stacks: str, ident: int) -> list[str]:
    """Return where a thread stands, the innermost call first, without the frames that run every call."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", stacks, flags=re.MULTILINE)
    found = {int(number, 16): block for number, block in zip(blocks[1::2], blocks[2::2], strict=True)}
    ours = ("envs/execution/", "envs/contract.py", "/threading.py")
    return [line for line in found.get(ident, "").splitlines() if line and not any(name in line for name in ours)][:12]


def threads(pid: int) -> list[int]:
    """Return the threads of a process, none where the system does not tell."""
    try:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def state(pid: int) -> str:
    """Return a process's state: "T" is stopped by a signal, "t" by a debugger; empty where the system does not tell."""
    return (_fields(f"/proc/{pid}/stat") or [""])[0]


def used(pid: int, thread: int) -> int:
    """Return the processor time of a thread so far, in ticks; one that waits for a disk counts as busy."""
    fields = _fields(f"/proc/{pid}/task/{thread}/stat")
    if fields and fields[0] == "D":
        waits = time.monotonic_ns() // 10_000_000
    else:
        waits = 0
    if fields:
        return int(fields[11]) + int(fields[12]) + waits
    return 0


def _fields(path: str) -> list[str]:
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), mmap.mmap(int(sys.argv[3]), SIZE), int(sys.argv[4]))
