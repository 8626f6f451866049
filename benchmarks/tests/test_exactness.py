"""The judge of streams: what it renders, and what it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness import Judge, compare, conversations
from benchmarks.exactness_peers import load_processor, trueturn
from tests.paths import SHARED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer and the template of Qwen3-VL."""
    source = SHARED / "qwen_tokenizer"
    if not source.exists():
        pytest.skip("needs ../shared")
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "chat_template.jinja").write_bytes((source / "templates" / "qwen3_vl.jinja").read_bytes())
    return folder


def test_our_streams_are_the_templates_and_the_judge_counts_what_is_not(model: Path, tmp_path: Path) -> None:
    processor = load_processor(model)
    judge = Judge(processor)
    for conversation in conversations(6, 1, processor, tmp_path):
        built = trueturn(conversation, processor)
        assert compare(conversation, built, judge)["exact"] == 1
        # The newline after the first turn's end, as a trainer may lose it.
        place = built["mask"].index(0, built["mask"].index(1))
        lost: dict[str, Any] = {
            **built,
            "ids": built["ids"][:place] + built["ids"][place + 1 :],
            "mask": built["mask"][:place] + built["mask"][place + 1 :],
        }
        found = compare(conversation, lost, judge)
        assert (found["exact"], found["other boundaries"], found["tokens lost"], found["tokens added"]) == (0, 1, 1, 0)
        assert compare(conversation, {**built, "images": []}, judge)["other images"] == len(built["images"])
