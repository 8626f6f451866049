"""Claims about the start of a run: servers start while the learner loads, and an error on one side ends the other."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model.kernel_cache import FOLDERS
from envs.errors import UserError
from tests.flags import last_of_each
from tests.paths import ROOT
from tests.processes import Command
from trainer.metrics.clock import StartClock
from trainer.setup.start import Start

#: The package `sglang` of a test: its server writes down its variables, then does what the test wants.
SERVER = """
import json, os, sys, time
from pathlib import Path
folder = Path({folder!r})
(folder / "variables.part").write_text(json.dumps(dict(os.environ)))
(folder / "variables.part").rename(folder / "variables.json")
{body}
"""
#: Serves only once the learner is there, which is when a run writes its configuration.
AFTER_THE_LEARNER = """
while not list(folder.glob("out/*/config.yaml")):
    time.sleep(0.05)
from tests.agents.engines.sglang_server import main
main()
"""
START = ("--env", "geo3k", "--steps", "1", "--eval-size", "0", "--group-size", "2", "--problems-per-step", "1")
SMALL = (*START, "--max-new-tokens", "8", "--train-size", "4", "--record", "0", "--tracker=", "--doctor", "off")
TIME_S = 120.0


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., Command]]:
    """Begin a training on servers that run `body`; they are found by their arguments, which name this test's folder."""

    def begin(body: str, *flags: str) -> Command:
        package = tmp_path / "site" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "launch_server.py").write_text(SERVER.format(folder=str(tmp_path), body=body))
        own = ("--engine", "sglang", "--out", str(tmp_path / "out"), f"--engine-args=--mark {tmp_path}")
        paths = f"{tmp_path / 'site'}:{ROOT}"
        unset = dict.fromkeys(FOLDERS, "")  # another test may have set them in the process that starts commands
        variables = {**unset, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        words = last_of_each([*SMALL, "--model", str(checkpoint), *own, *flags])
        return Command("trainer.run", *words, env=variables)

    yield begin
    assert not servers_of(tmp_path), "servers are left behind"


def servers_of(folder: Path) -> list[str]:
    """Return the command lines of the processes that are servers of a test."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"--mark {folder}" in line and "trainer.run" not in line:
            found.append(line)
    return found


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIME_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is not there"
        time.sleep(0.05)


def test_a_server_starts_before_the_learner_is_there_and_knows_of_its_adapters_and_the_cache_folders(
    run: Callable[..., Command], tmp_path: Path
) -> None:
    adapters = ("--lora-rank", "2") if importlib.util.find_spec("peft") else ()
    with run(
        AFTER_THE_LEARNER, "--save-every", "0", *adapters
    ) as training:  # if the learner waited for the server, neither would ever come
        code = training.wait(TIME_S)
        assert code == 0, training.output("stderr") + training.output("stdout")
        printed = training.output("stdout")
    variables = json.loads((tmp_path / "variables.json").read_text())
    kept = tmp_path / "cache" / "trueturn" / "kernels"
    assert {name: variables[name] for name in FOLDERS} == {name: str(kept / own) for name, own in FOLDERS.items()}
    (summary,) = (tmp_path / "out").glob("*/summary.json")
    stages = {stage["name"]: stage for stage in json.loads(summary.read_text())["start"]}
    assert stages["server 0"]["start_s"] <= stages["the learner"]["start_s"]
    assert stages["the learner"]["end_s"] <= stages["server 0"]["end_s"] <= stages["the first step"]["start_s"]
    (log,) = (tmp_path / "out").glob("*/servers/sglang-0.log")
    assert ("--enable-lora" in log.read_text()) == bool(adapters)
    (line,) = re.findall(r"^start: .*$", printed, re.MULTILINE)
    assert "server 0" in line and printed.index(line) < printed.index("step   1/1")


def test_a_learner_that_cannot_be_built_ends_the_servers_and_leaves_no_folder(
    run: Callable[..., Command], tmp_path: Path
) -> None:
    wrong = ("--doctor", "off", "--lora-rank", "2", "--lora-targets", "nonsense")
    with run("time.sleep(3600)", *wrong) as training:
        assert training.wait(TIME_S) == 2
        (line,) = training.output("stderr").splitlines()
    assert line.startswith("error: --lora-targets: ")
    assert not (tmp_path / "out").exists()
    assert not servers_of(tmp_path)


def test_a_server_that_cannot_start_ends_the_run_with_one_line_and_leaves_its_log(
    run: Callable[..., Command], tmp_path: Path
) -> None:
    with run("sys.exit('no such kernel')") as training:
        assert training.wait(TIME_S) == 2
        (line, *more) = training.output("stderr").splitlines()
    assert re.match(r"error: --engine sglang: must start a server, got its process ended with status 1; ", line)
    assert "no such kernel" in "\n".join((line, *more))
    (log,) = (tmp_path / "out").glob("*/servers/sglang-0.log")
    assert "no such kernel" in log.read_text()


def test_ctrl_c_during_the_start_leaves_no_server(run: Callable[..., Command], tmp_path: Path) -> None:
    with run("time.sleep(3600)") as training:
        wait_for(tmp_path / "variables.json")
        assert servers_of(tmp_path)
        training.send_signal(signal.SIGINT)
        assert training.wait(TIME_S) == 130
        assert not servers_of(tmp_path)


def dying(folder: Path) -> SGLangEngine:
    """An engine whose server ends once its start was seen."""
    return SGLangEngine(SGLangSettings(command=(sys.executable, "-c", "import sys; sys.exit(3)"), log_folder=folder), 1)


@pytest.mark.usefixtures("ctrl_c")
def test_the_death_of_a_server_interrupts_what_the_learner_does(tmp_path: Path) -> None:
    start = Start()
    with pytest.raises(UserError, match="ended with status 3"), start.watched():
        start.launch(dying(tmp_path))
        assert not threading.Event().wait(TIME_S), "nothing has ended the wait"
        pytest.fail("the wait was not interrupted")


def test_servers_that_are_ended_on_purpose_hide_no_error_of_the_learner(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    engine, start = SGLangEngine(SGLangSettings(command=command, log_folder=tmp_path), 1), Start()
    with pytest.raises(ZeroDivisionError), start.watched():
        try:
            start.launch(engine)
            raise ZeroDivisionError
        finally:
            engine.servers.end()
            time.sleep(0.5)  # the watch looks meanwhile
    assert start.failure is None


def test_a_server_that_comes_up_between_the_last_look_and_the_end_is_a_stage_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.setup.start.LOOK_S", 3600.0)
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    engine, start = SGLangEngine(SGLangSettings(command=command, log_folder=tmp_path), 1), Start()
    try:
        with start.watched():
            start.launch(engine)
            monkeypatch.setattr(engine.servers, "starting", tuple)  # it answers
        assert [stage.name for stage in start.clock.stages] == ["server 0"]
    finally:
        engine.servers.end()


def test_ctrl_c_of_the_user_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), Start().watched():
        raise KeyboardInterrupt


def test_the_clock_shows_what_runs_and_keeps_what_has_ended() -> None:
    clock = StartClock(age_s=3.0)
    clock.begin("server 0")
    with clock.stage("the learner"):
        assert re.fullmatch(r"server 0 \(\d s\), the learner \(\d s\)", clock.line())
    assert re.fullmatch(r"server 0 \(\d s\)", clock.line())
    clock.end("server 0")
    clock.end("server 0")  # no second time
    assert clock.line() == ""
    assert [stage.name for stage in clock.stages] == ["imports", "the learner", "server 0"]
    imports, learner, server = clock.stages
    assert (imports.start_s, imports.end_s) == (0.0, 3.0)
    assert 3.0 <= server.start_s <= learner.start_s <= learner.end_s <= server.end_s
    assert clock.summary() == "imports 0.0-3.0 s"  # the others took no time


def test_what_is_shown_while_the_run_waits_ends_with_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.setup.start.LOOK_S", 0.01)
    monkeypatch.setattr("trainer.setup.start.LINE_S", 0.0)
    console = Console(file=io.StringIO(), width=200)
    start, events = Start(console), list[str]()

    def waits_for(line: str) -> None:
        deadline = time.monotonic() + 20
        while not re.search(line, console.file.getvalue()):  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with start.shown(events), start.clock.stage("the engine"):
        waits_for(r"waiting for the engine \(\d+ s\)\n")
        events += ["server 0 lost: no answer", "server 0 lost again: refused"]
        waits_for(r"waiting for the engine \(\d+ s\); server 0 lost again: refused\n")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_that_a_library_turns_into_its_own_error_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), Start().watched():
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise RuntimeError("cannot import it") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_that_a_finalizer_swallows_ends_the_start_all_the_same() -> None:
    class Library:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    passed = []
    with pytest.raises(KeyboardInterrupt), Start().watched():
        Library()  # Python drops what a finalizer raises, and prints it
        passed.append("the finalizer")
    assert passed
