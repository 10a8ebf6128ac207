"""What linear equations leave open, searched: derivatives, roots, and what passes as one."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch
from victims import LEARNED, vit

from situs.audit.attacks.solver import DEFLATED, SOLVED, Descent, Range, Tokens
from situs.audit.attacks.tokens import search as module
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import count, read_spans
from situs.audit.attacks.tokens.search import (
    CHUNK,
    GROWTH,
    LEAST,
    PICTURES,
    VAIN,
    Candidates,
    Effort,
    Roots,
    Search,
    _distinct,
    _polished,
    _starts,
    _with,
    find_roots,
    shared_places,
)
from situs.audit.client import victim_gradients
from situs.audit.defences import Step
from situs.core.tokens import patchify

SINCOS = partial(vit, size=12, positions="sincos")


def scene(
    backbone: Any, batch: int = 1, more: int = 0, x: torch.Tensor | None = None, sent: torch.dtype = torch.float64
) -> tuple[Search, torch.Tensor]:
    size = backbone.input.shape[0]
    if x is None:
        x = torch.rand(batch, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    upload = victim_gradients(backbone, x, torch.arange(len(x)), step=Step(dtype=sent))
    with torch.no_grad():
        block = Block(backbone.requires_grad_(False))
        counts = count(block, batch)
        spans = read_spans(block, upload, counts)
        ends = Range(*(torch.full((block.weight.shape[1],), end, dtype=torch.float64) for end in (-1.0, 1.0)))
        counts = counts._replace(structural=counts.open + more) if more else counts
        return Search(block, upload, spans, counts, ends, Effort()), patchify(x, (4, 4))


def true_tokens(search: Search, patches: torch.Tensor) -> Tokens:
    """All tokens of images [B, N, K] by the block's own code, image by image."""
    block = search.block
    m, o = (part[:, len(block.prefix) :].flatten(0, 1) for part in block.middle(patches))
    z = patches @ block.weight.T + block.base
    return Tokens(patches.flatten(0, 1), o, z.flatten(0, 1), m)


