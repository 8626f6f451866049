"""Claims about trackers: what they are given, that they go on where a run goes on, and that none ends a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from envs.config.cli import exit_code
from envs.errors import UserError
from tests.paths import ROOT
from trainer.metrics import trackers
from trainer.metrics.log import MetricsLog
from trainer.metrics.trackers import TrackedRun, check_trackers
from trainer.run import run

CONFIG = {"seed": 3, "optim": {"lr": 1e-6}}


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a folder: of each curve, steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()
    assert tags["tensors"] == ["config/text_summary"]
    text = accumulator.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text) == CONFIG
    return {name: [(e.step, e.value) for e in accumulator.Scalars(name)] for name in tags["scalars"]}


def test_tensorboard_files_hold_every_number_of_every_step_and_the_configuration(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",))
    for step in (1, 2):
        log.write(step, {"reward": step / 2, "end/completed": 1.0})
    log.close()
    curves = events(tmp_path)
    assert curves["reward"] == [(1, 0.5), (2, 1.0)]
    assert curves["end/completed"] == [(1, 1.0), (2, 1.0)]


def test_tensorboard_hides_steps_that_a_resumed_run_takes_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",))
    for step in (1, 2, 3):
        log.write(step, {"reward": step / 2})
    log.close()
    # TensorBoard reads files in the order of their names, which begin with the second that they were opened in. A run
    # is never resumed within the same second.
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name("events.out.tfevents.0000000001"))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))  # a checkpoint stands at step 2
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",), steps_done=2)
    for step in (3, 4):
        log.write(step, {"reward": 10.0 * step})
    log.close()
    assert events(tmp_path)["reward"] == [(1, 0.5), (2, 1.0), (3, 30.0), (4, 40.0)]


class Broken:
    """A tracker that fails from its second row on."""

    def __init__(self, run: TrackedRun) -> None:
        self.rows: list[int] = []

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Fail at step 2."""
        if step > 1:
            raise OSError(28, "No space left on device")
        self.rows.append(step)

    def close(self) -> None:
        """Fail too."""
        raise ConnectionError("the network is gone")


def test_a_tracker_that_fails_is_reported_once_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers.OPENERS, "tensorboard", Broken)
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",))
    for step in (1, 2, 3):
        log.write(step, {"reward": 0.5})
    log.close()
    assert caplog.messages == [
        "tensorboard failed and gets no more numbers, metrics.jsonl has them: "
        "OSError: [Errno 28] No space left on device"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


class Hanging(Broken):
    """Never returns from a call."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Hang."""
        threading.Event().wait()


def test_a_tracker_that_hangs_is_reported_once_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "TRACKER_S", 0.1)
    monkeypatch.setitem(trackers.OPENERS, "tensorboard", Hanging)
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",))
    for step in (1, 2):
        log.write(step, {"reward": 0.5})
    log.close()
    (said,) = caplog.messages
    assert said.startswith("tensorboard failed and gets no more numbers") and said.endswith("no answer for 0.1 s")


def test_a_tracker_is_opened_called_and_closed_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Local:
        """Keeps state by thread, as a connection of sqlite3 does."""

        def __init__(self, run: TrackedRun) -> None:
            threads.append(threading.current_thread())

        def write(self, step: int, row: Mapping[str, float]) -> None:
            threads.append(threading.current_thread())

        def close(self) -> None:
            threads.append(threading.current_thread())

    monkeypatch.setitem(trackers.OPENERS, "tensorboard", Local)
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",))
    for step in (1, 2):
        log.write(step, {"reward": 0.5})
    log.close()
    assert len(threads) == 4 and len(set(threads)) == 1
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_a_tracker_that_fails_at_its_end_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers.OPENERS, "tensorboard", Broken)
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard",))
    log.write(1, {"reward": 0.5})
    log.close()
    assert len(caplog.messages) == 1 and "the network is gone" in caplog.text


