"""A server of images on this host, which counts as public while it runs."""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from envs.datasets import remote_images
from envs.datasets.remote_images import is_public


def png(color: str = "red") -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (32, 32), color).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass
class Answer:
    """What the server says to one path; `drips` sends the body byte by byte, one in `pause_s`."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drips: bool = False


class ImageServer(http.server.ThreadingHTTPServer):
    """A server on this host; `answers` by path, `asked` counts the requests. Each path of `fails` first answers 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Answer] = {"/red.png": Answer(png())}
        self.asked: Counter[str] = Counter()
        self.hosts: list[str] = []
        self.fails: set[str] = set()
        self.root = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, ImageServer)
        server.asked[self.path] += 1
        server.hosts.append(self.headers["Host"])
        answer = server.answers.get(self.path, Answer(status=404))
        if self.path in server.fails:
            server.fails.remove(self.path)
            answer = Answer(status=503)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if not answer.drips:
            self.wfile.write(answer.body)
            return
        try:
            for byte in answer.body:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        except OSError:  # the client left
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving_images(monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[ImageServer]:
    """Run a server; with `monkeypatch` its address counts as public, unlike every other private one."""
    with ImageServer() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        if monkeypatch:
            monkeypatch.setattr(remote_images, "is_public", lambda ip: ip == "127.0.0.1" or is_public(ip))
            monkeypatch.setattr(remote_images, "PAUSE_S", 0.01)
        yield running
        running.shutdown()
