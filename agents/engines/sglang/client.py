"""Calls one SGLang server over HTTP. The error of a failed call says whether another try makes sense."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from agents.engines.sglang.images import HELLO, PROTOCOL
from agents.engines.sglang.releases import UNKNOWN, Release
from agents.engines.weight_servers import (
    Adapter,
    GroupAddress,
    ServerLost,
    ServerRefused,
    WeightMessage,
)
from envs.execution.threads import DaemonThread

#: Time limits: to answer `model_info` or `server_info`, which a busy server does late, to say how it takes images, to
#: load weights, to load an adapter, and to free or take memory.
ALIVE_S = 20.0
HELLO_S = 5.0
UPDATE_S = 600.0
ADAPTER_S = 120.0
MEMORY_S = 120.0
#: How long a server may work on after its last answer before new weights come anyway.
IDLE_S = 5.0
#: Time limits to join a process group, and to receive and load a message of weights over it: longer than those of its
#: rank 0, which then knows why.
JOIN_S = 150.0
RECEIVE_S = 150.0
#: Bytes of an answer. The log-probs of a million tokens take about 30 MiB, the experts of 32,000 new tokens at most
#: 122 MiB (94 layers, 8 of them each).
MAX_ANSWER = 2**27


def authorization(api_key: str) -> dict[str, str]:
    """Return the headers that prove the key; none without a key."""
    if api_key:
        return {"Authorization": f"Bearer {api_key}"}
    return {}


def ask(url: str, path: str, api_key: str, timeout_s: float = 10.0) -> Any:
    """Return what a server answers to a GET, without an event loop; errors are those of `SGLangClient.call`."""

    async def one() -> Any:
        async with aiohttp.ClientSession(headers=authorization(api_key)) as http:
            return await SGLangClient(url, http).call(path, timeout_s=timeout_s)

    thread = DaemonThread("question")
    answer = thread.begin(lambda: asyncio.run(one()))
    thread.end()
    try:
        return answer.result(timeout_s + 1.0)
    except TimeoutError:  # an event loop waits for a name that is being looked up, however long that takes
        raise ServerLost(f"{url}/{path}: no whole answer within {timeout_s:g} s") from None


async def _text(response: aiohttp.ClientResponse) -> str:
    """Return the text of an answer. Raises `ValueError` where it is no text, or longer than `MAX_ANSWER`."""
    content = bytearray()
    # In pieces: an answer without an end must not fill the memory.
    async for piece in response.content.iter_chunked(2**20):
        content += piece
        if len(content) > MAX_ANSWER:
            raise ValueError(f"the answer has more than {MAX_ANSWER} bytes")
    return content.decode("utf-8")


class SGLangClient:
    """Calls to one server.

    Example::

        client = SGLangClient("http://127.0.0.1:30000", aiohttp.ClientSession())
        answer = await client.call("generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}})
    """

    def __init__(
        self, url: str, http: aiohttp.ClientSession, timeout_s: float = 600.0, keeps_kv_cache: bool = False
    ) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._timeout_s = timeout_s
        #: Whether new weights leave the prefix cache as it is.
        self._keeps_kv_cache = keeps_kv_cache
        self.release = UNKNOWN
        #: The node of the Ray cluster that the server runs on; "" without one.
        self.node = ""
        #: Whether it was started with what it needs to free memory.
        self.frees_memory = False
        self._waits: set[asyncio.Timeout] = set()

    async def call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Send a POST with the body, or a GET without one; return the decoded answer.

        Raises:
            ServerLost: no answer, one of status 5xx, or one that cannot be decoded.
            ServerRefused: any other status but 200, also one that names another place; holds the server's text.
        """
        # A host that is gone does not refuse a connection, and would hold the call for its whole time.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        method = "GET" if body is None else "POST"
        wait = asyncio.timeout(timeout_s or self._timeout_s)
        try:
            async with wait:
                self._waits.add(wait)
                async with self._http.request(
                    method,
                    f"{self.url}/{path}",
                    json=body,
                    timeout=timeout,
                    allow_redirects=False,  # the key would go to whatever host is named
                ) as response:
                    text = await _text(response)
                    if response.status == 200:
                        if response.content_type == "application/json":
                            return json.loads(text)
                        return text
        # A `TimeoutError` is an `OSError`; the last two are of what is no JSON.
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise ServerLost(f"{self.url}/{path}: {type(error).__name__} {error}".strip()) from error
        finally:
            self._waits.discard(wait)
        said = f"{self.url}/{path}: status {response.status}: {self._without_key(text)[:1000]}"
        if response.status >= 500:
            raise ServerLost(said)
        raise ServerRefused(said, response.status)

    def _without_key(self, text: str) -> str:
        """Return what a server said; one may repeat the headers that it got."""
        key = self._http.headers.get("Authorization", "").removeprefix("Bearer ")
        if key:
            return text.replace(key, "(key)")
        return text

    def time_out_calls(self) -> None:
        """End every call that waits for an answer, as if its time were up."""
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)

    async def is_alive(self) -> bool:
        """Whether the server answers at all."""
        return not await self.silence()

    async def silence(self) -> str:
        """Return why the server does not answer; "" if it does, and names its release unless it refuses to."""
        try:
            model = await self.call("model_info", timeout_s=ALIVE_S)
            try:
                server = await self.call("server_info", timeout_s=ALIVE_S)
            except ServerRefused:  # a gateway
                server = None
        except (ServerLost, ServerRefused) as error:
            return str(error)
        model_type = model.get("model_type") if isinstance(model, dict) else None
        if isinstance(server, dict):
            self.release = Release.of(server, str(model_type))
            self.frees_memory = server.get("enable_memory_saver") is True
        else:
            self.release = UNKNOWN
        return ""

    async def keeps_images(self) -> bool:
        """Whether the server has our image processor, which keeps what it has been sent."""
        body = {"input_ids": [0], "image_data": [HELLO], "sampling_params": {"max_new_tokens": 1}}
        try:
            await self.call("generate", body, timeout_s=HELLO_S)
        except ServerRefused as error:
            return PROTOCOL in str(error)
        except ServerLost:  # SGLang answers status 500 to what it cannot read
            pass
        return False

    async def weight_version(self) -> str:
        """Return the version of the weights that the server reports."""
        answer = await self.call("model_info", timeout_s=ALIVE_S)
        if not (isinstance(answer, dict) and "weight_version" in answer):
            raise ServerLost(f"{self.url}/model_info: names no weights: {answer!r:.500}")
        return str(answer["weight_version"])

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a checkpoint folder, which the server must be able to read, and empty its prefix cache unless kept."""
        body = {"model_path": folder, **self._ending(True, version)}
        await self._wait_until_idle()
        await self._update("update_weights_from_disk", body)

    async def update_from_tensors(self, payloads: Sequence[str], version: int, num_gpus: int = 1) -> None:
        """Load pickled handles of tensors on a GPU that the server sees; each of its own GPUs copies what it needs.

        Only the last payload empties the prefix cache and sets the version. So a server that is lost before it reports
        the old version, and is given the weights again.
        """
        # Each process of a tensor-parallel server takes the payload at its own place.
        bodies = [{"serialized_named_tensors": [payload] * num_gpus} for payload in payloads]
        await self._push("update_weights_from_tensor", bodies, version)

    async def num_gpus(self) -> int:
        """Return how many GPUs serve together, as the server says: its tensor-parallel size."""
        answer = await self.call("server_info", timeout_s=ALIVE_S)
        if isinstance(answer, dict) and "tp_size" in answer:
            return int(answer["tp_size"])
        return 1

    async def join_group(self, group: GroupAddress, first_rank: int) -> None:
        """Join a process group that weights are sent over; each GPU of the server is a member, from `first_rank` on."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": first_rank,
            "world_size": group.num_members,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._update("init_weights_update_group", body, JOIN_S)

    async def update_from_group(self, messages: Sequence[WeightMessage], group: str, version: int) -> None:
        """Receive and load weights over a process group; only the last message sets the version, as above.

        Ask for a group only if the server is in it: SGLang's scheduler ends at a name that it does not know.
        """
        bodies = [
            {
                "names": message.names,
                "dtypes": [message.dtype] * len(message.names),
                "shapes": message.shapes,
                "group_name": group,
                "load_format": "flattened_bucket",
            }
            for message in messages
        ]
        await self._push("update_weights_from_distributed", bodies, version, RECEIVE_S)

    async def leave_group(self, group: str) -> None:
        """Leave a process group that weights were sent over."""
        await self._update("destroy_weights_update_group", {"group_name": group}, ALIVE_S)

    async def _wait_until_idle(self) -> None:
        """Wait until the server has nothing in progress, as far as it tells, if new weights are to empty its cache.

        Its scheduler sends the last answer while the next step runs already, and ends if it is to empty its cache
        before that is done.
        """
        if self._keeps_kv_cache:
            return
        with suppress(ServerRefused):
            await self.call(f"flush_cache?timeout={IDLE_S:g}", {}, ALIVE_S)

    async def _push(self, path: str, bodies: Sequence[dict[str, Any]], version: int, timeout_s: float = 0.0) -> None:
        """Send weights in parts to a server that is idle, in a session of updates if its release has them."""
        await self._wait_until_idle()
        if self.release.has_update_sessions:
            await self._begin_update()
        for place, body in enumerate(bodies, 1):
            await self._update(path, body | self._ending(place == len(bodies), version), timeout_s)
        if self.release.has_update_sessions:
            await self._update("end_weight_update", {})

    async def _begin_update(self) -> None:
        """Open a session of updates; first close one that an earlier update left open because it failed."""
        try:
            await self._update("begin_weight_update", {})
        except ServerRefused as error:
            if "already open" not in str(error):
                raise
            await self._update("end_weight_update", {})
            await self._update("begin_weight_update", {})

    async def free_memory(self, kinds: Sequence[str]) -> None:
        """Free "kv_cache", "weights" or both; freed weights lose their values. No request may be in progress.

        A server that is not idle yet would end by it, and one that empties its cache is idle.
        """
        await self.call(f"flush_cache?timeout={MEMORY_S / 2:g}", {}, MEMORY_S)
        await self.call("release_memory_occupation", {"tags": list(kinds)}, MEMORY_S)

    async def take_memory(self, kind: str) -> None:
        """Take a kind of memory that was freed: the weights before new ones are pushed, the cache after that."""
        await self.call("resume_memory_occupation", {"tags": [kind]}, MEMORY_S)

    async def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Load an adapter, and make its name the version of the weights. It writes what asks for it by its name.

        The version comes last. So a server that is lost before reports the old one, and is given the adapter again.
        """
        body: dict[str, Any] = {"lora_name": name, "config_dict": adapter.config}
        if self.release.takes_adapters_by_gpu:
            body["serialized_named_tensors"] = [adapter.tensors] * await self.num_gpus()
        else:
            body["serialized_tensors"] = adapter.tensors
        try:
            await self._update("load_lora_adapter_from_tensors", body, ADAPTER_S)
        except ServerRefused as error:
            if "already loaded" not in str(error):  # by a call whose answer was lost
                raise
        await self._update("update_weight_version", {"new_version": name, "abort_all_requests": False}, ALIVE_S)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the server waits for the requests that use it."""
        await self._update("unload_lora_adapter", {"lora_name": name}, ALIVE_S)

    async def _update(self, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> None:
        answer = await self.call(path, body, timeout_s or max(UPDATE_S, self._timeout_s))
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise ServerRefused(f"{self.url}/{path}: {answer!r:.1000}")

    def _ending(self, is_last: bool, version: int) -> dict[str, Any]:
        """Return what the last message of an update has: it empties the prefix cache and sets the version."""
        flush = is_last and not self._keeps_kv_cache
        return {"flush_cache": flush, **({"weight_version": str(version)} if is_last else {})}