def test_a_tracker_that_does_not_open_is_an_error_of_the_user_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Good(Broken):
        def close(self) -> None:
            closed.append("good")

    def refuse(run: TrackedRun) -> Broken:
        raise PermissionError(f"{run.project} is not yours")

    monkeypatch.setitem(trackers.OPENERS, "tensorboard", Good)
    monkeypatch.setitem(trackers.OPENERS, "wandb", refuse)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(trackers, "_wandb_is_usable", lambda: True)
    with pytest.raises(UserError, match="--tracker: must open, got wandb: PermissionError: mine is not yours; fix"):
        MetricsLog(tmp_path, CONFIG, ("tensorboard", "wandb"), project="mine")
    assert closed == ["good"]


def test_a_tracker_whose_package_is_missing_is_found_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "wandb"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = tmp_path / "runs"
    assert exit_code(lambda: run(["--tracker", name, "--out", str(out)])) == 2
    said = capsys.readouterr()
    assert said.err == f"error: --tracker: needs its package, got {name}; pip install {name}\n" and said.out == ""
    assert not out.exists()


def in_a_process(home: Path, code: str, *argv: str, **variables: str) -> str:
    """Return what a process prints that knows no login and asks nobody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    environment = {**kept, "HOME": str(home), "WANDB_ERROR_REPORTING": "false", **variables}
    root = ROOT
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOGINS = """
import json, os, sys, wandb
from envs.errors import UserError
from trainer.metrics.trackers import check_trackers
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    try:
        check_trackers(["wandb"])
        print("usable")
    except UserError as error:
        print(error)
    wandb.teardown()
    for name in variables:
        del os.environ[name]
"""


@pytest.mark.slow
def test_wandb_needs_a_login_unless_it_stays_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    login = tmp_path / "login"
    login.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    login.chmod(0o600)
    ways = [{"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}, {"WANDB_API_KEY": "0" * 40}, {"NETRC": str(login)}]
    said = in_a_process(tmp_path, LOGINS, json.dumps([{}, *ways])).splitlines()
    assert said[0].startswith("--tracker: needs a login, got wandb; run `wandb login`, or set WANDB_MODE=offline")
    assert said[1:] == ["usable"] * len(ways)


TWICE = """
import sys
import threading
from pathlib import Path
from trainer.metrics.trackers import TrackedRun, open_trackers
for done in (0, 2):
    (tracker,) = open_trackers([sys.argv[2]], TrackedRun(Path(sys.argv[1]), {"seed": 3}, "mine", done)).values()
    for step in (done + 1, done + 2):
        tracker.write(step, {"step": float(step), "reward": step / 2})
    tracker.close()
"""


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a wandb file: 7 bytes, then in blocks of 32 KiB parts of a checksum, length and kind."""
    data = file.read_bytes()
    place, record = 7, b""
    while place + 7 < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, last
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_keeps_its_run_offline_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports] - an extra

    (tmp_path / "run").mkdir()
    in_a_process(tmp_path, TWICE, str(tmp_path / "run"), "wandb", WANDB_MODE="offline")
    identity = (tmp_path / "run" / "wandb_id.txt").read_text().strip()
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    everything = [Record.FromString(data) for file in files for data in records(file)]
    runs = [record.run for record in everything if record.HasField("run")]
    assert {(run.project, run.display_name, run.run_id) for run in runs} == {("mine", "run", identity)}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["seed"] == 3
    history = [record.history for record in everything if record.HasField("history")]
    rows = [{(i.key or i.nested_key[0]): json.loads(i.value_json) for i in row.item} for row in history]
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


def test_tracking_the_same_way_twice_is_tracking_once(tmp_path: Path) -> None:
    check_trackers(())
    log = MetricsLog(tmp_path, CONFIG, ("tensorboard", "tensorboard"))
    log.write(1, {"reward": 0.5})
    log.close()
    assert events(tmp_path)["reward"] == [(1, 0.5)]
