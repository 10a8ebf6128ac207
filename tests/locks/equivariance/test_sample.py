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
from situs.locks.equivariance.sample import moved_order, own_dtype, row_leak, row_refusal, sample_of

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
    assert count == 1 or not (order == torch.arange(count)).all(dim=1).any()  # none stays as it is


def test_so_many_patches_take_part_as_there_are_or_as_asked_for() -> None:
    backbone = make("vit", torch.float32)
    count, chance = backbone.num_tokens, torch.Generator().manual_seed(0)
    for tokens in (count, count + 1):
        assert sample_of(backbone, None, tokens, chance).index is None
    sample = sample_of(backbone, torch.zeros(3, 3, *backbone.input.shape, dtype=torch.float64), count - 1, chance)
    assert sample.mask is None and sample.x.shape[0] == 3 and sample.x.dtype == own_dtype(backbone)
    assert len({*sample.index.tolist()}) == count - 1 and sample.index.tolist() == sorted(sample.index.tolist())
    assert set(sample.index.tolist()) < set(range(count))
    swin = make("swin", torch.float32)  # its windows need every patch
    drawn = sample_of(swin, None, 2, chance)
    assert drawn.index is None and drawn.x.shape == (2, 3, *swin.input.shape) and drawn.x.dtype == torch.float32


@pytest.mark.parametrize(("name", "length", "padded"), [("bert", 4, 0), ("bert", 5, 3), ("gpt2", 5, 0)])
def test_a_text_of_five_words_is_padded_unless_its_model_is_causal(name: str, length: int, padded: int) -> None:
    backbone = make(name)
    sample = sample_of(backbone, None, length, torch.Generator().manual_seed(0))
    assert sample.x.shape == (2, length) and not sample.x.is_floating_point()
    assert 0 <= int(sample.x.min()) <= int(sample.x.max()) < backbone.model.config.vocab_size
    assert sample.mask is not None and sample.mask[0].all() and sample.index is None
    assert sample.mask[1].tolist() == [True] * (length - padded) + [False] * padded
    assert sample_of(backbone, None, 99, torch.Generator()).x.shape == (2, backbone.num_tokens)


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
