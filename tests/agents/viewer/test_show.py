"""Claims about the terminal form: figures are right, the episodes meant are shown, and no text steers the terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agents.recording import Recorder
from agents.recording.schema import WayRecord
from agents.recording.selection import SelectionConfig
from agents.show import Printer, ShowConfig, chosen, print_run
from agents.show import run as show
from agents.types import EndReason, Trajectory
from agents.viewer.source import Source
from agents.viewer.token_stream import level_of, texts_of
from envs.errors import UserError
from envs.tool_calls.thinking import Thinking
from tests.agents.viewer.test_viewer import LIGHT, MANIFEST, ROOT, played

SPELLED = {1: b"So ", 2: b"\xe4\xbd", 3: b"\xa0", 4: b"<|im_end|>"}


def write(run: Path, *episodes: Trajectory, step: int = 1) -> None:
    with Recorder(run / "episodes", MANIFEST, SPELLED.__getitem__) as recorder:
        for episode in episodes:
            recorder.write(episode, step)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert show(argv) == 0
    return capsys.readouterr().out


def coloured(run: Path, **changes: object) -> str:
    """Return what a terminal of 60 columns would get."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60, highlight=False)
    config = ShowConfig(run=run, **changes)  # pyright: ignore[reportArgumentType]
    print_run(Printer(console, is_wrapped=True), Source(run), config)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_overview_counts_by_phase_way_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = played(1, reward=0.0, end_reason=EndReason.MAX_TURNS)
    with Recorder(tmp_path / "episodes", MANIFEST, SPELLED.__getitem__) as recorder:
        recorder.write(played(0, reward=1.0), 0, "before", "greedy")
        for k, reward in enumerate((1.0, 0.5, 0.0)):
            recorder.write(played(0, k, reward=reward), 1)
        recorder.write(lost, 2)
        recorder.write_scores(lost, 2, np.array([-1, -0.5, -2.5], dtype=np.float32))
    lines = shown(capsys, str(tmp_path)).splitlines()
    assert lines[0] == f"{tmp_path.name}: sums, 5 episodes, steps 0 to 2, model small"
    rows = [" ".join(line.split()) for line in lines[1:] if line.strip()]
    assert rows[0] == "phase way end episodes share reward turns tokens written calls failed kl max gap"
    assert rows[2:] == [
        "before greedy completed 1 1.000 1.000 2.00 6.0 3.0 2 0.500",
        "train train completed 3 0.750 0.500 2.00 6.0 3.0 6 0.500",
        "train train max_turns 1 0.250 0.000 2.00 6.0 3.0 2 0.500 3.6e-02 5.0e-01",  # 0.10653 / 3
    ]


def test_an_episode_is_shown_as_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = played(3, 1, error="Traceback\n  File x\nValueError: no", end_reason=EndReason.ENV_ERROR)
    said = (replace(base.turns[0], text="I add.\nThen:"), replace(base.turns[1], text="5", info={"score": 0.5}))
    episode = replace(base, turns=said)
    with Recorder(tmp_path / "episodes", MANIFEST, SPELLED.__getitem__) as recorder:
        recorder.write(episode, 2)
        recorder.write_outcome(episode, 2, "train", -0.5)
        recorder.write_scores(episode, 2, np.array([-1, -0.5, -2.5], dtype=np.float32))
    (image,) = (tmp_path / "episodes" / "images").iterdir()
    out = shown(capsys, str(tmp_path), "--id", "train-3-*").partition("\n train-3-1")
    assert "".join(out[1:]).strip() == "\n".join(
        [
            "train-3-1   step 2, reward 0.25, advantage -0.5 (train), 2 turns, 3 of 6 tokens, kl 3.6e-02, "
            "largest gap 5.0e-01, 2.50 s",
            "problem sum-3, label 5, seed 0",
            "system",
            "  Add.",
            "user",
            f"image {image} 64x64",
            f"  What is 2 + 3? {'?' * 300}",
            "turn 1  2 tokens, stop, 0.00 s, then 0.00 s of the environment",
            "  I add.",
            "  Then:",
            "call ok  add(null)",
            "call malformed  a call(null)",
            "tool",
            "  5",
            "turn 2  1 token, stop, 0.00 s, then 0.00 s of the environment",
            "  5",
            'info {"score": 0.5}',
            "error",
            "  ValueError: no",
            "--- env_error, reward 0.25",
        ]
    )


