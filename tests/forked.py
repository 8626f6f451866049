"""Starts servers of tests in a moment: each is forked from a process that has imported what they need.

`python tests/forked.py SOCKET ARGUMENTS ...` stands for `python -m tests.agents.engines.sglang_server ARGUMENTS ...`.
It passes its files and arguments on to the process at SOCKET, ends as the server there ends, and takes the server with
it when it is killed itself. It imports nothing else, so that it starts in a moment too.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Have a server forked, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(sys.argv[1])
        files = [0, 1, 2, *inherited()]
        request = json.dumps({"argv": sys.argv[2:], "env": dict(os.environ), "files": files, "cwd": str(Path.cwd())})
        link.sendmsg([request.encode() + b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        status = link.recv(1)  # nothing where the server was killed
    sys.exit(status[0] if status else 1)


def inherited() -> list[int]:
    """Return the pipes that this process got beside its standard files: through one comes the key of a server."""
    opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [int(path.name) for path in opened if int(path.name) > 2 and str(path.readlink()).startswith("pipe:")]


def fork_servers(path: str) -> None:
    """Fork a server for each request at a socket, until the process that started this one ends."""
    # The first three are what loading a checkpoint imports.
    import transformers.models.auto.tokenization_auto
    import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

    from tests.agents.engines import sglang_server

    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(1.0)
        while os.getppid() == parent:
            try:
                link, _ = server.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(link, sglang_server.main)
            link.close()


def serve(link: socket.socket, run: Callable[[], None]) -> NoReturn:
    """Become the server of a request: with its files, arguments, variables and folder."""
    raw, files, _, _ = socket.recv_fds(link, 2**20, 16)
    while not raw.endswith(b"\n"):
        raw += link.recv(2**20)
    request = json.loads(raw)
    place(files, request["files"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["sglang_server", *request["argv"]]
    threading.Thread(target=end_with, args=[link], daemon=True).start()
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        link.send(bytes([status]))
        os._exit(status)


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give files the numbers that they had in the process that sent them."""
    # First out of the way of all numbers, so that none is overwritten before it is moved.
    moved = [os.dup2(file, 200 + index) for index, file in enumerate(files)]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def end_with(link: socket.socket) -> None:
    """End this process once the one that asked for it has ended."""
    link.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
