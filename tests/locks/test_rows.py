"""Rows in another order for every sample: same outputs, gradients and training; refused where it hides nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import CAUSAL, NO_ROWS, RELATIVE, ROTARY, ZOO, inputs, make

from situs.backbones import create_backbone
from situs.core.permutation import is_permutation
from situs.core.tokens import take
from situs.errors import SitusError
from situs.locks.precise import KeepDouble
from situs.locks.rows import PermutedRows, fresh_order, permuted_blocks, row_leak, row_refusal

ROWS = [name for name in ZOO if name not in NO_ROWS]


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", ROWS)
def test_outputs_and_gradients_are_those_of_the_model_itself(name: str) -> None:
    plain = make(name)
    wrapped = PermutedRows(copy.deepcopy(plain), torch.Generator().manual_seed(1))
    x = inputs(plain)
    with KeepDouble():
        a, b = plain(x), wrapped(x)
        assert gap(a, b) < 1e-10
        a.square().sum().backward()
        b.square().sum().backward()
    theirs = dict(wrapped.backbone.named_parameters())
    compared = 0
    for parameter, p in plain.named_parameters():
        if p.grad is not None:
            exact = 1e-10 if p.dtype == torch.float64 else 1e-6  # mixed rotary frequencies are float32 always
            assert gap(p.grad, theirs[parameter].grad) < exact * max(1.0, float(p.grad.abs().max()))
            compared += 1
    assert compared > 20


def test_training_is_the_same() -> None:
    plain = make("vit")
    wrapped = PermutedRows(copy.deepcopy(plain))
    x, labels = inputs(plain, 4), torch.tensor([0, 1, 2, 3])
    for model in (plain, wrapped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
    theirs = dict(wrapped.backbone.named_parameters())
    assert max(gap(p, theirs[name]) for name, p in plain.named_parameters()) < 1e-10


def test_the_blocks_see_another_order_for_each_sample_and_each_call() -> None:
    backbone = make("vit")
    wrapped = PermutedRows(backbone, torch.Generator().manual_seed(0))
    x = inputs(backbone, 1).expand(3, -1, -1, -1)
    seen: list[Tensor] = []
    backbone.model.blocks[0].norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        first, second = wrapped.run(x), wrapped.run(x)
        clear = backbone.assemble(backbone.embed(x), backbone.positions()).z
    assert len({tuple(row.tolist()) for row in torch.cat([first.order, second.order])}) == 6
    for z, order in zip(seen, (first.order, second.order), strict=True):
        assert torch.equal(z[:, 1:], take(clear[:, 1:], order))
        assert torch.equal(z[:, :1], clear[:, :1])  # prefix tokens stay in front
    assert first.leak is None


def test_a_given_order_is_used() -> None:
    backbone = make("registers")
    order = fresh_order(2, backbone.num_tokens, torch.Generator().manual_seed(3))
    result = PermutedRows(backbone).run(inputs(backbone), order=order)
    assert torch.equal(result.order, order)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_orders_are_permutations(batch: int, count: int, seed: int) -> None:
    order = fresh_order(batch, count, torch.Generator().manual_seed(seed))
    assert order.shape == (batch, count)
    assert bool(is_permutation(order).all())


def test_a_shared_order_serves_too() -> None:
    backbone = make("deit3")
    stream = backbone.assemble(backbone.embed(inputs(backbone)), backbone.positions())
    with torch.no_grad():
        out = permuted_blocks(backbone, stream, torch.randperm(backbone.num_tokens))
        assert gap(out.z, backbone.blocks(stream).z) < 1e-12
    assert out.prefix == stream.prefix


# --- masks ---------------------------------------------------------------------------------------------------------


def test_padding_moves_with_its_rows() -> None:
    backbone = make("bert")
    ids = inputs(backbone)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = False
    wrapped = PermutedRows(backbone, torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = backbone(ids, mask)
        assert gap(wrapped(ids, mask), expected) < 1e-12
        scrambled = torch.where(mask, ids, (ids + 7) % 31)
        assert gap(wrapped(scrambled, mask), expected) < 1e-12  # what stands at padding is never read
        assert gap(wrapped(scrambled), expected) > 1e-3
        # the library's own forward is the oracle for the mask itself
        own = backbone.model(ids, attention_mask=mask.long()).logits
    assert gap(wrapped(ids, mask), own) < 1e-10


# --- refusals and leaks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NO_ROWS)
def test_refused_with_the_reason(name: str) -> None:
    operation = "causal mask" if name in CAUSAL else "relative bias" if name in RELATIVE else "windows"
    backbone = make(name)
    assert operation in (row_refusal(backbone) or "")
    with pytest.raises(SitusError, match=f"refuses permuting the tokens: .*{operation}"):
        PermutedRows(backbone)


def test_a_network_without_tokens_is_refused() -> None:
    with pytest.raises(SitusError, match="convolutional"):
        PermutedRows(create_backbone("resnet18"))


@pytest.mark.parametrize("name", ROWS)
def test_rotation_leaks_the_order_and_the_result_says_so(name: str) -> None:
    backbone = make(name)
    leak = PermutedRows(backbone).run(inputs(backbone)).leak
    assert (leak is not None and "RoPE" in leak) == (name in ROTARY)
    assert leak == row_leak(backbone)


def test_the_leak_is_real() -> None:
    """From the rotation alone, as the blocks get it, the order is read off exactly."""
    backbone = make("dinov3")
    order = fresh_order(1, backbone.num_tokens, torch.Generator().manual_seed(4))
    stream = backbone.assemble(backbone.embed(inputs(backbone, 1)), backbone.positions())
    public, sent = stream.rotary, stream.take(order).rotary
    assert public is not None and sent is not None
    distance = torch.cdist(sent[0, 0, 0], public[0, 0, 0])
    assert torch.equal(distance.argmin(dim=1), order[0])
