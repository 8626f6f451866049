"""Bad input is one line on standard error and exit code 2, before step 0 and before a run folder exists."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image

from agents.model import STARTER_PATH
from envs.config.cli import exit_code
from envs.datasets.hub import check_is_there
from envs.errors import UserError
from tests.paths import ROOT
from trainer.checkpoint.run_dir import make_folder, new_folder
from trainer.config.rollout import API_KEY_VARIABLE, ServersConfig
from trainer.export import run as export
from trainer.run import run
from trainer.setup.servers import engine_api_key

ROW = {"problem": "<image>Find x.", "answer": "5", "images": ["a.png"]}


@pytest.fixture
def rows(tmp_path: Path):
    """Return a function that writes rows beside one good and one corrupt image, and returns the file."""
    Image.new("RGB", (64, 64), "white").save(tmp_path / "a.png")
    good = (tmp_path / "a.png").read_bytes()
    (tmp_path / "corrupt.png").write_bytes(good[: len(good) // 2])

    def write(*lines: dict[str, object]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def complaint(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, hold it to the rules that every complaint obeys, and return the complaint."""
    out = tmp_path / "runs"
    assert exit_code(lambda: run([*argv, "--out", str(out), "--steps", "1"])) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert not out.exists()
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--env", "geo3"], ["geo3", "did you mean 'geo3k'"]),
        (["--max-turn", "3"], ["--max-turn", "did you mean '--max-turns'"]),
        (["--max-turns", "0"], ["--max-turns", "greater than or equal to 1", "got 0"]),
        (["--max-turns", "three"], ["--max-turns", "integer", "three"]),
        (["--group-size", "1"], ["--group-size", "got 1"]),
        (["--lr", "-1"], ["--lr", "got -1"]),
        (["--schedule", "linear"], ["--schedule", "constant", "linear"]),
        (["--max-turns"], ["--max-turns", "expected one argument"]),
        (["--data", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--model", "no/such/model"], ["--model", "no/such/model"]),
        (["--device", "abacus"], ["--device", "abacus"]),
        (["--device", "cuda:1"], ["--device", "CUDA_VISIBLE_DEVICES=1"]),
        (["--lr", "inf"], ["--lr", "finite"]),
        (["--backend", "megatron", "--num-gpus", "3", "--pp", "2"], ["--num-gpus", "multiple of 2 = --pp 2", "got 3"]),
        (["--backend", "megatron", "--num-gpus", "4", "--tp", "4"], ["--tp", "6 heads of the vision tower", "got 4"]),
        (["--lora-rank", "4", "--lora-targets", "nope"], ["error: --lora-targets: must end", "nope", "q_proj"]),
        (["--lora-alpha", "8"], ["--lora-alpha", "--lora-rank"]),
        (["--engine", "vllm"], ["--engine", "sglang", "vllm"]),
        (["--engine-url", "http://127.0.0.1:9"], ["--engine-url", "http://127.0.0.1:9", "SGLang server"]),
        (["--engine-url", "127.0.0.1:9"], ["--engine-url", "127.0.0.1:9"]),
        (["--engine-url", "http://127.0.0.1:9", "--engine", "hf"], ["--engine-url", "hf"]),
        (["--engine-api-key-file", "nowhere.key"], ["--engine-api-key-file", "must be readable", "nowhere.key"]),
        (["--template-options", "[1]"], ["--template-options", "JSON object", "[1]"]),
        (["--template-options", "{"], ["--template-options", "JSON object"]),
        (["--template-options", "[" * 100_000], ["--template-options", "JSON object"]),
        (["--template-options", "9" * 5000], ["--template-options", "JSON object"]),
        (["--context-length", "100000"], ["--context-length", "4096"]),
        (["--registry", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--minibatches", "9"], ["--minibatches", "at most the 8 groups", "got 9", "--problems-per-step"]),
    ],
)
def test_bad_flags(argv: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(argv, tmp_path, capsys)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**ROW, "answer": None}, ["answer", "1"]),
        ({"problem": "<image>Find x.", "images": ["a.png"]}, ["answer", "1"]),
        ({**ROW, "images": ["corrupt.png"]}, ["corrupt.png", "1"]),
        ({**ROW, "images": ["missing.png"]}, ["missing.png", "1"]),
        ({**ROW, "problem": "<image><image>Find x."}, ["2", "1", "<image>"]),
        ({**ROW, "images": ["/etc/hostname"]}, ["/etc/hostname"]),
    ],
)
def test_bad_rows(row: dict[str, object], words: list[str], rows, tmp_path: Path, capsys) -> None:
    line = complaint(["--data", rows(ROW, row)], tmp_path, capsys)
    assert all(word in line for word in words), line


