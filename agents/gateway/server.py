"""The server of the endpoint: one a process, on the loopback address and the event loop of the run.

Each episode has a key of its own, which is known as long as the episode is played.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agents.gateway.chat import Asked, Chat, Refusal, read_json, read_request
from agents.gateway.dialects import DIALECTS
from agents.gateway.messages import Json
from envs.errors import UserError, first_line

if TYPE_CHECKING:
    from agents.gateway.episode import EpisodeEndpoint

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise UserError("agent", "needs a web server", str(error), "pip install 'trueturn[serve]'") from error

MAX_BODY = 64 * 2**20
#: A larger body is read on a thread: meanwhile other episodes go on.
SMALL_BODY = 2**14


class Gateway:
    """The endpoints of all episodes that are played on one event loop. The server ends with the loop.

    Example::

        gateway = Gateway()
        gateway.endpoints["sk-1"] = endpoint
        client = AsyncOpenAI(base_url=gateway.base_url, api_key="sk-1")
    """

    def __init__(self) -> None:
        """Listen on a free port. Connections wait there until the server takes them."""
        self.endpoints: dict[str, EpisodeEndpoint] = {}
        answers = [Route(one.path, functools.partial(self._answer, one), methods=["POST"]) for one in DIALECTS]
        self.app = Starlette(routes=[*answers, Route("/v1/models", _models, methods=["GET"])])
        # All agents of a step begin at once, and wait to be taken.
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.base_url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self.app,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
        )
        self.server = uvicorn.Server(config)
        # Ctrl-C is the run's.
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self.loop = asyncio.get_running_loop()
        _GATEWAYS[self.loop] = self
        serving = self.loop.create_task(self.server.serve(sockets=[self.listener]))
        serving.add_done_callback(self._close)

    def _close(self, serving: object) -> None:
        """Close what the server holds when its event loop ends."""
        _GATEWAYS.pop(self.loop, None)
        self.listener.close()
        for connection in tuple(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def _answer(self, dialect: Chat, request: Request) -> Response:
        endpoint = self.endpoints.get(_key(request))
        if endpoint is None:
            rule = "the key must be that of an episode which is played now (OPENAI_API_KEY)"
            return _json(dialect.error(Refusal(rule, "invalid_api_key")), 401)
        try:
            body = await _body(request)
            if len(body) <= SMALL_BODY:
                asked = _read(body, dialect, endpoint)
            else:
                asked = await asyncio.to_thread(_read, body, dialect, endpoint)
            # Clients of OpenAI count how often they have sent a request.
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            choices = await endpoint.answer(asked, hash(body), is_retry)
        except ClientDisconnect:
            return Response(status_code=400)
        except (UserError, Refusal) as error:
            refusal = endpoint.refuse(error)
            return _json(dialect.error(refusal), refusal.status)
        written = dialect.write(asked, choices)
        if asked.stream:
            return Response(dialect.stream(written, asked.stream_options), media_type="text/event-stream")
        return _json(written)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    # Where clients of Anthropic write it.
    return request.headers.get("x-api-key", "")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Refusal(f"the body has over {MAX_BODY} bytes", "too_large", 413)
    return bytes(body)


def _read(body: bytes, dialect: Chat, endpoint: EpisodeEndpoint) -> Asked:
    try:
        return read_request(dialect.read(read_json(body)), endpoint.loop.sampling, endpoint.images)
    except (RecursionError, MemoryError) as error:  # nested too deeply, for example
        raise UserError("the body", "must be one that can be read", first_line(error), "send less") from error


def _json(value: Json, status: int = 200) -> Response:
    # As ASCII: a model can write half of a surrogate pair, which no other encoding has.
    return Response(json.dumps(value), status, media_type="application/json")


async def _models(request: Request) -> Response:
    return _json({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "trueturn"}]})


#: One per event loop.
_GATEWAYS: dict[asyncio.AbstractEventLoop, Gateway] = {}


@contextlib.contextmanager
def open_endpoint(endpoint: EpisodeEndpoint) -> Iterator[tuple[str, str]]:
    """Serve an episode; yields its base URL and its key. The first one of an event loop starts the server."""
    gateway = _GATEWAYS.get(asyncio.get_running_loop()) or Gateway()
    key = f"sk-{secrets.token_urlsafe(24)}"
    gateway.endpoints[key] = endpoint
    try:
        yield gateway.base_url, key
    finally:
        del gateway.endpoints[key]
