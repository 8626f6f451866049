"""A server that speaks the part of SGLang's protocol that TrueTurn uses, on the embedded engine: a real network writes.

SGLang itself needs a GPU. What this keeps of it, as measured on 0.5.15.post1: one placeholder per image, expanded here
(an expanded stream is refused with status 500); log-probs by token; `weight_version` stamped on every answer; encoded
images kept by `mm_hashes` over weight updates, which `flush_cache` does not empty; aborted requests answer with what
they have, those that had not begun without a count of their prompt; an abort is of every name that begins like the one
given. Adapters are loaded under a name that is used once, and a request names the one that writes it (as read in the
source of 0.5.15.post1). Where the environment names our image processor, as for servers that we start, images are
kept by its own code. Run as `python -m tests.agents.engines.sglang_server --model-path FOLDER --port PORT`.

With `--release 0.5.23` it does what the source of that release does: encoded images are kept by their file, and
`mm_hashes` break the server (status 500 here, a CUDA error there); tensors are taken in a session only; answers list
which weights wrote which tokens.

With `--enable-return-routed-experts` answers have the experts of a mixture's tokens, if a request asks for them.

With `--enable-memory-saver` memory is freed and taken by kind (as read in the source): freed weights lose their values,
and what needs memory that is not there ends the server.

`/misbehave` takes faults for the next calls of a path, `/reset` makes the server one that was only just started, and
`/images` says how images came: `uri`, `png` (to be kept) or `key`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import json
import os
import pickle
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from aiohttp import web
from PIL import Image
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper

from agents.engines.hf import HFEngine
from agents.engines.hf_batch import CachedPrefix
from agents.engines.sglang.images import HELLO
from agents.engines.sglang.in_server.kept_images import (
    Grid,
    ImageAddress,
    ImageError,
    KeptImages,
    image_entries,
    map_image,
)
from agents.model.delta_net import States
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.types import GenerateRequest, ProcessedImage, SamplingParams
from tests.builders import full_logprobs

#: The releases that this speaks like.
OLD, NEW = "0.5.15.post1", "0.5.23"


class Emulator:
    """One server's state."""

    def __init__(
        self,
        model_path: str,
        slow_s: float,
        api_key: str = "",
        release: str = OLD,
        lora: Lora | None = None,
        num_gpus: int = 1,
        has_memory_saver: bool = False,
        dtype: torch.dtype = torch.float32,
        has_cache: bool = False,
        has_experts: bool = False,
    ) -> None:
        self.api_key, self.release = api_key, release
        self.has_session = False  # of updates, in the new release
        self.lora = lora
        self.adapters: dict[str, LoadedAdapter] = {}
        self.users: dict[str | None, int] = {}  # by adapter: requests that have not ended
        self.turn = asyncio.Condition()  # requests of one adapter write at a time
        self.num_writing = 0
        self.active: str | None = None
        torch.set_num_threads(1)
        self.model_path = model_path
        self.renderer = Renderer.from_checkpoint(model_path)
        network = PolicyModel.load(model_path)
        for module in network.modules():
            if type(module) is nn.Linear:
                module.__class__ = AdaptedLinear
        self.engine = HFEngine(network, max_batch=256, max_wait_s=0.02)
        self.slow_s, self.version, self.checkpoint = slow_s, "default", model_path
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.images: dict[str, tuple[ProcessedImage, str]] = {}  # the "encoder cache": by hash, never emptied
        self.keeps_images = bool(os.environ.get("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"))
        self.kept = KeptImages(self._cut)
        self.came: Counter[str] = Counter()
        self.updates: list[str] = []
        self.updating = asyncio.Lock()
        self.num_gpus, self.dtype = num_gpus, dtype  # it computes in float32
        self.groups: dict[str, list[dist.ProcessGroup]] = {}  # by name: one for each GPU
        self.faults: dict[str, list[str]] = {}  # by path: those of the next calls
        self.has_memory_saver = has_memory_saver
        self.has_cache = has_cache
        self.has_experts = has_experts
        self.prefixes: dict[str, list[CachedPrefix]] = {}  # what was read, by `extra_key`
        self.freed: list[str] = []  # kinds of memory

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[self.check_key, self.maybe_misbehave])
        app.router.add_post("/misbehave", self.misbehave)
        app.router.add_post("/reset", self.reset)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/updates", self.list_updates)
        app.router.add_get("/held", self.list_held)
        app.router.add_get("/images", self.list_images)
        app.router.add_get("/digests", self.list_digests)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_post("/release_memory_occupation", self.free_memory)
        app.router.add_post("/resume_memory_occupation", self.take_memory)
        app.router.add_post("/update_weights_from_disk", self.update_from_disk)
        app.router.add_post("/update_weight_version", self.update_version)
        app.router.add_post("/load_lora_adapter_from_tensors", self.load_adapter)
        app.router.add_post("/unload_lora_adapter", self.unload_adapter)
        app.router.add_post("/update_weights_from_tensor", self.update_from_tensor)
        app.router.add_post("/init_weights_update_group", self.join_group)
        app.router.add_post("/destroy_weights_update_group", self.leave_group)
        app.router.add_post("/update_weights_from_distributed", self.update_from_group)
        if self.release == NEW:
            app.router.add_post("/begin_weight_update", self.begin_update)
            app.router.add_post("/end_weight_update", self.end_update)
        return app

    async def misbehave(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.faults.setdefault(body["path"], []).extend(body["faults"])
        return web.Response()

    async def reset(self, request: web.Request) -> web.Response:
        self.slow_s, self.version = (await request.json())["slow_s"], "default"
        self.faults, self.images, self.updates, self.has_session, self.freed = {}, {}, [], False, []
        self.adapters, self.users, self.checkpoint, self.prefixes = {}, {}, self.model_path, {}
        self.kept, self.came = KeptImages(self._cut), Counter()
        while self.running:
            for task in self.running.values():
                task.cancel()
            await asyncio.sleep(0.01)
        async with self.updating:
            self.engine.load_weights(dict(PolicyModel.load(self.model_path).named_parameters()), version=0)
        return web.Response()

    @web.middleware
    async def check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
    ) -> web.StreamResponse:
        """Refuse a call without the key, as the real one does; what only tests call needs none."""
        is_real = request.path not in ("/misbehave", "/reset", "/updates", "/held", "/images", "/digests")
        if self.api_key and is_real and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @web.middleware
    async def maybe_misbehave(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
    ) -> web.StreamResponse:
        """Answer as the next fault of the path says, if there is one."""
        waiting = self.faults.get(request.path.strip("/"))
        is_hello = HELLO.encode() in await request.read()
        fault = waiting.pop(0) if waiting and not is_hello else ""
        if fault.startswith("status "):
            return web.Response(status=int(fault.removeprefix("status ")), text="as was asked for")
        if fault == "die":
            os._exit(1)
        if fault == "forget the images":
            self.kept = KeptImages(self._cut)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "not json":
            return web.Response(text="{", content_type="application/json")
        version = self.version
        response = await handler(request)
        if fault == "hang up":  # after the work was done
            assert request.transport
            request.transport.abort()
        if fault == "keep the version":
            self.version = version
        if fault == "keep the adapter" and len(self.adapters) > 1:  # the new name means the old values
            *_, old, new = self.adapters
            self.adapters[new] = self.adapters[old]
        if fault == "scale twice":
            new = list(self.adapters)[-1]
            self.adapters[new] = replace(self.adapters[new], scaling=2 * self.adapters[new].scaling)
        if fault.startswith("answer "):
            answer = json.loads(response.text)
            spoil(answer, fault.removeprefix("answer "))
            if fault == "answer aborted":  # in its queue: the real one never counts such a request as ended
                self.users[(await request.json()).get("lora_path")] += 1
            return web.json_response(answer)
        return response

    async def model_info(self, _: web.Request) -> web.Response:
        config = self.engine.model.config
        facts = {"architectures": config.architectures, "model_type": config.model_type}
        return web.json_response({"weight_version": self.version, **facts})

    async def server_info(self, _: web.Request) -> web.Response:
        facts = {"tp_size": self.num_gpus, "enable_memory_saver": self.has_memory_saver}
        facts["enable_return_routed_experts"] = self.has_experts
        return web.json_response({"version": self.release, **facts})

    async def list_updates(self, _: web.Request) -> web.Response:
        return web.json_response(self.updates)

    async def list_held(self, _: web.Request) -> web.Response:
        return web.json_response({"adapters": list(self.adapters), "num_images": len(self.images)})

    async def list_images(self, _: web.Request) -> web.Response:
        return web.json_response(self.came)

    async def list_digests(self, _: web.Request) -> web.Response:
        """Answer with the SHA-256 of every tensor that is served, by its name in a checkpoint."""
        return web.json_response(digests(dict(self.engine.model.named_parameters())))

    async def generate(self, request: web.Request) -> web.Response:
        """Answer with the network under the adapter that the request names, or with the network alone."""
        body = await request.json()
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            return web.json_response({"error": {"message": f"never been loaded: {name}"}}, status=400)
        self.users[name] = self.users.get(name, 0) + 1
        try:
            async with self.writing(name):
                return await self._generate(request, body)
        finally:
            self.users[name] -= 1

    @asynccontextmanager
    async def writing(self, name: str | None) -> AsyncIterator[None]:
        """Put an adapter into the network, once the requests of another one have ended."""
        async with self.turn:
            await self.turn.wait_for(lambda: not self.num_writing or self.active == name)
            self.num_writing, self.active = self.num_writing + 1, name
            adapter = self.adapters[name] if name else None
        for module_name, module in self.engine.model.backbone.named_modules():
            if isinstance(module, AdaptedLinear):
                module.use(adapter, module_name)
        try:
            yield
        finally:
            async with self.turn:
                self.num_writing -= 1
                self.turn.notify_all()

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.freed:  # an access to memory that is not there
            os._exit(1)
        try:
            images = await self._images(body.get("image_data", []), body.get("mm_hashes", []))
            ids = self._expand(body["input_ids"], images)
        except ImageError as error:
            return web.Response(status=400, text=str(error))
        except ValueError as error:
            return web.Response(status=500, text=str(error))
        if body.get("logprob_start_len") == 0:
            scores = await self.engine.score(ids, images)
            pairs = [[None, ids[0], None], *([float(x), i, None] for x, i in zip(scores, ids[1:], strict=True))]
            return web.json_response({"output_ids": [], "meta_info": {"input_token_logprobs": pairs}})
        params: Mapping[str, Any] = body["sampling_params"]
        generate = GenerateRequest(
            ids=tuple(ids),
            images=tuple(images),
            max_new_tokens=params["max_new_tokens"],
            sampling=SamplingParams(
                params["temperature"],
                tuple(params["stop_token_ids"]),
                tuple(int(token) for token in params["logit_bias"] or ()),
                max(0, params["top_k"]),
                params["top_p"],
                params["min_p"],
            ),
            seed=zlib.crc32(body["rid"].rpartition("-")[2].encode()),  # of its number: every run writes the same
        )
        key = body.get("extra_key", "")
        prefix = self._longest_prefix(key, generate)
        task = self.running[body["rid"]] = asyncio.create_task(self._write(generate, key, prefix))
        try:
            written, finish, logprobs = await task
        except asyncio.CancelledError:
            if request.transport is None or request.transport.is_closing():
                raise
            written, finish, logprobs = (), "abort", ()
        finally:
            self.running.pop(body["rid"], None)
        meta = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(ids),
            "cached_tokens": len(prefix.ids),
            "weight_version": self.version,
            "output_token_logprobs": [[x, i, None] for x, i in zip(logprobs, written, strict=True)],
        }
        if num_shown := body.get("top_logprobs_num"):
            meta |= self._among_all(generate, written, num_shown)
        if self.has_experts and body.get("return_routed_experts") and (written or finish != "abort"):
            if body["routed_experts_start_len"] > len(ids):
                return web.Response(status=400, text="routed_experts_start_len is higher")
            meta["routed_experts"] = self._experts(generate, written, body["routed_experts_start_len"])
        if self.release == NEW and written:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": len(written)}]
        if finish == "abort" and not written:
            del meta["prompt_tokens"], meta["cached_tokens"]
            self.users[body.get("lora_path")] += 1  # as above
        return web.json_response({"output_ids": list(written), "meta_info": meta})

    def _among_all(self, request: GenerateRequest, written: Sequence[int], num_shown: int) -> dict[str, Any]:
        """Return the log-probs of tokens among all ids, and the most likely ids at each (as read in the source)."""
        with torch.inference_mode():
            table = full_logprobs(self.engine.model, (*request.ids, *written), request.images, request.sampling)
        table = table[len(request.ids) - 1 :]
        tops = zip(*(part.tolist() for part in table.topk(num_shown)), strict=True)
        return {
            "output_token_logprobs": [[float(row[i]), i, None] for row, i in zip(table, written, strict=True)],
            "output_top_logprobs": [[[x, i, None] for x, i in zip(*top, strict=True)] for top in tops],
        }

    def _experts(self, request: GenerateRequest, written: Sequence[int], start: int) -> str:
        """Return the experts of the tokens from `start` on, all but the last one: int32 in base64."""
        found: dict[int, list[Tensor]] = {}  # by thread: the engine may compute meanwhile
        routers = [m for m in self.engine.model.modules() if type(m).__name__.endswith("TopKRouter")]

        def keep(_: Any, __: Any, output: tuple[Tensor, ...]) -> None:
            found.setdefault(threading.get_ident(), []).append(output[2])

        hooks = [router.register_forward_hook(keep) for router in routers]
        with torch.inference_mode():
            full_logprobs(self.engine.model, (*request.ids, *written), request.images, request.sampling)
        for hook in hooks:
            hook.remove()
        experts_TLK = torch.stack(found[threading.get_ident()], 1)[start:-1]
        return base64.b64encode(experts_TLK.to(torch.int32).numpy().tobytes()).decode()

    def _longest_prefix(self, key: str, request: GenerateRequest) -> CachedPrefix:
        """Return the longest part of a stream that was read under a key, by whatever weights. Its last token is always
        read: it gives the first log-probs.
        """
        found = [prefix for prefix in self.prefixes.get(key, ()) if request.ids[: len(prefix.ids)] == prefix.ids]
        longest = max(found, key=lambda prefix: len(prefix.ids), default=CachedPrefix())
        if len(longest.ids) < len(request.ids):
            return longest
        return first(longest, len(longest.ids) - 1)

    async def _write(
        self, request: GenerateRequest, key: str, prefix: CachedPrefix
    ) -> tuple[list[int], str, list[float]]:
        """Write piece by piece, so that a request can be ended in the middle of a turn with what it has."""
        ids: list[int] = []
        logprobs: list[float] = []
        finish = "length"
        try:
            async with self.engine.session() as session:
                session.prefix = prefix
                while finish == "length" and len(ids) < request.max_new_tokens:
                    piece = replace(
                        request,
                        ids=request.ids + tuple(ids),
                        max_new_tokens=min(4, request.max_new_tokens - len(ids)),
                        seed=request.seed + len(ids),
                    )
                    done = await session.generate(piece)
                    ids, logprobs, finish = [*ids, *done.ids], [*logprobs, *done.logprobs], done.finish
                    if self.has_cache:
                        self.prefixes.setdefault(key, []).append(session.prefix)
                    await asyncio.sleep(self.slow_s)
        except asyncio.CancelledError:
            finish = "abort"
        return ids, finish, logprobs

    async def _images(self, image_data: list[str], hashes: list[str]) -> list[ProcessedImage]:
        entries = image_entries(image_data) if self.keeps_images else None
        if entries is None:
            if self.release == NEW:
                if hashes:
                    raise ValueError("CUDA error: device-side assert triggered")
                hashes = image_data
            images = [self._read(base64.b64decode(uri.split(",", 1)[1])) for uri in image_data]
            self.came["uri"] += len(images)
        else:
            self.came.update("png" if entry.png else "key" for entry in entries)
            hashes = [entry.hash for entry in entries]
            images = [self._mapped(address) for address in await self.kept.addresses(entries)]
        return [self._encoded(image, key) for image, key in zip(images, hashes, strict=True)]

    def _read(self, png: bytes) -> ProcessedImage:
        assert self.renderer.images
        return self.renderer.images.process(Image.open(io.BytesIO(png)))

    def _cut(self, png: bytes) -> tuple[Tensor, Grid]:
        image = self._read(png)
        return torch.from_numpy(image.pixels_PD), image.grid_thw

    def _mapped(self, address: ImageAddress) -> ProcessedImage:
        time, height, width = address.grid_thw
        num_tokens = time * height * width // self.renderer.merge_size**2
        return ProcessedImage(address.key, map_image(address).numpy(), address.grid_thw, num_tokens)

    def _encoded(self, image: ProcessedImage, key: str) -> ProcessedImage:
        image, checkpoint = self.images.setdefault(key, (image, self.checkpoint))
        # The real one goes on with features of the old weights, and says nothing.
        if checkpoint != self.checkpoint and not self.has_cache:
            raise ValueError(f"the image under {key} was encoded by weights {checkpoint}, not {self.checkpoint}")
        return image

    def _expand(self, ids: list[int], images: list[ProcessedImage]) -> list[int]:
        pad, waiting, expanded = self.renderer.image_token_id, iter(images), []
        if ids.count(pad) != len(images):
            raise ValueError(f"{ids.count(pad)} placeholders for {len(images)} images")
        for token in ids:
            expanded += [token] * next(waiting).num_tokens if token == pad else [token]
        return expanded

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, task in list(self.running.items()):
            if body.get("abort_all") or rid.startswith(body["rid"]):
                task.cancel()
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        """Wait as long as the request says for the requests to end, then empty the cache."""
        deadline = time.monotonic() + float(request.query.get("timeout", 0.0))
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if not self.running:
            self.prefixes.clear()
        return web.Response(status=400 if self.running else 200)

    async def free_memory(self, request: web.Request) -> web.Response:
        """Free memory. The real one ends by it if it is not idle, and without the package keeps what it has."""
        if self.running:
            os._exit(1)
        tags = (await request.json())["tags"]
        if self.has_memory_saver:
            self.freed += tags
            print("freed", *tags, flush=True)
            if "weights" in tags:  # they come back without their values
                with torch.no_grad():
                    for parameter in self.engine.model.parameters():
                        parameter.fill_(torch.nan)
        return web.json_response(None)

    async def take_memory(self, request: web.Request) -> web.Response:
        for tag in (await request.json())["tags"]:
            if self.has_memory_saver:
                self.freed.remove(tag)
        return web.json_response(None)

    async def update_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self.updating:  # the real one has a lock for one writer, too
            while self.running:
                await asyncio.sleep(0.01)
            try:
                model = await asyncio.to_thread(PolicyModel.load, body["model_path"])
            except Exception as error:
                return web.json_response({"success": False, "message": f"Failed to load: {error}"}, status=400)
            self._load(dict(model.named_parameters()), body)
        return web.json_response({"success": True, "message": "ok"})

    def _load(self, weights: dict[str, torch.Tensor], body: dict[str, Any]) -> None:
        version: str | None = body.get("weight_version")
        if "weights" in self.freed:
            os._exit(1)
        self.engine.load_weights(weights, version=int(version or 0))
        if body.get("flush_cache", True):
            self.prefixes.clear()
        if version is not None:
            self.version = self.checkpoint = version
            self.updates.append(version)

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """Load a pickle of names and tensors. The real one is given handles of a GPU's memory in place of values."""
        body = await request.json()
        if self.release == NEW and not self.has_session:
            return refusal("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        weights = dict(self.engine.model.named_parameters())
        weights |= {f"backbone.{name}": tensor for name, tensor in named}
        self._load(weights, body)
        return web.json_response({"success": True, "message": "ok"})

    async def join_group(self, request: web.Request) -> web.Response:
        """Join a group, each GPU as a member, by torch's own function for groups that are made by name."""
        body = await request.json()
        ranks = range(body["rank_offset"], body["rank_offset"] + self.num_gpus)
        try:
            joining = (asyncio.to_thread(joined, body, rank) for rank in ranks)
            self.groups[body["group_name"]] = list(await asyncio.gather(*joining))
        except (RuntimeError, ValueError) as error:
            return refusal(f"Failed to initialize custom process group: {error}.")
        return web.json_response({"success": True, "message": "ok"})

    async def leave_group(self, request: web.Request) -> web.Response:
        if self.groups.pop((await request.json())["group_name"], None) is None:
            return refusal("The group to be destroyed does not exist.")
        return web.json_response({"success": True, "message": "ok"})

    async def update_from_group(self, request: web.Request) -> web.Response:
        """Receive the bytes of some weights and load them. Nothing else is done meanwhile, as in the real scheduler."""
        body = await request.json()
        if self.release == NEW and not self.has_session:
            return refusal("weights must be updated between begin_weight_update() and end_weight_update()")
        if body["group_name"] not in self.groups:
            os._exit(1)  # an assertion of the scheduler, whose end ends the server
        assert body["load_format"] == "flattened_bucket"
        async with self.updating:
            try:
                waits = (asyncio.to_thread(received, group, body) for group in self.groups[body["group_name"]])
                named, *others = await asyncio.gather(*waits)
            except RuntimeError as error:
                return refusal(f"Failed to update parameter online: {error}. The full weights are partially updated.")
            assert all(torch.equal(tensor, other[name]) for other in others for name, tensor in named.items())
            weights = dict(self.engine.model.named_parameters())
            weights |= {f"backbone.{name}": tensor.float() for name, tensor in named.items()}
            self._load(weights, body)
        return web.json_response({"success": True, "message": "ok"})

    async def begin_update(self, _: web.Request) -> web.Response:
        if self.has_session:
            return refusal("a weight-update session is already open; call end_weight_update() first")
        self.has_session = True
        return web.json_response({"success": True, "message": "Success"})

    async def end_update(self, _: web.Request) -> web.Response:
        if not self.has_session:
            return refusal("no weight-update session is open; call begin_weight_update() first")
        self.has_session = False
        return web.json_response({"success": True, "message": "Success"})

    async def update_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        self.updates.append(self.version)
        return web.json_response({"success": True, "message": "ok"})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, config = body["lora_name"], body["config_dict"]
        try:
            if self.lora is None:
                raise ValueError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            if name in self.adapters:
                raise ValueError(f"Failed to load LoRA adapter {name} because it is already loaded")
            if config["r"] > self.lora.rank or not set(config["target_modules"]) <= set(self.lora.targets):
                raise ValueError(f"LoRA adapter {name} is incompatible with the current LoRA memory pool configuration")
            self.adapters[name] = LoadedAdapter.read(self._sent(body), config)
        except ValueError as error:
            return web.json_response({"success": False, "error_message": str(error)}, status=400)
        return web.json_response({"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")})

    def _sent(self, body: Mapping[str, Any]) -> str:
        """Return the pickled tensors of an adapter; the new release is sent some for each GPU, under another name."""
        names = ("serialized_tensors", "serialized_named_tensors")
        wanted, other = names if self.release == OLD else reversed(names)
        if wanted not in body or other in body:
            raise ValueError(f"2 validation errors: {wanted!r}: Field required")
        if self.release == OLD:
            return body[wanted]
        copies: list[str] = body[wanted]
        if len(copies) != self.num_gpus or any(copy != copies[0] for copy in copies):
            raise ValueError(f"{len(copies)} copies of an adapter for {self.num_gpus} GPUs")
        return copies[0]

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            error = f"LoRA with name {name} does not exist"
            return web.json_response({"success": False, "error_message": error}, status=400)
        while self.users.get(name):
            await asyncio.sleep(0.01)
        del self.adapters[name]
        return web.json_response({"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")})


