"""Claims about the files of a saved model beside its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from trainer.export import run as export
from trainer.run import run
from trainer.setup.run_context import copy_other_files


def test_a_saved_model_has_the_other_files_of_its_base_and_nothing_from_outside(tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    base.mkdir()
    saved.mkdir()
    (base / "video_preprocessor_config.json").write_text("{}")
    for name in ("model.safetensors", "model.safetensors.index.json", "chat_template.json", "README.md", "model.py"):
        (base / name).write_text("{}")
    (tmp_path / "secret.json").write_text("secret")
    (base / "link.json").symlink_to(tmp_path / "secret.json")
    (base / "config.json").write_text("base")
    (saved / "config.json").write_text("saved")
    copy_other_files(base, saved)
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "video_preprocessor_config.json"]
    assert (saved / "config.json").read_text() == "saved"


def test_a_snapshot_of_the_hubs_cache_is_copied_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs, saved = tmp_path / "m" / "snapshots" / "a1", tmp_path / "m" / "blobs", tmp_path / "saved"
    for folder in (snapshot, blobs, saved):
        folder.mkdir(parents=True)
    (blobs / "b2").write_text("{}")
    (snapshot / "video_preprocessor_config.json").symlink_to(blobs / "b2")
    copy_other_files(snapshot, saved)
    assert [file.name for file in saved.iterdir()] == ["video_preprocessor_config.json"]


def test_every_model_of_a_run_has_the_video_settings_of_the_model_that_it_began_from(
    checkpoint: Path, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "run"
    shutil.copytree(checkpoint, base)
    video = json.dumps({"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "fps": 2})
    (base / "video_preprocessor_config.json").write_text(video)
    own = {file.name for file in base.iterdir()}
    small = ["--steps", "1", "--problems-per-step", "1", "--group-size", "2", "--train-size", "2", "--eval-size", "1"]
    argv = [
        "--model",
        str(base),
        *small,
        "--eval-every",
        "1",
        "--max-new-tokens",
        "24",
        "--tracker=",
        "--doctor",
        "off",
    ]
    assert run([*argv, "--out", str(tmp_path), "--name", "run"]) == 0
    assert export([str(folder), "--to", str(tmp_path / "exported")]) == 0
    for saved in (folder / "model", folder / "best", tmp_path / "exported"):
        assert (saved / "video_preprocessor_config.json").read_text() == video, saved
        assert own <= {file.name for file in saved.iterdir()}
