"""Claims about `python -m agents.play`: a person's turns go through the real agent loop, and see what a model sees."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from agents.cli.terminal import Terminal, expand_call
from agents.play import run
from agents.recording import Recording
from agents.rollout.invariants import broken_invariant
from envs.config.cli import exit_code
from envs.registry import get_spec
from envs.tool_calls import ToolCall, find_tool_calls
from tests.agents.rendering.template_cases import renderer_for
from tests.paths import ROOT
from tests.processes import Command
from tests.recordings import lines_of

LABEL = get_spec("geo3k").load_dataset("train", 1, 0)[0].label


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Play with piped input in an empty folder; returns the exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def playing(text: str, *argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = run(list(argv))
        return code, capsys.readouterr().out

    return playing


def read_terminal(text: str) -> list[str]:
    """Return every turn that a person types."""
    terminal = Terminal(io.StringIO(text), io.StringIO())
    turns: list[str] = []
    try:
        while True:
            turns.append(terminal.ask("hermes"))
    except Exception:
        return turns


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("one\ntwo\n.\nthree\n", ["one\ntwo", "three"]),
        ("one", ["one"]),
        ("", []),
        ("\nnext\n.\n", ["", "next"]),
        ("one\n\ntwo\n.\n", ["one\n\ntwo"]),
        (".\n.\n", ["", ""]),
        ("one\r\n.\r\n", ["one"]),
        ("one\n:quit\n", []),
        (" . \n..\n.\n", [" . \n.."]),
    ],
)
def test_a_turn_ends_with_a_dot_an_empty_first_line_or_the_end_of_the_input(text: str, turns: list[str]) -> None:
    assert read_terminal(text) == turns


def test_a_call_is_written_in_the_format_of_the_model() -> None:
    for tool_format in ("hermes", "qwen_xml"):
        text = expand_call(':call f {"a": "x y", "b": 3}', tool_format)
        (call,) = find_tool_calls(text, tool_format)
        assert isinstance(call, ToolCall) and (call.name, call.arguments["a"], str(call.arguments["b"])) == (
            "f",
            "x y",
            "3",
        )
    assert find_tool_calls(expand_call(":call f", "hermes")) == [ToolCall("f", {})]


def test_a_call_that_is_not_understood_is_asked_for_again() -> None:
    shown = io.StringIO()
    terminal = Terminal(
        io.StringIO(f":call\n:call f [1]\n:call f {{\n:call f {'[' * 100_000}\n:call f {'9' * 5000}\nNow.\n.\n"), shown
    )
    assert terminal.ask("hermes") == "Now."
    said = [line for line in shown.getvalue().splitlines() if not line.startswith("> ")]
    assert [line.split(";")[0] for line in said] == [
        "not understood: no name",
        "not understood: the arguments are no JSON object",
        "not understood: the arguments are no JSON (Expecting property name enclosed in double quotes at column 2)",
        "not understood: the arguments are no JSON (lists that nest too deeply)",
        "not understood: the arguments are no JSON (a number with too many digits)",
    ]


def test_an_unknown_command_in_the_first_line_of_a_turn_is_refused_and_elsewhere_is_text() -> None:
    shown = io.StringIO()
    terminal = Terminal(io.StringIO(":cal price {}\n:calls\n:) well\n:cal\n.\n :cal\n.\n"), shown)
    assert [terminal.ask("hermes"), terminal.ask("hermes")] == [":) well\n:cal", " :cal"]
    assert [line for line in shown.getvalue().splitlines() if not line.startswith("> ")] == [
        "not understood: :cal is no command, :call and :quit are; a space in front sends it",
        "not understood: :calls is no command, :call and :quit are; a space in front sends it",
    ]


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_transcript_reads_the_same_typed_or_piped() -> None:
    piped, typed = io.StringIO(), io.StringIO()
    Terminal(io.StringIO("one\ntwo\x1b\n.\n"), piped).ask("hermes")
    assert piped.getvalue() == "> one\n> two\\x1b\n> .\n"
    Terminal(Typed("one\ntwo\x1b\n.\n"), typed).ask("hermes")  # the terminal itself shows what is typed
    assert typed.getvalue() == "> > > "


def test_a_person_need_not_close_the_thought_that_a_template_opens(play, tmp_path: Path) -> None:
    model = tmp_path / "model"
    renderer_for("chatml_thinking").save(model)
    thought = f"\\boxed{{0}}?</think>\\boxed{{{LABEL}}}"
    for number, (text, said) in enumerate(
        [(f"\\boxed{{{LABEL}}}", f"\n</think>\n\n\\boxed{{{LABEL}}}"), (thought, thought)]
    ):
        folder = f"kept{number}"
        code, shown = play(text, "--env", "geo3k", "--model", str(model), "--record", folder)
        assert code == 0 and "--- end: completed, reward 1, 1 turn," in shown
        (episode,) = Recording.open(tmp_path / folder).episodes()
        assert episode.turns[0].text == said


def test_the_person_sees_prompt_tools_images_answers_and_how_it_ended(play, tmp_path: Path) -> None:
    wrong = ':call calc_score {"answer": "no"}\n.\n'
    code, shown = play(f"{wrong}So it is\n\\boxed{{{LABEL}}}\n", "--env", "geo3k")
    assert code == 0
    for text in (
        "<|im_start|>system\nSolve the problem.",
        '{"name": "calc_score", ',
        "<|vision_start|>[play/geo3k-0-prompt-1.png 160x128, 20 tokens]<|vision_end|>Find x.<|im_end|>",
        "--- the environment answers turn 1: done False, calc_score: ok",
        "<tool_response>Score 0.0: no is wrong. Try another way.</tool_response>",
        "--- the environment answers turn 2: done True",
        "--- end: completed, reward 1, 2 turns,",
    ):
        assert text in shown, text
    assert "<|image_pad|>" not in shown
    assert Image.open(tmp_path / "play" / "geo3k-0-prompt-1.png").size == (160, 128)


def test_images_of_the_environment_are_saved_under_their_turn(play, tmp_path: Path) -> None:
    zoom = ':call zoom {"left": 0, "top": 0, "right": 500, "bottom": 500}\n.\n'
    code, shown = play(zoom * 2, "--env", "geo3k_zoom", "--index", "1", "--max-turns", "2", "--images", "shots")
    assert code == 0
    assert "[shots/geo3k_zoom-1-turn1-1.png 448x352, 63 tokens]" in shown
    assert "[shots/geo3k_zoom-1-turn2-1.png 448x352]" in shown
    assert "--- end: max_turns, reward 0, 2 turns" in shown
    assert {path.name for path in (tmp_path / "shots").iterdir()} == {
        "geo3k_zoom-1-prompt-1.png",
        "geo3k_zoom-1-turn1-1.png",
        "geo3k_zoom-1-turn2-1.png",
    }


def test_the_limits_are_the_agent_loops(play) -> None:
    assert "--- end: max_turns, reward 0, 1 turn," in play("5\n.\n6\n.\n", "--env", "guess", "--max-turns", "1")[1]
    assert "--- end: token_budget" in play("word " * 50, "--env", "guess", "--max-new-tokens", "9")[1]


def test_a_control_token_that_the_person_writes_makes_the_stream_invalid(play) -> None:
    code, shown = play("<|image_pad|>\n", "--env", "calculator")
    assert code == 1
    assert "--- end: invalid_stream" in shown and "the model sampled suppressed ids" in shown


def test_the_episode_is_recorded_as_one_that_a_model_played(play, tmp_path: Path) -> None:
    play(f"\\boxed{{{LABEL}}}\n", "--env", "geo3k", "--record", "episodes")
    (episode,) = lines_of(tmp_path / "episodes" / "episodes.jsonl.gz")
    assert (episode["env"], episode["phase"], episode["reward"]) == ("geo3k", "play", 1.0)
    assert [turn["text"] for turn in episode["turns"]] == [f"\\boxed{{{LABEL}}}"]
    (turn,) = episode["turns"]
    assert episode["mask"] == [0] * turn["start"] + [1] * (turn["end"] - turn["start"])
    assert broken_invariant.__doc__  # the loop checked them: the end reason says so
    assert episode["end_reason"] == "completed"


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("file", "--record: must be a writable folder"),
        ("run", "--record: must be a folder without a recording"),
        ("other", "--record: must be a folder without a recording"),
    ],
)
def test_a_folder_that_cannot_be_recorded_in_is_refused_before_anybody_plays(
    folder: str, error: str, play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("run/episodes", "other"):
        play("3\n", "--env", "calculator", "--record", name)
    assert exit_code(lambda: play("3\n", "--env", "guess", "--record", folder)[0]) == 2
    said = capsys.readouterr()
    assert error in said.err and "Traceback" not in said.err and "--- turn 1" not in said.out


def test_quitting_and_the_end_of_the_input_close_the_environment(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closing_env.py").write_text(
        "from envs.guess import GuessEnv, samples\n"
        "class Closing(GuessEnv):\n"
        "    def close(self):\n"
        "        print('closed', flush=True)\n"
    )
    (tmp_path / "registry.yaml").write_text(
        "closing: {entry_point: 'closing_env:Closing', dataset: 'closing_env:samples', description: x, max_turns: 3}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = "--- end: the input ends here, the episode does not: no reward"
    for text, expected, end in (
        ("", 1, ended),
        ("3\n.\n", 1, ended),
        (":quit\n", 0, "--- quit"),
        ("3\n.\n:quit\n", 0, "--- quit"),
    ):
        code, shown = play(text, "--env", "closing", "--registry", "registry.yaml")
        assert (code, shown.splitlines()[-2:]) == (expected, ["closed", end])
    sys.modules.pop("closing_env")


def test_an_episode_that_does_not_end_says_that_it_is_not_recorded(play, tmp_path: Path) -> None:
    for text, end in (("", "no reward"), (":quit\n", "quit")):
        _, shown = play(text, "--env", "calculator", "--record", "kept")
        assert shown.splitlines()[-1].endswith(f"{end}; nothing is recorded in kept: the episode did not end")
    assert not list((tmp_path / "kept").iterdir())


def test_a_fault_of_the_environment_is_shown_and_is_exit_code_1(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_env.py").write_text(
        "from envs.guess import GuessEnv, samples\n"
        "class Faulty(GuessEnv):\n"
        "    def step(self, response_text):\n"
        "        raise KeyError('colour')\n"
    )
    (tmp_path / "registry.yaml").write_text(
        "faulty: {entry_point: 'faulty_env:Faulty', dataset: 'faulty_env:samples', description: x, max_turns: 3}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, shown = play("3\n", "--env", "faulty", "--registry", "registry.yaml")
    assert code == 1
    assert "KeyError: 'colour'" in shown and "--- end: env_error, reward 0, 1 turn," in shown
    sys.modules.pop("faulty_env")


def test_what_steers_a_terminal_is_shown_and_not_done() -> None:
    shown = io.StringIO()
    Terminal(io.StringIO(), shown).say("\x1b[2Jhello")
    assert shown.getvalue() == "\\x1b[2Jhello\n"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--env", "geo4k"], "did you mean 'geo3k'?"),
        (["--env", "guess", "--index", "-1"], "--index: must be"),
        (
            ["--env", "guess", "--index", "7", "--data", "rows.jsonl"],
            "--index: must be at most 2, got 7; the data has 3 problems, counted from 0",
        ),
        (["--env", "geo3k", "--model", "."], "--model: must have a tokenizer"),
        (["--env", "geo3k", "--images", "file/play"], "--images: must be writable"),
    ],
)
def test_what_a_user_can_mend_is_exit_code_2(
    argv: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"problem": "?", "answer": "3"}\n' * 3)
    assert exit_code(lambda: run(argv)) == 2
    assert error in capsys.readouterr().err


HIDDEN_TORCH = """
import importlib.util, sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchvision"):
            raise ModuleNotFoundError(name)

