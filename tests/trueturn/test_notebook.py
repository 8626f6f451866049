"""Claims about the notebook of the documentation: it runs from top to bottom and shows what it says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.paths import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_every_cell_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "\n".join(json.dumps(cell.outputs) for cell in book.cells if cell.cell_type == "code")
    for expected in ("step  10/10", "image/png", "dataframe", "(896, 0)", "reward/brevity", "4/4"):
        assert expected in shown, expected


def test_the_notebook_is_kept_with_its_output_and_without_paths_of_a_machine() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs or cell.source.endswith(")") for cell in code) and len(code) >= 10
    text = json.dumps([cell.outputs for cell in code])
    assert not re.search(r"/(home|tmp|root|work|Users)/", text)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