def test_a_model_folder_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(STARTER_PATH, model, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    line = complaint(["--model", str(model)], tmp_path, capsys)
    assert "--model" in line and "tokenizer" in line


def test_prompts_that_are_all_too_long(rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(["--data", rows(ROW), "--max-prompt-tokens", "5"], tmp_path, capsys)
    assert "5" in line and "prompt" in line


def test_an_existing_run_folder_is_never_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").mkdir()
    assert exit_code(lambda: run(["--out", str(tmp_path), "--name", "kept"])) == 2
    assert "--name" in capsys.readouterr().err
    assert not list((tmp_path / "kept").iterdir())


def test_the_command_itself_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.run", "--env", "geo3k", "--max-turns", "0"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_an_environment_whose_every_reward_is_wrong_is_found_before_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows
) -> None:
    (tmp_path / "unpaid.py").write_text(
        "from envs import ToolEnv\nclass Unpaid(ToolEnv):\n    def reward(self, final_text): pass\n"
    )
    registry = tmp_path / "unpaid.yaml"
    registry.write_text("unpaid: {entry_point: unpaid:Unpaid, description: d, max_turns: 1}")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = rows(ROW, ROW)
    line = complaint(["--env", "unpaid", "--registry", str(registry), "--data", data], tmp_path, capsys)
    assert "environment 'unpaid': must play a turn and give a reward" in line
    assert "reward must be a finite number, got None; does it return?" in line
    assert f"python -m envs.check unpaid --registry {registry} --data {data}" in line


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", ".", "/somewhere"])
def test_a_name_that_leaves_the_folder_of_runs_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--name: must name a folder in --out {tmp_path}/runs, got"):
        make_folder(tmp_path / "runs", name, "label")
    assert not list(tmp_path.iterdir())
    assert make_folder(tmp_path / "runs", "group/x", "label") == tmp_path / "runs/group/x"


def test_the_first_run_of_a_process_has_no_number_in_its_name_and_the_second_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.run_dir._numbers", itertools.count())
    monkeypatch.setattr("trainer.checkpoint.run_dir.default_name", lambda label: f"{label}-then")
    new_folder(tmp_path, "")  # what a command asks for before it loads anything
    assert [make_folder(tmp_path, "", "geo3k").name for _ in range(2)] == ["geo3k-then", "geo3k-then-1"]


def test_a_run_folder_whose_name_is_not_utf_8_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out: must be a path in UTF-8, got .*udcff/run; tokenizers cannot be saved"):
        make_folder(tmp_path / os.fsdecode(b"\xff"), "run", "label")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_named_as_the_export_was_given_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^RUN: must be a run folder, with config.yaml, got {tmp_path};"):
        export([str(tmp_path)])


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.0 200 OK\r\n\r\n[1]", b"HTTP/1.0 200 OK\r\n\r\n7"]
)
def test_an_engine_url_where_something_else_answers_is_found_before_step_0(
    said: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "must be a running SGLang server" in complaint(["--engine-url", url], tmp_path, capsys)


def test_a_key_comes_from_its_file_or_variable_and_stands_in_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv(API_KEY_VARIABLE, "from-variable")
    assert engine_api_key(ServersConfig()) == "from-variable"
    assert engine_api_key(ServersConfig(engine_api_key_file=file)) == "from-file"
    with pytest.raises(SystemExit):
        run(["--engine-api-key-file", str(file), "--print-config"])
    shown = capsys.readouterr().out
    assert f"engine_api_key_file: {file}" in shown and "from-" not in shown
    file.write_text("two words")
    with pytest.raises(UserError, match="--engine-api-key-file: must hold a key, one word") as caught:
        engine_api_key(ServersConfig(engine_api_key_file=file))
    assert "two words" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_a_gpu_that_is_not_there_is_not_offered_as_the_fix(tmp_path: Path, capsys) -> None:
    line = complaint(["--device", "cuda"], tmp_path, capsys)
    assert "--device" in line and "give cpu: torch sees no GPU here" in line


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ("[{'problem': 'a', 'answer': 'b'}] * size", "sample 0 must be an envs.Sample, got dict"),
        ("[Sample('a', TURN, {'x': 1})] * size", "the label of sample 0 must be a text or None, got dict"),
        ("[Sample(7, TURN, '1')] * size", "the id of sample 0 must be a text, got int 7; write id=str(...)"),
        ("[Sample('a', 'Find x.', '1')] * size", "must be a tuple of chat messages, got str 'Find x.'; write prompt="),
        ("[Sample('a', {'q': 1}, '1')] * size", "must be a tuple of chat messages, got dict {'q': 1}"),
        ("[Sample('a', ('Find x.',), '1')] * size", "the prompt of sample 0 must be a tuple of chat messages"),
        ("[Sample('a', TURN, '1', None)] * size", "the metadata of sample 0 must be a dict, got NoneType None; write"),
        ("[]", "problems: must be at least one, got 0; give --data"),
    ],
)
def test_an_environments_own_data_that_is_none_is_one_line(
    samples: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"from envs import Sample\nTURN = ({{'role': 'user', 'content': 'q'}},)\ndef samples(**_): return {samples}\n"
    )
    code = code.replace("**_", "split, size, seed")
    (tmp_path / "oddly_filled.py").write_text(code)
    registry = tmp_path / "odd.yaml"
    entry = "entry_point: envs.calculator:CalculatorEnv, description: d, max_turns: 1, dataset: oddly_filled:samples"
    registry.write_text(f"odd: {{{entry}}}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "oddly_filled", raising=False)
    assert words in complaint(["--env", "odd", "--registry", str(registry)], tmp_path, capsys)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./some/modle", "got ./some/modle; there is no such folder, and it is no hub id"),
        ("/some/modle", "there is no such folder, and it is no hub id"),
        (__file__, "it is a file: give the folder that config.json is in"),
    ],
)
def test_a_path_that_is_no_model_folder_asks_no_hub_and_no_library(path: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check_is_there(path)


@pytest.mark.parametrize("module", ["trainer.run", "trainer.evaluate", "trainer.sft"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "no.jsonl"], "no.jsonl: no such file, folder or"),
        (["--model", "./no"], "got ./no; there is no"),
        (["--out", ".", "--name", "docs"], "--name: must name a new run folder"),
        (["--out", "README.md/runs"], "--out: must be writable"),
    ],
)
def test_a_missing_file_or_model_is_said_before_torch_is_imported(module: str, flags: list[str], words: str) -> None:
    code = (
        "import sys, runpy\nsys.modules['torch'] = None  # its import would fail\n"
        f"sys.argv = {[module, *flags]}\nrunpy.run_module({module!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "some/modle"], "--model: must be a model folder or hub id, got some/modle; "),
        (
            ["--data", "some/rows"],
            "some/rows: must be a data set of the hub, or a file or folder here, got some/rows; ",
        ),
    ],
)
@pytest.mark.parametrize("answers", [True, False])
def test_a_mistyped_id_asks_the_hub_once_and_is_one_line(
    flags: list[str], words: str, answers: bool, tmp_path: Path
) -> None:
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

        do_HEAD = do_GET

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not answers:
        server.shutdown()
        server.server_close()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "trainer.run", "--env", "calculator", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if answers:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr and ("the hub has no such" if answers else "the hub gives no answer") in done.stderr
    assert sum("/some/" in path for path in asked) == answers
