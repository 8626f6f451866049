"""Claims about a stranger's recording: nothing outside its folder is read, and nothing kills, hangs or fills memory."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from agents.recording import EPISODES, OUTCOMES, SCORES, TOKENS, Recorder, Recording
from agents.recording.gzip_lines import GzipLines, num_skipped, read_gzip_lines
from agents.recording.images import DecodedImages
from agents.recording.safe_files import MAX_LINE, memory_of, read_lines
from agents.recording.schema import image_names
from agents.replay import run as replay
from agents.view import run as view
from agents.viewer.export import read_image as embedded
from agents.viewer.server import ViewServer
from agents.viewer.source import Source
from envs.errors import UserError
from tests.paths import ROOT
from tests.recordings import lines_of

GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording with images that a test may change."""
    return Path(shutil.copytree(GOLDEN / "geo3k_zoom", tmp_path / "stranger"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the first episode that has several turns, and drop the others."""
    line = next(line for line in lines_of(folder / EPISODES) if len(line["turns"]) > 1)
    change(line)
    (folder / EPISODES).unlink()
    GzipLines(folder / EPISODES).append(json.dumps(line).encode())


# Images -------------------------------------------------------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n0 setgray\nshowpage\n%%EOF\n"
HUGE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (2**30).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00" + bytes(40)


def _link(image: Path) -> None:
    image.symlink_to("/etc/passwd")


def _moved(image: Path) -> None:
    """Leave a link to the right image, which stands outside the folder."""
    other = next(path for path in (GOLDEN / "geo3k_zoom" / "images").iterdir() if path.name == image.name)
    image.symlink_to(other)


def _linked_folder(image: Path) -> None:
    shutil.rmtree(image.parent)
    image.parent.symlink_to(GOLDEN / "geo3k_zoom" / "images")


IMAGES: dict[str, Callable[[Path], object]] = {
    "a program for Ghostscript": lambda path: path.write_bytes(EPS),
    "a link to a file of this machine": _link,
    "a link to the right image": _moved,
    "a linked folder": _linked_folder,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "another image": lambda path: Image.new("RGB", (8, 8)).save(path),
    "no PNG": lambda path: Image.new("RGB", (8, 8)).save(path, format="JPEG"),
    "a header of 2**60 pixels": lambda path: path.write_bytes(HUGE),
    "80 million pixels in 80 kB": lambda path: Image.new("RGB", (9000, 9000)).save(path),
    "nothing": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES.keys())
def test_only_the_recorded_image_itself_is_read(
    make: Callable[[Path], object], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript runs"))
    image = sorted((folder / "images").iterdir())[0]
    image.unlink()
    make(image)
    recording, name = Recording.open(folder), f"images/{image.name}"
    for read in (recording.image, recording.image_file):
        with pytest.raises(UserError):
            read(name)
    source = Source(folder)
    assert embedded(source, name) is None
    with ViewServer([source]) as server:
        assert server.respond(f"/{server.token}/data/0/{name}").status == 404


def test_a_image_is_served_and_embedded_as_it_was_recorded(folder: Path) -> None:
    image, source = sorted((folder / "images").iterdir())[0], Source(folder)
    assert embedded(source, f"images/{image.name}") == image.read_bytes()


def test_decoded_images_are_kept_up_to_a_number_of_bytes(folder: Path) -> None:
    first, second, *_ = sorted((folder / "images").iterdir())
    size = 3 * Image.open(first).width * Image.open(first).height
    store = DecodedImages(max_bytes=size)
    assert store.read(first) is store.read(first) and store.num_bytes == size
    store.read(second)
    assert store.num_bytes == 3 * Image.open(second).width * Image.open(second).height


# Files ----------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Path], object]] = {
    "a symbolic link": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["recording.json", EPISODES, OUTCOMES, SCORES, TOKENS, "metrics.jsonl", "summary.json"]
)
def test_a_file_that_is_no_regular_one_is_refused_at_once(name: str, kind: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises(UserError, match=f"{name}: must be a regular file, got {kind}"):
        Source(folder).overview()


@pytest.mark.parametrize("name", [EPISODES, OUTCOMES, SCORES, TOKENS, "images"])
def test_recording_into_a_strangers_folder_writes_nowhere_else(name: str, folder: Path, tmp_path: Path) -> None:
    manifest, mine = Recording.open(folder).manifest, tmp_path / "mine"
    mine.write_bytes(b"mine\n")
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    (folder / name).symlink_to(mine)
    with pytest.raises(UserError, match="symbolic link"):
        Recorder(folder, manifest)
    assert mine.read_bytes() == b"mine\n"


def test_a_recording_elsewhere_that_a_run_folder_links_to_is_not_opened(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes").symlink_to(folder)
    with pytest.raises(UserError, match="must be a real folder, got a symbolic link"):
        Recording.open(tmp_path / "run")


# Streams --------------------------------------------------------------------------------------------------------------


def _mask_of_a_tool(line: dict[str, Any]) -> None:
    line["mask"][line["turns"][0]["end"]] = 1


def _sets(kept_N: np.ndarray) -> str:
    return base64.b64encode(kept_N.astype("<i4").tobytes()).decode()


def _routes(num_bytes: int) -> dict[str, Any]:
    experts = base64.b64encode(bytes(num_bytes)).decode()
    return {"num_layers": 1, "top_k": 2, "width": 1, "experts": experts}


def _turn(name: str, value: int) -> Callable[[dict[str, Any]], None]:
    return lambda line: line["turns"][0].update({name: value})


STREAMS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a mask over tool output": (_mask_of_a_tool, "log-probs for .* masked tokens"),
    "a mask over tool output, with its log-prob": (
        lambda line: (_mask_of_a_tool(line), line["logprobs"].append(-1.0)),
        "mask covers",
    ),
    "a 2 in a mask": (lambda line: line["mask"].__setitem__(-1, 2), "less than or equal to 1"),
    "a negative turn": (_turn("start", -5), "greater than or equal to 0"),
    "a turn past the end": (_turn("end", 10**6), "span .* in a stream of"),
    "a turn in the prompt": (_turn("start", 0), "begins at 0, the prompt ends at"),
    "versions of other tokens": (lambda line: line["turns"][0].update(versions=[[0, 1]]), "do not add up"),
    "a log-prob above 0": (lambda line: line["logprobs"].__setitem__(0, 5.0), "finite and at most 0"),
    "a log-prob beyond float32": (lambda line: line["logprobs"].__setitem__(0, -1e300), "finite and at most 0"),
    "an id too many": (lambda line: line["ids"].append(1), "lengths differ"),
    "an id of 100 bits": (lambda line: line["ids"].__setitem__(0, 2**100), "less than 9223372036854775808"),
    "a reward that is no number": (lambda line: line.update(reward=float("nan")), "reward: Input should be a finite"),
    "half a set of ids": (lambda line: line.update(kept="AAA="), "kept has 2 bytes for"),
    "sets of ids of no token": (
        lambda line: line.update(kept=_sets(np.arange(8)), logprobs=[]),
        "kept has 32 bytes for 0 tokens",
    ),
    "sets of ids that are no text of bytes": (lambda line: line.update(kept="A"), "kept: Base64 decoding error"),
    "a token that is not in its set": (
        lambda line: line.update(kept=_sets(np.full(len(line["logprobs"]), 2**30))),
        "is none of the ids that it was drawn from",
    ),
    "experts of no whole token": (
        lambda line: line.update(routes=_routes(7)),
        "routes: Value error, 7 bytes are no whole rows of 2",
    ),
    "experts of other tokens": (lambda line: line.update(routes=_routes(4)), "experts of 2 tokens, .* were read by"),
    "experts of no layer": (
        lambda line: line.update(routes=_routes(4) | {"num_layers": 0}),
        "routes.num_layers: Input should be greater than or equal to 1",
    ),
    "experts of three bytes": (lambda line: line.update(routes=_routes(6) | {"width": 3}), "routes.width"),
    "experts that are no text of bytes": (
        lambda line: line.update(routes=_routes(4) | {"experts": "A"}),
        "routes.experts: Base64 decoding error",
    ),
    "another schema": (lambda line: line.update(schema_version=3), "must be a recording of schema 4 or 5, got 3"),
}


@pytest.mark.parametrize(("change", "rule"), STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_that_breaks_a_rule_is_refused_by_whoever_reads_it(
    change: Callable[[dict[str, Any]], object], rule: str, folder: Path, tmp_path: Path
) -> None:
    rewrite(folder, change)
    for read in (
        lambda: list(Recording.open(folder).episodes()),
        lambda: Source(folder),
        lambda: replay([str(folder)]),
    ):
        with pytest.raises(UserError, match=rule):
            read()


def test_an_episode_that_ended_because_of_its_stream_is_still_shown(folder: Path) -> None:
    def broken(line: dict[str, Any]) -> None:
        line.update(end_reason="invalid_stream", error="turn 1: log-probs must be finite and at most 0, got nan at 9")
        line["logprobs"][:2] = [None, 1e300]

    rewrite(folder, broken)
    assert "must be finite and at most 0, got nan at 9" in Source(folder).episode(0)["error"]


@pytest.mark.parametrize("content", [3, [3], [["image"]], {"type": "image"}, [{"type": "image"}]])
def test_a_message_that_is_none_is_refused_and_not_a_crash(content: object, folder: Path) -> None:
    rewrite(folder, lambda line: line["messages"][0].update(content=content))
    recording = Recording.open(folder)
    (episode,) = recording.episodes()
    with pytest.raises(UserError):
        recording.trajectory(episode)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_costs_its_own_line_and_no_other(tmp_path: Path) -> None:
    noise = random.Random(0)
    path, lines = tmp_path / "x.gz", [bytes([97 + n]) * 7 + noise.randbytes(30).hex().encode() for n in range(4)]
    file = GzipLines(path)
    for line in lines:
        file.append(line)
    file.close()
    whole, ends = path.read_bytes(), [end for end, _ in read_gzip_lines(path)]
    num_found = 0
    for place in range(ends[2]):
        for bit in (1, 128):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            read, hit = [text[:-1] for _, text in read_gzip_lines(path)], sum(end <= place for end in ends)
            assert read in (lines, [*lines[:hit], *lines[hit + 1 :]]), (place, bit)
            assert num_skipped(path) == (read != lines)
            num_found += read != lines
    assert num_found > 2 * ends[2] * 0.8  # the others change bytes of a header that say nothing, such as its time


def test_lines_of_every_length_are_whole_wherever_reading_begins(tmp_path: Path) -> None:
    noise, block = random.Random(0), 2**16
    lengths = [9, block - 1, block, block + 1, 2 * block, 300_000, 1_000_000]
    lines = [noise.randbytes(length // 2).hex().encode() for length in lengths * 2]
    lines += [b"1.5," * (length // 4) for length in lengths]
    noise.shuffle(lines)
    path = tmp_path / "x.gz"
    file, starts = GzipLines(path), [0]
    for line in lines:
        file.append(line)
        starts.append(file.size())
    file.close()
    assert list(read_gzip_lines(path)) == [(end, line + b"\n") for end, line in zip(starts[1:], lines, strict=True)]
    assert num_skipped(path) == 0
    for start, end, line in zip(starts, starts[1:], lines, strict=False):
        assert next(read_gzip_lines(path, start)) == (end, line + b"\n")


def test_a_damaged_file_is_continued_and_nothing_is_set_aside(folder: Path, tmp_path: Path) -> None:
    path = folder / EPISODES
    whole, ends = path.read_bytes(), [end for end, _ in read_gzip_lines(path)]
    path.write_bytes(whole[: ends[2] + 60] + bytes([whole[ends[2] + 60] ^ 1]) + whole[ends[2] + 61 :])
    with Recorder(folder, Recording.open(folder).manifest) as recorder:
        (note,) = recorder.notes
    assert note == f"{path} is damaged at 1 place; its {len(ends) - 1} whole lines are kept"
    assert not (folder / "abandoned").exists() and len(list(Recording.open(folder).episodes())) == len(ends) - 1
    path.write_bytes(path.read_bytes() + whole[:50])
    with Recorder(folder, Recording.open(folder).manifest) as recorder:
        _, note = recorder.notes
    assert "did not end with a whole line; the 50 bytes are in" in note


def test_every_command_says_what_it_left_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / EPISODES
    whole, ends = path.read_bytes(), [end for end, _ in read_gzip_lines(path)]
    path.write_bytes(whole[: ends[2] + 60] + bytes(8) + whole[ends[2] + 68 :])
    for command, code in (
        (lambda: replay([str(folder)]), 3),
        (lambda: view([str(folder), "--export", str(tmp_path / "page.html")]), 0),
    ):
        assert command() == code
        said = " ".join(capsys.readouterr().out.split())
        assert "episodes.jsonl.gz is damaged, or has a line over" in said and "at 1 place" in said


@pytest.mark.parametrize("damage", [b"{", b'{"schema_version": 4}', b"[" * 10**5, b"\xff", b""])
def test_a_damaged_manifest_is_kept_aside_and_written_anew(damage: bytes, folder: Path) -> None:
    before = Recording.open(folder)
    num_episodes = len(list(before.episodes()))
    (folder / "recording.json").write_bytes(damage)
    with Recorder(folder, before.manifest) as recorder:
        (note,) = recorder.notes
    assert "recording.json was damaged and is written anew; it is now" in note
    assert (folder / "recording.json.damaged").read_bytes() == damage
    assert Recording.open(folder).manifest == before.manifest
    assert len(list(Recording.open(folder).episodes())) == num_episodes


def test_a_damaged_token_costs_its_own_line_and_is_said(folder: Path) -> None:
    (folder / TOKENS).write_bytes(b'{"id":1,"text":"a"}\n{"\xffd":2,"text":"b"}\n{"id":3,"text":"c"}\n')
    found = Recording.open(folder)
    assert found.tokens() == {1: b"a", 3: b"c"}
    assert found.damage() == [f"{folder / TOKENS} is damaged at 1 line: what stands there is left out"]


BOMB = """
import resource, sys
from pathlib import Path
from agents.recording import Recording
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, recording = peak(), Recording.open(sys.argv[1])
print(len(list(recording.episodes())), len(recording.damage()), peak() - before)
"""


@pytest.mark.slow
def test_a_line_that_unpacks_to_gigabytes_takes_little_memory_and_is_left_out(folder: Path) -> None:
    path = folder / EPISODES
    num_whole, block = len(list(read_gzip_lines(path))), b"[" * 2**20
    whole = path.read_bytes()
    with gzip.open(path, "ab", 9) as file:
        for _ in range(160):  # MiB, of which a line may have 32
            file.write(block)
    path.write_bytes(path.read_bytes() + whole[: next(end for end, _ in read_gzip_lines(path))])
    done = subprocess.run([sys.executable, "-c", BOMB, str(folder)], cwd=ROOT, capture_output=True, text=True)
    num_read, num_notes, kib = map(int, done.stdout.split())
    assert (num_read, num_notes) == (num_whole + 1, 1) and kib < 3 * MAX_LINE / 1024


@pytest.mark.parametrize("is_whole", [True, False], ids=["too long", "broken"])
def test_a_file_of_bombs_is_given_up_after_one_budget_of_bytes(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.recording.gzip_lines._Budget.num_bytes", 2**20)
    monkeypatch.setattr("agents.recording.gzip_lines._Budget.__init__", lambda budget: None)
    monkeypatch.setattr("agents.recording.gzip_lines._Budget.tries", 1000)
    monkeypatch.setattr("agents.recording.gzip_lines.MAX_LINE", 2**18)
    unpacked = 2**19 if is_whole else 2**17
    bomb = gzip.compress(b"[" * unpacked, 9)
    path = tmp_path / EPISODES
    path.write_bytes((bomb if is_whole else bomb[:-8] + bytes(8)) * 100)
    last = path.stat().st_size
    with path.open("ab") as file:
        file.write(gzip.compress(b"{}\n"))
    assert list(read_gzip_lines(path)) == []
    assert 1 <= num_skipped(path) <= 3
    assert list(read_gzip_lines(path, last)) == [(path.stat().st_size, b"{}\n")]


@pytest.mark.parametrize("part", ["{}", '{"":1}', "[]", "[[]]", "1.5", "99999", '"ab"', '{"%d":{}}', '{"%d":"%d"}'])
def test_a_text_never_takes_more_memory_than_is_said(part: str) -> None:
    text = f"[{','.join(part.replace('%d', str(number)) for number in range(3000))}]".encode()
    tracemalloc.start()
    try:
        found = json.loads(text)
        assert tracemalloc.get_traced_memory()[0] <= memory_of(text), len(found)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unit", [b"{},", b'{"":1},', b"1.5,"], ids=["empty objects", "objects", "numbers"])
def test_a_line_whose_values_would_fill_memory_is_left_out_and_said(unit: bytes, folder: Path) -> None:
    num_whole = len(list(Recording.open(folder).episodes()))
    line = next(line for line in lines_of(folder / EPISODES))
    text = json.dumps(line | {"metadata": {"x": "@"}}).encode().replace(b'"@"', b"[%s0]" % (unit * 4_100_000))
    assert len(text) < MAX_LINE
    GzipLines(folder / EPISODES).append(text)
    assert len(list(Recording.open(folder).episodes())) == num_whole and len(Recording.open(folder).damage()) == 1
    (folder / TOKENS).write_bytes(b"[%s0]\n" % (unit * 4_100_000))
    with pytest.raises(UserError, match="whose values take at most"):
        Recording.open(folder).tokens()


def test_images_of_an_episode_are_bounded_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.open(folder)
    episode = next(e for e in recording.episodes() if len(set(image_names(e.messages))) > 1)
    monkeypatch.setattr("agents.recording.recording.MAX_KEPT", 3 * 160 * 128)
    with pytest.raises(UserError, match="must have images of at most 61440 bytes together"):
        recording.messages(episode.messages)


def test_a_plain_line_that_does_not_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(b"{}\n")
    os.truncate(path, 2**40)  # a file with a hole takes no room
    with pytest.raises(UserError, match=f"must have lines of at most {MAX_LINE} bytes"):
        list(read_lines(path))


def test_json_that_nests_too_deeply_is_refused_or_left_out(folder: Path) -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"
    (folder / "metrics.jsonl").write_bytes(deep + b'{"loss": 1}\n')
    (folder / "summary.json").write_bytes(deep)
    overview = Source(folder).overview()
    assert overview["metrics"] == [{"loss": 1}] and overview["summary"] is None
    GzipLines(folder / SCORES).append(deep.strip())
    with pytest.raises(UserError, match=r"scores.jsonl.gz: must be a whole recording"):
        Recording.open(folder).scores()
    (folder / "recording.json").write_bytes(deep)
    with pytest.raises(UserError, match=r"must hold a whole recording.json"):
        Recording.open(folder)


def test_no_error_can_steer_the_terminal(folder: Path) -> None:
    rewrite(folder, lambda line: line.update(id="\x1b]0;own\x07\u202e", mask=[0] * len(line["mask"])))
    with pytest.raises(UserError) as raised:
        Source(folder)
    assert str(raised.value).isprintable() and "\\x1b]0;own\\x07\\u202e" in str(raised.value)
