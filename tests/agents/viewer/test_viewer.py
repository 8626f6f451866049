"""Claims about the viewer's data: figures are right, live answers hold what is new, nobody else reaches the server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from agents.recording import EPISODES, OUTCOMES, SCORES, EpisodeRecord, Manifest, Recorder, Recording, WayRecord
from agents.recording.recorder import rewind_recording
from agents.types import EndReason, Timing, Trajectory
from agents.view import run as view
from agents.viewer.columns import gap_cells
from agents.viewer.page import BLOCK, SCRIPTS, assemble
from agents.viewer.page import FOLDER as PAGE
from agents.viewer.server import ViewServer
from agents.viewer.source import Source
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.tool_calls.thinking import Thinking
from tests.builders import trajectory
from tests.paths import ROOT
from tests.prompts import make_image, question

MANIFEST = Manifest(
    created="2026-01-02T03:04:05+00:00",
    env=EnvSpec(id="sums", entry_point="sums:build_env", description="Sums.", max_turns=3),
    model="small",
)
SPELLED = {1: b"So ", 2: b"\xe4\xbd", 3: b"\xa0", 4: b"<|im_end|>", 9: b"!"}


def played(group: int = 0, sample_index: int = 0, **changes: object) -> Trajectory:
    """Return an episode of two turns, whose model tokens have log-probs (-1, -0.5, -2)."""
    base = trajectory([1, 2, 3, 1, 4, 1], [0, 0, 1, 1, 0, 1], [0, 0, -1, -0.5, 0, -2], reward=0.25)
    texts, calls = ("x" * 300 + "first", "last " * 60), [{"name": "add", "outcome": "ok"}, {"outcome": "malformed"}]
    turns = tuple(replace(t, text=text) for t, text in zip(base.turns, texts, strict=True))
    turns = (replace(turns[0], info={"tool_calls": calls}, observations=({"role": "tool", "content": "5"},)), turns[1])
    asked = ({"role": "system", "content": "Add."}, *question("What is 2 + 3? " + "?" * 300, make_image(seed=7)))
    made = replace(
        base,
        turns=turns,
        messages=asked,
        num_prompt_messages=2,
        label="5",
        sample_id=f"sum-{group}",
        group=group,
        sample_index=sample_index,
        timing=Timing(1e9, 2.5, 2.0, 0.25, 0.0),
    )
    return replace(made, **changes)


def recorder_of(run: Path) -> Recorder:
    return Recorder(run / "episodes", MANIFEST, SPELLED.__getitem__)


def write(run: Path, *episodes: Trajectory, step: int = 1) -> None:
    with recorder_of(run) as recorder:
        for episode in episodes:
            recorder.write(episode, step)


def column(overview: dict, name: str) -> list:
    return overview["columns"][name]


# Figures --------------------------------------------------------------------------------------------------------------


def test_every_figure_of_the_overview_is_that_of_the_recording(tmp_path: Path) -> None:
    broken = replace(
        trajectory([1, 2], [0, 0]), end_reason=EndReason.ENV_ERROR, error="Trace\nValueError: no", reward=0.0
    )
    with recorder_of(tmp_path) as recorder:
        recorder.write(broken, 0, "before", "greedy")
        recorder.write(played(3, 1), 2)
        recorder.write_outcome(played(3, 1), 2, "train", -0.5)
        recorder.write_scores(played(3, 1), 2, np.array([-1, -0.25, -2.5], dtype=np.float32))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2}\n{"ste')
    (tmp_path / "summary.json").write_text('{"seconds": 12.5}')
    found = Source(tmp_path).overview()
    image = next((tmp_path / "episodes" / "images").iterdir()).name
    expected = {
        "id": ["before-greedy-0-0", "train-3-1"],
        "phase": ["before", "train"],
        "way": ["greedy", "train"],
        "step": [0, 2],
        "group": [0, 3],
        "sample_index": [0, 1],
        "attempt": [0, 0],
        "sample_id": ["sample", "sum-3"],
        "env": ["", ""],
        "label": ["", "5"],
        "reward": [0.0, 0.25],
        "success": [False, False],
        "advantage": [None, -0.5],
        "fate": ["", "train"],
        "end_reason": ["env_error", "completed"],
        "error": ["ValueError: no", ""],
        "num_turns": [0, 2],
        "num_streams": [1, 1],
        "num_tokens": [2, 6],
        "num_model_tokens": [0, 3],
        "num_tool_calls": [0, 2],
        "num_tool_errors": [0, 1],
        "mean_logprob": [None, pytest.approx(-3.5 / 3)],
        "mean_gap": [None, pytest.approx(0.25)],  # d = (0, 0.25, -0.5)
        "max_gap": [None, pytest.approx(0.5)],
        # (exp(0) - 1 - 0 + exp(0.25) - 1 - 0.25 + exp(-0.5) - 1 + 0.5) / 3
        "kl": [None, pytest.approx((0.0340254167 + 0.1065306597) / 3)],
        "total_s": [0.0, 2.5],
        "env_s": [0.0, 0.25],
        "engine_s": [0.0, 2.0],
        "image": ["", f"images/{image}"],
        "question": ["", "What is 2 + 3? " + "?" * 185],
        "answer": ["", "last " * 40],
    }
    assert found["columns"] == expected
    assert (found["name"], found["env"], found["live"], found["num_episodes"]) == (tmp_path.name, "sums", False, 2)
    assert found["metrics"] == [{"step": 1, "loss": None}, {"step": 2}] and found["summary"] == {"seconds": 12.5}
    assert found["manifest"]["model"] == "small"
    assert found["tokens"] == {"1": "So ", "4": "<|im_end|>"} and found["token_hex"] == {"2": "e4bd", "3": "a0"}
    json.dumps(found, allow_nan=False)


def test_an_episode_is_the_record_with_its_outcome_and_its_score(tmp_path: Path) -> None:
    with recorder_of(tmp_path) as recorder:
        recorder.write(played(), 1)
        recorder.write(played(1), 1)
        recorder.write_outcome(played(1), 1, "train", 0.5)
        recorder.write_scores(played(1), 1, np.array([-1, -0.25, -2.5], dtype=np.float32))
    source, (_, second) = Source(tmp_path), Recording.open(tmp_path).episodes()
    found = source.episode(1)
    assert found.items() >= second.model_dump(mode="json", exclude_unset=True).items()
    assert found["outcome"] == {"id": "train-1-0", "step": 1, "fate": "train", "advantage": 0.5, "turn_advantages": []}
    assert found["score"] == {"id": "train-1-0", "step": 1, "logprobs": [-1.0, -0.25, -2.5]} and found["index"] == 1
    assert source.episode(0)["outcome"] is source.episode(0)["score"] is None
    for index in (-1, 2):
        with pytest.raises(LookupError, match="of 2"):
            source.episode(index)


def test_a_gap_leaves_out_what_one_side_lacks_and_is_unknown_where_they_are_of_other_tokens() -> None:
    assert gap_cells([None, -1.0], [-1.0, -1.5])["mean_gap"] == 0.5
    assert (
        gap_cells([-1.0], [-1.0, -2.0]) == gap_cells([None], [-1.0]) == {"mean_gap": None, "max_gap": None, "kl": None}
    )
    assert gap_cells([-2000.0], [0.0])["kl"] is None  # no number of JSON


# Live -----------------------------------------------------------------------------------------------------------------


def test_a_live_answer_holds_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    recorder.write(played(0), 1)
    (tmp_path / "config.yaml").touch()
    source = Source(tmp_path)
    first = source.overview()
    assert first["live"] and first["first"] == 0 and column(first, "id") == ["train-0-0"] and first["updates"] == {}

    recorder.write(played(1, ids_T=np.array([1, 2, 3, 1, 4, 9])), 1)
    recorder.write_outcome(played(0), 1, "train", 0.5)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    second = source.overview(first["cursor"])
    assert second["first"] == 1 and column(second, "id") == ["train-1-0"] and second["num_episodes"] == 2
    assert second["updates"] == {"advantage": {"0": 0.5}, "fate": {"0": "train"}}
    assert second["tokens"] == {"9": "!"} and second["token_hex"] == {}
    assert second["metrics"] == [{"step": 1}] and second["first_metric"] == 0

    recorder.write_scores(played(0), 1, np.array([-1, -0.5, -2.5], dtype=np.float32))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"step": 3')
    third = source.overview(second["cursor"])
    assert {name: list(cells) for name, cells in third["updates"].items()} == {
        n: ["0"] for n in ("mean_gap", "max_gap", "kl")
    }
    assert third["updates"]["max_gap"] == {"0": 0.5}
    assert third["metrics"] == [{"step": 2}] and third["first_metric"] == 1

    recorder.close()
    (tmp_path / "summary.json").write_text("{}")
    fourth = source.overview(third["cursor"])
    assert (fourth["live"], fourth["metrics"], fourth["updates"], fourth["tokens"]) == (False, [], {}, {})
    assert all(cells == [] for cells in fourth["columns"].values()) and fourth["cursor"] == third["cursor"]
    assert column(source.overview(), "advantage") == [0.5, None]  # who asks anew is told all


def test_what_comes_with_an_episode_is_no_update_of_it(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    source = Source(tmp_path)
    first = source.overview()
    with recorder_of(tmp_path) as recorder:
        recorder.write(played(1), 1)
        recorder.write_outcome(played(1), 1, "filtered")
    second = source.overview(first["cursor"])
    assert column(second, "fate") == ["filtered"] and second["updates"] == {}


def test_part_of_a_line_at_the_end_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    file = tmp_path / "episodes" / EPISODES
    whole = file.read_bytes()
    write(tmp_path, played(1))
    more = file.read_bytes()[len(whole) :]
    file.write_bytes(whole + more[: len(more) // 2])
    source = Source(tmp_path)
    first = source.overview()
    assert column(first, "id") == ["train-0-0"]
    file.write_bytes(whole + more)
    assert column(source.overview(first["cursor"]), "id") == ["train-1-0"]


@pytest.mark.parametrize("num_more", [0, 1, 4])
def test_a_recording_that_was_taken_back_is_read_anew(num_more: int, tmp_path: Path) -> None:
    with recorder_of(tmp_path) as recorder:
        recorder.write(played(0), 1)
        sizes = recorder.sizes()
        for group in (1, 2):
            recorder.write(played(group), 2)
            if num_more < 4:
                recorder.write_outcome(played(group), 2, "train", 0.5)
    source = Source(tmp_path)
    first = source.overview()
    assert rewind_recording(tmp_path / "episodes", sizes) == []
    write(tmp_path, *(played(7 + k) for k in range(num_more)))
    second = source.overview(first["cursor"])
    assert second["first"] == 0 and column(second, "id") == [f"train-{g}-0" for g in (0, 7, 8, 9, 10)[: 1 + num_more]]
    assert column(second, "fate") == [""] * (1 + num_more)
    assert source.episode(num_more)["id"] == column(second, "id")[-1]


def test_of_two_lines_with_one_id_the_later_counts_and_keeps_its_place(tmp_path: Path) -> None:
    write(tmp_path, played(0), played(1))
    source = Source(tmp_path)
    first = source.overview()
    with recorder_of(tmp_path) as recorder:
        recorder.write_scores(played(0), 1, np.array([-1, -0.5, -2], dtype=np.float32))
        recorder.write(played(0, reward=0.75, logprobs_T=np.array([0, 0, -1, -0.5, 0, -2.25], dtype=np.float32)), 1)
    second = source.overview(first["cursor"])
    assert second["first"] == 2 and second["num_episodes"] == 2
    assert second["updates"]["reward"] == {"0": 0.75} and second["updates"]["max_gap"] == {"0": 0.25}
    assert source.episode(0)["reward"] == 0.75 and column(source.overview(), "id") == ["train-0-0", "train-1-0"]
    write(tmp_path, played(0))  # again, after its score was read
    third = source.overview(second["cursor"])
    assert third["updates"]["reward"] == {"0": 0.25} and third["updates"]["max_gap"] == {"0": 0.0}


def test_a_score_is_compared_even_where_the_episode_was_not_kept_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.viewer.source.MAX_KEPT", 0)
    with recorder_of(tmp_path) as recorder:
        recorder.write(played(0), 1)
        recorder.write_scores(played(0), 1, np.array([-1, -0.5, -2.5], dtype=np.float32))
    assert column(Source(tmp_path).overview(), "max_gap") == [0.5]


def test_a_cursor_that_is_none_gets_everything(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    source = Source(tmp_path)
    for after in ("", "x", "1.2", "1.9.0.0.0", "-1.0.0.0.0", "1.1.0.0.0.0", "١.٠.٠.٠.٠", "9" * 99 + ".0.0.0.0"):
        assert column(source.overview(after), "id") == ["train-0-0"], after


@pytest.mark.parametrize(
    ("files", "is_live"),
    [
        ((), False),
        (("config.yaml",), True),
        (("config.yaml", "summary.json"), False),
    ],
)
def test_a_run_is_live_from_its_begin_to_its_end(files: tuple[str, ...], is_live: bool, tmp_path: Path) -> None:
    write(tmp_path, played(0))
    for name in files:
        (tmp_path / name).write_text("{}")
    assert Source(tmp_path).is_live is is_live
    assert Source(tmp_path / "episodes").is_live is is_live


def test_what_is_written_with_the_summary_while_a_run_is_read_is_asked_for_once_more(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    (tmp_path / "config.yaml").write_text("{}")
    ended = False

    def end(episode: EpisodeRecord) -> bool:
        nonlocal ended
        if episode.group == 1 and not ended:  # read up to here, then the run writes its last episode and its summary
            ended = True
            write(tmp_path, played(2))
            (tmp_path / "summary.json").write_text("{}")
        return True

    source = Source(tmp_path, keep=end)
    write(tmp_path, played(1))
    first = source.overview()
    assert first["live"]
    last = source.overview(first["cursor"])
    assert not last["live"] and source.overview()["num_episodes"] == 3


def test_a_run_without_a_recording_is_the_users_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="must hold a recording"):
            Source(path)
    (tmp_path / "recording.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="must be a recording of schema"):
        Source(tmp_path)


def test_a_line_of_another_form_is_the_users_error(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    with (tmp_path / "episodes" / EPISODES).open("ab") as file:
        file.write(gzip.compress(b'{"id": "train-1-0"}\n'))
    with pytest.raises(UserError, match=r"must be a whole recording, got .* validation errors for EpisodeRecord"):
        Source(tmp_path)


@pytest.mark.slow
def test_many_episodes_are_kept_as_figures_and_places_alone(tmp_path: Path) -> None:
    num_episodes, num_tokens = 1000, 400
    noise = np.random.default_rng(0)
    mask = [0] * 100 + [1] * (num_tokens - 100)
    with Recorder(tmp_path, MANIFEST) as recorder:
        for group in range(num_episodes):
            ids, logprobs = noise.integers(0, 9999, num_tokens).tolist(), (-noise.random(num_tokens)).tolist()
            base = trajectory(ids, mask, logprobs)
            said = tuple(replace(turn, text="word " * 200) for turn in base.turns)
            episode = replace(base, turns=said, group=group)
            recorder.write(episode, 1)
            recorder.write_scores(episode, 1, episode.logprobs_T[episode.mask_T])
    tracemalloc.start()
    source = Source(tmp_path)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == num_episodes and column(source.overview(), "kl") == [0.0] * num_episodes
    assert kept < 2500 * num_episodes  # a record alone has 700 numbers of 8 bytes or more
    assert most < kept + 300 * 8 * num_episodes + 8e6  # while they wait for their score, and what a block takes
    assert source.episode(234)["id"] == "train-234-0"


# The page and the export ----------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Collects the scripts, the policy and the other elements of a page as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy, self.styles = "", list[str]()
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"] or ""
        if tag in ("script", "style"):
            self._open = tag, named
            self.scripts.append((named, "")) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open and self._open[0] == "script":
            named, text = self.scripts.pop()
            self.scripts.append((named, text + data))
        elif self._open:
            self.styles.append(data)


def inflated(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text, validate=True), -15))


def exported(page: Path) -> dict[str, str]:
    return {named["id"] or "": text for named, text in Elements(page.read_text()).scripts if "id" in named}


HOSTILE = "</script><script>alert(1)</script><!-- <script> </SCRIPT >"


def test_an_export_holds_the_recording_whatever_is_said_in_it(tmp_path: Path) -> None:
    base = played()
    said = (replace(base.turns[0], text=HOSTILE), base.turns[1])
    run = tmp_path / HOSTILE.replace("/", "")
    write(run, *(played(k, turns=said, sample_id=HOSTILE, error=HOSTILE) for k in range(BLOCK + 2)))
    (run / "summary.json").write_text(json.dumps({"note": HOSTILE}))
    assert view([str(run), "--export", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    data, source = exported(tmp_path / "page.html"), Source(run)
    assert len(re.findall("</script", text, re.IGNORECASE)) == len(data) + 1 == len(re.findall("<script", text))
    assert json.loads(data.pop("page")) == {"runs": 1, "block": BLOCK, "mode": "file", "live": False}
    held, overview = inflated(data.pop("run-0-overview")), source.overview()
    differing = {name for name in held if held[name] != overview[name]}
    assert held.keys() == overview.keys() and differing <= {"folder", "manifest", "live"}
    assert str(tmp_path) not in json.dumps(held) and str(tmp_path) in json.dumps(overview)
    blocks = [inflated(data.pop(f"run-0-block-{k}")) for k in range(2)]
    assert [len(block) for block in blocks] == [BLOCK, 2]
    assert [*blocks[0], *blocks[1]] == [source.episode(k) for k in range(BLOCK + 2)]
    (image,) = (run / "episodes" / "images").iterdir()
    assert base64.b64decode(data.pop(f"run-0-image-{image.stem}")) == image.read_bytes() and not data
    assert not list(tmp_path.glob("*.part"))


def test_numbers_that_json_does_not_know_are_none_in_an_export(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    path = tmp_path / "episodes" / EPISODES
    odd = gzip.decompress(path.read_bytes()).replace(b'"metadata":{}', b'"metadata":{"x":[NaN,-Infinity]}')
    path.write_bytes(gzip.compress(odd))
    assert Source(tmp_path).episode(0)["metadata"] == {"x": [None, None]}
    view([str(tmp_path), "--export", str(tmp_path / "page.html")])
    (block,) = inflated(exported(tmp_path / "page.html")["run-0-block-0"])
    assert block["metadata"] == {"x": [None, None]}


def test_a_page_runs_its_own_script_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, played())
    view([str(tmp_path), "--export", str(tmp_path / "page.html")])
    found = Elements((tmp_path / "page.html").read_text())
    run = [text for named, text in found.scripts if "type" not in named]
    assert {named["type"] for named, _ in found.scripts if "type" in named} == {
        "application/json",
        "application/octet-stream",
    }
    rules = dict(rule.split(" ", 1) for rule in found.policy.split("; "))
    for texts, rule in ((run, rules["script-src"]), (found.styles, rules["style-src"])):
        (text,) = texts
        assert rule == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"


def test_every_script_of_the_page_is_in_it() -> None:
    assert sorted(SCRIPTS) == sorted(path.name for path in PAGE.glob("*.js"))
    assert assemble("server", 2, live=True).head.count('{"runs": 2, "block": 64, "mode": "server", "live": true}') == 1


def test_what_an_export_holds_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *(played(k, reward=float(k % 2)) for k in range(6)), step=1)
    page = tmp_path / "page.html"
    argv = [str(tmp_path), "--export", str(page)]
    assert view([*argv, "--max-reward", "0", "--id", "train-[2-9]-*"]) == 0
    assert re.search(r"page.html: 2 episodes of .*, \d\.\d MB\n", capsys.readouterr().out)
    (block,) = (inflated(text) for name, text in exported(page).items() if "block" in name)
    assert [episode["id"] for episode in block] == ["train-2-0", "train-4-0"]
    assert view([*argv, "--limit", "2"]) == 0 and "2 episodes" in capsys.readouterr().out
    with pytest.raises(UserError, match="must hold an episode that is selected"):
        view([*argv, "--step", "9"])
    with pytest.raises(UserError, match="must be a file that can be written"):
        view([str(tmp_path), "--export", str(tmp_path / "none" / "page.html")])


def test_two_runs_are_exported_side_by_side(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, played(0, label=name))
    view([str(tmp_path / "a"), "--export", str(tmp_path / "page.html"), str(tmp_path / "b")])
    data = exported(tmp_path / "page.html")
    names = [inflated(data[f"run-{k}-overview"])["name"] for k in range(2)]
    assert names == ["a", "b"] and json.loads(data["page"])["runs"] == 2


def test_a_image_that_is_missing_or_named_oddly_is_left_out_of_an_export(tmp_path: Path) -> None:
    odd = (
        {"role": "user", "content": [{"type": "image", "image": "../../secret.png"}, {"type": "image", "image": 5}]},
    )
    write(tmp_path, played(0), played(1, messages=odd))
    for file in (tmp_path / "episodes" / "images").iterdir():
        file.unlink()
    assert view([str(tmp_path), "--export", str(tmp_path / "page.html")]) == 0
    assert not [name for name in exported(tmp_path / "page.html") if "image" in name]


# The server -----------------------------------------------------------------------------------------------------------


@contextmanager
def served(*sources: Source) -> Iterator[ViewServer]:
    with ViewServer(sources) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: ViewServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, "/", skip_host="Host" in headers, skip_accept_encoding=True)
    # Not through `putrequest`, which sends no path but one of ASCII.
    connection._buffer[0] = f"{method} {path} HTTP/1.1".encode()  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return found


def test_the_server_gives_the_page_and_its_data(tmp_path: Path) -> None:
    write(tmp_path, played(0), played(1))
    source = Source(tmp_path)
    with served(source) as server:
        root = f"/{server.token}/"
        status, headers, content = ask(server, root)
        assert status == 200 and headers["content-type"].startswith("text/html") and b'"mode": "server"' in content
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert headers["content-security-policy"].endswith("frame-ancestors 'none'")
        status, headers, content = ask(server, f"{root}data/0/overview")
        overview = json.loads(content)
        assert (status, headers["content-type"]) == (200, "application/json") and overview["num_episodes"] == 2
        _, _, content = ask(server, f"{root}data/0/overview?after={overview['cursor']}")
        assert json.loads(content)["first"] == 2
        assert json.loads(ask(server, f"{root}data/0/episode/1")[2]) == source.episode(1)
        status, headers, content = ask(server, f"{root}data/0/{column(overview, 'image')[0]}")
        assert (status, headers["content-type"]) == (200, "image/png") and content.startswith(b"\x89PNG")
        for name, value in (
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("referrer-policy", "no-referrer"),
        ):
            assert headers[name] == value
        packed = ask(server, f"{root}data/0/overview", **{"Accept-Encoding": "gzip"})
        assert packed[1]["content-encoding"] == "gzip" and json.loads(zlib.decompress(packed[2], 31)) == overview


def test_the_server_listens_on_this_machine_alone_under_a_word_that_cannot_be_guessed(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    with served(Source(tmp_path)) as server, served(Source(tmp_path)) as other:
        assert server.server_address[0] == "127.0.0.1" and server.socket.family == socket.AF_INET
        assert len(server.token) >= 32 and server.token != other.token
        assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
        for path in ("/", "/x/", f"/{other.token}/", f"/{server.token[:-1]}/", f"/{server.token}", "/é/", "//"):
            assert ask(server, path)[0] == 404, path
        with pytest.raises(UserError, match="--port: must be free"):
            ViewServer([Source(tmp_path)], server.server_port)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]", "0.0.0.0"]
)
def test_a_request_by_another_name_is_refused(host: str, tmp_path: Path) -> None:
    write(tmp_path, played(0))
    with served(Source(tmp_path)) as server:
        assert ask(server, f"/{server.token}/", Host=host)[0] == 403
        for name in (
            f"localhost:{server.server_port}",
            "127.0.0.1:9999",
            "[::1]:80",
            "localhost",
        ):  # through a tunnel too
            assert ask(server, f"/{server.token}/", Host=name)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_nothing_but_a_get_is_answered(method: str, tmp_path: Path) -> None:
    write(tmp_path, played(0))
    with served(Source(tmp_path)) as server:
        assert ask(server, f"/{server.token}/", method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        *("data/0/images/../recording.json", "data/0/images/..%2frecording.json", "data/0/../../../etc/passwd"),
        *("data/0/images/%2e%2e/recording.json", "data/0/images//etc/passwd", "data/0/images/abcdef0123456789.png"),
        *(
            "data/0/images/abcdef0123456789.png%00.txt",
            "data/0/recording.json",
            "data/0/episode/-1",
            "data/0/episode/2",
        ),
        *("data/0/episode/1e9", "data/0/episode/99999999999999999999", "data/1/overview", "data/2/overview", "data/0/"),
        *("data/0/overview/", "../", "..", "data/0/episode/٠", "page.html", "data/0/images/"),
    ],
)
def test_what_is_no_part_of_the_run_is_not_found(path: str, tmp_path: Path) -> None:
    write(tmp_path, played(0), played(1))
    with served(Source(tmp_path)) as server:
        assert ask(server, f"/{server.token}/{path}")[0] == 404


def test_a_broken_request_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, played(0))
    with served(Source(tmp_path)) as server:
        for sent in (
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"a" * 70_000,
            b"",
        ):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
                connection.sendall(sent)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            connection.sendall(
                f"GET /{server.token}/data/0/overview?after=%ff%00 HTTP/1.1\r\nHost: localhost\r\n".encode()
            )
            connection.sendall(b"Connection: close\r\n\r\n")
            assert connection.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
        assert ask(server, f"/{server.token}/")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_damaged_line_costs_its_episode_alone(tmp_path: Path) -> None:
    write(tmp_path, played(0), played(1))
    source = Source(tmp_path)
    file = tmp_path / "episodes" / EPISODES
    content = bytearray(file.read_bytes())
    content[source.spans[1][0] + 30] ^= 0xFF
    file.write_bytes(content)
    with served(source) as server:
        assert ask(server, f"/{server.token}/data/0/episode/1")[0] in (404, 500)
        assert ask(server, f"/{server.token}/data/0/episode/0")[0] == 200


# The command ----------------------------------------------------------------------------------------------------------

LIGHT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have switched it off
sys.modules["torch"] = sys.modules["transformers"] = None
from agents.{name} import run
from envs.config.cli import exit_code
sys.exit(exit_code(lambda: run(None)))
"""


