"""Claims about images on servers that keep them: each crosses once, none is mistaken for another, none is lost."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import pickle
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.images import HELLO, PROTOCOL, SentImages, image_key, missed_images, salted_hash
from agents.engines.sglang.in_server import kept_images
from agents.engines.sglang.in_server.kept_images import (
    Grid,
    ImageAddress,
    ImageEntry,
    ImageError,
    KeptImages,
    image_entries,
    keep_image,
    map_image,
)
from agents.engines.sglang.in_server.prompts import expand
from agents.engines.sglang.payloads import collapse
from agents.engines.sglang.process import LocalProcess, ReservedPorts
from agents.model.mrope import mrope_positions
from agents.rendering.renderer import Renderer
from agents.types import GenerateRequest, ProcessedImage, SamplingParams
from tests.agents.engines.test_sglang_engine import misbehave, settings, short_waits, url, with_engine
from tests.prompts import make_image, question
from tests.servers import emulator

__all__ = ["short_waits", "url"]  # fixtures

HASH = "00ff"


def entry(name: str) -> ImageEntry:
    """Return an image as it comes the first time."""
    return ImageEntry(image_key(name.encode()), HASH, base64.b64encode(name.encode()).decode())


def known(name: str) -> ImageEntry:
    return ImageEntry(image_key(name.encode()), HASH)


def processed(renderer: Renderer, *seeds: int) -> tuple[ProcessedImage, ...]:
    assert renderer.images
    return tuple(renderer.images.process(make_image(64, 32, seed)) for seed in seeds)


# What is sent ---------------------------------------------------------------------------------------------------------


def test_a_image_is_sent_whole_once_and_again_when_it_was_missed(renderer: Renderer) -> None:
    (one, other), sent = processed(renderer, 1, 2), SentImages()
    first, again, also = sent.entries([one, one, other], "salt")
    key, hash_ = image_key(one.png), salted_hash(one, "salt")
    assert image_entries([first, again]) == [
        ImageEntry(key, hash_, base64.b64encode(one.png).decode()),
        ImageEntry(key, hash_),
    ]
    assert sent.entries([one], "other") == [again.replace(hash_, salted_hash(one, "other"))]
    refusal = f"http://host/generate: status 400: {{'message': 'trueturn-image misses {key} 00ff'}}"
    assert missed_images(refusal) == (key, "00ff")
    sent.forget(missed_images(refusal))
    assert sent.entries([one, other], "salt") == [first, also.rpartition(":")[0]]
    assert missed_images("status 400: the prompt misses a lot") == ()


def test_the_key_is_of_the_pixels_that_the_model_reads(renderer: Renderer) -> None:
    (one,) = processed(renderer, 1)
    copy = ProcessedImage("another name", one.pixels_PD, one.grid_thw, one.num_tokens, one.resized)
    resized = ProcessedImage(one.digest, one.pixels_PD, one.grid_thw, one.num_tokens, make_image(96, 32, 1))
    keys = [SentImages().entries([image], "salt")[0].split(":")[1] for image in (one, copy, resized)]
    assert keys[0] == keys[1] != keys[2]


# What a server keeps --------------------------------------------------------------------------------------------------


class Cutter:
    """Cuts every image into patches of its length, and counts."""

    def __init__(self, rows: int = 1) -> None:
        self.cut: list[bytes] = []
        self.rows, self.broken = rows, b"broken"

    def __call__(self, png: bytes) -> tuple[torch.Tensor, Grid]:
        if png == self.broken:
            raise OSError("no image")
        self.cut.append(png)
        return torch.full((self.rows, 2), float(len(png))), (1, 2, 2)


def test_a_image_is_cut_once_for_all_who_ask_and_those_without_it_wait_for_it() -> None:
    cutter = Cutter()

    async def play() -> list[list[ImageAddress]]:
        kept = KeptImages(cutter)
        asked = [kept.addresses([one]) for one in (entry("png"), known("png"), entry("png"))]
        return [*await asyncio.gather(*asked), await kept.addresses([known("png"), entry("png")])]

    first, *others, both = asyncio.run(play())
    assert all(other == first for other in others) and both == first * 2 and cutter.cut == [b"png"]
    assert map_image(first[0]).tolist() == [[3.0, 3.0]]


def test_a_request_that_is_cancelled_leaves_the_image_to_the_others() -> None:
    async def play() -> list[ImageAddress]:
        kept = KeptImages(Cutter())
        first = asyncio.create_task(kept.addresses([entry("png")]))
        await asyncio.sleep(0)
        first.cancel()
        return await kept.addresses([known("png")])

    assert len(asyncio.run(play())) == 1


def test_images_that_nobody_brings_are_named_and_are_taken_when_they_come() -> None:
    async def play() -> None:
        kept = KeptImages(Cutter())
        with pytest.raises(ImageError) as raised:
            await kept.addresses([known("a"), entry("b"), known("c")])
        assert missed_images(str(raised.value)) == (known("a").key, known("c").key)
        assert list(kept._images) == [known("b").key]
        assert len(await kept.addresses([entry("c"), known("b")])) == 2

    asyncio.run(play())


@pytest.mark.parametrize(
    ("png", "fault"),
    [
        (base64.b64encode(b"broken").decode(), "OSError no image"),
        ("%%%", "cannot be read"),
        (entry("another").png, "not the one of this key"),
    ],
)
def test_a_image_that_cannot_be_read_fails_its_requests_and_may_come_again(png: str, fault: str) -> None:
    whole = entry("broken")

    async def play() -> None:
        cutter = Cutter()
        kept = KeptImages(cutter)
        results = await asyncio.gather(
            *(kept.addresses([replace(whole, png=text)]) for text in (png, "", png)), return_exceptions=True
        )
        assert all(f"image {whole.key} cannot be read" in str(result) and fault in str(result) for result in results)
        cutter.broken = b""
        assert len(await kept.addresses([whole])) == 1

    asyncio.run(play())


def test_the_images_used_last_stay_within_the_bytes_and_none_in_use_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(in_use_s: float) -> str:
        monkeypatch.setattr(kept_images, "IN_USE_S", in_use_s)
        kept = KeptImages(Cutter(rows=1000), max_bytes=20_000)
        for name in "abac":
            await kept.addresses([entry(name)])
            await asyncio.sleep(0.01)
        names = {entry(name).key: name for name in "abc"}
        return "".join(names[key] for key in kept._images)

    before = len(list(Path("/proc/self/fd").iterdir()))
    assert asyncio.run(play(60.0)) == "bac"
    assert asyncio.run(play(0.0)) == "ac"
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 3 + 2 + 2  # kept images, and the thread's own


def test_a_request_of_another_kind_is_left_to_sglang_and_the_protocol_is_told_to_who_asks() -> None:
    assert image_entries(None) is None and image_entries([]) is None
    assert image_entries(["data:image/png;base64,AA"]) is None
    assert image_entries(["trueturn-image:aa:00ff", "data:image/png;base64,AA"]) is None
    with pytest.raises(ImageError, match=PROTOCOL):
        image_entries([HELLO])
    with pytest.raises(ImageError, match="an entry must be trueturn-image:KEY:HASH"):
        image_entries(["trueturn-image:aa"])


# Shared memory --------------------------------------------------------------------------------------------------------


def test_another_process_maps_a_image_of_any_dtype_to_the_bit() -> None:
    values = 100 * torch.rand(80, 1536, generator=torch.Generator().manual_seed(0))
    images = [values.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    addresses = [keep_image(f"5f5f{number}", patches, (1, 8, 10)) for number, patches in enumerate(images)]
    code = (
        "import sys, pickle; from agents.engines.sglang.in_server.kept_images import map_image\n"
        "import torch\n"
        "for address in pickle.load(sys.stdin.buffer):\n"
        "    patches = map_image(address)\n"
        "    sys.stdout.buffer.write(patches.view(torch.uint8).numpy().tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(addresses), capture_output=True, check=True)
    assert done.stdout == b"".join(patches.view(torch.uint8).numpy().tobytes() for patches in images)
    for address in addresses:
        os.close(address.fd)


def test_images_outlive_the_process_that_made_them_where_they_are_mapped_and_are_never_taken_for_others() -> None:
    address = keep_image("aa", torch.ones(4, 4), (1, 2, 2))
    mapped = map_image(address)
    os.close(address.fd)
    other = keep_image("bb", torch.zeros(4, 4), (1, 2, 2))
    assert other.fd == address.fd  # the number is used again
    assert mapped.tolist() == torch.ones(4, 4).tolist()
    del mapped
    gc.collect()
    with pytest.raises(LookupError, match="aa was replaced"):
        map_image(address)
    os.close(other.fd)
    with pytest.raises(LookupError, match="aa is gone"):
        map_image(address)


# Prompts --------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_expanded_as_the_renderer_expands_it_with_the_networks_positions(renderer: Renderer) -> None:
    rendered = renderer.prompt(question("look", make_image(64, 32), make_image(96, 64)))
    assert renderer.image_token_id is not None
    short = collapse(rendered.ids, rendered.images, renderer.image_token_id)
    grids = [image.grid_thw for image in rendered.images]
    prompt = expand(short, grids, renderer.image_token_id, renderer.merge_size)
    assert prompt.ids == list(rendered.ids)
    expected = mrope_positions(np.array(rendered.ids), grids, renderer.image_token_id, renderer.merge_size)
    assert prompt.positions_3T.tolist() == expected.tolist()
    later = mrope_positions(np.array([*rendered.ids, 1]), grids, renderer.image_token_id, renderer.merge_size)
    assert later[:, -1].tolist() == [len(prompt.ids) + prompt.delta] * 3
    for (first, last), image in zip(prompt.spans, rendered.images, strict=True):
        assert set(prompt.ids[first : last + 1]) == {renderer.image_token_id}
        assert last - first + 1 == image.num_tokens


@pytest.mark.parametrize(("ids", "grids"), [([7, 9], []), ([7], [(1, 2, 2)]), ([9, 9], [(1, 2, 2)])])
def test_images_without_their_placeholders_are_refused(ids: list[int], grids: list[Any]) -> None:
    with pytest.raises(ImageError, match="placeholders for"):
        expand(ids, grids, 9, 2)


# On servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_server(checkpoint: Path) -> Iterator[str]:
    """A server that others have started with our image processor; `url` makes it as if just started."""
    ports = ReservedPorts(1)
    (port,) = ports.numbers
    command = [*emulator(), "--model-path", str(checkpoint)]
    env = {**os.environ, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "agents.engines.sglang.in_server"}
    process = subprocess.Popen([*command, "--port", str(port)], env=env)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        ports.release()


def came(engine: SGLangEngine) -> list[dict[str, int]]:
    """Return how images came to each server."""
    headers = dict(engine.servers._http.headers)  # type: ignore[union-attr]
    requests = [urllib.request.Request(f"{s.client.url}/images", headers=headers) for s in engine.servers.all]
    return [json.load(urllib.request.urlopen(request, timeout=20)) for request in requests]


def asked(renderer: Renderer, seeds: Sequence[int], seed: int = 1) -> GenerateRequest:
    rendered = renderer.prompt(question("look", *(make_image(64, 32, number) for number in seeds)))
    return GenerateRequest(rendered.ids, rendered.images, 4, SamplingParams(1.0, (), renderer.suppressed_ids), seed)


async def write(engine: SGLangEngine, *requests: GenerateRequest) -> list[Any]:
    async def one(request: GenerateRequest) -> Any:
        async with engine.session() as session:
            return await session.generate(request)

    return await asyncio.gather(*map(one, requests))


def test_a_group_sends_its_image_once_and_writes_what_it_would_write_with_data_uris(
    checkpoint: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [asked(renderer, (1, 2))] * 6 + [asked(renderer, (2, 1, 2))] * 2

    async def play(engine: SGLangEngine) -> Any:
        written = await write(engine, *requests)
        scores = await engine.score(requests[0].ids, requests[0].images)
        logprobs = [x for completion in written for x in completion.logprobs]
        return [(c.ids, c.prompt_length) for c in written], [*logprobs, *scores.tolist()], came(engine)

    kept, logprobs, how = with_engine(settings(checkpoint, tmp_path), renderer, play)
    assert how == [{"png": 2, "key": 6 * 2 + 2 * 3 + 2 - 2}]
    monkeypatch.setenv("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "")
    plain, plain_logprobs, how = with_engine(settings(checkpoint, tmp_path), renderer, play)
    assert how == [{"uri": 6 * 2 + 2 * 3 + 2}] and kept == plain
    assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)  # of batches that form as requests arrive


def test_a_image_crosses_once_over_turns_and_weights_and_is_encoded_anew_by_each(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    async def play(engine: SGLangEngine) -> Any:
        for version in range(3):
            if version:
                await engine.pause()
                await engine.update_from_disk(checkpoint, version)
                await engine.resume()
            for seeds in ((1,), (1, 2)):  # the later turn has a further image
                (completion,) = await write(engine, asked(renderer, seeds))
                assert completion.finish == "length" and completion.versions == ((version, 4),)
        return came(engine)

    # An encoding of old weights would be refused by the server, and the turn given up.
    assert with_engine(settings(checkpoint, tmp_path), renderer, play) == [{"png": 2, "key": 7}]


def test_a_server_that_forgot_its_images_is_sent_them_again_within_the_call(
    url: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engine: SGLangEngine) -> Any:
        await write(engine, asked(renderer, (1, 2)))
        misbehave(url, "generate", "forget the images")
        written = await write(engine, asked(renderer, (1, 2)), asked(renderer, (1, 3)))
        assert all(completion.finish == "length" for completion in written)
        assert engine.num_retried == 0 and engine.servers.events == []
        return came(engine)

    (how,) = with_engine(SGLangSettings(urls=(url,)), renderer, play)
    assert how["png"] in (5, 6)  # two, then those two again and one more; the second request may miss one as well


def test_two_runs_on_one_server_share_images_but_no_encodings(url: str, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> Any:
        other = SGLangEngine(SGLangSettings(urls=(url,)), renderer.image_token_id)
        await other.start()
        try:
            written = await write(engine, asked(renderer, (1,))) + await write(other, asked(renderer, (1,)))
            assert engine.salt != other.salt
        finally:
            await other.close()
        return [completion.logprobs for completion in written], came(engine)

    (first, second), how = with_engine(SGLangSettings(urls=(url,)), renderer, play)
    assert first == second and how == [{"png": 2}]


@pytest.mark.slow
def test_a_server_that_is_killed_gets_its_images_again(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    async def play(engine: SGLangEngine) -> Any:
        await write(engine, asked(renderer, (1, 2)))
        process = engine.servers.all[0].process
        assert isinstance(process, LocalProcess)
        process.popen.kill()
        (completion,) = await write(engine, asked(renderer, (1, 2)))
        assert completion.finish == "length"
        return came(engine)

    assert with_engine(settings(checkpoint, tmp_path), renderer, play) == [{"png": 2}]


def test_a_bad_image_ends_its_own_turn_alone(url: str, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> Any:
        good, bad = asked(renderer, (1,)), asked(renderer, (77,))
        (image,) = bad.images
        object.__setattr__(image, "png", b"no image")  # a cached property: what would be sent
        broken, sound = await write(engine, bad, good)
        return broken.finish, sound.finish

    assert with_engine(SGLangSettings(urls=(url,)), renderer, play) == ("abort", "length")


def test_what_a_processor_hands_over_is_sglangs_own_record(renderer: Renderer) -> None:
    pytest.importorskip("sglang", reason="SGLang needs a GPU")
    from agents.engines.sglang.in_server.handover import prepared_prompt

    prompt = expand([7, 9, 7, 9], [(1, 4, 4), (1, 2, 2)], 9, 2)
    patches, others = torch.randn(16, 8).to(torch.bfloat16), torch.randn(4, 8).to(torch.bfloat16)
    addresses = [keep_image("aa", patches, (1, 4, 4)), keep_image("bb", others, (1, 2, 2))]
    record = pickle.loads(pickle.dumps(prepared_prompt(prompt, addresses, [2**55 + 1, 3], {"im_token_id": 9})))
    item, other = record.mm_items
    assert type(record).__name__ == "MultimodalProcessorOutput" and item.hash == 2**55 + 1
    assert torch.equal(item.feature, patches) and item.offsets == [(1, 4)]
    assert torch.equal(other.feature, others) and other.image_grid_thw.tolist() == [[1, 2, 2]]
    assert list(record.padded_input_ids) == [7, *[item.pad_value] * 4, 7, other.pad_value]
    assert record.mrope_positions.tolist() == prompt.positions_3T.tolist()
    assert record.mrope_position_delta.tolist() == [[prompt.delta]]
    for address in addresses:
        os.close(address.fd)
