"""Selections of tokens, against lists of places made one sample at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from situs.core.selection import Selection, Tokens, draw_region

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def tokens_of(lengths: list[int], special: int, *, width: int = 9) -> tuple[Tokens, Tensor]:
    """Samples of these lengths, filled up to `width`, and noise for them."""
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    noise = torch.rand(len(lengths), width, generator=torch.Generator().manual_seed(sum(lengths)))
    return Tokens(width, real, special), noise


@given(LENGTHS, st.integers(0, 1))
def test_special_tokens_stand_first_and_what_is_not_real_last(lengths: list[int], special: int) -> None:
    tokens, noise = tokens_of(lengths, special)
    for row, order in enumerate(tokens.shuffled(noise).tolist()):
        middle = sorted(range(special, lengths[row]), key=lambda place: float(noise[row, place]))
        assert order[: lengths[row]] == [*range(special), *middle]
        assert sorted(order) == list(range(9))


@given(LENGTHS, st.integers(0, 1), st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9]), st.booleans())
def test_a_share_is_a_share_of_each_sample(lengths: list[int], special: int, ratio: float, floor: bool) -> None:
    tokens, noise = tokens_of(lengths, special)

    def left(count: int) -> int:
        gone = int(ratio * count + 1e-6)
        return max(special, int((1 - ratio) * count + 1e-6) if floor else count - gone)

    chosen = tokens.select(tokens.shuffled(noise), ratio, floor=floor)
    assert chosen.order.shape[1] == left(9)
    real = chosen.real
    assert real is not None
    for row, length in enumerate(lengths):
        assert real[row].tolist() == [slot < left(length) for slot in range(left(9))]
        assert all(place < length for place in chosen.order[row][real[row]].tolist())


@given(LENGTHS, st.sampled_from([0.25, 0.5, 0.75]))
def test_equal_samples_are_slices_and_others_masks_that_say_the_same(lengths: list[int], ratio: float) -> None:
    """A batch without padding, with and without a mask that says so: the same tokens either way."""
    order = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(n)) for n in lengths])
    plain, masked = Selection(order), Selection(order, torch.full((len(lengths), 1), 9))
    kept = plain.kept(ratio)
    assert isinstance(kept, int) and masked.kept(ratio).tolist() == [[kept]] * len(lengths)  # type: ignore[union-attr]
    assert plain.context(ratio).size == masked.context(ratio).size == kept and plain.context(ratio).keys is None
    keys = masked.context(ratio).keys
    assert keys is not None and keys.sum(dim=1).tolist() == [kept] * len(lengths) and bool(keys[:, :kept].all())
    start, asked = plain.behind(kept)
    begun, mask = masked.behind(masked.kept(ratio))
    assert (start, asked, begun) == (kept, None, 0) and mask is not None
    assert torch.equal(mask, (torch.arange(9) >= kept).expand(len(lengths), -1))


def test_a_special_token_is_never_asked_and_always_told() -> None:
    tokens, noise = tokens_of([9, 2, 1], 1)
    chosen = tokens.select(tokens.shuffled(noise))
    start, asked = chosen.behind(0)
    assert start == 0 and asked is not None
    assert asked.sum(dim=1).tolist() == [8, 1, 0] and not asked[:, 0].any()
    told = chosen.some(noise, 0.5)
    assert told[:, 0].all()
    assert [int(row[:length].sum()) for row, length in zip(told, (9, 2, 1), strict=True)] >= [4, 1, 1]
    bare = Selection(torch.arange(4).expand(2, -1), None, 1)
    assert bare.behind(0) == (1, None)


def test_hints_are_as_many_as_asked_for() -> None:
    order = torch.arange(8).expand(500, -1)
    noise = torch.rand(500, 8, generator=torch.Generator().manual_seed(0))
    told = Selection(order).some(noise, 0.25)
    assert told.sum(dim=1).tolist() == [2] * 500
    assert torch.allclose(told.double().mean(dim=0), torch.full((8,), 0.25, dtype=torch.float64), atol=0.08)
    among = Selection(order, torch.full((500, 1), 4)).some(noise, 0.5)
    assert among[:, :4].sum(dim=1).tolist() == [2] * 500 and not among[:, 4:].any()
    least = Selection(order, torch.full((500, 1), 4)).some(noise, 0.1)
    assert least[:, :4].sum(dim=1).tolist() == [1] * 500 and not least[:, 4:].any()


@pytest.mark.parametrize("special", [0, 1])
def test_a_region_is_a_block_of_a_grid_or_spans_of_a_sample(special: int) -> None:
    ids = torch.arange(50)
    block = draw_region(0, 0, ids, "test", Tokens(16), (4, 4), 0.5)
    assert block.sum(dim=1).tolist() == [8] * 50
    lengths = [4 + row % 9 for row in range(50)]
    tokens, _ = tokens_of(lengths, special, width=12)
    spans = draw_region(0, 0, ids, "test", tokens, (12,), 0.5)
    assert spans.sum(dim=1).tolist() == [(length - special) // 2 for length in lengths]
    assert tokens.real is not None and not (spans & ~tokens.real).any() and not spans[:, :special].any()
    assert torch.equal(tokens.or_missing(spans), spans | ~tokens.real)
    assert torch.equal(Tokens(16).or_missing(block), block)
