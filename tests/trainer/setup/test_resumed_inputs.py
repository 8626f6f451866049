"""Claims about what a resume compares: a bounded read of the data notices what changed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from trainer.setup.resumed_inputs import MAX_BYTES, changed_data, fingerprint


def test_a_start_reads_little_of_a_folder_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        with (tmp_path / f"{number:02}.parquet").open("wb") as file:
            file.truncate(MAX_BYTES)  # sparse: takes no room
    read: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            read.append(len(found))
            return found

    monkeypatch.setattr(Path, "open", lambda path, mode: Counted(path))
    fingerprint(tmp_path)
    assert 0 < sum(read) <= MAX_BYTES


def test_other_rows_in_some_or_all_files_are_noticed(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run.mkdir()
    assert changed_data(run, {"--data": str(data)}) == []
    assert changed_data(run, {"--data": str(data)}) == []
    before = fingerprint(data)
    for number in range(20):
        (data / f"{number:02}.jsonl").write_text('{"problem": "2+2?"}\n')
    filled = fingerprint(data)
    (data / "07.jsonl").write_text('{"problem": "2+22?"}\n')
    longer = fingerprint(data)
    for number in range(20):
        (data / f"{number:02}.jsonl").write_text('{"problem": "2+3?"}\n')
    assert len({before, filled, longer, fingerprint(data)}) == 4
    assert changed_data(run, {"--data": str(data)}) == [f"--data {data} has other content"]