def test_the_first_observation_is_shown_before_the_first_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = played(3)
    noon, answer = {"role": "user", "content": "It is noon."}, {"role": "tool", "content": "5"}
    texts = [{"role": "assistant", "content": turn.text} for turn in base.turns]
    write(tmp_path, replace(base, messages=(*base.messages, noon, texts[0], answer, texts[1])))
    lines = shown(capsys, str(tmp_path), "--id", "train-3-0").splitlines()
    place = lines.index("  It is noon.")
    assert lines[place - 1] == "user" and lines[place + 1].startswith("turn 1")


def test_a_turn_is_shown_in_parts_with_its_thinking_dimmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = played()
    episode = replace(base, turns=(replace(base.turns[0], text="Is it 5?</think>\n\nIt is 5."), *base.turns[1:]))
    limits = {"max_turns": 1, "use_tools": True, "max_new_tokens": 9, "context_length": 9, "temperature": 1.0}
    for thinking, spoken in (
        (
            Thinking("<think>", "</think>", True),
            ["thinking, 18 characters", "  Is it 5?</think>", "  ", "  ", "  It is 5."],
        ),
        (None, ["  Is it 5?</think>", "  ", "  It is 5."]),
    ):
        run = tmp_path / str(thinking is None)
        ways = {"train": WayRecord.model_validate({**limits, "thinking": thinking})}
        with Recorder(run / "episodes", MANIFEST.model_copy(update={"ways": ways}), SPELLED.__getitem__) as recorder:
            recorder.write(episode, 1)
        lines = shown(capsys, str(run), "--id", "train-0-0").splitlines()
        first = next(place for place, line in enumerate(lines) if line.startswith("turn 1")) + 1
        assert lines[first : first + len(spoken)] == spoken
        is_dim = "\x1b[2mIs it 5?" in coloured(run, selection=SelectionConfig(id=("train-0-0",)))
        assert is_dim == (thinking is not None)


def test_the_worst_the_best_and_those_of_the_largest_gap_are_chosen(tmp_path: Path) -> None:
    with Recorder(tmp_path / "episodes", MANIFEST, SPELLED.__getitem__) as recorder:
        for k, (reward, gap) in enumerate([(1.0, 0.5), (0.0, 0.25), (0.5, 1.0), (0.0, None), (1.0, None)]):
            recorder.write(played(k, reward=reward), 1)
            if gap is not None:
                recorder.write_scores(played(k), 1, np.array([-1, -0.5, -2 - gap], dtype=np.float32))
    source = Source(tmp_path)
    named = SelectionConfig(id=("train-*",))
    for config, expected in (
        (ShowConfig(run=tmp_path, worst=3), [3, 1, 2]),
        (ShowConfig(run=tmp_path, best=2), [4, 0]),
        (ShowConfig(run=tmp_path, gap=4), [2, 0, 1]),
        (ShowConfig(run=tmp_path, worst=1, best=1, gap=1), [3, 4, 2]),
        (ShowConfig(run=tmp_path, worst=9, best=9), [3, 1, 2, 4, 0]),
        (ShowConfig(run=tmp_path), []),
        (ShowConfig(run=tmp_path, selection=named), [0, 1, 2, 3, 4]),
    ):
        assert chosen(source, config) == expected, config


