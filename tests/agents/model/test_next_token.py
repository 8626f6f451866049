"""Claims about the pass over one new token: its attention is torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from agents.model.next_token import CachePart, Sharing, attend


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_one_query_a_row_attends_as_torch_does(key_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 8)
    store = torch.randn(2, 3, key_heads, 20, 8)
    keys, values = store[:, :, :, :13]
    seen = torch.rand(3, 13) < 0.6
    seen[:, -1] = True
    repeated = [x.repeat_interleave(4 // key_heads, dim=1) for x in (keys, values)]
    expected = F.scaled_dot_product_attention(query, repeated[0], repeated[1], seen[:, None, None], scale=0.3)
    got = attend(query, [CachePart(store[:, :, :, :13])], ~seen[:, None], 0.3)
    torch.testing.assert_close(got, expected.transpose(1, 2).flatten(2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("prompts", [[0, 0, 0, 1, 1], [1, 0, 2, 0, 0], [2, 2, 2, 2, 2]])
def test_rows_that_share_a_prompt_attend_as_those_with_a_copy(prompts: list[int], key_heads: int) -> None:
    torch.manual_seed(0)
    prompt_B, query = torch.tensor(prompts), torch.randn(5, 4, 1, 8)
    common, own = torch.randn(2, 3, key_heads, 9, 8), torch.randn(2, 5, key_heads, 4, 8)
    seen = torch.rand(5, 13) < 0.6
    seen[:, -1] = True
    copied = CachePart(torch.cat([common[:, prompt_B], own], dim=3))
    shared = [CachePart(common, Sharing.of(prompt_B, 3)), CachePart(own)]
    expected = attend(query, [copied], ~seen[:, None], 0.3)
    torch.testing.assert_close(attend(query, shared, ~seen[:, None], 0.3), expected, rtol=0, atol=1e-6)
