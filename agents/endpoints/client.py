"""Asks one model of an OpenAI-compatible server, through the package `openai`: retries, rate limit, cache of answers.

Whatever a server does, `ask` returns an answer or raises `EndpointFault` in bounded time and memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from agents.endpoints.chat import Answer, EndpointFault, read_answer
from agents.endpoints.settings import Endpoint
from agents.engines.scripted import StillEngine
from envs.errors import UserError, first_line
from envs.execution.watchdog import bounded
from envs.tool_calls import ToolFormat

#: The most bytes of a response; the longest answers of models have a few hundred thousand.
MAX_BODY = 8 * 2**20
#: The longest waits between two tries that `openai` accepts from a server, in seconds.
MAX_RETRY_AFTER = 120
MAX_ERROR_CHARS = 500
MIN_SECRET = 12
#: The longest wait for a server before anything is played, in seconds.
CHECK_S = 15.0


class EndpointClient(StillEngine):
    """The model of an endpoint, in the place of an engine; `read` counts where answers came from.

    Example::

        client = EndpointClient(endpoint, "hermes", cache=Path("answers"))
        answer = await client.ask({"messages": [{"role": "user", "content": "2 + 2?"}]}, seed=7)
        answer.text, client.sources       # ("4", Counter({"server": 1}))
    """

    #: Unknown: only the server counts tokens.
    context_length = 0

    def __init__(self, endpoint: Endpoint, tool_format: ToolFormat, cache: Path | None = None) -> None:
        """Read the key, and try whether the server is there.

        Raises:
            UserError: package, key or server is missing, or the cache cannot be written.
        """
        try:
            openai = import_module("openai")
        except ModuleNotFoundError as error:
            fix = "pip install 'trueturn[endpoint]'"
            raise UserError("--endpoint", "needs the package openai", "none", fix) from error
        http = import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__)  # httpx, from release 3 on httpx2
        self.endpoint = endpoint
        self.tool_format: ToolFormat = tool_format
        self.sources = Counter[str]()
        key = endpoint.read_key()
        # A shorter one, such as "EMPTY", is no secret, and may be a word of the model. NUL is in no text of JSON.
        self._secret = key if len(key) >= MIN_SECRET else "\0"
        self._cache = cache
        if cache:
            try:
                cache.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fix = f"give another folder ({error.strerror})"
                raise UserError("--endpoint-cache", "must be a writable folder", str(cache), fix) from error
        self._free_at = time.monotonic()
        self._slots = asyncio.Semaphore(endpoint.max_concurrent)
        self._errors = openai.OpenAIError, http.HTTPError, http.InvalidURL, OSError, ValueError
        hooks = {
            "request": [self._wait_for_rate],
            "response": [_limit_body(http.AsyncByteStream, endpoint.timeout_s)],
        }
        server = {
            "base_url": endpoint.url,
            "api_key": key or "none",  # never the variable of another provider, which `openai` reads by itself
            # The limit of a body is of bytes on the wire, so nothing may be compressed.
            "default_headers": {"Accept-Encoding": "identity"},
        }
        self._client = openai.AsyncOpenAI(
            **server,
            max_retries=endpoint.max_retries,
            timeout=endpoint.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks),
        )
        probe = openai.OpenAI(**server, max_retries=0, timeout=CHECK_S)
        for client in (self._client, probe):  # from variables of OpenAI's own service, which this may not be
            client.organization = None
            client.project = None
        self._check(openai, probe)

    def _check(self, openai: Any, probe: Any) -> None:
        """Raise `UserError` where nobody answers or the key is refused, before retries of many episodes find out."""
        try:
            with bounded(f"asking {self.endpoint.url}", 2 * CHECK_S):
                probe.models.with_raw_response.list()
        except (openai.APIConnectionError, openai.AuthenticationError, TimeoutError) as error:
            fix = f"start the server, or give another URL or key ({type(error).__name__})"
            raise UserError("--endpoint", "must answer and accept the key", self.endpoint.url, fix) from None
        except self._errors:  # not every server lists its models
            pass

    def session(self) -> AbstractAsyncContextManager[Any]:
        """Return an empty context: the conversation belongs to the episode."""
        return nullcontext()

    async def ask(
        self, body: Mapping[str, Any], seed: int, check: Callable[[Answer], object] = lambda answer: None
    ) -> Answer:
        """Return the model's answer to a request, or the one in the cache for the same request and seed.

        The cache holds none for which `check(answer)` raises `EndpointFault`.

        Raises:
            EndpointFault: there is no usable answer after all retries.
        """
        asked = {**body, **self.endpoint.options, "model": self.endpoint.model, "messages": body["messages"]}
        asked = {name: value for name, value in asked.items() if value is not None}
        try:
            text = json.dumps([self.endpoint.url, asked, seed], sort_keys=True)
        except (TypeError, ValueError) as error:  # an environment's message may hold anything
            raise EndpointFault(f"the request cannot be written: {first_line(error)}") from None
        place = self._cache and self._cache / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        if place and place.is_file():
            try:
                answer = read_answer(place.read_bytes(), self.tool_format)
                check(answer)
                self.sources["cache"] += 1
                return answer
            except (EndpointFault, OSError):
                place.unlink(missing_ok=True)  # damaged
        async with self._slots:
            content = await self._send(asked)
        answer = read_answer(content, self.tool_format)
        check(answer)
        self.sources["server"] += 1
        if place:
            part = place.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(content)
            part.replace(place)  # a killed process leaves no half an answer
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _send(self, body: Mapping[str, Any]) -> bytes:
        """Return the body of the response, without the key: a server may write it into an answer or an error."""
        rest = {name: value for name, value in body.items() if name not in ("model", "messages")}
        endpoint = self.endpoint
        # A server may ask for long waits, which `openai` accepts.
        limit_s = (endpoint.timeout_s + MAX_RETRY_AFTER) * (endpoint.max_retries + 1)
        try:
            async with asyncio.timeout(limit_s):
                response = await self._client.chat.completions.with_raw_response.create(
                    model=body["model"], messages=body["messages"], extra_body=rest
                )
                content = response.content
        except TimeoutError:
            raise EndpointFault(f"no whole answer within {limit_s:g} s") from None
        except self._errors as error:
            reason = str(error.__cause__ or error) or type(error.__cause__ or error).__name__
            shown = f"{type(error).__name__}: {reason}".replace(self._secret, "[key]")
            raise EndpointFault(shown[:MAX_ERROR_CHARS]) from None
        return content.replace(self._secret.encode(), b"[key]")

    async def _wait_for_rate(self, request: object) -> None:
        """Wait until the rate limit has room for one more request; also called for each retry."""
        if self.endpoint.requests_per_minute:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + 60 / self.endpoint.requests_per_minute
            await asyncio.sleep(begin - time.monotonic())


def _limit_body(stream_type: type, limit_s: float) -> Callable[[Any], Any]:
    """Return a hook for responses that makes it a fault to read more than `MAX_BODY` bytes or for longer than a limit.

    The timeout of `httpx` starts again with each byte.
    """

    class Limited(stream_type):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            until = time.monotonic() + limit_s
            async for chunk in self._stream:
                num_bytes += len(chunk)
                if num_bytes > MAX_BODY:
                    raise EndpointFault(f"the response has over {MAX_BODY} bytes")
                if time.monotonic() > until:
                    raise EndpointFault(f"the response takes over {limit_s:g} s")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def limit(response: Any) -> None:
        response.stream = Limited(response.stream)

    return limit