def find(name, package=None, find_spec=importlib.util.find_spec):
    try:
        return find_spec(name, package)
    except ModuleNotFoundError:
        return None

sys.meta_path.insert(0, Hidden)
importlib.util.find_spec = find
from agents.play import run
sys.argv[1:] = ["--env", "calculator"]
code = run()
print(code, "torch" in sys.modules)
"""


def test_a_machine_without_torch_can_play(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{HIDDEN_TORCH}"],
        cwd=tmp_path, input="\\boxed{0}\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--- end: completed" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 False"


def test_the_module_itself_imports_neither_torch_nor_transformers_nor_the_trainer() -> None:
    code = "import sys, agents.play; print(sorted({'torch', 'transformers', 'trainer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_ctrl_c_ends_the_episode_while_a_turn_is_waited_for(tmp_path: Path) -> None:
    with Command("agents.play", "--env", "guess", "--images", str(tmp_path), written=None) as playing:
        while "\n--- turn 1" not in playing.output("stdout"):
            assert playing.poll() is None, playing.output("stderr")
            time.sleep(0.05)
        time.sleep(0.2)  # until it waits
        playing.send_signal(signal.SIGINT)
        assert playing.wait(60) == 130
        _, _, after = playing.output("stdout").partition("\n--- turn 1")[2].partition("\n")
        assert after == "--- interrupted\n"
        assert "Traceback" not in playing.output("stderr")


def test_a_person_sees_the_whole_prompt_of_each_stream_where_the_history_is_cut(
    play: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    entry = {
        "entry_point": "envs.geo3k.zoom:Geo3kZoomEnv",
        "description": "Zoom with a window.",
        "dataset": "starter.textbook.problems:TextbookGeo3k",
        "history": {"keep_images": 1},
        "max_turns": 4,
    }
    (tmp_path / "registry.yaml").write_text(json.dumps({"window": entry}))
    zooms = [f':call zoom {{"left": 0, "top": 0, "right": {right}, "bottom": 500}}\n.\n' for right in (400, 600)]
    code, shown = play("".join([*zooms, "\\boxed{1}\n.\n"]), "--env", "window", "--registry", "registry.yaml")
    assert code == 0
    begun = shown.split("--- the history is cut: from here on the model sees this\n")
    assert len(begun) == 2
    cut, _ = begun[1].split("--- turn 3")
    assert cut.startswith("<|im_start|>") and "(an earlier image)" in cut
    assert re.findall(r"window-0-(\w+)-1.png", cut) == ["prompt", "turn2"]
    assert "in 2 streams" in begun[1]
