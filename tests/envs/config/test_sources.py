"""Claims about layers: later ones win, each reads all kinds of values, and every mistake names what gave it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from envs.config.cli import parse
from envs.config.files import dump, read_file
from envs.config.settings import changed, validate
from envs.config.sources import Sources
from envs.errors import UserError


class Optim(BaseModel):
    """The optimizer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = Field(default=5e-5, gt=0, description="learning rate")
    compile: Literal["auto", "on", "off"] = Field(default="auto", description="compile; auto: on a GPU")
    warmup: int | None = Field(default=None, ge=0, description="steps of warm-up")


class Log(BaseModel):
    """What is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    record: bool = Field(default=True, description="record episodes")
    name: str = Field(default="", description="name of the run")
    tracker: tuple[Literal["a", "b"], ...] = Field(default=("a",), description="where numbers go")
    folder: tuple[Path, ...] = Field(default=(), description="more folders")
    resume: Path | None = Field(default=None, description="folder to go on with")


class Config(BaseModel):
    """A command."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = Field(default=50, ge=0, description="training steps")
    optim: Optim = Optim()
    log: Log = Log()


@pytest.fixture
def layers(tmp_path: Path) -> Sources:
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "small.yaml").write_text("steps: 2\noptim: {lr: 1e-6}\n")
    return Sources(tmp_path / "ready", ("log", "resume"))


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a file and returns its path."""

    def write(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def parsed(layers: Sources, *argv: str) -> Config:
    return parse(Config, argv, "prog", "What it does.", layers)


def error_of(layers: Sources, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parsed(layers, *argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_each_layer_wins_over_those_below(layers: Sources, write, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path(write("steps: 1\noptim: {lr: 1.0, warmup: 1, compile: on}\nlog: {name: run}", "run/config.yaml")).parent
    first = write("optim: {lr: 2.0, warmup: 2, compile: on}", "first.yaml")
    second = write("optim: {lr: 3.0, warmup: 3}", "second.yaml")
    monkeypatch.setenv("TRUETURN_LR", "4.0")
    argv = ["--resume", str(run), "--config", first, "--config", second]
    assert parsed(layers, *argv).optim == Optim(lr=4.0, warmup=3, compile="on")
    assert parsed(layers, *argv, "--lr", "5").optim.lr == 5.0
    assert (parsed(layers, *argv).steps, parsed(layers, *argv).log.name) == (1, "run")
    monkeypatch.delenv("TRUETURN_LR")
    assert parsed(layers, *argv).optim.lr == 3.0
    assert parsed(layers, "--resume", str(run)).optim.lr == 1.0
    assert parsed(layers, "--config", second, "--config", first).optim.lr == 2.0


def test_a_command_without_layers_reads_flags_alone(layers: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUETURN_STEPS", "7")
    monkeypatch.setenv("TRUETURN_NONE", "7")
    assert parse(Config, [], "prog", "") == Config()
    with pytest.raises(UserError, match="--config: is no flag of this command"):
        parse(Config, ["--config", "small"], "prog", "")


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("optim: {lr: 1e-6}", Config(optim=Optim(lr=1e-6))),  # YAML 1.1 reads 1e-6 as a text
        ("optim: {compile: off}", Config(optim=Optim(compile="off"))),  # and off as false
        ("log: {record: no}", Config(log=Log(record=False))),
        ("log: {name: 12}", Config(log=Log(name="12"))),
        ("log: {name: 2026-01-02}", Config(log=Log(name="2026-01-02"))),
        ('log: {name: "null"}', Config(log=Log(name="null"))),
        ("log: {tracker: [b, a]}", Config(log=Log(tracker=("b", "a")))),
        ("log: {tracker: []}", Config(log=Log(tracker=()))),
        ("log: {tracker: }", Config(log=Log(tracker=()))),
        ("log: {folder: [x, y/z]}", Config(log=Log(folder=(Path("x"), Path("y/z"))))),
        ("optim: {warmup: 3}", Config(optim=Optim(warmup=3))),
        ("optim: {warmup: null}", Config()),
        ("optim:\nsteps: 3", Config(steps=3)),
        ("", Config()),
        ("# nothing yet", Config()),
        ("log: &kept {name: x}\n", Config(log=Log(name="x"))),
    ],
)
def test_a_file_reads_values_as_flags_do(layers: Sources, write, yaml: str, expected: Config) -> None:
    assert parsed(layers, "--config", write(yaml)) == expected


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LR", "1e-6", Config(optim=Optim(lr=1e-6))),
        ("COMPILE", "off", Config(optim=Optim(compile="off"))),
        ("RECORD", "false", Config(log=Log(record=False))),
        ("TRACKER", "[b, a]", Config(log=Log(tracker=("b", "a")))),
        ("TRACKER", '["b"]', Config(log=Log(tracker=("b",)))),
        ("TRACKER", "", Config(log=Log(tracker=()))),
        ("FOLDER", "[http://a:1, http://b:2]", Config(log=Log(folder=(Path("http://a:1"), Path("http://b:2"))))),
        ("WARMUP", "", Config()),
        ("NAME", "[not a list]", Config(log=Log(name="[not a list]"))),
    ],
)
def test_a_variable_reads_values_as_flags_do(
    layers: Sources, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: Config
) -> None:
    monkeypatch.setenv(f"TRUETURN_{variable}", value)
    assert parsed(layers) == expected


def test_an_empty_flag_empties_what_a_lower_layer_set(layers: Sources, write) -> None:
    file = write("optim: {warmup: 3}\nlog: {name: x, tracker: [b], resume: nowhere}")
    argv = ["--config", file, "--warmup", "", "--name", "", "--tracker", "", "--resume", ""]
    assert parsed(layers, *argv) == Config(log=Log(tracker=()))


def test_a_tuple_of_a_higher_layer_replaces_that_of_a_lower_one(layers: Sources, write) -> None:
    assert parsed(layers, "--config", write("log: {tracker: [a, b]}"), "--tracker", "b").log.tracker == ("b",)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("optim: {lr: -1}", " optim.lr: must be greater than 0, got -1; see --help (learning rate)"),
        ("optim: {lr: fast}", " optim.lr: must be a valid number, unable to parse string as a number, got fast; see"),
        ("optim: {compile: no}", " optim.compile: must be 'auto', 'on' or 'off', got no; see --help"),
        ("optim: {lrr: 1}", " optim.lrr: is not a setting of optim, got lrr; did you mean 'lr'?"),
        ("optm: {lr: 1}", " optm: is not a section or setting, got optm; did you mean 'optim'?"),
        ("lr: 1", " lr: lr belongs under optim, got it outside of all sections; write optim: {lr: ...}"),
        ("log: {lr: 1}", " log.lr: lr belongs under optim, got it under log; write optim: {lr: ...}"),
        ("log: {steps: 1}", " log.steps: steps belongs to no section, got it under log; write steps: ... at the start"),
        ("optim: 3", " optim: must be a section with settings under it, got 3; write lr or compile under it"),
        ("[steps]", ": must be a section with settings under it, got ['steps']; write steps or optim under it"),
        ("log: {tracker: a}", " log.tracker: must be a list, got a; write tracker: [a]"),
        ("log: {tracker: [a, c]}", " log.tracker: must be 'a' or 'b', got c; see --help"),
        ("steps: [3]", " steps: must be one value, got ['3']; "),
        ("steps: {a: 3}", " steps: must be one value, got {'a': '3'}; "),
        ("steps:", " steps: must be a valid integer, unable to parse string as an integer, got nothing; see"),
        ("steps: 1\nsteps: 2", " line 2: must be YAML, got 'steps' stands twice; fix the line"),
        ("optim: {lr: 1, lr: 2}", " line 1: must be YAML, got 'lr' stands twice; fix the line"),
        ("steps: 1\n  lr: 2", " line 2: must be YAML, got mapping values are not allowed here; fix the line"),
        ("log: {resume: nowhere}", " log.resume: must be a folder with a config.yaml, got nowhere; give the folder"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(layers: Sources, write, yaml: str, message: str) -> None:
    file = write(yaml)
    assert error_of(layers, "--config", file).startswith(f"{file}{message}")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRUETURN_LR", "-1", "TRUETURN_LR: must be greater than 0, got -1; see --help (learning rate)"),
        ("TRUETURN_STEP", "3", "TRUETURN_STEP: is no setting of this command, got TRUETURN_STEP=3; did you mean "),
        ("TRUETURN_TRACKER", "a", "TRUETURN_TRACKER: must be a list, got a; write TRUETURN_TRACKER='[a]'"),
        ("TRUETURN_TRACKER", "[a", "TRUETURN_TRACKER line 1: must be YAML, got "),
        ("TRUETURN_TRACKER", "[c]", "TRUETURN_TRACKER: must be 'a' or 'b', got c; see --help (where numbers go)"),
        ("TRUETURN_RESUME", "nowhere", "TRUETURN_RESUME: must be a folder with a config.yaml, got nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_variable_names_it(
    layers: Sources, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert error_of(layers).startswith(message)


def test_a_mistake_in_the_base_names_its_file(layers: Sources, write) -> None:
    file = write("optim: {lr: 0}", "run/config.yaml")
    assert error_of(layers, "--resume", str(Path(file).parent)).startswith(f"{file} optim.lr: must be greater than 0")
    assert error_of(layers, "--resume", "x").startswith("--resume: must be a folder with a config.yaml, got x")
    run = Path(write("epochs: 2", "other/config.yaml")).parent
    assert error_of(layers, "--resume", str(run)).startswith(f"--resume: must be a run of this command, got {run}; ")


def test_the_variables_of_another_command_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUETURN_LR", "1")
    assert parse(Log, [], "prog", "", Sources(tmp_path, shared=Config)) == Log()
    with pytest.raises(UserError, match="TRUETURN_LR: is no setting of this command"):
        parse(Log, [], "prog", "", Sources(tmp_path))


def test_a_ready_configuration_goes_by_its_name(layers: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(layers, "--config", "small", "--steps", "3") == Config(steps=3, optim=Optim(lr=1e-6))
    assert error_of(layers, "--config", "smal") == (
        "--config: must be a YAML file or the name of a ready configuration, got smal; the ready ones are small"
    )
    with pytest.raises(SystemExit):
        parsed(layers, "--help")
    assert "ready: small" in " ".join(capsys.readouterr().out.split())


def test_a_mistake_in_a_ready_configuration_names_it(layers: Sources) -> None:
    (layers.ready / "odd.yaml").write_text("steps: -1")
    assert error_of(layers, "--config", "odd").startswith("odd steps: must be greater than or equal to 0, got -1")


PRINTED = """\
# training steps
steps: 3  # default: 50; from --steps

