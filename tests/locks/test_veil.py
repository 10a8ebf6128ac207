"""Feature defences: what each does to the tokens, against slow references, and that the way back is exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from situs.core.permutation import is_permutation
from situs.errors import SitusError
from situs.locks.key import Key
from situs.locks.veil import (
    Cut,
    Veil,
    deviation,
    exchange,
    exchange_order,
    low_frequencies,
    low_pass,
    normal_from,
    parse_veil,
    parse_veils,
    row_orders,
    secret_words,
    token_scale,
)

KEY = Key(bytes(range(32)))


def tokens(batch=4, prefix=1, grid=(4, 6), dim=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, prefix + math.prod(grid), dim, dtype=torch.float64, generator=generator)


def test_words_follow_from_the_secret_its_use_and_the_step_alone() -> None:
    words = secret_words(KEY, "run", "7")
    assert torch.equal(words("rows", 100)[:50], words("rows", 50))
    others = (secret_words(KEY, "run", "8"), secret_words(Key(bytes(32)), "run", "7"), secret_words(KEY, "ru", "n7"))
    assert len({tuple(w("rows", 4).tolist()) for w in (words, *others)} | {tuple(words("noise", 4).tolist())}) == 5


def test_row_orders_are_permutations_of_all_rows_and_uniform() -> None:
    orders = row_orders(secret_words(KEY, "1"), 6000, 3)
    assert bool(is_permutation(orders).all())
    counts = torch.stack([(orders == torch.tensor(p)).all(1).sum() for p in [(0, 1, 2), (2, 1, 0), (1, 0, 2)]])
    assert ((counts - 1000).abs() < 5 * math.sqrt(1000)).all()  # six orders, 5 sigma


def test_noise_has_the_strength_asked_for_in_units_of_the_tokens() -> None:
    z = tokens(8, 1, (16, 16), 8)
    scale = token_scale(3 * z[:, 1:])
    veil = Veil("noise", 0.5)
    drawn = veil.draw(secret_words(KEY), (*z.shape,), 1, (16, 16))
    moved, _, back = veil.apply(z, None, drawn, prefix=1, scale=scale)
    assert torch.equal(moved[:, 0], z[:, 0])
    assert torch.equal(back(moved), moved)
    added = moved[:, 1:] - z[:, 1:]
    assert added.std() == pytest.approx(0.5 * scale, rel=0.02)
    assert added.mean().abs() < 0.05 * scale
    assert (added**4).mean() / added.var() ** 2 == pytest.approx(3, rel=0.05)  # a normal's, a uniform's is 1.8


def test_the_deviation_is_that_of_all_entries_about_their_common_mean() -> None:
    z = 3 * torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(0)) - 20
    for parts in ([z], [z[:2], z[2:]], z.split(1)):
        assert deviation(parts) == pytest.approx(float(z.double().std()), rel=1e-9)


def test_normal_numbers_are_finite_for_the_extreme_words() -> None:
    edges = torch.tensor([0, -1, 2**63 - 1, -(2**63)] * 2)
    assert normal_from(edges).isfinite().all()


def test_low_pass_is_the_projection_on_the_lowest_waves() -> None:
    """Against waves written out: each kept cosine and sine passes, each other is taken away."""
    grid, share = (4, 6), 0.4
    kept = low_frequencies(grid, share)
    assert 1 <= kept.sum() <= share * 24
    y, x = torch.meshgrid(torch.arange(4.0).double(), torch.arange(6.0).double(), indexing="ij")
    heights = []
    for a in range(4):
        for b in range(6):
            angle = 2 * math.pi * (a * y / 4 + b * x / 6)
            waves = torch.stack([angle.cos(), angle.sin()], -1).reshape(1, 24, 2)
            expected = waves if kept[a, b] else torch.zeros_like(waves)
            assert torch.allclose(low_pass(waves, grid, share), expected, atol=1e-12)
            fold = ((a + 2) % 4 - 2) / 4, ((b + 3) % 6 - 3) / 6
            heights.append((fold[0] ** 2 + fold[1] ** 2, bool(kept[a, b])))
    assert max(h for h, stays in heights if stays) < min(h for h, stays in heights if not stays)


def test_low_pass_at_its_ends() -> None:
    z = tokens()[:, 1:]
    assert torch.allclose(low_pass(z, (4, 6), 1.0), z, atol=1e-12)
    mean = z.mean(1, keepdim=True).expand_as(z)
    assert torch.allclose(low_pass(z, (4, 6), 0.01), mean, atol=1e-12)
    once = low_pass(z, (4, 6), 0.3)
    assert torch.allclose(low_pass(once, (4, 6), 0.3), once, atol=1e-12)
    assert low_pass(z.bfloat16(), (4, 6), 0.3).dtype is torch.bfloat16


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 7), count=st.integers(1, 5), size=st.integers(1, 8))
def test_exchange_stays_within_its_samples_and_comes_back(batch, count, size) -> None:
    index = exchange_order(secret_words(KEY, "x"), batch, count, size)
    assert bool(is_permutation(index))
    places = torch.arange(batch * count)
    assert torch.equal(index // (count * size), places // (count * size))
    patches = torch.randn(batch, count, 2)
    assert torch.equal(exchange(exchange(patches, index), index.argsort()), patches)


def test_batch_shuffle_leaves_prefix_rows_and_is_undone() -> None:
    z = tokens(6).requires_grad_()
    moved, _, back = Cut(Veil("batch-shuffle", 3), 1, (4, 6), secret=KEY).enter(z, None, ("y",))
    assert torch.equal(moved[:, 0], z[:, 0])
    assert not torch.equal(moved, z)
    pool = [part.flatten(0, 1) for part in moved[:, 1:].split(3)]
    truth = [part.flatten(0, 1) for part in z[:, 1:].split(3)]
    assert all(torch.equal(a.sort(0).values, b.sort(0).values) for a, b in zip(pool, truth, strict=True))
    assert torch.equal(back(moved), z)
    weight = torch.randn(z.shape, dtype=z.dtype)
    (back(moved * 2) * weight).sum().backward()
    assert torch.equal(z.grad, 2 * weight)


@pytest.mark.parametrize(
    ("text", "count"), [("none", 0), ("noise=0.2", 0), ("lowpass=0.3", 0), ("batch-shuffle", 6), ("batch-shuffle=2", 2)]
)
def test_how_many_samples_exchange_their_tokens(text: str, count: int) -> None:
    assert parse_veil(text).exchanging(6) == count
    drawn = parse_veil(text).draw(secret_words(KEY, "exchange"), (6, 5, 4), 1, (2, 2))
    if not count:
        assert "defence" not in drawn or drawn["defence"].dim() > 1  # noise, or a filter
        return
    order = drawn["defence"].view(6, 4)
    assert torch.equal((order // 4) // count, torch.arange(6).view(6, 1).expand(6, 4) // count)


@pytest.mark.parametrize("defence", ["lowpass=0.5", "batch-shuffle"])
def test_padding_would_be_mixed_with_words(defence: str) -> None:
    veil, z, mask = parse_veil(defence), tokens(), torch.ones(4, 25, dtype=torch.bool)
    drawn = veil.draw(secret_words(KEY), (*z.shape,), 1, (4, 6))
    with pytest.raises(SitusError, match=f"defence={defence}: does not support batches with padding") as raised:
        veil.apply(z, mask, drawn, prefix=1)
    assert raised.value.field == "defence"
    assert not torch.equal(veil.apply(z, None, drawn, prefix=1)[0], z)


def test_the_words_for_a_defence() -> None:
    for text in ("none", "noise=0.5", "lowpass=0.25", "batch-shuffle", "batch-shuffle=8"):
        assert str(parse_veil(text)) == text
    for text in (
        "noise",
        "noise=-1",
        "noise=nan",
        "noise=x",
        "lowpass=0",
        "lowpass=1.5",
        "batch-shuffle=1",
        "blur",
        "none=1",
    ):
        with pytest.raises(SitusError, match="defence="):
            parse_veil(text)


def test_defences_are_audited_alone_and_under_each_permutation() -> None:
    curve = ("noise=0.1", "noise=0.2")
    assert list(map(str, parse_veils(("none", "curve", "none"), (), curve))) == ["none", *curve]
    assert list(map(str, parse_veils(("lowpass=0.5", "noise=0.1", "curve"), (), curve))) == ["lowpass=0.5", *curve]
    both = parse_veils(("none", "noise=1"), ("rows", "columns"), curve)
    asked = [(veil.kind, veil.rows, veil.columns) for veil in both]
    assert asked == [(kind, r, c) for kind in ("none", "noise") for r in (False, True) for c in (False, True)]
    assert [(veil.rows, veil.columns) for veil in parse_veils(("none",), ("columns",), ())] == [
        (False, False), (False, True),
    ]  # fmt: skip
    for defences, permute, field in (((), (), "defences"), (("blur",), (), "defences"), (("none",), ("x",), "permute")):
        with pytest.raises(SitusError) as raised:
            parse_veils(defences, permute, curve)
        assert raised.value.field == field
