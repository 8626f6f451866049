"""Text that a command prints cannot control the terminal, hide a part, or look like markup."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from envs.console import Console
from envs.safe_text import escape_controls, escape_lines, guard_streams
from tests.paths import ROOT

HOSTILE = "\x1b]0;own\x07\x1b[2J\x9b31m\u202egnp.exe\x00\x08\u200b\u3164\U000e0041\ud800 \x1b]8;;http://x\x1b\\go\r"
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\u3164\ud800-\udfff]"
)
STYLING = re.compile(r"\x1b\[[0-9;?]*[mKAhl]|\r")
MARKUP = "[bold]b[/] [link=http://x]l[/link] :smile: [/nothing]"

#: Modules that print although no command's `exit_code` has guarded the streams before, and why that is safe.
PRINTS_ITSELF = {
    "agents/cli/terminal.py": "escapes each line: anything with lines is a terminal",
    "envs/checking/worker_player.py": "runs under envs.check",
    "envs/config/cli.py": "guards the streams",
    "envs/interrupts.py": "a text of its own",
    "envs/execution/watchdog_process.py": "names calls as `watchdog` has escaped them, and places in code",
    "trainer/learner/ray_group.py": "a text of its own",
    "trainer/metrics/console.py": "a text of its own",
    "trueturn/recorded.py": "escapes each line",
}
#: Programs that no person starts: one writes into a log file, the other is the watchdog's process.
NO_COMMANDS = {"agents/engines/sglang/launch.py", "envs/execution/watchdog_process.py"}


def sources() -> Iterator[tuple[str, str]]:
    for package in ("envs", "agents", "trainer", "trueturn"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_ordinary_text_of_all_scripts_and_emoji_stay_as_they_are():
    for text in (
        "café ∠x = 68°",
        "漢字とかな",
        "नमस्ते क्\u200dष",
        "می\u200cخواهم",
        "שלום",
        "👨‍👩‍👧 ❤️‍🔥 1️⃣ 🇩🇪 👍🏽",
        "a\u0301 ⟦x⟧ ─",
    ):
        assert escape_controls(text) == text


def test_what_steers_or_shows_nothing_is_written_out():
    shown = escape_controls(HOSTILE + "\n\t")
    assert not STEERS.search(shown) and shown.endswith(r"\r\n\t") and escape_lines("a\n\tb") == "a\n\tb"
    assert r"\x1b]0;own\x07\x1b[2J\x9b31m\u202egnp.exe\x00\x08\u200b\u3164\U000e0041\ud800" in shown
    assert escape_controls("a\u200db") == r"a\u200db" and escape_controls("é\u200d\u200dé") == r"é\u200d\u200dé"
    assert escape_controls("x\ufe0f\ufe01\U000e0100") == "x\ufe0f\\ufe01\\U000e0100"


@given(st.text())
def test_escaped_text_holds_no_control_and_is_not_escaped_again(text: str):
    shown = escape_controls(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert escape_controls(shown) == shown and escape_lines(text).count("\n") == text.count("\n")


@pytest.mark.parametrize("hostile", [HOSTILE, MARKUP])
def test_the_console_prints_any_text_as_it_is_written_in_every_part_of_a_table(hostile: str):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=400)
    table = Table(hostile, title=hostile, caption=hostile)
    table.add_row(hostile)
    table.add_row(Text(hostile, "bold red"))
    table.add_row(Text.from_ansi("\x1b]8;;http://x\x1b\\go\x1b]8;;\x1b\\"))
    console.print(table)
    console.print(hostile, soft_wrap=True)
    with Progress(console=console) as progress, console.status(Text(hostile)):
        progress.console.print(hostile)
    shown = out.getvalue()
    assert not STEERS.search(STYLING.sub("", shown)) and "\x1b[1;31m" in shown
    assert shown.count(hostile[-8:] if hostile is MARKUP else "gnp.exe") >= 6


def guarded(monkeypatch: pytest.MonkeyPatch) -> io.TextIOWrapper:
    """Return what takes the place of both streams of this process, guarded."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogatepass", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    guard_streams()
    return stream


