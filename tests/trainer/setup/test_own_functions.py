"""Claims about losses and corrections of users: they are called before a run begins, and what fails names its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.errors import UserError
from trainer.config.algorithm import AlgorithmConfig
from trainer.setup.plugins import check_algorithm

FUNCTIONS = """
import torch
from trainer.algorithms.policy_loss import PolicyTerms
def terms(loss_N): return PolicyTerms(loss_N, torch.zeros_like(loss_N, dtype=torch.bool), torch.ones_like(loss_N))
def right(tokens, config): return terms(-tokens.advantages_N * tokens.logprobs_N)
def raises(tokens, config): raise KeyError("beta")
def number(tokens, config): return 1.0
def one(tokens, config): return terms(tokens.logprobs_N.sum())
def detached(tokens, config): return terms(tokens.logprobs_N.detach())
async def later(tokens, config): return right(tokens, config)
def weights(tokens, config): return torch.ones_like(tokens.old_logprobs_N), tokens.old_logprobs_N > 0
def few(tokens, config): return torch.ones(3), torch.ones(3)
"""


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("policy_loss", "raises", "must not raise, got KeyError: 'beta' (my.py:6)"),
        ("policy_loss", "number", "it must be PolicyTerms), got 1.0 (my.py:7)"),
        ("policy_loss", "one", "5 tokens need a tensor of that shape, not ()"),
        ("policy_loss", "detached", "must have a gradient by `logprobs_N`, got RuntimeError"),
        ("policy_loss", "later", "must not be async, got my.py:10"),
        ("correction", "raises", "must not raise, got KeyError: 'beta' (my.py:6)"),
        ("correction", "number", "(my.py:7)"),
        ("correction", "later", "must not be async, got my.py:10"),
        ("correction", "few", "5 tokens need a tensor of that shape, not (3,)"),
    ],
)
def test_a_loss_or_correction_that_fails_names_its_function_and_line_before_the_run(
    kind: str, name: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(FUNCTIONS)
    with pytest.raises(UserError) as caught:
        check_algorithm(AlgorithmConfig.model_validate({kind: f"{tmp_path / 'my.py'}:{name}"}))
    assert str(caught.value).startswith(f"--{kind.replace('_', '-')}: ")
    assert f"my.py:{name}" in str(caught.value) and told in str(caught.value)


def test_a_loss_and_a_correction_that_work_are_taken(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(FUNCTIONS)
    mine = {"policy_loss": f"{tmp_path / 'my.py'}:right", "correction": f"{tmp_path / 'my.py'}:weights"}
    check_algorithm(AlgorithmConfig.model_validate(mine))
