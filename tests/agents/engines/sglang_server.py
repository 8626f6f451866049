"""A server that speaks the part of SGLang's protocol that TrueTurn uses, on the embedded engine: a real network writes.

SGLang itself needs a GPU. What this keeps of it, as measured on 0.5.15.post1: one placeholder per image, expanded here
(an expanded stream is refused with status 500); log-probs by token; `weight_version` stamped on every answer; encoded
images kept by `mm_hashes` over weight updates, which `flush_cache` does not empty; aborted requests answer with what
they have, those that had not begun without a count of their prompt; an abort is of every name that begins like the one
given. Where the environment names our picture processor, as for servers that we start, pictures are kept by its own
code. Run as `python -m tests.agents.engines.sglang_server --model-path FOLDER --port PORT`.

With `--release 0.5.23` it does what the source of that release does: encoded images are kept by their file, and
`mm_hashes` break the server (status 500 here, a CUDA error there); tensors are taken in a session only; answers list
which weights wrote which tokens.

`/misbehave` takes faults for the next calls of a path, `/reset` makes the server one that was only just started, and
`/pictures` says how pictures came: `uri`, `png` (to be kept) or `key`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from aiohttp import web
from PIL import Image

from agents.engines.hf import HFEngine
from agents.engines.sglang.in_server.kept_pictures import (
    Grid,
    KeptPictures,
    PatchesAddress,
    PictureError,
    map_patches,
    picture_entries,
)
from agents.engines.sglang.pictures import HELLO
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.types import GenerateRequest, ProcessedImage, SamplingParams

#: The releases that this speaks like.
OLD, NEW = "0.5.15.post1", "0.5.23"


class Emulator:
    """One server's state."""

    def __init__(self, model_path: str, slow_s: float, api_key: str = "", release: str = OLD) -> None:
        self.api_key, self.release = api_key, release
        self.has_session = False  # of updates, in the new release
        torch.set_num_threads(1)
        self.model_path = model_path
        self.renderer = Renderer.from_checkpoint(model_path)
        self.engine = HFEngine(PolicyModel.load(model_path), max_batch=256, max_wait_s=0.02)
        self.slow_s, self.version = slow_s, "default"
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.images: dict[str, tuple[ProcessedImage, str]] = {}  # the "encoder cache": by hash, never emptied
        self.keeps_pictures = bool(os.environ.get("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"))
        self.kept = KeptPictures(self._cut)
        self.came: Counter[str] = Counter()
        self.updates: list[str] = []
        self.updating = asyncio.Lock()
        self.faults: dict[str, list[str]] = {}  # by path: those of the next calls

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[self.check_key, self.maybe_misbehave])
        app.router.add_post("/misbehave", self.misbehave)
        app.router.add_post("/reset", self.reset)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/updates", self.list_updates)
        app.router.add_get("/pictures", self.list_pictures)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_post("/update_weights_from_disk", self.update_from_disk)
        app.router.add_post("/update_weights_from_tensor", self.update_from_tensor)
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
        self.faults, self.images, self.updates, self.has_session = {}, {}, [], False
        self.kept, self.came = KeptPictures(self._cut), Counter()
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
        is_real = request.path not in ("/misbehave", "/reset", "/updates", "/pictures")
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
        if fault == "forget the pictures":
            self.kept = KeptPictures(self._cut)
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
        if fault.startswith("answer "):
            answer = json.loads(response.text)
            spoil(answer, fault.removeprefix("answer "))
            return web.json_response(answer)
        return response

    async def model_info(self, _: web.Request) -> web.Response:
        config = self.engine.model.config
        facts = {"architectures": config.architectures, "model_type": config.model_type}
        return web.json_response({"weight_version": self.version, **facts})

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def list_updates(self, _: web.Request) -> web.Response:
        return web.json_response(self.updates)

    async def list_pictures(self, _: web.Request) -> web.Response:
        return web.json_response(self.came)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            images = await self._images(body.get("image_data", []), body.get("mm_hashes", []))
            ids = self._expand(body["input_ids"], images)
        except PictureError as error:
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
            ),
            seed=zlib.crc32(body["rid"].rpartition("-")[2].encode()),  # of its number: every run writes the same
        )
        task = self.running[body["rid"]] = asyncio.create_task(self._write(generate))
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
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[x, i, None] for x, i in zip(logprobs, written, strict=True)],
        }
        if self.release == NEW and written:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": len(written)}]
        if finish == "abort" and not written:
            del meta["prompt_tokens"], meta["cached_tokens"]
        return web.json_response({"output_ids": list(written), "meta_info": meta})

    async def _write(self, request: GenerateRequest) -> tuple[list[int], str, list[float]]:
        """Write piece by piece, so that a request can be ended in the middle of a turn with what it has."""
        ids: list[int] = []
        logprobs: list[float] = []
        finish = "length"
        try:
            async with self.engine.session() as session:
                while finish == "length" and len(ids) < request.max_new_tokens:
                    piece = replace(
                        request,
                        ids=request.ids + tuple(ids),
                        max_new_tokens=min(4, request.max_new_tokens - len(ids)),
                        seed=request.seed + len(ids),
                    )
                    done = await session.generate(piece)
                    ids, logprobs, finish = [*ids, *done.ids], [*logprobs, *done.logprobs], done.finish
                    await asyncio.sleep(self.slow_s)
        except asyncio.CancelledError:
            finish = "abort"
        return ids, finish, logprobs

    async def _images(self, image_data: list[str], hashes: list[str]) -> list[ProcessedImage]:
        entries = picture_entries(image_data) if self.keeps_pictures else None
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

    def _cut(self, png: bytes) -> tuple[torch.Tensor, Grid]:
        image = self._read(png)
        return torch.from_numpy(image.pixels_PD), image.grid_thw

    def _mapped(self, address: PatchesAddress) -> ProcessedImage:
        time, height, width = address.grid_thw
        num_tokens = time * height * width // self.renderer.merge_size**2
        return ProcessedImage(address.key, map_patches(address).numpy(), address.grid_thw, num_tokens)

    def _encoded(self, image: ProcessedImage, key: str) -> ProcessedImage:
        image, version = self.images.setdefault(key, (image, self.version))
        if version != self.version:  # the real one would go on with features of the old weights, and say nothing
            raise ValueError(f"the image under {key} was encoded by weights {version}, not {self.version}")
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

    async def flush(self, _: web.Request) -> web.Response:
        return web.Response()

    async def update_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self.updating:  # the real one has a lock for one writer, too
            while self.running:
                await asyncio.sleep(0.01)
            try:
                model = await asyncio.to_thread(PolicyModel.load, body["model_path"])
            except Exception as error:
                return web.json_response({"success": False, "message": f"Failed to load: {error}"}, status=400)
            self._load(dict(model.named_parameters()), body["weight_version"])
        return web.json_response({"success": True, "message": "ok"})

    def _load(self, weights: dict[str, torch.Tensor], version: str | None) -> None:
        self.engine.load_weights(weights, version=int(version or 0))
        if version is not None:
            self.version = version
            self.updates.append(version)

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """Load a pickle of names and tensors. The real one is given handles of a GPU's memory in place of values."""
        body = await request.json()
        if self.release == NEW and not self.has_session:
            return refusal("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        weights = dict(self.engine.model.named_parameters())
        weights |= {f"backbone.{name}": tensor for name, tensor in named}
        self._load(weights, body.get("weight_version"))
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
    options, _ = parser.parse_known_args()
    api_key = options.api_key or (yaml.safe_load(Path(options.config).read_text())["api-key"] if options.config else "")
    web.run_app(
        Emulator(options.model_path, options.slow_s, api_key, options.release).routes(),
        host=options.host,
        port=options.port,
        print=None,
    )


if __name__ == "__main__":
    main()
