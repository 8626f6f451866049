"""Claims about the pass over one new token: its attention is torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from agents.model.next_token import attend


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
    got = attend(query, keys, values, ~seen[:, None], 0.3)
    torch.testing.assert_close(got, expected.transpose(1, 2).flatten(2), rtol=0, atol=1e-6)