def test_ends_that_were_all_found_before_are_none_to_polish() -> None:
    search, _ = scene(SINCOS())
    nothing = torch.zeros(0, dtype=torch.int64)
    assert list(_polished(search, nothing, search.block, nothing, torch.zeros(3))) == []  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "name",
    ["SwiGLU", "RMS norms", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ViT", "ReLU, no qkv bias"))],
)
def test_derivatives_are_those_of_autograd(name: str) -> None:
    search, _ = scene(LEARNED[name](), more=5)
    place, span, activation = torch.tensor([3]), search.span, search.activation
    assert activation.plain
    some = torch.randperm(activation.hidden)[: span.rank + 20].sort().values
    unsure = torch.rand(2, 2, dtype=torch.float64)
    for plain, units, known in ((True, None, None), (True, some, None), (True, some, unsure), (False, None, unsure)):
        activation.plain = plain
        descent = Descent(activation, search.family, span, search.pixels, units, known=known)
        phi = 0.1 * torch.randn(1, 5, dtype=torch.float64)
        chosen = torch.arange(activation.hidden) if units is None else units
        axes, upper = torch.linalg.qr(span.inside[:, chosen].T)
        basis, worth = axes.T, torch.zeros(span.rank, dtype=torch.float64)
        if known is not None:  # what drawn numbers of deviation 1 do to the last two directions of these units
            drawn = upper[-2:, -2:] @ known @ torch.randn(2, 100_000, dtype=torch.float64)
            worth[-2:] = DEFLATED / (2**0.5 * drawn.std(dim=1))
            torch.testing.assert_close(descent._worth, worth, rtol=2e-2, atol=0)
            worth = descent._worth

        def plainly(
            at: torch.Tensor,
            chosen: torch.Tensor = chosen,
            basis: torch.Tensor = basis,
            worth: torch.Tensor = worth,
        ) -> torch.Tensor:
            """The residual by the block's own code."""
            tokens = search.family.tokens(place, at)
            scaled = (search.block.late(tokens.m)[0] * span.column)[chosen]
            over = (tokens.x - 1).clamp(min=0) + (tokens.x + 1).clamp(max=0)
            inside = basis @ scaled
            out = torch.cat([scaled - basis.T @ inside, worth * inside]) / inside.norm()
            return torch.cat([out, 1e-3 * over[0] / over.shape[1] ** 0.5])

        cost, slope, normal = descent.normal(place, phi @ descent._turn)
        jacobian = torch.func.jacfwd(plainly)(phi)
        assert isinstance(jacobian, torch.Tensor)
        jacobian, out, turn = jacobian[:, 0], plainly(phi), descent._turn
        torch.testing.assert_close(cost[0], out.square().sum(), rtol=1e-8, atol=0)
        torch.testing.assert_close(turn @ slope[0], jacobian.T @ out, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(turn @ normal[0] @ turn.T, jacobian.T @ jacobian, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_the_truth_fits_and_sums_of_tokens_do_not() -> None:
    """A sum of other tokens at the same place passes every linear test; the activation tells it apart."""
    search, patches = scene(SINCOS())
    places = torch.arange(9)
    truth = search.polished(places, true_tokens(search, patches))
    torch.testing.assert_close(truth.tokens.x, patches[0], rtol=1e-6, atol=1e-6)
    assert bool((truth.fit <= SOLVED).all())
    base = search.block.base  # rows and columns of sines add up
    torch.testing.assert_close(base[0] + base[4], base[1] + base[3])
    wrong = patches[0][1] + patches[0][3] - patches[0][4]  # at place 0
    phi = search.family.phi(places[:1], wrong[None])
    tokens = search.family.tokens(places[:1], phi)
    torch.testing.assert_close(tokens.x[0], wrong)
    late = search.block.late
    off = search.span.residual(late(tokens.m))
    assert float(off) > 100 * float(search.span.residual(late(truth.tokens.m)).max())


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViT", "SwiGLU"])
def test_a_token_that_is_taken_out_leaves_the_spans_of_the_others(name: str) -> None:
    search, patches = scene(LEARNED[name](), 2)
    tokens, deflation = true_tokens(search, patches), search.deflation
    assert bool(deflation.remove(tokens.m[:5]).all())
    spans, late, known = deflation.left()
    assert spans.fc1.rank == search.spans.fc1.rank - 5 and late.rank == search.span.rank
    h, a = search.block.norm2.apply(tokens.m), search.block.late(tokens.m)
    assert float(late.residual(a).max()) < 1e-6  # the same span
    last = (a * late.column @ late.inside.T)[:, -5:].norm(dim=1) / (a * late.column).norm(dim=1)
    for out in (spans.fc1.residual(h), last):
        assert float(out[5:].max()) < 1e-6 < 1e-4 < float(out[:5].min())
    assert known.shape == (5, 5) and float(known.norm()) < 1e-8  # in float64 they are sure
    wrong = tokens.m[5:6] + 0.1 * (tokens.m[7:8] - tokens.m[6:7])
    assert not bool(deflation.remove(wrong).any()) and len(deflation.first) == 5  # no δ passes at what is no token


@torch.no_grad()
def test_taking_tokens_out_closes_open_directions_of_the_others() -> None:
    """One token the less, one direction the less, as long as the places that are left have as many dimensions."""
    search, patches = scene(SINCOS())
    tokens, base = true_tokens(search, patches), search.block.base
    for removed, wide in ((0, 4), (1, 3), (3, 2)):  # at last the first row of three
        assert bool(search.deflation.remove(tokens.m[len(search.deflation.first) : removed]).all())
        left = torch.arange(removed, 9)
        family = search.stage(torch.arange(9) >= removed).family
        assert family.along.x.shape[0] == wide == len(left) - torch.linalg.matrix_rank(base[left])
        again = family.tokens(left, family.phi(left, tokens.x[left]))
        torch.testing.assert_close(again.x, tokens.x[left], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(again.m, tokens.m[left], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_token_whose_pixels_leave_the_range_by_a_quarter_is_no_fit() -> None:
    search, patches = scene(SINCOS())
    places, truth = torch.arange(9), true_tokens(search, patches)
    normal = search._whole.run(places, search.family.phi(places, truth.x), 0).normal
    assert bool((search.fit(truth, normal) <= SOLVED).all())
    for sign, over, fits in ((1, 0.24, True), (1, 0.26, False), (-1, 0.24, True), (-1, 0.26, False)):
        top = float((sign * truth.x).max())  # which is `over` times the range beyond its end
        ends = sign * torch.tensor([(top - over) / (1 + over), -1.0], dtype=torch.float64)
        search.pixels = Range(*(end.expand(48) for end in ends.sort().values))
        most = (sign * truth.x).amax(dim=1).argmax()
        assert bool(search.fit(truth, normal)[most] <= SOLVED) is fits


@torch.no_grad()
def test_how_far_rounding_turns_what_is_taken_out_is_told_by_the_tokens_found() -> None:
    """The last directions of a token that is left are as far from 0 as those found say, whom no truth has told."""
    search, patches = scene(LEARNED["ViT"](), 2, sent=torch.float32)
    tokens, deflation = true_tokens(search, patches), search.deflation
    assert int(deflation.remove(tokens.m[:12]).sum()) >= 8
    _, late, known = deflation.left()
    count = len(deflation.first)
    a = search.block.late(tokens.m[12:]) * late.column @ late.inside.T
    off = (a[:, -count:] / a.norm(dim=1, keepdim=True)).square().mean(dim=0).sqrt()
    ratio = off.norm() / known.norm()
    assert 0.2 < float(ratio) < 5 and float(known.norm()) > 1e-7


@torch.no_grad()
def test_ends_near_a_token_that_was_found_are_not_polished_again() -> None:
    m = torch.eye(4, dtype=torch.float64)
    roots = Roots(torch.tensor([2]), Tokens(m[:1], m[:1], m[:1], m[:1]), m[:1, 0], torch.full((4,), 2))
    ends = torch.cat([m[:1] + 1e-4, m[1:2], m[1:2] + 1e-4, m[:1]])
    assert _distinct(torch.tensor([2, 2, 2, 3]), ends, roots).tolist() == [1, 3]


@torch.no_grad()
def test_ends_that_fit_are_taken_once_each_the_best_first_and_no_more_than_a_place_has() -> None:
    m = torch.eye(6, dtype=torch.float64)
    none = Tokens(m[:0], m[:0], m[:0], m[:0])
    roots = Roots(torch.zeros(0, dtype=torch.long), none, m[:0, 0], torch.tensor([2, 1]))
    ends = torch.cat([m[:1], m[:1] * (1 + 1e-5), m[1:2], m[2:3], m[3:4], m[4:5]])
    places, fit = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0.5, 0.4, 0.6, 0.7, SOLVED, SOLVED + 0.01])
    found = _with(roots, places, Candidates(Tokens(ends, ends, ends, ends), fit.double()))
    assert found.place.tolist() == [0, 0, 1] and found.fit.tolist() == pytest.approx([0.4, 0.6, SOLVED])
    assert torch.equal(found.tokens.m, ends[[1, 2, 4]]) and found.lacking.tolist() == [0, 0]
    again = _with(found, places, Candidates(Tokens(ends, ends, ends, ends), fit.double()))
    assert len(again.place) == 3


@pytest.mark.thin(2)
@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "batch"),
    [(SINCOS, 1), (partial(vit, size=12, positions="none"), 1), (partial(vit, size=8), 2)],
    ids=["sin-cos", "no table", "learned, batch 2"],
)
def test_all_tokens_are_found_each_once(make: Any, batch: int) -> None:
    search, patches = scene(make(), batch)
    roots = find_roots(search, batch)
    assert bool((roots.lacking == 0).all()) and bool((roots.fit <= SOLVED).all())
    first = shared_places(search.block.base)
    for place in first.unique().tolist():
        real = patches[:, first == place].flatten(0, 1)
        away = torch.cdist(roots.tokens.x[roots.at(place)], real)
        assert float(away.min(dim=1).values.max()) < 1e-4
        assert sorted(away.argmin(dim=1).tolist()) == list(range(len(real)))