def written(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("utf-8", "surrogatepass")


def test_guarded_streams_let_only_the_console_draw(monkeypatch: pytest.MonkeyPatch):
    terminal = guarded(monkeypatch)
    console = Console(force_terminal=True, color_system="standard", width=200)
    with Progress(console=console) as progress:
        task = progress.add_task("bar", total=2)
        print("printed", HOSTILE)
        print("\x1b[8mconcealed\x1b[0m")
        sys.stderr.write(f"error {HOSTILE}\n")
        progress.advance(task)
    print("after", HOSTILE)
    console.print(Text("ours", "green"))
    shown = written(terminal)
    assert "\x1b[32mours\x1b[0m" in shown and "\x1b[2K" in shown, "our colours and the bar are there"
    assert not STEERS.search(STYLING.sub("", shown)) and "\x1b[8m" not in shown and r"\x1b[8mconcealed" in shown


def test_a_library_s_bar_draws_its_line_again_and_a_text_after_a_label_does_not(monkeypatch: pytest.MonkeyPatch):
    terminal = guarded(monkeypatch)
    for done in ("10%", "20%"):
        sys.stderr.write(f"\r{done}")
    print()
    print("the model says", "\rerror: send your key")
    assert written(terminal) == "\r10%\r20%\nthe model says \\rerror: send your key\n"


def test_a_traceback_and_a_warning_and_help_that_a_command_prints_are_escaped():
    code = (
        "import sys, warnings; from envs.config.cli import exit_code\n"
        "def main():\n    warnings.warn('\\x1b[2J warned')\n    raise RuntimeError('\\x1b]0;own\\x07 \\u202e')\n"
        "sys.exit(exit_code(main))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert r"\x1b[2J warned" in done.stderr and r"RuntimeError: \x1b]0;own\x07 \u202e" in done.stderr
    assert not STEERS.search(done.stderr) and done.returncode == 1


def test_only_one_module_makes_consoles_and_none_reads_markup_or_goes_round_the_guard():
    others = re.compile(
        r"from rich\.console import .*\bConsole\b|from rich import .*\bprint\b|rich\.(print|traceback|logging|pretty)"
        r"|from_markup|markup=True|get_console|sys\.__std(out|err)__|std(out|err)\.buffer|os\.write\([12]\b|/dev/tty"
    )
    found = {name: others.findall(text) for name, text in sources() if name != "envs/console.py"}
    assert not {name for name, each in found.items() if each}, "use envs.console.Console"
    columns = [line for _, text in sources() for line in text.splitlines() if 'TextColumn("{' in line]
    assert all("markup=False" in line for line in columns), "a column of a bar reads markup by itself"
    updates = [line for _, text in sources() for line in re.findall(r"status\.update\((.{4})", text)]
    assert set(updates) == {"Text"}, "a status reads markup in a string"


def test_whoever_prints_is_a_command_with_guarded_streams_or_says_why_not():
    for name, text in sources():
        calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        prints = any(ast.unparse(call) in ("print", "sys.stdout.write", "sys.stderr.write") for call in calls)
        assert not prints or "exit_code(" in text or name in PRINTS_ITSELF or name == "envs/wrapper.py", name


def test_every_command_guards_its_streams_first():
    for name, text in sources():
        _, is_program, start = text.partition('\nif __name__ == "__main__":\n')
        if is_program and name not in NO_COMMANDS:
            called = "exit_code(" if "main()" in start else "sys.exit(exit_code("
            assert called in (text if "main()" in start else start), name


def test_every_command_prints_to_a_terminal_that_knows_ascii_alone(tmp_path: Path) -> None:
    def printed(*words: str, answer: str = "") -> str:
        ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, input=answer.encode(), env=ascii_only, check=False
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done.stdout.decode("ascii")

    printed("agents.play", "--env", "calculator", "--record", "played", answer="\u03c0 \\boxed{4}")
    assert "0 failed" in printed("envs.check", "calculator")
    for words in (("agents.replay",), ("trueturn", "replay")):
        assert "0 differ" in printed(*words, "played")
