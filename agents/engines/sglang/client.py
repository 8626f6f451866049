"""One SGLang server over HTTP: a call in, its JSON out, or an error that says whether another try makes sense.

Measured on SGLang 0.5.15.post1: `/generate` takes ids with one placeholder per image, expands them itself and keeps all
other ids verbatim; `flush_cache` empties the prefix cache but not the cache of encoded images, which is keyed by
`mm_hashes` where a request gives them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from agents.types import GenerateRequest, ProcessedImage

#: Added to the logit of a token that must never be drawn. Finite, for infinity is no JSON; exp of it is 0.
NEVER = -1e9
#: How long a server may take to say that it is there, which a busy one does late, and to load weights.
ALIVE_S, UPDATE_S = 20.0, 600.0

_URIS: WeakKeyDictionary[ProcessedImage, str] = WeakKeyDictionary()


class ServerLost(Exception):
    """The server gave no answer, or one that makes no sense: it is gone, broken or too slow. Another may answer."""


class ServerRefused(Exception):
    """The server answered that it will not do this; asking again would not help."""


class SGLangClient:
    """Calls to one server.

    Example::

        client = SGLangClient("http://127.0.0.1:30000", aiohttp.ClientSession())
        answer = await client.call("generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}})
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, timeout_s: float = 600.0) -> None:
        self.url, self._http, self._timeout_s = url.rstrip("/"), http, timeout_s
        self._waits: set[asyncio.Timeout] = set()

    async def call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Post a body, or get where there is none; return the decoded answer.

        Raises:
            ServerLost: no answer, one of status 5xx, or one that cannot be decoded.
            ServerRefused: any other status but 200; holds the server's text.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        method = "GET" if body is None else "POST"
        wait = asyncio.timeout(timeout_s or self._timeout_s)
        try:
            async with wait:
                self._waits.add(wait)
                async with self._http.request(method, f"{self.url}/{path}", json=body, timeout=timeout) as response:
                    if response.status == 200:
                        is_json = response.content_type == "application/json"
                        return await response.json() if is_json else await response.text()
                    text = (await response.text())[:1000]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # the last: no JSON, or no text
            raise ServerLost(f"{self.url}/{path}: {type(error).__name__} {error}".strip()) from error
        finally:
            self._waits.discard(wait)
        kind = ServerLost if response.status >= 500 else ServerRefused
        raise kind(f"{self.url}/{path}: status {response.status}: {text}")

    def hang_up(self) -> None:
        """End every call that waits for an answer, as if its time were up."""
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)

    async def is_alive(self) -> bool:
        """Whether the server answers at all."""
        try:
            await self.call("model_info", timeout_s=ALIVE_S)
        except (ServerLost, ServerRefused):
            return False
        return True

    async def weight_version(self) -> str:
        """Return the server's own name for its weights."""
        answer = await self.call("model_info", timeout_s=ALIVE_S)
        if not (isinstance(answer, dict) and "weight_version" in answer):
            raise ServerLost(f"{self.url}/model_info: names no weights: {answer!r:.500}")
        return str(answer["weight_version"])

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a checkpoint folder, which the server must be able to read, and empty its prefix cache."""
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        await self._update("update_weights_from_disk", body)

    async def update_from_tensors(self, payload: str, version: int, is_last: bool, num_gpus: int = 1) -> None:
        """Load pickled handles of tensors on a GPU that the server sees; each of its own GPUs copies what it needs.

        The last payload empties the prefix cache and names the weights: those of a server that is lost before it have
        the old name, and are found out.
        """
        body = {"serialized_named_tensors": [payload] * num_gpus, "flush_cache": is_last}
        await self._update("update_weights_from_tensor", body | ({"weight_version": str(version)} if is_last else {}))

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        answer = await self.call(path, body, timeout_s=max(UPDATE_S, self._timeout_s))
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise ServerRefused(f"{self.url}/{path}: {answer!r:.1000}")


def collapse(ids: Sequence[int], images: Sequence[ProcessedImage], image_token_id: int | None) -> list[int]:
    """Return the stream with one placeholder per image, as the server takes it.

    >>> collapse([7, 9, 9, 7], [ProcessedImage("", np.zeros((8, 1)), (1, 2, 4), num_tokens=2)], image_token_id=9)
    [7, 9, 7]
    """
    ids, short, position = list(ids), [], 0
    for image in images:
        first = ids.index(image_token_id, position)  # type: ignore[arg-type]
        short += ids[position : first + 1]
        position = first + image.num_tokens
    return short + ids[position:]


def data_uri(image: ProcessedImage) -> str:
    """Return the picture, already of the size that the model reads, as the server takes it; made once per picture."""
    if image not in _URIS:
        _URIS[image] = "data:image/png;base64," + base64.b64encode(image.png).decode()
    return _URIS[image]


def salted_hash(image: ProcessedImage, salt: str) -> str:
    """Return 14 hexadecimal digits (a positive 64-bit number to the server) that depend on picture and salt."""
    return hashlib.blake2b(f"{image.digest}/{salt}".encode(), digest_size=7).hexdigest()


def generate_body(
    request: GenerateRequest, written: Sequence[int], rid: str, image_token_id: int | None, salt: str
) -> dict[str, Any]:
    """Return the body of `/generate` that goes on with a turn of which `written` is there already.

    `salt` becomes part of each image's hash: with the weights' version, an image that was encoded by older weights is
    not found again.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [*collapse(request.ids, request.images, image_token_id), *written],
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": request.max_new_tokens - len(written),
            "stop_token_ids": list(sampling.stop_ids),
            "logit_bias": {str(token): NEVER for token in sampling.suppressed_ids} or None,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        },
        "return_logprob": True,
    }
    return body | image_fields(request.images, salt)


def score_body(
    ids: Sequence[int], images: Sequence[ProcessedImage], image_token_id: int | None, salt: str
) -> dict[str, Any]:
    """Return the body of `/generate` that asks for the log-probs of a whole stream."""
    return {
        "input_ids": collapse(ids, images, image_token_id),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    } | image_fields(images, salt)


def image_fields(images: Sequence[ProcessedImage], salt: str) -> dict[str, Any]:
    """Return the pictures of a request and their hashes."""
    if not images:
        return {}
    return {
        "image_data": [data_uri(image) for image in images],
        "mm_hashes": [salted_hash(image, salt) for image in images],
    }