def test_filters_hold_for_the_overview_and_the_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *(played(k, reward=k / 4) for k in range(4)))
    out = shown(capsys, str(tmp_path), "--min-reward", "0.25", "--worst", "1")
    assert "3 episodes" in out and re.findall(r"^ train-\d-0 ", out, re.MULTILINE) == [" train-1-0 "]
    assert "scored none of these" in shown(capsys, str(tmp_path), "--gap", "1")
    for flags in (["--step", "7", "--worst", "1"], ["--id", "zzz*"]):
        with pytest.raises(UserError, match="must hold an episode that is selected, got none"):
            show([str(tmp_path), *flags])
    with pytest.raises(UserError, match="no such folder"):
        show([str(tmp_path / "none")])
    write(tmp_path / "empty")
    with pytest.raises(UserError, match="empty: must hold an episode, got none; give a run that has ended an episode"):
        show([str(tmp_path / "empty")])


ODD = "\x1b]0;own\x07 [red]markup[/red] \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \u202egnp.exe \x9b31m :smile: a\rb\x08"
WRITTEN = (
    r"\x1b]0;own\x07 [red]markup[/red] \x1b]8;;http://x\x1b\link\x1b]8;;\x1b\ \u202egnp.exe \x9b31m :smile: a\rb\x08"
)
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f]")


def hostile() -> Trajectory:
    """Return an episode in which everything that somebody else says would like to steer."""
    base = played(0)
    info = {"tool_calls": [{"name": ODD, "arguments": {ODD: ODD}, "outcome": ODD}], ODD: ODD}
    said = ({"role": ODD, "content": [{"type": "text", "text": ODD}, {"type": "image", "image": ODD}]},)
    turns = (replace(base.turns[0], text=ODD, info=info, observations=said, finish=ODD), base.turns[1])
    asked = ({"role": "user", "content": ODD},)
    return replace(
        base, turns=turns, messages=asked, num_prompt_messages=1, label=ODD, sample_id=ODD, error="Error: \x1b[31m"
    )


def test_no_text_of_others_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path / "episodes", MANIFEST, lambda _: ODD.encode()) as recorder:
        recorder.write(hostile(), 1, phase=ODD, way=ODD)
    out = shown(capsys, str(tmp_path), "--worst", "1", "--tokens")
    assert not _STEERS.search(out) and f"\n  {WRITTEN}\n" in out
    assert out.count("[red]markup[/red]") >= 12 and out.count(":smile:") >= 12 and "\n  Error: \\x1b[31m\n" in out
    painted = coloured(tmp_path, worst=1, tokens=True)
    assert "\x1b[" in painted and not _STEERS.search(re.sub(r"\x1b\[[0-9;]*m", "", painted))


def test_text_of_others_passes_for_no_line_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = f"--- completed, reward 1\nturn 9\n{'wide ' * 40}turn 9"
    base = played(0)
    said = replace(base.turns[0], text=forged, info={"said": forged})
    write(tmp_path, replace(base, turns=(said, base.turns[1])))
    for width in ("0", "70"):
        out = shown(capsys, str(tmp_path), "--worst", "1", "--width", width)
        assert re.findall("^(?:---|turn).*", out, re.MULTILINE) == [
            "turn 1  2 tokens, stop, 0.00 s, then 0.00 s of the environment",
            "turn 2  1 token, stop, 0.00 s, then 0.00 s of the environment",
            "--- completed, reward 0.25",
        ]


def test_a_long_text_is_cut_with_a_word_unless_all_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = played(0)
    long = "a" * 500_000 + "MIDDLE" + "b" * 499_994
    write(tmp_path, replace(base, turns=(replace(base.turns[0], text=long), base.turns[1])))
    out = shown(capsys, str(tmp_path), "--worst", "1")
    assert "\n  [... 996,000 characters more; --full shows them ...]\n  bbb" in out and "MIDDLE" not in out
    assert f"\n  {long}\n" in shown(capsys, str(tmp_path), "--worst", "1", "--full")


