"""A real HTTP server with OpenAI's `/v1/chat/completions`, whose model is a function of the request."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What a model says to a request: a chat completion, or the status and the body of any response.
Reply = Callable[[dict[str, Any]], Mapping[str, Any] | tuple[int, bytes]]
#: Seconds between two bytes of a body that begins with this text.
DRIP = b"drip"
DRIP_S = 0.05


def says(
    text: str | None = None, calls: Sequence[tuple[str, str]] = (), finish: str = "stop", **more: Any
) -> dict[str, Any]:
    """Return a chat completion; `calls` are (name, arguments as JSON text)."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"id{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": {**message, **more}, "finish_reason": finish}
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [choice],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


@dataclass
class ChatServer:
    """What the server has been asked: bodies and the keys in the headers."""

    reply: Reply
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    times: list[float] = field(default_factory=list)


@contextlib.contextmanager
def chat_server(reply: Reply) -> Iterator[ChatServer]:
    """Run a server on a free port."""
    chat = ChatServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            """List no models, as some servers do; refuse a key that says so."""
            self.send_error(401 if "refused" in self.headers["Authorization"] else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            chat.asked.append(body)
            chat.times.append(time.monotonic())
            chat.keys.add(self.headers.get("Authorization", ""))
            found = chat.reply(body)
            status, content = found if isinstance(found, tuple) else (200, json.dumps(found).encode())
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                if status == 429:
                    self.send_header("Retry-After", "0.01")
                self.end_headers()
                for byte in content if content.startswith(DRIP) else b"":
                    self.wfile.write(bytes([byte]))
                    time.sleep(DRIP_S)
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    chat.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield chat
    finally:
        server.shutdown()
        server.server_close()
