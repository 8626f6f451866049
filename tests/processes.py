"""Processes that start at once: forked from one interpreter that has already imported torch and the product.

`run_ranks` starts the ranks of a process group; `run_command` runs a command as `python -m` does. A new interpreter
takes two to four seconds of the processor for the same imports. The claim that a command runs as a module at all needs
one true subprocess a command, in that command's own test.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.paths import ROOT

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.qwen3_vl.modeling_qwen3_vl",
        "trainer.run", "trainer.loop", "trainer.sft", "trainer.evaluate", "trainer.learner.fsdp_learner",
        "agents.engines.hf", "agents.play", "agents.replay", "agents.view", "envs.check", "envs.new",
    ]
)  # fmt: skip


def run_ranks(main: Callable[..., None], num_ranks: int, store: Path, *args: Any) -> None:
    """Run `main(rank, *args)` in the ranks of a gloo process group; `store` is a file that does not exist yet.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    from torch.multiprocessing.spawn import start_processes

    start_processes(_rank, (num_ranks, str(store), main, args), num_ranks, start_method="forkserver")


def _rank(rank: int, num_ranks: int, store: str, main: Callable[..., None], args: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # so that a rank which dies in native code leaves its traceback in the test's output
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    main(rank, *args)
    dist.destroy_process_group()


class Command:
    """`python -m module argv` in a process of its own, with more variables and what is written to it (None: it waits).

    Example::

        with Command("agents.play", "--env", "guess", written=None) as playing:
            playing.send_signal(signal.SIGINT)
            playing.wait(60)                       # 130
            playing.output("stdout")               # all that it has printed
    """

    def __init__(
        self, module: str, *argv: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, written: str | None = ""
    ) -> None:
        self.args = [module, *argv]
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._streams = [Path(self._folder.name) / name for name in ("stdin", "stdout", "stderr")]
        for path, text in zip(self._streams, (written, "", ""), strict=True):
            path.write_text(text, encoding="utf-8") if text is not None else os.mkfifo(path)
        self._process = _CONTEXT.Process(target=_command, args=(module, argv, cwd, dict(env or {}), self._streams))
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def poll(self) -> int | None:
        """Return the exit code, None as long as it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `timeout_s`.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout_s)
        return self._process.exitcode

    def output(self, stream: str) -> str:
        """Return all that it has written to "stdout" or "stderr"."""
        return (Path(self._folder.name) / stream).read_text(encoding="utf-8")


def run_command(
    module: str,
    *argv: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    written: str = "",
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit code and its output.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout_s`, and has been killed.
    """
    with Command(module, *argv, cwd=cwd, env=env, written=written) as running:
        code = running.wait(timeout_s)
        return subprocess.CompletedProcess(running.args, code, running.output("stdout"), running.output("stderr"))


def _command(module: str, argv: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[Path]) -> None:
    # Where the tests run in the background, the shell has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [str(cwd), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    for descriptor, path in enumerate(streams):
        file = os.open(path, os.O_RDWR)  # a pipe that its reader can write to has no end
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.argv = [module, *argv]
    sys.modules.pop(module, None)  # as in a new interpreter: it is run, not imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def kill_listener(url: str) -> None:
    """Kill the process that was started to listen at a URL, and its group if it leads one."""
    port, killed = url.rpartition(":")[2].encode(), 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        words, pid = file.read_bytes().split(b"\0") if file.exists() else [], int(file.parent.name)
        if b"--port" in words and words[words.index(b"--port") + 1] == port:
            (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
            killed += 1
    assert killed, f"no process of this host listens at {url}"
