"""A server for tests: one that speaks SGLang's protocol, in a process of its own."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agents.engines.sglang.process import ReservedPorts

ROOT = Path(__file__).parents[1]
#: The arguments with which servers take adapters of all decoder layers.
TAKES_ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj")
TAKES_ADAPTERS += ("o_proj", "gate_proj", "up_proj", "down_proj")


@functools.cache
def emulator() -> tuple[str, ...]:
    """Return the command of `tests.agents.engines.sglang_server`, which starts in a moment: it is forked.

    What it is forked from ends with this process.
    """
    path = f"{tempfile.mkdtemp()}/servers"
    program = f"from tests.forked import fork_servers; fork_servers({path!r})"
    forking = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not Path(path).exists():
        assert forking.poll() is None, "no server can be forked"
        time.sleep(0.02)
    return sys.executable, str(ROOT / "tests" / "forked.py"), path


@contextmanager
def serving(checkpoint: Path, *arguments: str) -> Iterator[str]:
    """Run `tests.agents.engines.sglang_server` on a checkpoint; yield its address once it answers."""
    ports = ReservedPorts(1)
    (port,) = ports.numbers
    process = subprocess.Popen([*emulator(), "--model-path", str(checkpoint), "--port", str(port), *arguments])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/model_info", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()
        ports.release()