def started(name: str, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LIGHT.format(name=name), *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_until(process: subprocess.Popen[str], start: str) -> Sequence[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(start):
            return lines
    raise AssertionError(f"{lines} {process.stderr.read() if process.stderr else ''}")


def test_the_command_serves_without_torch_and_transformers_until_it_is_interrupted(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    (tmp_path / "config.yaml").touch()
    with started("view", str(tmp_path), "--no-browser") as process:
        first, url, _ = lines_until(process, "Only this machine")
        assert first == f"{tmp_path}: 1 episode, live" and url.startswith("http://127.0.0.1:")
        where = urlsplit(url)
        connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=10)
        connection.request("GET", f"{where.path}data/0/overview")
        assert json.loads(connection.getresponse().read())["num_episodes"] == 1
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (0, "", "")


@pytest.mark.parametrize(
    ("argv", "message"), [((), "RUNS: field required"), (("a", "b", "c"), "at most 2"), (("none",), "no such folder")]
)
def test_a_wrong_command_is_the_users_error(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        view(argv)


def test_outcomes_and_scores_are_read_after_the_episodes_that_they_are_of(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    source = Source(tmp_path)
    with recorder_of(tmp_path) as recorder:
        recorder.write(played(1), 1)
        recorder.write_outcome(played(1), 1, "train", 0.5)
        recorder.write_outcome(played(9), 1, "train", 0.5)  # of an episode that is not there
    source.refresh()
    assert source.columns["fate"] == ["", "train"]
    assert {(tmp_path / "episodes" / name).stat().st_size > 0 for name in (OUTCOMES, SCORES)} == {True, False}


def test_what_is_said_of_an_episode_that_comes_while_it_is_read_is_not_lost(tmp_path: Path) -> None:
    class Raced(Source):
        def _read_episodes(self) -> None:
            super()._read_episodes()
            if len(self) == 1:
                with recorder_of(tmp_path) as recorder:
                    recorder.write(played(1), 1)
                    recorder.write_outcome(played(1), 1, "train", 0.5)
                    recorder.write_scores(played(1), 1, np.array([-1, -0.5, -2.5], dtype=np.float32))

    write(tmp_path, played(0))
    source = Raced(tmp_path)
    assert len(source) == 1
    second = source.overview()
    assert column(second, "fate") == ["", "train"] and column(second, "max_gap") == [None, 0.5]


def test_the_answer_of_a_row_is_what_was_said_and_not_what_was_thought(tmp_path: Path) -> None:
    limits = {"max_turns": 2, "use_tools": True, "max_new_tokens": 9, "context_length": 9, "temperature": 1.0}
    thinking = Thinking("<think>", "</think>", is_opened=True)
    ways = {"train": WayRecord.model_validate({**limits, "thinking": thinking}), "play": WayRecord(**limits)}
    with Recorder(tmp_path / "episodes", MANIFEST.model_copy(update={"ways": ways}), SPELLED.__getitem__) as recorder:
        for way in ways:
            base = played()
            last = replace(base.turns[-1], text="Is it 5?</think>\n\nIt is 5.")
            recorder.write(replace(base, turns=(*base.turns[:-1], last)), 1, way=way)
    assert Source(tmp_path).columns["answer"] == ["It is 5.", "Is it 5?</think>\n\nIt is 5."]
