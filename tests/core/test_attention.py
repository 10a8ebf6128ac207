"""Attention and its weights against one query, one head and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from situs.core.attention import attend, attention_weights


def slow(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[B, H, S, K]; a bias may be shared by samples and heads."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    full = None if bias is None else bias.expand(batch, heads, queries, keys)
    weights = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)):
        powers = []
        for j in range(keys):
            logit = scale * sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h, j], strict=True))
            added = 0.0 if full is None else full[b, h, i, j].item()
            powers.append(0.0 if added is False else math.exp(logit + (0.0 if added is True else added)))
        weights[b, h, i] = torch.tensor(powers, dtype=torch.float64) / sum(powers)
    return weights


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, generator=generator) for n in (5, 6, 6))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kind", ["none", "added", "mask"])
def test_weights_and_what_they_mix_are_those_of_the_loops(kind: str, scale: float | None) -> None:
    q, k, v = drawn()
    bias = {
        "none": None,
        "added": torch.randn(1, 3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        "mask": (torch.arange(6) < torch.tensor([[6], [2]]))[:, None, None],
    }[kind]
    wanted = slow(q, k, bias, 0.5 if scale is None else scale)  # 1/√4
    torch.testing.assert_close(attention_weights(q, k, bias, scale), wanted, rtol=0, atol=1e-12)
    mixed = torch.cat([wanted[:, head] @ v[:, head] for head in range(3)], dim=-1)
    torch.testing.assert_close(attend(q, k, v, bias, scale=scale), mixed, rtol=0, atol=1e-12)


def test_weights_of_half_precision_are_computed_in_float32() -> None:
    q, k, _ = drawn(torch.bfloat16)
    found = attention_weights(q, k, torch.zeros(5, 6, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), slow(q, k, None, 0.5), rtol=0, atol=1e-6)
