"""Claims about command lines: flags become a validated tree, and every mistake is one line that names its flag."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from envs.config.cli import exit_code, parse
from envs.config.settings import has_flag, leaves
from envs.errors import UserError
from tests.paths import ROOT
from trainer.config.run import FIRST_SETTINGS, RunConfig
from trainer.config.sources import SOURCES


class Inner(BaseModel):
    """How episodes are played.

    Only the first line stands in the help.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_turns: int = Field(default=3, ge=1, description="turns of an episode")
    record: bool = Field(default=True, description="record 100% of all episodes")
    shuffle: bool = Field(default=False, description="shuffle the rows")
    files: tuple[Path, ...] = Field(default=(), description="more files")


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = Field(default=1e-3, gt=0, description="learning rate")
    schedule: Literal["constant", "cosine"] = Field(default="constant", description="schedule")
    isolation: Literal["thread", "process"] | None = Field(default=None, description="where it runs")
    folder: str | None = Field(default=None, description="folder to record in; empty: none")
    inner: Inner = Inner()


def parsed(*argv: str) -> Outer:
    return parse(Outer, argv, "prog", "What it does.")


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parsed(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_flags_are_the_defaults() -> None:
    assert parsed() == Outer()


def test_flags_reach_fields_of_the_tree() -> None:
    assert parsed("--max-turns", "5", "--lr=0.5", "--schedule", "cosine") == Outer(
        lr=0.5, schedule="cosine", inner=Inner(max_turns=5)
    )


def test_a_bool_is_a_pair_of_flags() -> None:
    assert parsed("--no-record", "--shuffle").inner == Inner(record=False, shuffle=True)
    assert parsed("--record", "--no-shuffle").inner == Inner(record=True, shuffle=False)


class Several(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    runs: tuple[Path, ...] = Field(min_length=1, max_length=2, description="runs to compare")
    live: bool | None = Field(default=None, description="follow; empty: until it ends")
    port: int = Field(default=0, description="port")


def test_a_required_tuple_is_several_arguments_wherever_flags_stand() -> None:
    for argv in (["a", "b", "--port", "5"], ["--port", "5", "a", "b"], ["a", "--port", "5", "b"]):
        assert parse(Several, argv, "prog", "") == Several(runs=(Path("a"), Path("b")), port=5)
    for argv, message in (
        ([], "RUNS: field required, got nothing"),
        (["a", "b", "c"], "RUNS: tuple should have at most 2"),
        (["a", "--prot", "5"], "--prot: is no flag of this command, got --prot; did you mean '--port'?"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse(Several, argv, "prog", "")


def test_a_bool_that_may_be_left_open_is_a_pair_of_flags() -> None:
    found = [parse(Several, ["a", *flags], "prog", "").live for flags in ([], ["--live"], ["--no-live"])]
    assert found == [None, True, False]


def test_a_tuple_is_a_flag_given_again() -> None:
    assert parsed("--files", "a.yaml", "--files", "b.yaml").inner.files == (Path("a.yaml"), Path("b.yaml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lr", "1", "--lr", "2"], "--lr: must be given once, got 1, then 2; leave one of them out"),
        (["--lr=1", "--shuffle", "--lr=1"], "--lr: must be given once, got 1, then 1; leave one of them out"),
        (["--folder", "", "--folder", "x"], "--folder: must be given once, got , then x; leave one of them out"),
        (["--record", "--no-record"], "--no-record: must be given once, got True, then --no-record"),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(argv: list[str], message: str) -> None:
    assert error_of(*argv).startswith(message)


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        (["--record", "maybe"], "", ""),
        (["--record", "false"], "--record", "false"),
        (["--no-record=true"], "--no-record", "true"),
        (["--lr", "1", "--record", "0", "--shuffle"], "--record", "0"),
    ],
)
def test_a_switch_with_a_value_is_told_its_two_forms(argv: list[str], flag: str, value: str) -> None:
    if flag:
        assert error_of(*argv) == f"{flag}: takes no value, got {value}; write --record or --no-record alone"
    else:
        assert error_of(*argv).startswith("maybe: is no flag of this command")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-turn", "5"], "--max-turn: is no flag of this command, got --max-turn; did you mean '--max-turns'?"),
        (["--max-turn=5"], "--max-turn: is no flag of this command, got --max-turn=5; did you mean '--max-turns'?"),
        (
            ["--zzz"],
            "--zzz: is no flag of this command, got --zzz; known: --files, --folder, --isolation, --lr, ",
        ),
        (
            ["cosine"],
            "cosine: is no flag of this command, got cosine; write the flag that it belongs to before it; known",
        ),
        (
            ["--max-turns", "0"],
            "--max-turns: must be greater than or equal to 1, got 0; see --help (turns of an episode)",
        ),
        (
            ["--max-turns", "three"],
            "--max-turns: must be a valid integer, unable to parse string as an integer, got three",
        ),
        (["--max-turns", "2.5"], "--max-turns: must be a valid integer"),
        (["--max-turns", ""], "--max-turns: must be a valid integer"),
        (["--lr", "nan"], "--lr: must be greater than 0, got nan"),
        (["--schedule", "linear"], "--schedule: must be 'constant' or 'cosine', got linear; see --help (schedule)"),
        (["--max-turns"], "--max-turns: expected one argument, got --max-turns; see --help"),
        (["--lr", "1", "--max-turns"], "--max-turns: expected one argument, got --lr 1 --max-turns; see --help"),
        (["--record", "maybe"], "maybe: is no flag of this command"),
        (["--record=maybe"], "--record: takes no value, got maybe; write --record or --no-record alone"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(argv: list[str], message: str) -> None:
    assert error_of(*argv).startswith(message)


class Named(BaseModel):
    id: str = Field(description="the environment")
    samples: int = Field(default=8, description="how many")


class Flagged(BaseModel):
    env: str = Field(default="geo3k", description="the environment")


@pytest.mark.parametrize(
    ("model", "argv", "message"),
    [
        (Named, ["--env", "shop"], "--env: is no flag of this command, got --env; write shop without --env"),
        (Named, ["--sample", "3"], "--sample: is no flag of this command, got --sample; did you mean '--samples'?"),
        (Named, ["--env=shop"], "--env: is no flag of this command, got --env=shop; known: --samples, ID"),
        (
            Named,
            ["shop", "pear"],
            "pear: is no flag of this command, got pear; "
            "write the flag that it belongs to before it; known: --samples, ID",
        ),
        (Flagged, ["shop"], "shop: is no flag of this command, got shop; write --env shop"),
        (
            Flagged,
            ["--env", "shop", "pear"],
            "pear: is no flag of this command, got pear; write the flag that it belongs to before it; known: --env",
        ),
    ],
)
def test_an_environment_that_is_named_as_another_command_takes_it_is_told_the_right_form(
    model: type[BaseModel], argv: list[str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(model, argv, "prog", "What it does.")
    assert str(caught.value) == message


def help_of(model: type[BaseModel], width: int, monkeypatch: pytest.MonkeyPatch, capsys) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as caught:
        parse(model, ["--help"], "prog", "What it does.")
    assert caught.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_help_names_every_flag_with_its_type_range_description_and_default(monkeypatch, capsys) -> None:
    assert (
        help_of(Outer, 100, monkeypatch, capsys)
        == """\
usage: prog [FLAGS]

What it does.

options:
  -h, --help                    show this help message and exit
  --lr FLOAT                    learning rate (>0; default: 0.001)
  --schedule {constant,cosine}  schedule (default: constant)
  --isolation {thread,process}  where it runs (default: empty)
  --folder TEXT                 folder to record in; empty: none

inner:
  How episodes are played.

  --max-turns INT               turns of an episode (>=1; default: 3)
  --record, --no-record         record 100% of all episodes (default: true)
  --shuffle, --no-shuffle       shuffle the rows (default: false)
  --files PATH                  more files (repeat for more; default: empty)
""".splitlines()
    )


Reason = StrEnum("Reason", ["COMPLETED", "MAX_TURNS", "TOKEN_BUDGET", "CONTEXT_FULL", "PARSE_ERROR", "ENV_ERROR"])


class Odd(BaseModel):
    """A command."""

    runs: tuple[Path, ...] = Field(min_length=1, description="runs to compare")
    share: float = Field(default=0.5, gt=0, lt=1, description="share")
    reason: tuple[Reason, ...] = Field(default=(Reason.MAX_TURNS,), description="why it ended")
    live: bool | None = Field(default=None, description="follow; empty: until it ends")
    ks: tuple[int, ...] = Field(default=(1, 2), description="numbers")


def test_help_shows_arguments_choices_and_lists_and_keeps_to_the_width(monkeypatch, capsys) -> None:
    lines = help_of(Odd, 60, monkeypatch, capsys)
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    for part in (
        "usage: prog [FLAGS] RUNS",
        "positional arguments: RUNS runs to compare",
        "--share FLOAT share (>0, <1; default: 0.5)",
        "--reason NAME why it ended (one of completed, max_turns, token_budget, context_full, parse_error, env_error; "
        "repeat for more; default: max_turns)",
        "--live, --no-live follow; empty: until it ends --ks INT numbers (repeat for more; default: 1, 2)",
    ):
        assert part in text


def test_help_keeps_a_flag_in_a_description_in_one_piece(monkeypatch, capsys) -> None:
    for width in range(70, 90):
        lines = help_of(RunConfig, width, monkeypatch, capsys)
        assert [line for line in lines if re.search(r"--[\w-]*-$", line)] == []
        assert '--engine-args="--attention-backend' in " ".join(lines)


def test_a_sub_command_of_trueturn_calls_itself_by_its_name(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["trueturn run", "--help"])
    with pytest.raises(SystemExit):
        parse(Outer, None, "python -m trainer.run", "What it does.")
    assert capsys.readouterr().out.startswith("usage: trueturn run [FLAGS]\n")


def test_every_field_of_a_run_is_a_flag_of_its_own_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(RunConfig, [], "prog", "") == RunConfig()
    with pytest.raises(SystemExit):
        parse(RunConfig, ["--help"], "prog", "")
    assert "None (default" not in capsys.readouterr().out


def test_help_shows_the_first_settings_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse(RunConfig, [flag], "prog", "", first=FIRST_SETTINGS)
    short, full = (re.findall(r"^  (--[a-z0-9-]+)", text, re.M) for text in capsys.readouterr().out.split("usage:")[1:])
    assert short == [
        flag for flag in full if flag.removeprefix("--").replace("-", "_") in (*FIRST_SETTINGS, "help_all")
    ]
    assert len(short) == len(FIRST_SETTINGS) + 1 <= 31
    with pytest.raises(UserError, match="--help-all lists all flags"):
        parse(RunConfig, ["--zzz"], "prog", "", first=FIRST_SETTINGS)


def test_a_command_prints_a_users_error_as_one_line_and_returns_two(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        parsed("--max-turns", "0")
        return 0

    assert exit_code(main) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "error: --max-turns: must be greater than or equal to 1, got 0; see --help (turns of an episode)\n"
    )
    assert captured.out == ""
    assert exit_code(lambda: 0) == 0


def test_code_that_hangs_at_exit_is_named_with_its_line() -> None:
    code = (
        "import atexit, time\nfrom envs.config import cli\ncli.END_S = 0.2\n"
        "def author(): time.sleep(1)\ncli.exit_code(lambda: atexit.register(author) and 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "in author" in done.stderr


def test_an_error_is_one_readable_line_whatever_it_quotes() -> None:
    bomb: list[object] = ["x"]
    for _ in range(60):
        bomb = [bomb] * 9  # its whole text would never end
    for got, shown in (
        (Path("runs") / "x", "got runs/x;"),
        ("\x1b]0;own\x07 \u202egnp.exe", "got \\x1b]0;own\\x07 \\u202egnp.exe;"),
        ("a\nb", "got a b;"),
        ([1, 2, 3], "got [1, 2, 3];"),
        (bomb, "got [[[["),
    ):
        assert shown in str(UserError("--x", "must be y", got, "fix")), got


def test_a_path_that_is_too_long_is_one_line_in_any_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: bool(Path("a" * 300).is_file())) == 2
    assert capsys.readouterr().err.startswith("error: path: is too long, got aaaa")
    with pytest.raises(FileNotFoundError):
        exit_code(lambda: len(Path("nowhere").read_text()))


def test_an_error_repeats_no_more_than_a_little_of_a_value() -> None:
    error = UserError("f" * 5000, "must be a list", "x" * 5000, f"write [{'x' * 5000}]")
    assert len(str(error)) < 1500


def test_a_setting_without_a_flag_is_set_by_files_and_variables_and_a_flag_for_it_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rollout: {resample: 0}")
    assert parse(RunConfig, ["--config", str(file)], "prog", "", SOURCES).rollout.resample == 0
    monkeypatch.setenv("TRUETURN_RESAMPLE", "2")
    assert parse(RunConfig, ["--config", str(file)], "prog", "", SOURCES).rollout.resample == 2
    fix = r"it has no flag: write rollout: \{resample: \.\.\.\} into a --config file, or set TRUETURN_RESAMPLE"
    with pytest.raises(UserError, match=fix):
        parse(RunConfig, ["--resample", "0"], "prog", "", SOURCES)
    with pytest.raises(UserError, match=r"write rollout: .stop_early"):
        parse(RunConfig, ["--no-stop-early"], "prog", "", SOURCES)


def test_a_run_has_at_most_100_flags() -> None:
    flags = [path for path, field in leaves(RunConfig) if has_flag(field)]
    assert len(flags) + len(("--config", "--print-config")) <= 100
