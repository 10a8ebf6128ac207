"""Blocks whose sums, norms, biases and activations are joined are the blocks that they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.core.kernels import blocks as module
from situs.core.kernels.blocks import Layer, Norm, Parts, run_joined

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    """A pre-norm block as one would write it."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=biased), nn.Linear(WIDTH, WIDTH, bias=biased)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=biased)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, z: Tensor, keys: int | None, scales: tuple[Tensor | None, ...]) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(z)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys]).transpose(1, 2).flatten(2)
        first, second = (1.0 if scale is None else scale[:, None, None] for scale in scales)
        z = z + first * self.proj(mixed)
        return z + second * self.fc2(F.gelu(self.fc1(self.norm2(z))))

    def parts(self, scales: tuple[Tensor | None, ...]) -> Parts:
        norm1, norm2 = (Norm(norm.weight, norm.bias, norm.eps) for norm in (self.norm1, self.norm2))
        qkv, proj, fc1, fc2 = (Layer(each.weight, each.bias) for each in (self.qkv, self.proj, self.fc1, self.fc2))
        return Parts(norm1, qkv, HEADS, proj, norm2, fc1, fc2, *scales)


@pytest.mark.parametrize("keys", [None, 1, 4])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_they_are_the_same(keys: int | None, scaled: bool, biased: bool) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(biased) for _ in range(3)).double()
    z = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    scales = (torch.tensor([0.0, 1.25]), torch.tensor([1.25, 1.25])) if scaled else (None, None)
    plain = z
    for block in blocks:
        plain = block(plain, keys, scales)
    joined = run_joined([block.parts(scales) for block in blocks], z, keys)  # pyright: ignore[reportCallIssue]
    wanted, got = (
        [out, *torch.autograd.grad(out.square().sum(), (z, *blocks.parameters()))] for out in (plain, joined)
    )
    for one, other in zip(wanted, got, strict=True):  # GELU is computed in float32
        assert (one - other).norm() <= 1e-5 * one.norm() + 1e-9


def test_the_context_is_not_kept_for_the_backward() -> None:
    """It is a copy of the first of the tokens that are kept anyway, and is copied again."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(True) for _ in range(3)).double()
    kept: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run_joined([block.parts((None, None)) for block in blocks], torch.randn(2, 6, WIDTH).double(), 4)  # pyright: ignore[reportCallIssue]
    assert (2, 6, WIDTH) in kept
    assert not {(2, 4, WIDTH), (8, WIDTH)} & set(kept)


def test_the_compiler_is_told_the_truth_of_the_product() -> None:
    grad, normed = torch.randn(2, 3, 5), torch.randn(2, 4, 6)
    torch.library.opcheck(module._product, (grad, normed), test_utils=("test_schema", "test_faketensor"))
