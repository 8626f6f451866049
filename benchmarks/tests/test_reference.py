"""The published speeds of a peer, and the same workload of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agents.model import STARTER_PATH
from benchmarks import reference


def test_lengths_and_operations_follow_from_the_published_figures() -> None:
    shape = reference.PUBLISHED["qwen2.5-vl-3b"]
    assert shape.tokens_per_sample == 1800 * 8 * 120 // (512 * 5)
    from transformers import AutoTokenizer

    config = reference.shape_config(shape, AutoTokenizer.from_pretrained(STARTER_PATH))
    mlp = 3 * 2048 * 11008
    attention = 2048 * (2048 + 256 + 256 + 2048)
    weights = 36 * (mlp + attention) + 2 * 151_936 * 2048
    assert reference.published_flops(config, 675) == 6 * weights * 675 + 12 * 675**2 * 128 * 16 * 36


@pytest.mark.parametrize("chosen", [["--shape", "tiny", "--tokenizer", str(STARTER_PATH)], ["--model", "starter"]])
def test_both_forms_train_whole_steps(chosen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    flags = ["--problems", "2", "--steps", "2", "--work", str(tmp_path / "work"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["reference", *chosen, *flags])
    reference.main()
    result = json.loads(out.read_text())
    for row in result["rows"]:
        assert row["token_mult_prob_error"] >= 1.0
        assert row["step_s"] >= row["rollout_s"] + row["train_s"] + row["sync_s"]
    if "samples" in result:
        assert result["written_tokens"] == result["response_tokens"]
