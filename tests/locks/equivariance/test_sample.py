"""Rows in another order for every sample: same outputs and gradients; refused where it hides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zoo import CAUSAL, NO_ROWS, RELATIVE, ROTARY, ZOO, inputs, make

from situs.backbones import Backbone, create_backbone
from situs.backbones.base import Stream
from situs.core.permutation import invert, is_permutation
from situs.core.position import Positions
from situs.locks.equivariance.experiment import KeepDouble
from situs.locks.equivariance.sample import moved_order, row_leak, row_refusal

ROWS = [name for name in ZOO if name not in NO_ROWS]


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def places(backbone: Backbone, x: Tensor) -> Positions:
    """A shorter sentence takes the first places."""
    return backbone.positions() if backbone.input.shape is not None else backbone.positions((x.shape[1],))


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ROWS)
def test_outputs_and_gradients_are_those_of_the_model_itself(name: str) -> None:
    """blocks(P s) = P blocks(s), put together by hand: another order for each sample, prefix tokens in front."""
    plain, moved = make(name), make(name)
    x = inputs(plain)
    order = moved_order(len(x), plain.embed(x).shape[1], torch.Generator().manual_seed(1))

    def permuted(stream: Stream) -> Stream:
        out = moved.blocks(stream.take(order))
        return replace(stream, z=replace(out, rotary=None, bias=None).take(invert(order)).z)

    with KeepDouble():
        a = plain(x)
        b = moved.head(moved.finish(permuted(moved.assemble(moved.embed(x), places(moved, x)))))
        assert gap(a, b) < 1e-10
        a.square().sum().backward()
        b.square().sum().backward()
    theirs = dict(moved.named_parameters())
    compared = 0
    for parameter, p in plain.named_parameters():
        if p.grad is not None:
            exact = 1e-10 if p.dtype == torch.float64 else 1e-6  # mixed rotary frequencies are float32 always
            assert gap(p.grad, theirs[parameter].grad) < exact * max(1.0, float(p.grad.abs().max()))
            compared += 1
    assert compared > 20


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_orders_are_permutations(batch: int, count: int, seed: int) -> None:
    order = moved_order(batch, count, torch.Generator().manual_seed(seed))
    assert order.shape == (batch, count)
    assert bool(is_permutation(order).all())


# --- refusals and leaks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NO_ROWS)
def test_refused_with_the_reason(name: str) -> None:
    operation = "causal mask" if name in CAUSAL else "relative bias" if name in RELATIVE else "windows"
    backbone = make(name)
    assert operation in (row_refusal(backbone) or "")


def test_a_network_without_tokens_is_refused() -> None:
    assert "convolutional" in (row_refusal(create_backbone("test_resnet")) or "")


@pytest.mark.parametrize("name", ROWS)
def test_rotation_leaks_the_order_and_it_is_said(name: str) -> None:
    backbone = make(name)
    leak = row_leak(backbone)
    assert (leak is not None and "RoPE" in leak) == (name in ROTARY)


def test_the_leak_is_real() -> None:
    """From the rotation alone, as the blocks get it, the order is read off exactly."""
    backbone = make("dinov3")
    order = moved_order(1, backbone.num_tokens, torch.Generator().manual_seed(4))
    stream = backbone.assemble(backbone.embed(inputs(backbone, 1)), backbone.positions())
    public, sent = stream.rotary, stream.take(order).rotary
    assert public is not None and sent is not None
    distance = torch.cdist(sent[0, 0, 0], public[0, 0, 0])
    assert torch.equal(distance.argmin(dim=1), order[0])
