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
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.images import HELLO, PROTOCOL, SentImages, image_key, missed_images, salted_hash
from agents.engines.sglang.in_server import kept_images
from agents.engines.sglang.in_server.cutting import PatchForm, Processed, learn_values, ordered_levels, patch_values
from agents.engines.sglang.in_server.kept_images import (
    Allocate,
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
from agents.engines.sglang.in_server.scheduler import levels
from agents.engines.sglang.payloads import collapse
from agents.engines.sglang.process import LocalProcess, ReservedPorts
from agents.model.mrope import mrope_positions
from agents.rendering.renderer import Renderer
from agents.types import GenerateRequest, ProcessedImage, SamplingParams
from tests.agents.engines.test_sglang_engine import EMULATOR, misbehave, settings, url, with_engine
from tests.prompts import make_image, question

__all__ = ["url"]  # a fixture

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
    """Cuts every image into one patch of its length, and counts."""

    def __init__(self, rows: int = 1) -> None:
        self.cut: list[bytes] = []
        self.rows, self.broken = rows, b"broken"

    def __call__(self, png: bytes, allocate: Allocate) -> tuple[int, int, int]:
        patches = allocate((self.rows, 2), torch.float32)
        if png == self.broken:
            raise OSError("no image")
        self.cut.append(png)
        patches.fill_(len(png))
        return 1, 2, 2


def test_a_image_is_cut_once_for_all_who_ask_and_those_without_it_wait_for_it() -> None:
    cutter = Cutter()

    async def play() -> list[list[ImageAddress]]:
        kept = KeptImages(cutter)
        asked = [kept.addresses([one]) for one in (known("png"), entry("png"), entry("png"), known("png"))]
        return [*await asyncio.gather(*asked), await kept.addresses([known("png"), entry("png")])]

    first, *others, both = asyncio.run(play())
    assert all(other == first for other in others) and both == first * 2 and cutter.cut == [b"png"]
    assert map_image(first[0]).tolist() == [[3.0, 3.0]]


def test_images_that_nobody_brings_are_named_and_are_taken_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_images, "WAIT_S", 0.05)

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
    monkeypatch.setattr(kept_images, "WAIT_S", 0.05)
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


# Cutting --------------------------------------------------------------------------------------------------------------


def processor_cut(dtype: torch.dtype, **settings: Any) -> Processed:
    """Return the cut of Transformers' own processor."""
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 128 * 128, "longest_edge": 512 * 512}, **settings)

    def cut(image: Image.Image) -> tuple[torch.Tensor, Grid]:
        made = processor(images=[image], return_tensors="pt")
        (grid,) = made["image_grid_thw"].tolist()
        return made["pixel_values"].to(dtype), tuple(grid)

    return cut


CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [{"patch_size": 14, "merge_size": 2} | CLIP, {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3}],
    ids=["qwen2.5", "qwen3"],
)
def test_patches_are_the_processors_to_the_bit(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    reference, form = processor_cut(dtype, **settings), PatchForm(settings["patch_size"], settings["merge_size"], 2)
    values_CL = learn_values(reference, form)
    assert values_CL is not None
    random, unit = np.random.default_rng(0), settings["patch_size"] * settings["merge_size"]
    for rows, columns in ((5, 7), (8, 8), (13, 5)):
        pixels = random.integers(0, 256, (rows * unit, columns * unit, 3), dtype=np.uint8)
        levels_PN, grid = ordered_levels(Image.fromarray(pixels), form)
        wanted, wanted_grid = reference(Image.fromarray(pixels))
        assert grid == wanted_grid and levels_PN.dtype == torch.uint8 and levels_PN.numel() == pixels.size
        for sent in (levels_PN, levels_PN.to(torch.bfloat16)):  # from 0.5.21 on SGLang casts what it moves to a GPU
            patches = patch_values(sent, values_CL, form.frames)
            assert patches.dtype == wanted.dtype and torch.equal(patches, wanted)


def test_a_processor_that_mixes_pixels_or_orders_patches_otherwise_is_not_imitated() -> None:
    plain = processor_cut(torch.float32, patch_size=16, merge_size=2)

    def blurred(image: Image.Image) -> tuple[torch.Tensor, Grid]:
        return plain(image.filter(ImageFilter.BLUR))

    def reordered(image: Image.Image) -> tuple[torch.Tensor, Grid]:
        patches, grid = plain(image)
        return patches.flip(0), grid

    form = PatchForm(16, 2, 2)
    assert learn_values(plain, form) is not None
    assert learn_values(blurred, form) is None
    assert learn_values(reordered, form) is None
    assert learn_values(plain, replace(form, frames=1)) is None


@dataclass
class Item:
    """An image as SGLang's scheduler holds it."""

    feature: torch.Tensor
    model_specific_data: dict[str, torch.Tensor]


def test_the_network_gets_the_values_of_levels_and_other_items_as_they_came() -> None:
    class Model:
        visual = SimpleNamespace(device="cpu", patch_embed=SimpleNamespace(temporal_patch_size=2))
        is_broken = False

        def get_image_feature(self, items: list[Item]) -> list[torch.Tensor]:
            if self.is_broken:
                raise RuntimeError("out of memory")
            return [item.feature for item in items]

    levels.install(Model)
    random = torch.Generator().manual_seed(0)
    values_CL = torch.randn(3, 256, generator=random)
    first, other = (torch.randint(256, (rows, 12), generator=random, dtype=torch.uint8) for rows in (4, 8))
    data, theirs = {"level_values": values_CL}, torch.randn(4, 24, generator=random)
    items = [Item(first, data), Item(theirs, {}), Item(other, data)]
    one, left_alone, two = Model().get_image_feature(items)
    assert torch.equal(one, patch_values(first, values_CL, 2)) and torch.equal(two, patch_values(other, values_CL, 2))
    assert left_alone is theirs and [item.feature for item in items] == [first, theirs, other]
    model = Model()
    model.is_broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        model.get_image_feature(items)
    assert [item.feature is kept for item, kept in zip(items, (first, theirs, other), strict=True)] == [True] * 3


# Shared memory --------------------------------------------------------------------------------------------------------


def kept(key: str, patches: torch.Tensor, grid_thw: tuple[int, int, int]) -> ImageAddress:
    """Keep patches as if they had been cut from an image."""

    def cut(_: bytes, allocate: Allocate) -> tuple[int, int, int]:
        allocate((len(patches), patches.shape[1]), patches.dtype).copy_(patches)
        return grid_thw

    return keep_image(key, b"", cut)


def test_another_process_maps_a_image_of_any_dtype_to_the_bit() -> None:
    values = 100 * torch.rand(80, 1536, generator=torch.Generator().manual_seed(0))
    images = [values.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8)]
    addresses = [kept(f"5f5f{number}", patches, (1, 8, 10)) for number, patches in enumerate(images)]
    code = (
        "import sys, pickle; from agents.engines.sglang.in_server.kept_images import map_image\n"
        "import torch\n"
        "for address in pickle.load(sys.stdin.buffer):\n"
        "    patches = map_image(address)\n"
        "    assert map_image(address) is patches\n"
        "    sys.stdout.buffer.write(patches.view(torch.uint8).numpy().tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(addresses), capture_output=True, check=True)
    assert done.stdout == b"".join(patches.view(torch.uint8).numpy().tobytes() for patches in images)
    for address in addresses:
        os.close(address.fd)


def test_images_outlive_the_process_that_made_them_where_they_are_mapped_and_are_never_taken_for_others() -> None:
    address = kept("aa", torch.ones(4, 4), (1, 2, 2))
    mapped = map_image(address)
    os.close(address.fd)
    other = kept("bb", torch.zeros(4, 4), (1, 2, 2))
    assert other.fd == address.fd  # the number is used again
    assert mapped.tolist() == torch.ones(4, 4).tolist()
    del mapped
    gc.collect()
    with pytest.raises(LookupError, match="aa was replaced"):
        map_image(address)
    os.close(other.fd)
    with pytest.raises(LookupError, match="aa is gone"):
        map_image(address)


def test_a_image_that_cannot_be_read_keeps_no_memory() -> None:
    def broken(png: bytes, allocate: Allocate) -> tuple[int, int, int]:
        allocate((1000, 1000), torch.float32)
        raise OSError("no image")

    def open_files() -> list[str]:
        return sorted(path.name for path in Path("/proc/self/fd").iterdir())

    before = open_files()
    with pytest.raises(OSError, match="no image"):
        keep_image("aa", b"", broken)
    assert open_files() == before


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
    command = [sys.executable, "-m", "agents.engines.sglang.launch", *EMULATOR, "--model-path", str(checkpoint)]
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
    headers = dict(engine.servers._http[False].headers)
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
    patches, of_levels = torch.randn(16, 8).to(torch.bfloat16), torch.randint(256, (4, 4), dtype=torch.uint8)
    values_CL = torch.randn(3, 256).to(torch.bfloat16)
    addresses = [kept("aa", patches, (1, 4, 4)), kept("bb", of_levels, (1, 2, 2))]
    prepared = prepared_prompt(prompt, addresses, [2**55 + 1, 3], values_CL, {"im_token_id": 9})
    record = pickle.loads(pickle.dumps(prepared))
    item, other = record.mm_items
    assert type(record).__name__ == "MultimodalProcessorOutput" and item.hash == 2**55 + 1
    assert torch.equal(item.feature, patches) and item.offsets == [(1, 4)]
    assert torch.equal(other.feature, of_levels) and torch.equal(other.level_values, values_CL)
    assert "level_values" not in item.model_specific_data and other.image_grid_thw.tolist() == [[1, 2, 2]]
    assert list(record.padded_input_ids) == [7, *[item.pad_value] * 4, 7, other.pad_value]
    assert record.mrope_positions.tolist() == prompt.positions_3T.tolist()
    assert record.mrope_position_delta.tolist() == [[prompt.delta]]
    for address in addresses:
        os.close(address.fd)
