"""A server for tests: one that speaks SGLang's protocol, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agents.engines.sglang.process import ReservedPorts

#: The arguments with which servers take adapters of all decoder layers.
TAKES_ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj")
TAKES_ADAPTERS += ("o_proj", "gate_proj", "up_proj", "down_proj")


@contextmanager
def serving(checkpoint: Path, *arguments: str) -> Iterator[str]:
    """Run `tests.agents.engines.sglang_server` on a checkpoint; yield its address once it answers."""
    ports = ReservedPorts(1)
    (port,) = ports.numbers
    command = [
        sys.executable,
        "-m",
        "tests.agents.engines.sglang_server",
        "--model-path",
        str(checkpoint),
        "--port",
        str(port),
        *arguments,
    ]
    process = subprocess.Popen(command)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/model_info", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()
        ports.release()