def test_a_pipe_gets_no_colours_and_a_width_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, played(0))
    argv = (str(tmp_path), "--worst", "1", "--tokens")
    assert "\x1b" not in shown(capsys, *argv)
    lines = shown(capsys, *argv, "--width", "50").splitlines()
    path = next(line for line in lines if line.startswith("image"))
    assert all(len(line) <= 50 for line in lines[lines.index(path) + 5 :])


def test_tokens_are_marked_by_who_wrote_them_and_by_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episode = played(
        0, ids_T=np.array([1, 4, 2, 3, 4, 1]), logprobs_T=np.array([0, 0, -0.01, -3, 0, -0.01], np.float32)
    )
    with Recorder(tmp_path / "episodes", MANIFEST, SPELLED.__getitem__) as recorder:
        recorder.write(episode, 1)
        recorder.write_scores(episode, 1, np.array([-0.01, -3, -0.51], dtype=np.float32))
    argv = (str(tmp_path), "--id", "train-0-0", "--tokens")
    # Ids 2 and 3 are one character together; exp(-3) = 0.05.
    assert "\n  So <|im_end|>⟦你{0.05}⟧<|im_end|>⟦So ⟧\n" in shown(capsys, *argv)
    assert "\n  So <|im_end|>⟦你⟧<|im_end|>⟦So {0.5}⟧\n" in shown(capsys, *argv, "--color", "gap")
    out = shown(capsys, *argv, "--color", "mask")
    assert "\n  So <|im_end|>⟦你⟧<|im_end|>⟦So ⟧\n" in out and "tokens  ⟦written by the model⟧, read\n" in out
    painted = coloured(tmp_path, worst=1, tokens=True)
    assert "\x1b[35m你\x1b[0m" in painted and "\x1b[32mSo \x1b[0m" in painted and "\x1b[2m<|im_end|>\x1b[0m" in painted


def test_a_run_of_one_token_is_folded_where_it_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids_T, mask_T = np.array([4] * 5 + [1] * 4 + [4] * 5), np.array([False] * 9 + [True] * 5)
    logprobs_T = np.where(mask_T, -0.01, 0).astype(np.float32)
    turns = (replace(played().turns[0], start=9, end=14, versions=((0, 5),)),)
    write(tmp_path, played(0, ids_T=ids_T, mask_T=mask_T, logprobs_T=logprobs_T, turns=turns, prompt_length=9))
    out = shown(capsys, str(tmp_path), "--worst", "1", "--tokens")
    assert f"\n  <|im_end|>×5{'So ' * 4}⟦{'<|im_end|>' * 5}⟧\n" in out


def test_an_episode_without_a_score_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, played(0))
    assert "has not scored this episode" in shown(capsys, str(tmp_path), "--worst", "1", "--tokens", "--color", "gap")


def test_levels_are_those_of_the_legend() -> None:
    assert [level_of(p, "probability") for p in (1.0, 0.9, 0.89, 0.5, 0.1, 0.01, 0.0)] == [0, 0, 1, 1, 2, 3, 4]
    assert [level_of(gap, "gap") for gap in (0.0, 0.001, 0.05, 0.1, 1.0, 9.0)] == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        ([b"a", b"b"], ["a", "b"]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "😀"]),
        ([b"\xe4\xbd", b"!"], ["\\xe4\\xbd", "!"]),
        ([b"\xe4"], ["\\xe4"]),
        ([b"x\xe4", b"\xbd\xa0y", b"z"], ["", "x你y", "z"]),
        ([None, b"a"], ["<|0|>", "a"]),
        ([b"\xe4", None], ["\\xe4", "<|1|>"]),
    ],
)
def test_characters_of_several_tokens_are_put_together(spelled: list[bytes | None], expected: list[str]) -> None:
    known = {k: each for k, each in enumerate(spelled) if each is not None}
    assert texts_of(range(len(spelled)), known) == expected


def test_the_command_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write(tmp_path, played(0))
    command = [sys.executable, "-c", LIGHT.format(name="show"), str(tmp_path), "--worst", "1", "--tokens"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "train-0-0" in done.stdout
