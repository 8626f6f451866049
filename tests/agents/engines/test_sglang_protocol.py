"""Claims about what SGLang servers are sent and how their answers are read, against a server that follows a script."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import io
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from agents.engines.pending_turn import PendingTurn
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.client import MAX_ANSWER, SGLangClient, authorization
from agents.engines.sglang.engine import MAX_GIVEN_UP
from agents.engines.sglang.images import HELLO, data_uri, image_fields, salted_hash
from agents.engines.sglang.payloads import (
    collapse,
    generate_body,
    parse_answer,
    parse_scores,
    score_body,
)
from agents.engines.sglang.releases import UNKNOWN, Release
from agents.engines.sglang.session import MAX_TRIES, pause_s
from agents.engines.weight_servers import Adapter, EngineDown, ServerLost, ServerRefused
from agents.model.architectures import NO_IMAGE_TOKEN, ModelFacts
from agents.rollout.invariants import broken_turn
from agents.types import Completion, GenerateRequest, ProcessedImage, SamplingParams
from envs.errors import UserError
from tests.prompts import make_image
from trainer.setup.servers import check_server

PAD = 9
LIMIT_S = 30
Call = tuple[str, str, Any]


def processed(digest: str, num_tokens: int = 2, seed: int = 0) -> ProcessedImage:
    return ProcessedImage(digest, np.zeros((8, 4), np.float32), (1, 2, 4), num_tokens, make_image(64, 32, seed))


def asked(ids: Sequence[int] = (1, 2, 3), max_new_tokens: int = 4, **params: Any) -> GenerateRequest:
    return GenerateRequest(tuple(ids), (), max_new_tokens, SamplingParams(**params), seed=1)


def written(
    *ids: int, finish: str = "length", prompt: int | None = 3, version: str = "default", cached: int = 0
) -> Any:
    """Return an answer of `/generate` whose tokens have the log-probs -1, -2 and so on."""
    pairs = [[-float(number), token, None] for number, token in enumerate(ids, 1)]
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": pairs, "weight_version": version}
    counts = {} if prompt is None else {"prompt_tokens": prompt, "cached_tokens": cached}
    return {"output_ids": list(ids), "meta_info": meta | counts}


class Script:
    """A server that keeps every call it gets, and answers each path as it is told: with one answer after the other.

    An answer is sent as JSON; a number is a status; "hang" is none at all. A path without answers says all is well.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answers: dict[str, list[Any]] = {}
        self.url = ""

    def bodies(self, path: str) -> list[Any]:
        return [body for _, name, body in self.calls if name == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        body = await request.json() if request.can_read_body else None
        if body and body.get("image_data") == [HELLO]:  # SGLang itself knows no such image
            return web.Response(status=500, text="cannot identify image")
        self.calls.append((request.method, path, body))
        waiting = self.answers.get(path)
        well = {"weight_version": "default", "success": True, "version": "0.5.15.post1"}
        answer: Any = waiting.pop(0) if waiting else well
        if answer == "hang":
            await asyncio.sleep(3600)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no" * 2000)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


def on_servers(play: Callable[..., Awaitable[Any]], count: int = 1, **answers: list[Any]) -> Any:
    """Run `play` with so many scripted servers."""

    async def run() -> Any:
        scripts, runners = [Script() for _ in range(count)], []
        scripts[0].answers = dict(answers)
        try:
            for script in scripts:
                app = web.Application()
                app.router.add_route("*", "/{path:.*}", script.handle)
                runner = web.AppRunner(app, shutdown_timeout=0.01)
                runners.append(runner)
                await runner.setup()
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return await play(*scripts)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def with_client(play: Callable[[SGLangClient, Script], Awaitable[Any]], timeout_s: float = 20.0, **answers: Any) -> Any:
    async def run(script: Script) -> Any:
        async with aiohttp.ClientSession() as http:
            return await play(SGLangClient(script.url + "/", http, timeout_s), script)

    return on_servers(run, **answers)


def with_engine(play: Callable[..., Awaitable[Any]], count: int = 1, **answers: Any) -> Any:
    """Run `play(engine, script, ...)` with an engine on scripted servers."""

    async def run(*scripts: Script) -> Any:
        settings = SGLangSettings(urls=tuple(script.url for script in scripts), start_timeout_s=5.0)
        engine = SGLangEngine(settings, PAD)
        await engine.start()
        try:
            return await play(engine, *scripts)
        finally:
            await engine.close()

    return on_servers(run, count, **answers)


async def write(engine: SGLangEngine, request: GenerateRequest) -> Completion:
    async with engine.session() as session:
        return await session.generate(request)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing longer than a test may."""
    for module in ("engine", "session"):
        monkeypatch.setattr(f"agents.engines.sglang.{module}.pause_s", lambda tries: 0.0)
    monkeypatch.setattr("agents.engines.sglang.servers.POLL_S", 0.01)


# What is sent ---------------------------------------------------------------------------------------------------------


def test_a_request_says_every_part_of_the_sampling_law_and_nothing_the_model_did_not_see() -> None:
    images = (processed("a"), processed("b", 1, seed=1))
    request = GenerateRequest((1, PAD, PAD, 2, PAD, 3), images, 10, SamplingParams(0.7, (5, 6), (PAD, 8)), seed=1)
    assert generate_body(request, [40, 41, 42], "name", PAD) | image_fields(images, "salt", None) == {
        "rid": "name",
        "input_ids": [1, PAD, 2, PAD, 3, 40, 41, 42],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": 7,
            "stop_token_ids": [5, 6],
            "logit_bias": {str(PAD): -1e9, "8": -1e9},
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "image_data": [data_uri(image) for image in images],
        "mm_hashes": [salted_hash(image, "salt") for image in images],
    }


def test_a_request_without_images_and_suppressed_ids_names_neither() -> None:
    body = generate_body(asked(), [], "name", None)
    assert body["sampling_params"]["logit_bias"] is None
    assert not {"image_data", "mm_hashes"} & set(body)
    assert image_fields((), "salt", None) == {}


def test_scores_are_asked_for_at_temperature_one_from_the_first_token_on() -> None:
    image = processed("a")
    assert score_body([1, PAD, PAD, 2], [image], PAD) == {
        "input_ids": [1, PAD, 2],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


@pytest.mark.parametrize(
    ("ids", "sizes", "short"),
    [
        ([7, 9, 9, 9, 7], [3], [7, 9, 7]),
        ([9, 9, 9, 9, 9], [2, 3], [9, 9]),
        ([9, 7, 9, 9, 7, 7], [1, 2], [9, 7, 9, 7, 7]),
        ([7, 7], [], [7, 7]),
    ],
)
def test_each_image_keeps_one_placeholder_wherever_it_stands(
    ids: list[int], sizes: list[int], short: list[int]
) -> None:
    assert collapse(tuple(ids), [processed(str(size), size) for size in sizes], PAD) == short


def test_the_image_that_is_sent_has_the_very_pixels() -> None:
    image = processed("a", seed=3)
    kind, encoded = data_uri(image).split(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).tobytes() == make_image(64, 32, 3).tobytes()


def test_a_hash_has_14_digits_and_is_of_image_and_salt() -> None:
    hashes = [salted_hash(image, salt) for image in (processed("a"), processed("b")) for salt in ("x", "y")]
    assert [len(text) for text in hashes] == [14] * 4
    assert len(set(hashes)) == 4
    assert salted_hash(processed("a"), "x") == hashes[0]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_server_is_sent_the_temperature_that_was_asked_for(temperature: float) -> None:
    async def play(engine: SGLangEngine, script: Script) -> list[Any]:
        await write(engine, asked(temperature=temperature, stop_ids=(5,), suppressed_ids=(8,)))
        return script.bodies("generate")

    (body,) = with_engine(play, generate=[written(4, 5, 6, 7)])
    given = body["sampling_params"]
    assert (given["temperature"], given["stop_token_ids"], given["logit_bias"]) == (temperature, [5], {"8": -1e9})
    assert (body["input_ids"], given["max_new_tokens"]) == ([1, 2, 3], 4)


# One server -----------------------------------------------------------------------------------------------------------


def test_a_call_with_a_body_posts_it_and_one_without_gets() -> None:
    async def play(client: SGLangClient, script: Script) -> Any:
        answers = [await client.call("one"), await client.call("two", {}), await client.call("three", {"a": [1]})]
        assert client.url == script.url
        assert not client._waits
        return answers, script.calls

    text = web.Response(text="done")
    answers, calls = with_client(play, one=[{"b": 2}], two=[text], three=[[3]])
    assert answers == [{"b": 2}, "done", [3]]
    assert calls == [("GET", "one", None), ("POST", "two", {}), ("POST", "three", {"a": [1]})]


@pytest.mark.parametrize("status", [201, 204, 400, 404, 499])
def test_any_status_but_200_and_5xx_is_a_refusal_with_the_servers_text(status: int) -> None:
    async def play(client: SGLangClient, script: Script) -> str:
        with pytest.raises(ServerRefused) as refused:
            await client.call("it")
        return str(refused.value)

    message = with_client(play, it=[web.Response(status=status, text="" if status == 204 else "no" * 2000)])
    assert f"/it: status {status}: " in message
    assert message.endswith("status 204: " if status == 204 else " " + "no" * 500)


@pytest.mark.parametrize(
    "answer",
    [
        500,
        503,
        web.Response(text="{", content_type="application/json"),
        web.Response(body=b"\xff", charset="utf-8"),
        web.Response(text="[" * 10**5, content_type="application/json"),
        web.Response(text="9" * 10**5, content_type="application/json"),
        web.Response(body=bytes(MAX_ANSWER + 1)),
        web.Response(body=gzip.compress(bytes(MAX_ANSWER + 1), 1), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["500", "503", "no JSON", "no text", "deep", "many digits", "long", "long when unpacked"],
)
def test_a_5xx_or_an_answer_that_cannot_be_decoded_loses_the_server(answer: Any) -> None:
    async def play(client: SGLangClient, script: Script) -> None:
        with pytest.raises(ServerLost, match=f"^{script.url}/it: "):
            await client.call("it")
        assert not client._waits

    with_client(play, it=[answer])


def test_a_server_that_names_another_place_is_refused_and_that_place_gets_nothing() -> None:
    async def play(client: SGLangClient, script: Script) -> None:
        there = web.Response(status=307, headers={"Location": f"{script.url}/other"})
        script.answers["it"] = [there]
        with pytest.raises(ServerRefused, match="/it: status 307"):
            await client.call("it", {"weights": "w"})
        assert script.bodies("other") == []

    with_client(play)


def test_a_key_that_a_server_repeats_is_in_no_message() -> None:
    async def run(script: Script) -> None:
        async with aiohttp.ClientSession(headers=authorization("a-secret")) as http:
            with pytest.raises(ServerRefused, match=r"got Bearer \(key\)") as refused:
                await SGLangClient(script.url, http).call("it")
            assert "a-secret" not in str(refused.value)

    on_servers(run, it=[web.Response(status=400, text="got Bearer a-secret")])


def test_where_nobody_listens_the_server_is_lost() -> None:
    async def play(client: SGLangClient, script: Script) -> None:
        away = SGLangClient("http://127.0.0.1:9", client._http)
        with pytest.raises(ServerLost, match=r"ClientConnectorError"):
            await away.call("it")
        assert not await away.is_alive()

    with_client(play)


@pytest.mark.parametrize(("own_s", "call_s"), [(0.05, None), (20.0, 0.05)])
def test_a_call_ends_after_its_own_time_or_else_the_clients(own_s: float, call_s: float | None) -> None:
    async def play(client: SGLangClient, script: Script) -> None:
        with pytest.raises(ServerLost, match="TimeoutError"):
            await asyncio.wait_for(client.call("it", timeout_s=call_s), 5)

    with_client(play, own_s, it=["hang"])


def test_only_the_connection_has_a_limit_of_its_own_beside_the_calls() -> None:
    async def play(client: SGLangClient, script: Script) -> Any:
        given: list[Any] = []
        client._http = _Late(client._http, given)  # type: ignore[assignment]
        await client.call("it")
        return given

    (options,) = with_client(play)
    assert (options["timeout"].total, options["timeout"].sock_connect) == (None, 10)


def test_hanging_up_ends_all_that_wait_and_nothing_later() -> None:
    async def play(client: SGLangClient, script: Script) -> Any:
        waiting = [asyncio.create_task(client.call("it")) for _ in range(3)]
        await until(lambda: len(script.calls) == 3)
        client.time_out_calls()
        client.time_out_calls()  # of those whose time is up already, nothing more
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 0.9)
        assert [type(error) for error in ended] == [ServerLost] * 3
        assert not client._waits
        return await client.call("it")

    assert with_client(play, it=["hang", "hang", "hang", {"a": 1}]) == {"a": 1}


@pytest.mark.parametrize(("answer", "alive"), [({"weight_version": "0"}, True), (404, False), (500, False)])
def test_a_server_is_alive_where_it_answers_the_question_for_its_model(answer: Any, alive: bool) -> None:
    async def play(client: SGLangClient, script: Script) -> Any:
        return await client.is_alive(), script.calls[0]

    assert with_client(play, model_info=[answer]) == (alive, ("GET", "model_info", None))


def test_a_server_that_hangs_is_not_alive_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.engines.sglang.client.ALIVE_S", 0.05)

    async def play(client: SGLangClient, script: Script) -> bool:
        with pytest.raises(ServerLost):
            await asyncio.wait_for(client.weight_version(), 5)
        return await asyncio.wait_for(client.is_alive(), 5)

    assert with_client(play, model_info=["hang", "hang"]) is False


def test_the_name_of_the_weights_is_a_text_and_a_server_without_one_is_lost() -> None:
    async def play(client: SGLangClient, script: Script) -> str:
        name = await client.weight_version()
        for _ in range(2):
            with pytest.raises(ServerLost, match="names no weights"):
                await client.weight_version()
        return name

    assert with_client(play, model_info=[{"weight_version": 7}, {"version": "7"}, "weight_version"]) == "7"


IDLE = ("flush_cache", {})


@pytest.mark.parametrize("answer", [200, 400, 404])
def test_weights_from_disk_are_named_and_empty_the_prefix_cache_of_a_server_that_may_end_its_step_first(
    answer: int,
) -> None:
    async def play(client: SGLangClient, script: Script) -> list[Call]:
        await client.update_from_disk("/some/folder", 3)
        return script.calls

    body = {"model_path": "/some/folder", "weight_version": "3", "flush_cache": True}
    assert with_client(play, flush_cache=[answer]) == [("POST", *IDLE), ("POST", "update_weights_from_disk", body)]


TENSORS = [
    ("update_weights_from_tensor", {"serialized_named_tensors": ["first", "first"], "flush_cache": False}),
    (
        "update_weights_from_tensor",
        {"serialized_named_tensors": ["last", "last"], "flush_cache": True, "weight_version": "3"},
    ),
]
BEGIN, END = ("begin_weight_update", {}), ("end_weight_update", {})


def tensor_calls(version: str, **answers: Any) -> list[Any]:
    """Return the paths and bodies of an update of two payloads on a server of two GPUs and a release of SGLang."""

    async def play(client: SGLangClient, script: Script) -> list[Any]:
        client.release = Release.of({"version": version})
        with contextlib.suppress(ServerRefused):
            await client.update_from_tensors(["first", "last"], 3, num_gpus=2)
        return [(path, body) for _, path, body in script.calls]

    return with_client(play, **answers)


def test_only_the_last_tensors_name_the_weights_and_every_gpu_gets_all() -> None:
    assert tensor_calls("0.5.15.post1") == [IDLE, *TENSORS]


def test_releases_that_take_tensors_in_a_session_get_one_and_one_left_open_is_closed_first() -> None:
    assert tensor_calls("0.5.21") == tensor_calls("0.5.23") == [IDLE, BEGIN, *TENSORS, END]
    left_open = {"success": False, "message": "a weight-update session is already open; call end_weight_update() first"}
    assert tensor_calls("0.5.23", begin_weight_update=[left_open]) == [IDLE, BEGIN, END, BEGIN, *TENSORS, END]
    assert tensor_calls("0.5.23", begin_weight_update=[{"success": False, "message": "no"}]) == [IDLE, BEGIN]


@pytest.mark.parametrize(
    ("version", "sent"),
    [
        ("0.5.16", {"serialized_tensors": "pickled"}),
        ("0.5.17", {"serialized_named_tensors": ["pickled", "pickled"]}),
        ("0.5.23", {"serialized_named_tensors": ["pickled", "pickled"]}),
    ],
)
def test_an_adapter_comes_as_the_release_takes_it(version: str, sent: dict[str, Any]) -> None:
    async def play(client: SGLangClient, script: Script) -> Any:
        client.release = Release.of({"version": version})
        await client.load_adapter("mine", Adapter({"r": 4}, "pickled", 9, ()))
        return [(path, body) for _, path, body in script.calls if path != "server_info"]

    assert with_client(play, server_info=[{"tp_size": 2}]) == [
        ("load_lora_adapter_from_tensors", {"lora_name": "mine", "config_dict": {"r": 4}, **sent}),
        ("update_weight_version", {"new_version": "mine", "abort_all_requests": False}),
    ]


@pytest.mark.parametrize(
    ("version", "model_type", "facts", "doubt"),
    [
        ("0.5.12.post1", "qwen3_vl", (False, False, False), "older than 0.5.15"),
        ("0.5.13", "qwen3_vl", (True, False, False), "0.5.13 is untried"),
        ("0.5.15.post1", "qwen3_vl", (True, False, False), ""),
        ("0.5.19", "qwen3_vl", (True, False, False), ""),
        ("0.5.20.dev3+g1234", "qwen3_vl", (True, True, False), ""),
        ("0.5.20", "qwen2_5_vl", (True, False, False), ""),
        ("0.5.23", "qwen3_vl_moe", (True, True, True), ""),
        ("0.10.0", "qwen3_vl", (True, True, True), "treated as 0.5.23"),
        ("0.0.0.dev0", "qwen3_vl", (True, False, False), "does not name its release"),
        ("main", "qwen3_vl", (True, False, False), "does not name its release"),
    ],
)
def test_a_release_is_known_by_its_number_and_doubted_outside_of_what_was_compared(
    version: str, model_type: str, facts: tuple[bool, bool, bool], doubt: str
) -> None:
    async def play(client: SGLangClient, script: Script) -> Release:
        assert await client.is_alive()
        assert [path for _, path, _ in script.calls] == ["model_info", "server_info"]
        return client.release

    release = with_client(play, model_info=[{"model_type": model_type}], server_info=[{"version": version}])
    assert (release.keeps_ids, release.names_files, release.has_update_sessions) == facts
    assert (doubt in release.doubt, bool(doubt)) == (True, bool(release.doubt))


@pytest.mark.parametrize("answer", [404, ["0.5.23"], {}, {"version": None}, {"version": "9" * 400}])
def test_a_server_that_names_no_release_is_treated_as_the_measured_one(answer: Any) -> None:
    async def play(client: SGLangClient, script: Script) -> Release:
        client.release = Release.of({"version": "0.5.23"})  # an earlier one at this address
        assert await client.is_alive()
        return client.release

    assert with_client(play, server_info=[answer]) == UNKNOWN
    assert (UNKNOWN.names_files, UNKNOWN.has_update_sessions) == (False, False)


def test_a_busy_server_that_does_not_tell_its_release_is_not_alive_yet() -> None:
    async def play(client: SGLangClient, script: Script) -> str:
        assert not await client.is_alive()
        assert await client.is_alive()
        return client.release.version

    assert with_client(play, server_info=[500, {"version": "0.5.23"}]) == "0.5.23"


def test_servers_with_a_cache_of_processed_images_name_every_models_images_by_their_files() -> None:
    info = {"version": "0.5.23", "mm_preprocess_cache_size_mb": 256}
    assert Release.of(info, "qwen2_5_vl").names_files


def test_a_file_named_by_its_bytes_has_the_salt_as_a_comment_and_the_same_pixels() -> None:
    image, release = processed("a"), Release.of({"version": "0.5.23"}, "qwen3_vl")

    def sent(salt: str) -> bytes:
        fields = image_fields([image], salt, None, release)
        assert list(fields) == ["image_data"]  # hashes of ours would end the server
        return base64.b64decode(fields["image_data"][0].split(",")[1])

    one, other = sent("run/0/0"), sent("run/1/0")
    assert sent("run/0/0") == one != other != image.png
    for file, salt in ((one, "run/0/0"), (other, "run/1/0")):
        raw_image = Image.open(io.BytesIO(file))
        raw_image.load()
        assert raw_image.info == {"Comment": salt}
        assert raw_image.tobytes() == Image.open(io.BytesIO(image.png)).tobytes()


def test_a_server_that_decodes_the_ids_of_requests_with_images_is_refused_before_a_run_that_has_some(
    checkpoint: Path,
) -> None:
    async def play(*scripts: Script) -> None:
        old, unknown = (script.url for script in scripts)
        reads_images = ModelFacts.load(checkpoint)
        scripts[1].answers["server_info"] = [404]
        await asyncio.to_thread(check_server, old, replace(reads_images, image_token_id=NO_IMAGE_TOKEN))
        await asyncio.to_thread(check_server, unknown, reads_images)
        with pytest.raises(UserError, match=r"got SGLang 0\.5\.12\.post1, .* serve with SGLang 0\.5\.15 or later"):
            await asyncio.to_thread(check_server, old, reads_images)

    on_servers(play, 2, server_info=[{"version": "0.5.12.post1"}] * 2)


def test_a_run_says_what_is_not_known_of_its_servers_releases() -> None:
    async def play(engine: SGLangEngine, *_: Script) -> list[str]:
        return engine.servers.events

    assert with_engine(play, server_info=[{"version": "0.5.23"}]) == []
    (event,) = with_engine(play, server_info=[{"version": "0.6.0"}])
    assert event.startswith("server 0: SGLang 0.6.0 is untried")


@pytest.mark.parametrize("answer", [{"success": False}, {"success": "yes"}, {}, "success", 400])
def test_an_update_that_did_not_succeed_is_a_refusal(answer: Any) -> None:
    async def play(client: SGLangClient, script: Script) -> None:
        with pytest.raises(ServerRefused, match="update_weights_from_disk: "):
            await client.update_from_disk("folder", 1)

    with_client(play, update_weights_from_disk=[answer])


@pytest.mark.parametrize("longest", ["client", "update"])
def test_an_update_may_take_ten_minutes_or_as_long_as_any_call(longest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.engines.sglang.client.UPDATE_S", 20.0 if longest == "update" else 0.01)

    async def play(client: SGLangClient, script: Script) -> None:
        monkeypatch.setattr(client, "_http", _Late(client._http))
        await client.update_from_disk("folder", 1)

    with_client(play, 20.0 if longest == "client" else 0.01)


class _Late:
    """An HTTP session whose answers take 0.2 s; it keeps the options of requests."""

    def __init__(self, http: aiohttp.ClientSession, given: list[Any] | None = None) -> None:
        self._http, self._given = http, given if given is not None else []

    def request(self, *args: Any, **options: Any) -> Any:
        http = self._http
        self._given.append(options)

        class Context:
            async def __aenter__(self) -> Any:
                await asyncio.sleep(0.2)
                self.response = await http.request(*args, **options)
                return self.response

            async def __aexit__(self, *_: object) -> None:
                self.response.release()

        return Context()


# What is made of an answer --------------------------------------------------------------------------------------------


def test_an_answer_is_read_whole() -> None:
    answer = parse_answer(written(4, 5, finish="stop", prompt=12, version="3", cached=7), SamplingParams())
    assert (answer.ids, answer.logprobs, answer.finish) == ([4, 5], [-1.0, -2.0], "stop")
    assert (answer.prompt_length, answer.num_cached, answer.version) == (12, 7, "3")


CUT = SamplingParams(top_k=3, top_p=0.7)


def cut(*tokens: int) -> Any:
    """Return an answer whose tokens were drawn where ids 4, 5 and 6 have the probabilities 0.5, 0.25 and 0.25."""
    top = [[math.log(0.5), 4, None], [math.log(0.25), 5, None], [math.log(0.25), 6, None]]
    given = written(*tokens)
    shown = {token: logprob for logprob, token, _ in top}
    pairs = [[shown.get(token, math.log(0.001)), token, None] for token in tokens]
    given["meta_info"] |= {"output_token_logprobs": pairs, "output_top_logprobs": [top] * len(tokens)}
    return given


def test_a_request_with_top_k_asks_for_the_most_likely_ids() -> None:
    body = generate_body(asked(top_k=20, top_p=0.9), [], "name", None)
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["top_p"]) == (20, 0.9)
    assert body["top_logprobs_num"] == 20
    assert "top_logprobs_num" not in generate_body(asked(), [], "name", None)


def test_the_ids_that_a_server_drew_from_are_found_again() -> None:
    answer = parse_answer(cut(4, 5), CUT)
    assert answer.kept_NK is not None and answer.kept_NK.tolist() == [[4, 5, 4], [4, 5, 4]]
    assert answer.logprobs == pytest.approx([math.log(2 / 3), math.log(1 / 3)])
    likely = parse_answer(cut(4), SamplingParams(top_k=3, min_p=0.6))
    assert likely.kept_NK is not None and likely.kept_NK.tolist() == [[4, 4, 4]]
    assert likely.logprobs == pytest.approx([0.0])


def test_of_equally_likely_ids_the_one_that_was_drawn_is_kept() -> None:
    answer = parse_answer(cut(6), CUT)
    assert answer.kept_NK is not None and answer.kept_NK.tolist() == [[4, 6, 4]]
    assert answer.logprobs == pytest.approx([math.log(1 / 3)])


def test_a_token_that_the_cuts_leave_out_breaks_the_stream() -> None:
    request = asked(max_new_tokens=1, top_k=3, top_p=0.7)
    answer = parse_answer(cut(9), request.sampling)
    turn = PendingTurn(request)
    turn.append(answer.ids, answer.logprobs, answer.kept_NK)
    turn.stamp(0)
    assert broken_turn(1, request, turn.completion()) == (
        "turn 1: token 1, id 9, is none of the ids that it was drawn from"
    )


@pytest.mark.parametrize("top", [None, [], [[[-1.0, 4, None]]], [[["x", 4], [-1.0, 5], [-2.0, 6]]], [7]])
def test_an_answer_without_the_most_likely_ids_loses_the_server(top: Any) -> None:
    given = cut(4)
    given["meta_info"]["output_top_logprobs"] = top
    with pytest.raises(ServerLost, match="no answer: "):
        parse_answer(given, CUT)


def test_log_probs_and_counts_that_are_null_are_nan_and_none() -> None:
    given = written(4, finish="abort", prompt=None)
    given["meta_info"]["output_token_logprobs"][0][0] = None
    answer = parse_answer(given, SamplingParams())
    assert math.isnan(answer.logprobs[0])
    assert (answer.prompt_length, answer.num_cached) == (None, 0)
    empty = written(finish="abort", prompt=5)
    empty["meta_info"]["output_token_logprobs"] = None
    answer = parse_answer(empty, SamplingParams())
    assert (answer.ids, answer.prompt_length) == ([], 5)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        written(4, finish="stop", prompt=None),
        written(4, finish="length", prompt=None),
        written(4, finish="other"),
        written(4) | {"output_ids": [5]},
        written(4) | {"output_ids": []},
        written(4) | {"meta_info": written(4)["meta_info"] | {"prompt_tokens": math.inf}},
    ],
)
def test_an_answer_that_is_none_loses_the_server(broken: Any) -> None:
    with pytest.raises(ServerLost, match="no answer: "):
        parse_answer(broken, SamplingParams())


def test_scores_are_those_of_all_ids_but_the_first() -> None:
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-2.0, 3, None]]}}
    scores = parse_scores(answer, 3)
    assert (scores.tolist(), scores.dtype) == ([-0.5, -2.0], np.float32)
    short = {"meta_info": {"input_token_logprobs": [[], [1], [2]]}}
    for broken, count in ((answer, 2), (answer, 4), ({}, 3), (None, 3), ({"meta_info": {}}, 3), (short, 3)):
        with pytest.raises(ServerLost, match="no scores: "):
            parse_scores(broken, count)


def test_waits_double_from_a_tenth_of_a_second_to_ten_seconds_and_ten_tries_take_half_a_minute() -> None:
    assert [pause_s(tries) for tries in (1, 2, 3, 7, 8, 20)] == pytest.approx([0.1, 0.2, 0.4, 6.4, 10.0, 10.0])
    assert 30 < sum(pause_s(tries) for tries in range(1, MAX_TRIES)) < 40


# Turns ----------------------------------------------------------------------------------------------------------------


def test_a_turn_that_was_cut_short_goes_on_behind_what_it_has() -> None:
    async def play(engine: SGLangEngine, script: Script) -> Any:
        done = await write(engine, asked(max_new_tokens=9))
        assert (engine.num_requests, engine.num_retried) == (2, 0)
        return done, script.bodies("generate")

    parts = [written(4, 5, finish="abort", cached=2), written(6, finish="stop", prompt=5, cached=5)]
    done, (first, second) = with_engine(play, generate=parts)
    assert (done.ids, done.logprobs, done.finish) == ((4, 5, 6), (-1.0, -2.0, -1.0), "stop")
    assert (done.prompt_length, done.versions, done.num_cached) == (3, ((0, 3),), 2)
    assert (first["input_ids"], first["sampling_params"]["max_new_tokens"]) == ([1, 2, 3], 9)
    assert (second["input_ids"], second["sampling_params"]["max_new_tokens"]) == ([1, 2, 3, 4, 5], 7)
    assert first["rid"] != second["rid"]


def test_a_turn_cut_short_with_all_its_tokens_has_ended_by_length() -> None:
    done = with_engine(
        lambda engine, _: write(engine, asked(max_new_tokens=2)), generate=[written(4, 5, finish="abort")]
    )
    assert (done.ids, done.finish) == ((4, 5), "length")


@pytest.mark.parametrize(("counts", "length"), [((4, 5), 4), ((3, 6), 4), ((3, 5), 3), ((5, 4), 5), ((2, 5), 2)])
def test_a_count_of_the_prompt_that_is_wrong_in_any_part_is_reported(counts: tuple[int, int], length: int) -> None:
    parts = [written(4, 5, finish="abort", prompt=counts[0]), written(6, finish="stop", prompt=counts[1])]
    assert with_engine(lambda engine, _: write(engine, asked()), generate=parts).prompt_length == length


def test_a_part_without_a_count_says_nothing_of_the_prompt() -> None:
    parts = [written(finish="abort", prompt=None), written(6, finish="stop", cached=2)]
    done = with_engine(lambda engine, _: write(engine, asked()), generate=parts)
    assert (done.prompt_length, done.num_cached) == (3, 2)


def test_what_other_weights_wrote_is_thrown_away_and_counted() -> None:
    async def play(engine: SGLangEngine, script: Script) -> Completion:
        done = await write(engine, asked())
        assert (engine.num_requests, engine.num_retried) == (3, 2)
        assert "wrote with weights 7, not 0" in engine.servers.events[0]
        return done

    done = with_engine(play, generate=[*[written(8, 8, version="7")] * 2, written(4, finish="stop")])
    assert (done.ids, done.versions) == ((4,), ((0, 1),))


@pytest.mark.parametrize("answer", [500, written(finish="abort"), {"meta_info": {}}])
def test_a_turn_is_asked_for_ten_times_in_vain_and_then_aborted(answer: Any) -> None:
    async def play(engine: SGLangEngine, script: Script) -> Completion:
        done = await write(engine, asked())
        assert engine.num_requests == MAX_TRIES == 10
        assert engine.num_retried == (0 if answer == written(finish="abort") else MAX_TRIES)
        assert [event for event in engine.servers.events if event.startswith("turn given up: ")]
        return done

    done = with_engine(play, generate=[answer] * 20)
    assert (done.ids, done.finish, done.versions) == ((), "abort", ())
    assert (done.prompt_length, done.num_cached) == (3, 0)


def test_a_turn_that_nothing_was_written_of_is_asked_for_again_and_the_ninth_retry_still_counts() -> None:
    answers = [*([written(finish="abort")] * 9), written(4, finish="stop")]
    assert with_engine(lambda engine, _: write(engine, asked()), generate=answers).ids == (4,)


def test_a_turn_that_is_refused_is_asked_for_once() -> None:
    async def play(engine: SGLangEngine, script: Script) -> Completion:
        done = await write(engine, asked())
        assert (engine.num_requests, engine.num_retried) == (1, 0)
        assert engine.servers.up, "the server is well"
        (event,) = engine.servers.events
        assert event.startswith("turn given up: ") and "status 400" in event
        return done

    assert with_engine(play, generate=[400]).finish == "abort"


def test_an_answer_between_two_that_are_given_up_begins_the_count_again() -> None:
    engine = SGLangEngine(SGLangSettings(), None)
    for _ in range(MAX_GIVEN_UP - 1):
        engine.count_given_up("reason")
    engine.count_answer()
    for _ in range(MAX_GIVEN_UP - 1):
        engine.count_given_up("reason")
    with pytest.raises(EngineDown, match=r"^32 turns in a row were given up, the last one: reason$"):
        engine.count_given_up("reason")
    assert engine.servers.events == ["turn given up: reason"] * (2 * MAX_GIVEN_UP - 1)


def test_a_turn_that_is_written_begins_the_count_of_those_given_up_again() -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        for _ in range(MAX_GIVEN_UP - 1):
            engine.count_given_up("reason")
        assert (await write(engine, asked())).ids == (4,)
        engine.count_given_up("reason")

    with_engine(play, generate=[written(4, finish="stop")])


def test_a_wait_that_is_cancelled_ends_that_request_on_its_server() -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        writing = asyncio.create_task(write(engine, asked()))
        await until(lambda: bool(script.bodies("generate")))
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert writing.cancelled() and len(script.bodies("generate")) == 1
        await until(lambda: bool(script.bodies("abort_request")))
        assert script.bodies("abort_request") == [{"rid": script.bodies("generate")[0]["rid"]}]
        await until(lambda: not engine._aborts)
        await asyncio.wait_for(engine.pause(), 1)  # nothing is in flight
        assert engine.servers.all[0].num_sessions == 0

    with_engine(play, generate=["hang"])


def test_a_request_whose_server_is_lost_is_ended_there() -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        await write(engine, asked())
        await until(lambda: bool(script.bodies("abort_request")))
        assert script.bodies("abort_request") == [{"rid": script.bodies("generate")[0]["rid"]}]

    with_engine(play, generate=[500, written(4, finish="stop")])


# Sessions, pauses, weights --------------------------------------------------------------------------------------------


def test_a_session_stays_with_its_server_and_leaves_it_at_the_end() -> None:
    async def play(engine: SGLangEngine, one: Script, other: Script) -> Any:
        other.answers["generate"] = [written(4, finish="stop")] * 3
        async with engine.session() as first, engine.session() as second:
            await first.generate(asked())
            for _ in range(3):
                await second.generate(asked((3, 2, 1)))
            assert [server.num_sessions for server in engine.servers.all] == [1, 1]
        assert [server.num_sessions for server in engine.servers.all] == [0, 0]
        return len(one.bodies("generate")), len(other.bodies("generate"))

    assert with_engine(play, 2, generate=[written(4, finish="stop")] * 3) == (1, 3)


def test_every_session_counts_at_its_server_until_it_ends() -> None:
    async def play(engine: SGLangEngine, script: Script) -> list[int]:
        (server,), counts = engine.servers.all, []
        async with engine.session() as first, engine.session() as second, engine.session():
            await first.generate(asked())
            counts.append(server.num_sessions)
            await second.generate(asked())
            counts.append(server.num_sessions)
        return [*counts, server.num_sessions]

    assert with_engine(play, generate=[written(4, finish="stop")] * 2) == [1, 2, 0]


def test_a_session_whose_server_is_lost_goes_on_at_another() -> None:
    async def play(engine: SGLangEngine, one: Script, other: Script) -> Any:
        one.answers["model_info"] = [500] * 1000
        other.answers["generate"] = [written(4, finish="stop")]
        async with engine.session() as session:
            done = await session.generate(asked())
            assert [server.num_sessions for server in engine.servers.all] == [0, 1]
        assert engine.num_retried == 1
        return done.ids

    assert with_engine(play, 2, generate=[500]) == (4,)


def test_a_session_that_goes_on_in_a_new_stream_sends_that_stream_alone_to_its_server() -> None:
    async def play(engine: SGLangEngine, *scripts: Script) -> Any:
        first = GenerateRequest((1, PAD, PAD, 2), (processed("a"),), 4, SamplingParams(), seed=1)
        later = GenerateRequest((1, 5, PAD, PAD, 6), (processed("b", seed=1),), 4, SamplingParams(), seed=2, stream=1)
        async with engine.session() as session:
            done = [await session.generate(first), await session.generate(later)]
        bodies = [script.bodies("generate") for script in scripts if script.bodies("generate")]
        return done, bodies

    answers = [written(4, finish="stop", prompt=4), written(7, finish="stop", prompt=5)]
    done, (bodies,) = with_engine(play, generate=answers)
    assert [(each.ids, each.prompt_length) for each in done] == [((4,), 4), ((7,), 5)]
    assert [body["input_ids"] for body in bodies] == [[1, PAD, 2], [1, 5, PAD, 6]]
    assert [len(body["mm_hashes"]) for body in bodies] == [1, 1]


def test_a_pause_ends_what_every_server_writes_and_returns_once_nothing_is_written() -> None:
    async def play(engine: SGLangEngine, one: Script, other: Script) -> Any:
        writing = asyncio.create_task(write(engine, asked()))
        await until(lambda: bool(one.bodies("generate")))
        assert not engine.is_paused
        pausing = asyncio.create_task(engine.pause())
        await until(lambda: len(one.bodies("abort_request")) > 1)
        assert engine.is_paused and not pausing.done()
        for script in (one, other):
            assert script.bodies("abort_request")[0] == {"abort_all": True, "rid": ""}
        engine.servers.all[0].client.time_out_calls()
        await pausing
        asked_before = engine.num_requests
        await asyncio.sleep(0.05)
        assert (engine.num_requests, writing.done()) == (asked_before, False)
        for script in (one, other):
            script.answers["generate"] = [written(4, finish="stop")]
        await engine.resume()
        assert not engine.is_paused
        return (await writing).ids

    assert with_engine(play, 2, generate=["hang"]) == (4,)


def test_a_server_that_does_not_take_the_word_to_end_is_lost_and_the_pause_is_not_held_up() -> None:
    async def play(engine: SGLangEngine, script: Script) -> list[str]:
        writing = asyncio.create_task(write(engine, asked()))
        await until(lambda: bool(script.bodies("generate")))
        script.answers |= {"abort_request": [503], "model_info": [500] * 1000}
        await engine.pause()
        writing.cancel()
        return engine.servers.events

    assert "abort_request: status 503" in with_engine(play, generate=["hang"])[0]


def test_a_word_to_end_waits_ten_seconds_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    call = SGLangClient.call

    async def noted(self: SGLangClient, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        if path == "abort_request":
            limits.append(timeout_s)
        return await call(self, path, body, timeout_s)

    monkeypatch.setattr(SGLangClient, "call", noted)

    async def play(engine: SGLangEngine, script: Script) -> None:
        writing = asyncio.create_task(write(engine, asked()))
        await until(lambda: bool(script.bodies("generate")))
        pausing = asyncio.create_task(engine.pause())
        await until(lambda: bool(limits))
        writing.cancel()
        await pausing
        await until(lambda: len(script.bodies("abort_request")) > 1)

    with_engine(play, generate=["hang"])
    assert set(limits) == {10}


def test_an_empty_part_that_a_pause_cut_off_is_no_fault() -> None:
    async def play(engine: SGLangEngine, script: Script) -> Completion:
        for _ in range(MAX_GIVEN_UP - 1):
            engine.count_given_up("reason")
        async with engine.session() as session:
            await engine.pause()
            writing = asyncio.create_task(session.generate(asked()))
            await asyncio.sleep(0.02)
            assert not script.bodies("generate")
            await engine.resume()
            return await writing

    assert with_engine(play, generate=[written(4, finish="stop")]).ids == (4,)


def test_new_weights_are_pushed_to_every_server_and_one_that_does_not_take_them_is_lost(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, one: Script, other: Script) -> Any:
        other.answers["update_weights_from_disk"] = [{"success": False}]
        other.answers["model_info"] = [500] * 1000
        await engine.update_from_disk(tmp_path, 3)
        assert [server.is_up for server in engine.servers.all] == [True, False]
        assert engine.weight_version == 3
        return one.bodies("update_weights_from_disk"), other.bodies("update_weights_from_disk")

    body = {"model_path": str(tmp_path), "weight_version": "3", "flush_cache": True}
    assert with_engine(play, 2) == ([body], [body])


def test_a_relative_folder_of_weights_is_named_absolutely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def play(engine: SGLangEngine, script: Script) -> Any:
        script.answers["model_info"] = [{"weight_version": "1"}, {"weight_version": "2"}]
        engine.current_weights = lambda: Path("late")
        await engine.update_from_disk(Path("new"), 2)
        await engine._load_current_weights(engine.servers.all[0].client)
        return [body["model_path"] for body in script.bodies("update_weights_from_disk")]

    assert with_engine(play) == [str(tmp_path / "new"), str(tmp_path / "late")]


def test_weights_do_not_change_while_something_is_written(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        writing = [asyncio.create_task(write(engine, asked())) for _ in range(2)]
        await until(lambda: len(script.bodies("generate")) == 2)
        with pytest.raises(AssertionError, match="pause first"):
            await engine.update_from_disk(tmp_path, 1)
        writing[0].cancel()
        await asyncio.gather(writing[0], return_exceptions=True)
        with pytest.raises(AssertionError, match="pause first"):  # the other is still written
            await engine.update_from_disk(tmp_path, 1)
        writing[1].cancel()
        await asyncio.gather(writing[1], return_exceptions=True)
        await engine.update_from_disk(tmp_path, 1)

    with_engine(play, generate=["hang", "hang"])


def test_a_server_that_is_back_is_given_the_current_weights_and_no_encoding_is_found_again(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, script: Script) -> Any:
        engine.current_weights = lambda: tmp_path
        script.answers["model_info"] = [{"weight_version": "0"}]
        salt = engine.salt
        await engine._load_current_weights(engine.servers.all[0].client)  # nobody has pushed any yet
        assert engine.salt == salt
        await engine.update_from_disk(tmp_path / "pushed", 4)
        salt = engine.salt
        await engine._load_current_weights(engine.servers.all[0].client)
        assert engine.salt != salt
        return script.bodies("update_weights_from_disk")[1:]

    assert with_engine(play) == [{"model_path": str(tmp_path), "weight_version": "4", "flush_cache": True}]


def test_a_server_that_was_away_while_the_run_went_back_gets_the_weights_of_a_version_that_comes_again(
    tmp_path: Path,
) -> None:
    async def play(engine: SGLangEngine, one: Script, other: Script) -> Any:
        engine.current_weights = lambda: tmp_path / "again"
        for version in (1, 2):
            await engine.update_from_disk(tmp_path / "abandoned", version)
        other.answers["model_info"] = [500] * 1000
        engine.servers.report_lost(engine.servers.all[1], "no answer")
        for version in (1, 2):
            await engine.update_from_disk(tmp_path / "again", version)
        other.answers["model_info"] = [{"weight_version": "2"}] * 1000
        await until(lambda: engine.servers.all[1].is_up)
        return [Path(body["model_path"]).name for body in other.bodies("update_weights_from_disk")]

    assert with_engine(play, 2) == ["abandoned", "abandoned", "again"]


def test_weights_that_were_loading_while_the_run_went_back_are_followed_by_the_current_ones(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, script: Script) -> Any:
        await engine.update_from_disk(tmp_path / "abandoned", 2)
        (server,) = engine.servers.all
        server.is_up, give = False, server.client.update_from_disk

        async def slowly(folder: str, version: int) -> None:
            await give(folder, version)
            if Path(folder).name == "abandoned":
                await engine.update_from_disk(tmp_path / "again", 1)
                await engine.update_from_disk(tmp_path / "again", 2)
                engine.current_weights = lambda: tmp_path / "again"

        server.client.update_from_disk = slowly  # type: ignore[method-assign]
        engine.current_weights = lambda: tmp_path / "abandoned"
        await engine._load_current_weights(server.client)
        return [Path(body["model_path"]).name for body in script.bodies("update_weights_from_disk")]

    assert with_engine(play) == ["abandoned", "abandoned", "again"]


def test_a_server_with_weights_of_an_earlier_run_that_misses_the_first_push_gets_those_of_this_run(
    tmp_path: Path,
) -> None:
    async def play(engine: SGLangEngine, script: Script) -> Any:
        engine.current_weights = lambda: tmp_path
        script.answers |= {"update_weights_from_disk": [500], "model_info": [{"weight_version": "0"}] * 1000}
        await engine.update_from_disk(tmp_path, 0)
        await until(lambda: engine.servers.all[0].is_up)
        return len(script.bodies("update_weights_from_disk"))

    assert with_engine(play) == 2


def test_a_server_that_refuses_the_current_weights_is_not_asked_again(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, script: Script) -> int:
        engine.current_weights = lambda: tmp_path
        engine.weight_version = 4
        with pytest.raises(ServerRefused, match="'success': False"):
            await engine._load_current_weights(engine.servers.all[0].client)
        return len(script.bodies("update_weights_from_disk"))

    assert with_engine(play, update_weights_from_disk=[{"success": False}]) == 1


def test_default_names_the_first_weights_until_any_were_given(tmp_path: Path) -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        assert [engine.is_current(name) for name in ("default", "0", "1", "")] == [True, True, False, False]
        engine.weight_version = 1
        assert [engine.is_current(name) for name in ("default", "0", "1")] == [False, False, True]
        await engine.update_from_disk(tmp_path, 0)
        assert [engine.is_current(name) for name in ("default", "0")] == [False, True]

    with_engine(play)


def test_names_and_salts_are_of_this_engine_alone() -> None:
    engines = [SGLangEngine(SGLangSettings(), None) for _ in range(2)]
    names = [engine.next_request_id() for engine in engines for _ in range(3)]
    assert len({name.split("-")[0] for name in names}) == 2
    assert [name.split("-")[1] for name in names[:3]] == ["000000000000", "000000000001", "000000000002"]
    assert len({len(name) for name in names}) == 1
    assert engines[0].salt != engines[1].salt
    salt = engines[0].salt
    engines[0].weight_version = 1
    assert engines[0].salt != salt


def test_scores_are_of_every_server_that_is_up_and_of_the_first_alone_where_one_is_asked_for() -> None:
    def scored(second: float) -> Any:
        return {"meta_info": {"input_token_logprobs": [[None, 1, None], [second, 2, None]]}}

    async def play(engine: SGLangEngine, one: Script, other: Script) -> Any:
        other.answers["generate"] = [scored(-2.0)] * 2
        both = await engine.score_everywhere([1, 2], ())
        first = await engine.score([1, 2], ())
        assert one.bodies("generate")[0] == score_body([1, 2], (), PAD) | {"extra_key": engine.salt}
        return [scores.tolist() for scores in both], first.tolist()

    assert with_engine(play, 2, generate=[scored(-1.0)] * 2) == ([[-1.0], [-2.0]], [-1.0])


def test_scores_are_asked_for_ten_times_before_the_last_fault_is_raised() -> None:
    async def play(engine: SGLangEngine, script: Script) -> Any:
        with pytest.raises(ServerLost, match="status 500"):
            await engine.score([1, 2], ())
        assert any("status 500" in event for event in engine.servers.events)
        return len(script.bodies("generate"))

    assert with_engine(play, generate=[500] * 20) == MAX_TRIES


def test_scores_that_are_refused_are_not_asked_for_again() -> None:
    async def play(engine: SGLangEngine, script: Script) -> Any:
        with pytest.raises(ServerRefused, match="status 400"):
            await engine.score([1, 2], ())
        return len(script.bodies("generate"))

    assert with_engine(play, generate=[400] * 20) == 1


def test_an_engine_that_closes_first_ends_what_servers_still_write() -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        writing = asyncio.create_task(write(engine, asked()))
        await until(lambda: bool(script.bodies("generate")))
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await engine.close()
        assert len(script.bodies("abort_request")) == 1
        assert not engine.is_paused

    with_engine(play, generate=["hang"])


def test_a_turn_that_waits_out_a_pause_fails_as_the_engine_closes() -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        await engine.pause()
        waiting = asyncio.create_task(write(engine, asked()))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineDown):
            await asyncio.wait_for(waiting, 5)

    with_engine(play)


def test_an_engine_reads_4096_tokens_where_nothing_else_is_said() -> None:
    assert SGLangEngine(SGLangSettings(), 7).context_length == 4096
    engine = SGLangEngine(SGLangSettings(), 7, 100)
    assert (engine.image_token_id, engine.context_length, engine.weight_version) == (7, 100, 0)


def test_images_that_are_scored_have_the_hashes_of_this_run_and_its_weights() -> None:
    image = processed("a")
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, PAD, None], [-2.0, PAD, None]]}}

    async def play(engine: SGLangEngine, script: Script) -> None:
        await engine.score([1, PAD, PAD], [image])
        (body,) = script.bodies("generate")
        assert (body["input_ids"], body["mm_hashes"]) == ([1, PAD], [salted_hash(image, engine.salt)])

    with_engine(play, generate=[answer])


def test_an_engine_closes_though_a_server_does_not_answer_that_it_has_ended_a_request() -> None:
    async def play(engine: SGLangEngine, script: Script) -> float:
        await write(engine, asked())
        started = asyncio.get_running_loop().time()
        await engine.close()
        return asyncio.get_running_loop().time() - started

    given = {"generate": [500, written(4, finish="stop")], "abort_request": ["hang"]}
    assert 1.5 < with_engine(play, **given) < 8


def test_a_word_to_end_that_fails_is_nobodys_error() -> None:
    async def play(engine: SGLangEngine, script: Script) -> None:
        seen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
        await write(engine, asked())
        await until(lambda: not engine._aborts)
        gc.collect()
        await asyncio.sleep(0)
        assert seen == []

    with_engine(play, generate=[500, written(4, finish="stop")], abort_request=[500])
