"""Claims about the CPU's own arithmetic: it is that of Transformers' layers, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agents.model.cpu import prepare_for_cpu
from agents.model.next_token import attend


def test_the_norm_and_its_gradients_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    theirs = Qwen3RMSNorm(32).double()
    theirs.weight.data = torch.randn(32, dtype=torch.float64)
    ours = Qwen3RMSNorm(32)
    ours.weight.data = theirs.weight.data.float()
    prepare_for_cpu(ours)
    x, grad = torch.randn(5, 7, 32), torch.randn(5, 7, 32)
    results = []
    for norm, dtype in ((theirs, torch.float64), (ours, torch.float32)):
        given = x.to(dtype).requires_grad_()
        out = norm(given)
        out.backward(grad.to(dtype))
        assert given.grad is not None
        assert norm.weight.grad is not None
        results.append([value.double() for value in (out, given.grad, norm.weight.grad)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


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
