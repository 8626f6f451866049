"""Claims about images that rows name by URL: only public addresses are asked, within bounds, and once."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from envs import images
from envs.check import run as check
from envs.datasets import remote_images
from envs.datasets.remote_images import RemoteImages, is_public
from envs.datasets.samples import load_samples
from envs.errors import UserError
from envs.types import message_images
from tests.image_server import Answer, ImageServer, png, serving_images

FIELD = "train.jsonl row 3 images[0]"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    with serving_images(monkeypatch) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> RemoteImages:
    return RemoteImages(tmp_path / "cache")


def refusal(cache: RemoteImages, url: str) -> str:
    with pytest.raises(UserError) as caught:
        cache.fetch(url, FIELD)
    assert str(caught.value).startswith(FIELD)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a9fe:a9fe::", "::127.0.0.1", "::ffff:0:127.0.0.1",
        "64:ff9b:1::7f00:1", "64:ff9b:1::1.1.1.1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1",
        "3fff::1", "fec0::1", "5f00::1", "2606:4700::1111%eth0", "192.0.0.8", "192.88.99.1", "127.1", "0177.0.0.1",
        "1.1.1.1.", "0", "localhost",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_known_as_such_also_inside_another(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:1.1.1.1"]
)
def test_a_public_address_is_public(address: str) -> None:
    assert is_public(address)


def test_a_url_is_downloaded_once_and_kept_under_the_hash_of_its_bytes(
    server: ImageServer, cache: RemoteImages, tmp_path: Path
) -> None:
    server.answers["/copy.png"] = server.answers["/red.png"]
    first = cache.fetch(f"{server.root}/red.png", FIELD)
    assert first.read_bytes() == png()
    assert cache.fetch(f"{server.root}/copy.png", FIELD) == first, "equal bytes are one file"
    assert RemoteImages(tmp_path / "cache").fetch(f"{server.root}/red.png", FIELD) == first
    assert server.asked == {"/red.png": 1, "/copy.png": 1}


def test_a_damaged_file_of_the_cache_is_downloaded_again(
    server: ImageServer, cache: RemoteImages, tmp_path: Path
) -> None:
    file = cache.fetch(f"{server.root}/red.png", FIELD)
    file.write_bytes(png()[:20])
    assert RemoteImages(tmp_path / "cache").fetch(f"{server.root}/red.png", FIELD).read_bytes() == png()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0", "127.0.0.1.",
        "0177.0.0.1", "0x7f000001", "[::127.0.0.1]", "１２７.0.0.1", "127。0。0。1", "①②⑦.1", "[::1%25lo]", "ⓛocalhost",
    ],
)  # fmt: skip
def test_no_spelling_of_a_private_host_is_asked(host: str, cache: RemoteImages) -> None:
    with serving_images() as running:
        message = refusal(cache, f"http://{host}:{running.server_port}/red.png")
    assert running.asked == {}
    assert "must be a URL of an image that downloads" in message


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest", "http://[::1]/", "http://10.0.0.1:8265/", "http://127.1:8265/", "//0:8265/",
        "http://2130706433/", "http://[::127.0.0.1]/", "http://[64:ff9b:1::7f00:1]/",
    ],
)  # fmt: skip
def test_a_redirect_to_a_private_address_is_refused(target: str, server: ImageServer, cache: RemoteImages) -> None:
    server.answers["/away"] = Answer(status=302, headers={"Location": target})
    assert "no public address" in refusal(cache, f"{server.root}/away")
    assert server.asked == {"/away": 1}


def test_a_redirect_to_another_scheme_is_refused(server: ImageServer, cache: RemoteImages) -> None:
    server.answers["/away"] = Answer(status=302, headers={"Location": "file:///etc/passwd"})
    assert "a redirect to file" in refusal(cache, f"{server.root}/away")


def test_redirects_are_followed_relative_ones_too_but_not_for_ever(server: ImageServer, cache: RemoteImages) -> None:
    server.answers["/a/b"] = Answer(status=301, headers={"Location": "../red.png"})
    server.answers["/loop"] = Answer(status=307, headers={"Location": "/loop"})
    assert cache.fetch(f"{server.root}/a/b", FIELD).read_bytes() == png()
    assert "more than 5 redirects" in refusal(cache, f"{server.root}/loop")
    assert server.asked["/loop"] == remote_images.MAX_REDIRECTS + 1


def test_a_name_is_resolved_once_and_the_checked_address_is_connected_to(
    server: ImageServer, cache: RemoteImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def rebinding(self: Any, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict[str, Any]]:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "10.0.0.1"
        return [{"hostname": host, "host": address, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", rebinding)
    assert cache.fetch(f"http://images.test:{server.server_port}/red.png", FIELD).read_bytes() == png()
    assert asked == ["images.test"]
    assert server.hosts == [f"images.test:{server.server_port}"]
    assert "images.test is 10.0.0.1, no public address" in refusal(cache, "http://images.test/other.png")


def test_a_private_address_of_a_name_with_public_ones_too_is_not_connected_to(
    cache: RemoteImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mixed(self: Any, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict[str, Any]]:
        shared = {"hostname": host, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
        return [{**shared, "host": "192.168.0.1"}, {**shared, "host": "1.1.1.1"}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", mixed)
    assert "images.test is 192.168.0.1" in refusal(cache, "http://images.test/red.png")


def test_an_address_that_the_client_takes_for_itself_is_checked_when_the_socket_is_opened(
    cache: RemoteImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images, "_is_number", lambda host: False)  # as if aiohttp knew a spelling that we do not
    with serving_images() as running:
        assert "127.0.0.1, no public address" in refusal(cache, f"http://127.0.0.1:{running.server_port}/red.png")
    assert running.asked == {}


@pytest.mark.parametrize("url", ["http://1.1.1.1:22/", "http://example.com:25/", "https://example.com:0/"])
def test_a_port_of_another_service_is_refused(url: str, cache: RemoteImages) -> None:
    assert "belongs to another service" in refusal(cache, url)


@pytest.mark.parametrize("host", ["1.1", "0x01010101", "16843009", "1.1.1.1.", "01.1.1.1"])
def test_an_odd_spelling_of_a_public_address_is_refused_too(host: str, cache: RemoteImages) -> None:
    assert "no public address" in refusal(cache, f"http://{host}/red.png")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(status=404), "the server answers 404"),
        (Answer(b"<html>no image</html>"), "must be an image of a known format"),
        (Answer(png()[:-20]), "must be a whole image"),
        (Answer(gzip.compress(png()), headers={"Content-Encoding": "gzip"}), "must be an image of a known format"),
        (Answer(b"x" * 3000), "more than 2000 bytes"),
        (Answer(png(), headers={"Content-Length": "9999"}), "ClientPayloadError"),
        (Answer(status=503), "the server answers 503"),
    ],
)
def test_what_is_no_whole_image_is_refused_and_not_kept(
    answer: Answer,
    reason: str,
    server: ImageServer,
    cache: RemoteImages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 2000)
    server.answers["/a"] = answer
    message = refusal(cache, f"{server.root}/a")
    assert reason in message
    assert f"{server.root}/a" in message
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_a_server_that_sends_a_byte_now_and_then_is_left_in_time(
    server: ImageServer, cache: RemoteImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images, "TIMEOUT_S", 0.5)
    server.answers["/slow"] = Answer(png() * 10, drips=True)
    began = time.monotonic()
    assert "downloads within 0.5 s" in refusal(cache, f"{server.root}/slow")
    assert time.monotonic() - began < 3


def test_a_busy_server_is_asked_again(server: ImageServer, cache: RemoteImages) -> None:
    server.fails = {"/red.png"}
    assert cache.fetch(f"{server.root}/red.png", FIELD).read_bytes() == png()
    assert server.asked["/red.png"] == 2


def test_a_password_in_a_url_is_refused(cache: RemoteImages) -> None:
    assert "a user or password in it" in refusal(cache, "http://me:secret@example.org/a.png")


def test_the_cache_stays_under_its_limit_without_the_images_in_use(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    colors = ("red", "green", "blue")
    server.answers |= {f"/{color}.png": Answer(png(color)) for color in colors}
    monkeypatch.setattr(remote_images, "MAX_CACHE_BYTES", int(2.5 * len(png())))
    before = RemoteImages(tmp_path)
    old = [before.fetch(f"{server.root}/{color}.png", FIELD) for color in ("red", "green")]
    now = RemoteImages(tmp_path)
    used = now.fetch(f"{server.root}/green.png", FIELD)
    new = now.fetch(f"{server.root}/blue.png", FIELD)
    assert (old[0].exists(), used.exists(), new.exists()) == (False, True, True)
    assert "must have images of at most" in refusal(now, f"{server.root}/red.png")


def test_the_check_of_an_environment_downloads_the_images_of_its_problems(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"problem": "Find x.", "answer": "1", "images": f"{server.root}/red.png"}))
    with pytest.raises(UserError, match="give --allow-remote-images"):
        check(["geo3k_single", "--data", str(file)])
    assert check(["geo3k_single", "--data", str(file), "--allow-remote-images"]) == 0
    assert server.asked == {"/red.png": 1}


def test_rows_with_urls_load_only_with_the_flag_and_name_row_and_url_where_one_fails(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{server.root}/red.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    rows: list[dict[str, Any]] = [
        {"problem": "<image>Find x.", "answer": "1", "images": [url]},
        {"problem": "Find x.", "answer": "1", "images": [{"url": url}]},
        {"problem": [{"role": "user", "content": [part, {"type": "text", "text": "Find x."}]}], "answer": "1"},
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"train.jsonl row 0 images\[0\]: must not be a URL, got http.*red.png; give "):
        load_samples(str(file))
    assert server.asked == {}

    with caplog.at_level(logging.INFO):
        samples = load_samples(str(file), allow_remote_images=True)
    for sample in samples:
        (image,) = message_images(sample.prompt)
        assert image.getpixel((0, 0)) == (255, 0, 0)
    assert server.asked["/red.png"] <= len(rows), "rows are read by several threads, and read again from the cache"
    assert caplog.text.count("downloading the images of URLs into") == 1

    file.write_text(file.read_text() + json.dumps({**rows[0], "images": [f"{server.root}/gone.png"]}) + "\n")
    with pytest.raises(UserError, match=r"train.jsonl row 3 images\[0\].*gone.png; the server answers 404"):
        load_samples(str(file), allow_remote_images=True)
