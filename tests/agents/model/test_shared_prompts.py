"""Claims about shared prompts: rows meet the keys and values of their own prompt, in any order and as rows end."""

from __future__ import annotations

import pytest
import torch

from agents.model.shared_prompts import SharedPrompts

LENGTHS = (5, 3, 0)  # the last prompt has no columns


@pytest.mark.parametrize("of_row", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 0], [1], [0, 1, 2, 0, 1, 2]])
@pytest.mark.parametrize("queries", [1, 3])
def test_each_row_meets_its_prompt_before_and_after_rows_end(of_row: list[int], queries: int) -> None:
    torch.manual_seed(0)
    stored = torch.zeros(2, 3, 2, 5, 4)
    seen_GP = torch.zeros(3, 5, dtype=torch.bool)
    for prompt, length in enumerate(LENGTHS):
        stored[:, prompt, :, 5 - length :] = torch.randn(2, 2, length, 4)
        seen_GP[prompt, 5 - length :] = True
    prompts = SharedPrompts([torch.zeros(2, 3, 2, 5, 4), stored], seen_GP, torch.tensor(of_row))
    rows = torch.arange(len(of_row))
    for kept in (rows, rows[::2], rows[:1]):
        if kept is not rows:
            prompts.select(kept)
            of_row = [of_row[row] for row in kept.tolist()]
        q, shares = torch.randn(len(of_row), 2, queries, 4), torch.randn(len(of_row), 2, queries, 5)
        keys, values = stored[:, of_row]
        torch.testing.assert_close(prompts.scores(q, 1), torch.einsum("bkqd,bkpd->bkqp", q, keys))
        torch.testing.assert_close(prompts.mixed(shares, 1), torch.einsum("bkqp,bkpd->bkqd", shares, values))
        assert torch.equal(prompts.expanded(1), stored[:, of_row])
        assert torch.equal(prompts.seen_BP, seen_GP[of_row])
        distinct = len(set(of_row)) if kept is not rows else 3
        assert prompts.saved_bytes == (len(of_row) - distinct) * 2 * 2 * 5 * 4 * 4
        rows = torch.arange(len(of_row))