@torch.no_grad()
def test_rounds_have_more_starts_and_finer_ones_only_once_paths_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = scene(vit(size=8), 2)
    rounds: list[tuple[int, int, bool]] = []

    def begin(search: Any, roots: Roots, places: torch.Tensor, number: int, fine: bool = False) -> Tokens:
        rounds.append((len(roots.place), len(places), fine))
        return _starts(search, roots, places, number, fine)

    monkeypatch.setattr(module, "_starts", begin)
    roots = find_roots(search, 2)
    assert bool((roots.lacking == 0).all())
    assert rounds[0] == rounds[1] == (0, 4, False)  # one path from each place, with smooth pictures
    known = [count for count, _, _ in rounds]
    assert known == sorted(known)
    assert all(count <= GROWTH * LEAST for _, count, _ in rounds)
    assert all(LEAST <= count < LEAST + 4 and not fine for known, count, fine in rounds[2:] if not known)


@torch.no_grad()
def test_alike_patches_of_two_images_are_two_tokens() -> None:
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    x[1, :, :4, :4] = x[0, :, :4, :4]
    search, patches = scene(vit(size=8), 2, x=x)
    roots = find_roots(search, 2)
    assert bool((roots.lacking == 0).all()) and bool((roots.fit <= SOLVED).all())
    torch.testing.assert_close(roots.tokens.x[roots.at(0)], patches[:, 0], atol=1e-4, rtol=0)