def first(prefix: CachedPrefix, count: int) -> CachedPrefix:
    """Return the part of a prefix that holds so many tokens; nothing of one with states, which are those of its end."""
    if any(isinstance(layer, States) for layer in prefix.layers):
        return CachedPrefix()
    return CachedPrefix(prefix.ids[:count], tuple(layer[:, :, :count] for layer in prefix.layers))


@dataclass(frozen=True)
class Lora:
    """What the server was started for: the largest rank, and the layers that may be adapted."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class LoadedAdapter:
    """A (R, H) and B (O, R) of each adapted layer, and alpha / rank."""

    sides: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float

    @classmethod
    def read(cls, serialized: str, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> LoadedAdapter:
        tensors: dict[str, Tensor] = pickle.loads(base64.b64decode(serialized))
        prefix, ending = "base_model.model.", ".lora_A.weight"
        layers = [name.removeprefix(prefix).removesuffix(ending) for name in tensors if name.endswith(ending)]
        values = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        names = {layer: f"{prefix}{layer}.lora_" for layer in layers}
        sides = {layer: (values[f"{name}A.weight"], values[f"{name}B.weight"]) for layer, name in names.items()}
        if 2 * len(sides) != len(tensors) or any(a.shape[0] != config["r"] for a, _ in sides.values()):
            raise ValueError("the tensors are not those of the configuration")
        return cls(sides, config["lora_alpha"] / config["r"])


class AdaptedLinear(nn.Linear):
    """A linear layer that adds scaling * B (A x) while an adapter is in use. Its parameters keep their names."""

    sides: tuple[Tensor, Tensor] | None = None
    scaling = 0.0

    def use(self, adapter: LoadedAdapter | None, name: str) -> None:
        self.sides = adapter.sides.get(name) if adapter else None
        self.scaling = adapter.scaling if adapter else 0.0

    def forward(self, input: Tensor) -> Tensor:
        base = super().forward(input)
        if self.sides is None:
            return base
        a_RH, b_OR = self.sides
        return base + self.scaling * ((input @ a_RH.T) @ b_OR.T)


def joined(body: Mapping[str, Any], rank: int) -> dist.ProcessGroup:
    """Return the group that a request names, joined as a rank of it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limit, size, name = timedelta(minutes=30), body["world_size"], body["group_name"]
    address = body["master_address"], body["master_port"]
    store = PrefixStore(name, TCPStore(*address, size, is_master=False, timeout=limit))
    if rank == body["rank_offset"]:
        group, _ = _new_process_group_helper(size, rank, [], body["backend"], store, group_name=name, timeout=limit)
        return group
    # torch has a name once in a process; the real one has a process for each GPU.
    return dist.ProcessGroupGloo(PrefixStore("cpu/", PrefixStore(f"{name}/", store)), rank, size, timeout=limit)


