"""The benchmark beside TRL and verl: the scripted turns, what the table says, and both trainers on a small task."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from transformers import AutoTokenizer

from benchmarks import peers
from benchmarks.peers_task import CALL, SUCCESSOR_LOGIT, Task, chain, write_model

TASK = Task(device="cpu", shape="tiny", steps=2, problems=2, group=2, text=20, batch=4, images=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("peers")
    write_model(path / "model", TASK)
    return path


def test_a_scripted_turn_is_text_then_a_call_and_its_length_varies(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    successors = chain(tokenizer, 30)
    *_, begun = tokenizer("<|im_start|>assistant\n").input_ids

    def turn(choice: int) -> list[int]:
        ids = [begun]
        while ids[-1] != tokenizer.eos_token_id:
            following = successors[ids[-1]]
            ids.append(following[choice % len(following)])
        return ids[1:]

    turns = [turn(choice) for choice in range(4)]
    for ids in turns:
        assert len(set(ids)) == len(ids), "an id may come once, since it decides the next one"
        assert tokenizer.decode(ids).endswith(f"<tool_call>{CALL}</tool_call><|im_end|>")
    assert len({len(ids) for ids in turns}) == 2


def test_the_network_writes_the_scripted_successors(folder):
    import torch

    from agents.model.policy import PolicyModel

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    network = PolicyModel.load(folder / "model").backbone.eval()
    (called,), (closed,) = (tokenizer(text, add_special_tokens=False).input_ids for text in (CALL, "</tool_call>"))
    with torch.no_grad():
        logits_V = network(input_ids=torch.tensor([[called]])).logits[0, -1]
    assert int(logits_V.argmax()) == closed
    assert float(logits_V[closed]) == pytest.approx(SUCCESSOR_LOGIT, rel=0.5)


def test_the_first_step_does_not_count_and_idle_is_of_the_others():
    gpu = peers.Gpu()
    gpu.samples = [(1.0, 0.0, 90.0), (11.0, 100.0, 10.0), (12.0, 50.0, 10.0)]
    steps = [{"at": at, "written": 8.0, "tokens": 40.0, "kl": kl} for at, kl in ((10.0, 1.0), (12.0, 0.1), (14.0, 0.2))]
    row = peers.figures(TASK, steps, gpu)
    assert row["s a step"] == 2 and row["samples/s"] == 2 and row["tokens/s"] == 20
    assert row["GPU idle"] == 0.25 and row["GPU peak, GiB"] == 90
    assert row["KL"] == "2.0e-01"


def test_a_peer_that_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise ValueError('no such kernel')")
    monkeypatch.setitem(peers.MODULES, "trl", "broken")
    monkeypatch.setattr(peers, "search_path", lambda peer, sites: str(tmp_path))
    row = peers.measure("trl", TASK, tmp_path, tmp_path, 60)
    assert row["ended"] == "ValueError: no such kernel"
    assert "no such kernel" in peers.table({"trl": row})


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_both_trainers_play_the_same_episodes(tmp_path, monkeypatch):
    out = tmp_path / "peers.json"
    flags = (
        "--peers ours trl --device cpu --shape tiny --steps 2 --problems 2 --group 2 --text 20 --batch 4 --text-only"
    )
    monkeypatch.setattr(sys, "argv", ["peers", *flags.split(), "--out", str(out), "--work", str(tmp_path / "work")])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    peers.main()
    rows = json.loads(out.read_text())["rows"]
    assert [rows[peer]["ended"] for peer in ("ours", "trl")] == ["", ""]
    written = [rows[peer]["steps"][-1]["written"] for peer in ("ours", "trl")]
    # Four episodes of three turns: 20 tokens, a call of 3, the end.
    assert written == [4 * 3 * 24, 4 * 3 * 24]
