"""The process that `watchdog` starts: `python watchdog_process.py PID SIGNAL MEMORY TRACES`. Imports nothing of ours.

If the watched process stops counting for as long as a call under way may take, it is asked for the traceback of its
threads, which needs no interpreter. The message names the call and where it stands, then the process is killed. What it
had recorded until then is on disk.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path

BEAT_S = 0.2
#: A pause that an honest program may need to import a library or to copy a network: no limit is shorter.
SHORTEST_S = 10.0
LABEL_SIZE, NUM_CALLS = 400, 64
BEAT = struct.Struct("<Q")
#: Limit in seconds (0: no call), the thread's number in the system and in Python, and what is called.
CALL = struct.Struct(f"<dQQ{LABEL_SIZE}s")
SLOT_SIZE = CALL.size
SIZE = BEAT.size + NUM_CALLS * SLOT_SIZE


def main(pid: int, number: int, memory: mmap.mmap, traces: int) -> None:
    """Watch until the process has ended, or has to be killed."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the run answers to them, and this process ends with it
        signal.signal(ignored, signal.SIG_IGN)
    last, silent_s = -1, 0.0
    while os.getppid() == pid:
        time.sleep(BEAT_S)
        (beat,) = BEAT.unpack_from(memory)
        # Its own rounds are counted, not the clock: a program that was stopped and continued is not late.
        last, silent_s = beat, silent_s + BEAT_S if beat == last else 0.0
        calls = [CALL.unpack_from(memory, BEAT.size + slot * SLOT_SIZE) for slot in range(NUM_CALLS)]
        calls = [call for call in calls if call[0]]
        if calls and silent_s >= max(SHORTEST_S, min(call[0] for call in calls)):
            report(pid, calls, number, traces)
            os.kill(pid, signal.SIGKILL)
            return


def report(pid: int, calls: list[tuple[float, int, int, bytes]], number: int, traces: int) -> None:
    """Print which call keeps the interpreter, and where it stands."""
    before = {call[1]: used(pid, call[1]) for call in calls}
    os.kill(pid, number)
    time.sleep(1.0)
    limit_s, _, thread, label = max(calls, key=lambda call: used(pid, call[1]) - before[call[1]])
    blocks = re.split(r"\n(?=(?:Current thread|Thread) 0x)", os.pread(traces, 1 << 20, 0).decode(errors="replace"))
    stack = next((block for block in blocks if int((block.split("0x")[-1] + " ").split()[0], 16) == thread), "")
    lines = [line for line in stack.splitlines()[1:] if "envs/execution/" not in line and "/threading.py" not in line]
    print(
        f"error: {label.rstrip(bytes(1)).decode(errors='replace')}: must let other code run within its limit of "
        f"{limit_s:g} s, got nothing of the interpreter for {max(SHORTEST_S, limit_s):g} s, so the program is ended; "
        "everything recorded until now is on disk; write `isolation: process` in the registry entry, which ends such "
        "a call alone",
        *lines[:12],
        sep="\n",
        file=sys.stderr,
        flush=True,
    )


def used(pid: int, thread: int) -> int:
    """Return the processor time of a thread so far, in ticks; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), mmap.mmap(int(sys.argv[3]), SIZE), int(sys.argv[4]))