def received(group: dist.ProcessGroup, body: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights that rank 0 of a group sends as one tensor of bytes."""
    dtypes = [getattr(torch, name) for name in body["dtypes"]]
    empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
    flat, options = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8), dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([flat], options).wait()
    pieces = flat.split([tensor.nbytes for tensor in empty])
    return {
        name: piece.clone().view(tensor.dtype).view(tensor.shape)
        for name, piece, tensor in zip(body["names"], pieces, empty, strict=True)
    }


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of every tensor's bytes, by its name in a checkpoint."""
    flat = ((name, weight.detach().contiguous().flatten().view(torch.uint8)) for name, weight in weights.items())
    return {name.removeprefix("backbone."): hashlib.sha256(w.numpy()).hexdigest() for name, w in flat}


def refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


def spoil(answer: dict[str, Any], how: str) -> None:
    """Change an answer of `/generate` as a server would that is broken in this way."""
    meta = answer["meta_info"]
    if how == "without facts":
        del answer["meta_info"]
    elif how == "of other weights":
        meta["weight_version"] = "7"
    elif how == "with one log-prob less":
        meta["output_token_logprobs"].pop()
    elif how == "with null log-probs":
        meta["output_token_logprobs"] = [[None, *rest] for _, *rest in meta["output_token_logprobs"]]
    elif how == "with another count":
        meta["prompt_tokens"] += 1
    elif how == "aborted":
        answer["output_ids"], meta["output_token_logprobs"], meta["finish_reason"] = [], [], {"type": "abort"}
        del meta["prompt_tokens"]
    elif how == "with other experts":
        experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
        meta["routed_experts"] = base64.b64encode(((experts + 1) % 4).tobytes()).decode()
    elif how == "without experts":
        del meta["routed_experts"]
    else:
        raise ValueError(how)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--slow-s", type=float, default=0.0, help="seconds to sleep after every 4 tokens")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--release", default=OLD, choices=(OLD, NEW))
    parser.add_argument("--config", help="YAML file of further arguments")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--has-cache", action="store_true", help="reuse what was read, as the real one does")
    parser.add_argument("--max-lora-rank", type=int, default=0)
    parser.add_argument("--lora-target-modules", nargs="*", default=[])
    options, _ = parser.parse_known_args()
    lora = Lora(options.max_lora_rank, tuple(options.lora_target_modules)) if options.enable_lora else None
    api_key = options.api_key or (yaml.safe_load(Path(options.config).read_text())["api-key"] if options.config else "")
    dtype: torch.dtype = getattr(torch, options.dtype)
    num_gpus, saves = options.tp_size, options.enable_memory_saver
    server = Emulator(
        options.model_path,
        options.slow_s,
        api_key,
        options.release,
        lora,
        num_gpus,
        saves,
        dtype,
        options.has_cache,
        options.enable_return_routed_experts,
    )
    web.run_app(server.routes(), host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
