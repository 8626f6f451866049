"""Claims about taking an appended file back: nothing is lost, however often it is tried or broken off."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.recording.append_log import rewind
from envs.errors import UserError


def test_what_stands_behind_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("one\ntwo\nthr")
    kept = rewind(path, 4)
    assert kept == tmp_path / "abandoned" / "metrics-4-11.jsonl"
    assert path.read_text() == "one\n" and kept.read_text() == "two\nthr"
    with path.open("a") as file:
        file.write("2\n")
    assert rewind(path, 4) == tmp_path / "abandoned" / "metrics-4-6.jsonl"
    assert sorted(p.read_text() for p in (tmp_path / "abandoned").iterdir()) == ["2\n", "two\nthr"]


def test_a_file_of_the_right_length_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert rewind(path, 0) is None
    path.write_text("one\n")
    assert rewind(path, 4) is None
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_broken_off_before_the_cut_it_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("one\ntwo\n")
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            rewind(path, 4)
    assert path.read_text() == "one\ntwo\n"
    rewind(path, 4)
    assert path.read_text() == "one\n"
    assert [p.name for p in (tmp_path / "abandoned").iterdir()] == ["metrics-4-8.jsonl"]


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("one\n")
    with pytest.raises(UserError, match="at least 9 bytes"):
        rewind(tmp_path / "metrics.jsonl", 9)