def test_time_that_is_over_leaves_a_guess_that_proves_nothing() -> None:
    search, _ = scene(SINCOS())
    search.stop = lambda: True
    roots = find_roots(search, 1)
    assert len(roots.place) == 9 and bool((roots.fit > SOLVED).all())


@torch.no_grad()
def test_paths_begin_at_tokens_with_the_attention_of_a_picture() -> None:
    search, patches = scene(vit(size=8), 2)
    block, places, first = search.block, torch.arange(4).repeat(50), len(search.block.prefix)
    none = Roots(places[:0], search.family.fixed.at(places[:0]), block.base[:0, 0], torch.full((4,), 2))
    search.generator.manual_seed(3)
    m, o = (part[:, first:] for part in block.middle(search.smooth(PICTURES, 3)))  # by the block's own attention
    for number, at in ((0, m.mean(dim=0)[places]), (1, None)):
        search.generator.manual_seed(3)
        begun = _starts(search, none, places, number)
        if at is not None:
            torch.testing.assert_close(begun.m, at)
            continue
        away = torch.cat([m, o], dim=2)[:, places] - torch.cat([begun.m, begun.o], dim=1)
        which = away.norm(dim=2).argmin(dim=0)
        assert float(away.norm(dim=2).amin(dim=0).max()) < 1e-9 and len(which.unique()) > PICTURES // 2
    # Of found ones the patch comes with the attention that it was given.
    known = true_tokens(search, patches)
    two = Tokens(*(part[[0, 5]] for part in known))  # place 0 of the first image, 1 of the second
    begun = _starts(search, Roots(torch.tensor([0, 1]), two, none.fit.new_zeros(2), none.wanted), places, 1)
    patch, given = ((part.unsqueeze(1) - of).norm(dim=2) < 1e-9 for part, of in ((begun.x, two.x), (begun.o, two.o)))
    assert int(given.any(dim=1).sum()) >= 60 and int((patch & given).any(dim=1).sum()) >= 30  # of 200
    assert torch.equal(patch.any(dim=1), (patch & given).any(dim=1))  # and never with another's


@pytest.mark.parametrize(
    ("share", "right", "polished"),
    [
        ([1e-5, 2e-5, 3e-5, 4e-5, 1e-4, 4e-3, 5e-3, 6e-3, *[7e-3] * 8], range(5), 8),  # roots stand apart
        ([4e-3] * 40, (), VAIN * CHUNK),  # none
        ([4e-3] * 40, range(0, 40, 7), 40),  # rounding hides which: all are tried
        ([4e-3] * 40, (0,), (1 + VAIN) * CHUNK),  # as many chunks in vain behind one that fits
        ([1.0, 1.0, 1.0, 2.0, *[20.0] * 4, *[20.5] * 4], (0, 3), 8),  # ten times the last that fits, and more
        ([1e-5, *[4e-3] * 15], (), 16),  # what is near and none says nothing of the others
    ],
)
def test_ends_are_polished_as_long_as_tokens_can_be_among_them(
    share: list[float], right: Collection[int], polished: int
) -> None:
    shares, order = torch.tensor(share), torch.arange(len(share))
    tokens = Tokens(*(order.double().unsqueeze(1) for _ in range(4)))

    class Fake:
        stop = staticmethod(lambda: False)

        def polished(self, places: torch.Tensor, some: Tokens) -> Candidates:
            assert torch.equal(places.double(), some.x[:, 0])
            return Candidates(some, torch.tensor([0.5 if int(each) in right else 2 * SOLVED for each in places]))

    found = list(_polished(Fake(), order, tokens, order, shares))  # pyright: ignore[reportArgumentType]
    assert torch.cat([some for _, some in found]).tolist() == list(range(polished))
    assert sum(int((each.fit <= SOLVED).sum()) for each, _ in found) == len(right)
