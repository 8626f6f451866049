"""Serves the viewer's page and its data to browsers on this machine.

The server listens on the loopback address only. Every path begins with a random token; a request without it gets
nothing. A request whose Host header is another name is refused, so no web page can read a run by pointing its own name
at this address (DNS rebinding).
"""

from __future__ import annotations

import gzip
import hmac
import re
import secrets
import socketserver
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agents.viewer.page import Page, assemble
from agents.viewer.source import Source
from agents.viewer.strict_json import dump
from envs.errors import UserError, first_line

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost", "[::1]")
_ROUTE = re.compile(r"data/([01])/(overview|episode/([0-9]{1,9})|(images/[0-9a-f]{8,64}\.png))")
_MIN_COMPRESSED = 2048
HTML = "text/html; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"
DATA = "application/json"
PNG = "image/png"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Response:
    """The response to a request; only a page has a `policy`."""

    status: HTTPStatus
    kind: str
    content: bytes
    policy: str = ""


class ViewServer(ThreadingHTTPServer):
    """Serves the page of one or two runs, and their data.

    Example::

        with ViewServer([Source(Path("runs/x"))]) as server:
            print(server.url)           # http://127.0.0.1:43121/9f2b...e1/
            server.serve_forever()
    """

    daemon_threads = True

    def __init__(self, sources: Sequence[Source], port: int = 0) -> None:
        """Take a port; 0 takes a free one.

        Raises:
            UserError: another program uses the port.
        """
        self.sources = sources
        # Other users of this machine can reach the port, but not guess the path.
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            fix = f"give another one, or none ({error.strerror})"
            raise UserError("--port", "must be free", port, fix) from error

    def server_bind(self) -> None:
        """Take the port, without the base class's look-up of this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = HOST
        self.server_port = self.server_address[1]

    @property
    def url(self) -> str:
        """The page's URL."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def page(self) -> Page:
        """Return the page, assembled anew, so that a reload shows edits of its files."""
        return assemble("server", runs=len(self.sources), live=any(source.is_live for source in self.sources))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection: the browser asks again, and other requests are not affected."""

    def respond(self, target: str) -> Response:
        """Return the response to a GET of a path with its query."""
        url = urlsplit(target)
        token, _, path = url.path.removeprefix("/").partition("/")
        # Takes equally long for every wrong token, so that its letters cannot be found one by one.
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return _refusal(HTTPStatus.NOT_FOUND)
        if not path and url.path.endswith("/"):
            page = self.page()
            # A browser takes this rule from a header only, not from the page.
            policy = f"{page.policy}; frame-ancestors 'none'"
            return Response(HTTPStatus.OK, HTML, (page.head + page.tail).encode(), policy)
        route = _ROUTE.fullmatch(path)
        if not route or int(route[1]) >= len(self.sources):
            return _refusal(HTTPStatus.NOT_FOUND)
        source = self.sources[int(route[1])]
        try:
            if route[2] == "overview":
                after = parse_qs(url.query).get("after", [""])[0]
                return Response(HTTPStatus.OK, DATA, dump(source.overview(after)))
            if route[3]:
                return Response(HTTPStatus.OK, DATA, dump(source.episode(int(route[3]))))
            return Response(HTTPStatus.OK, PNG, source.image(route[4]))
        except (LookupError, OSError, UserError):
            return _refusal(HTTPStatus.NOT_FOUND)


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60
    error_content_type = PLAIN
    error_message_format = "%(code)d %(message)s\n"

    def parse_request(self) -> bool:
        """Refuse every method but GET, and every other Host."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif re.sub(r":[0-9]+$", "", self.headers.get("Host", "")) not in HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN)
        else:
            return True
        self.close_connection = True
        return False

    def do_GET(self) -> None:
        """Send the response; an error affects this request only."""
        try:
            response = self.server.respond(self.path)
        except Exception as error:  # for example a damaged line of the recording
            text = first_line(error)
            response = Response(HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, text.encode(errors="replace"))
        content = response.content
        takes_gzip = "gzip" in self.headers.get("Accept-Encoding", "") and response.kind != PNG
        is_compressed = takes_gzip and len(content) >= _MIN_COMPRESSED
        # Level 1: data go no further than this machine, or through a tunnel.
        if is_compressed:
            content = gzip.compress(content, 1)
        self.send_response(response.status)
        self.send_header("Content-Type", response.kind)
        self.send_header("Content-Length", str(len(content)))
        if is_compressed:
            self.send_header("Content-Encoding", "gzip")
        if response.policy:
            self.send_header("Content-Security-Policy", response.policy)
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "TrueTurn"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a log would contain the token."""


def _refusal(status: HTTPStatus) -> Response:
    return Response(status, PLAIN, f"{status.value} {status.phrase}\n".encode())