# The optimizer.
optim:
  # learning rate
  lr: 1.0e-06  # default: 5.0e-05; from small
  # compile; auto: on a GPU (one of auto, on, off)
  compile: "off"  # default: auto; from TRUETURN_COMPILE
  # steps of warm-up
  warmup: null

# What is kept.
log:
  # record episodes
  record: true
  # name of the run
  name: ""
  # where numbers go (one of a, b)
  tracker: [a, b]  # default: [a]; from --tracker
  # more folders
  folder: []
  # folder to go on with
  resume: null
"""


def test_the_printed_configuration_says_what_each_setting_is_and_where_it_comes_from(
    layers: Sources, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, write
) -> None:
    monkeypatch.setenv("TRUETURN_COMPILE", "off")
    argv = ["--config", "small", "--steps", "3", "--tracker", "a", "--tracker", "b", "--record"]
    with pytest.raises(SystemExit) as caught:
        parsed(layers, *argv, "--print-config")
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed == PRINTED
    monkeypatch.delenv("TRUETURN_COMPILE")
    assert parsed(layers, "--config", write(printed)) == parsed(layers, *argv, "--compile", "off")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["null", "~", "no", "1e-6", "0x1", "a: b", "# a", "[a]", "{", "'", '"', " a ", "-", "<<", "=", "!x", "*a", "\n"]
)  # fmt: skip


@given(
    steps=st.integers(0),
    lr=st.floats(0, exclude_min=True),
    compile=st.sampled_from(["auto", "on", "off"]),
    warmup=st.none() | st.integers(0),
    record=st.booleans(),
    name=TEXTS,
    folder=st.lists(TEXTS.filter(lambda text: text and "\0" not in text).map(Path), max_size=3).map(tuple),
)
def test_any_configuration_survives_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, steps, lr, compile, warmup, record, name, folder
) -> None:
    config = Config(
        steps=steps,
        optim=Optim(lr=lr, compile=compile, warmup=warmup),
        log=Log(record=record, name=name, folder=folder),
    )
    file = tmp_path_factory.getbasetemp() / "survives.yaml"
    file.write_text(dump(config), encoding="utf-8", newline="")
    assert validate(Config, read_file(Config, file)) == config


def test_changed_fields_have_their_old_and_new_values() -> None:
    other = Config(steps=80, log=Log(tracker=()))
    assert changed(other, Config()) == {("steps",): (50, 80), ("log", "tracker"): (("a",), ())}
    assert changed(other, other) == {}
