"""What linear equations leave open, searched: derivatives, roots, and what passes as one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from victims import LEARNED, vit

from situs.audit.attacks.spans import SOLVED, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.count import count
from situs.audit.attacks.tokens.linear import family_of, read_spans
from situs.audit.attacks.tokens.roots import find_roots, shared_places
from situs.audit.attacks.tokens.search import Effort, Range, Search
from situs.audit.client import victim_gradients
from situs.core.tokens import patchify

SINCOS = partial(vit, size=12, positions="sincos")


def scene(backbone: Any, batch: int = 1, more: int = 0) -> tuple[Search, torch.Tensor]:
    size = backbone.input.shape[0]
    x = torch.rand(batch, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    upload = victim_gradients(backbone, x, torch.arange(batch), dtype=torch.float64)
    with torch.no_grad():
        block = Block(backbone.requires_grad_(False))
        counts = count(block, batch)
        spans = read_spans(block, upload, counts)
        family = family_of(block, spans, counts.open + more)
        ends = Range(*(torch.full((block.weight.shape[1],), end, dtype=torch.float64) for end in (-1.0, 1.0)))
        return Search(block, spans, Span(upload[block.layers.fc2], counts.fc2), family, ends), patchify(x, (4, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", ["ViT", "SwiGLU", "RMS norms", "ReLU, no qkv bias"])
def test_derivatives_are_those_of_autograd(name: str) -> None:
    search, _ = scene(LEARNED[name](), more=5)
    place, phi, span = torch.tensor([3]), 0.1 * torch.randn(1, 5, dtype=torch.float64), search.span

    def plain(at: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """The residual by the block's own code."""
        scaled = search.block.late(search.tokens(place, at).m)[0] * span.column
        return (scaled - span.inside.T @ (span.inside @ scaled)) / (size @ span.inside @ scaled).norm()

    for functionals in (None, torch.randn(4, span.rank, dtype=torch.float64)):
        out, slope = search.residuals(place, phi, functionals)
        size = torch.eye(span.rank, dtype=torch.float64) if functionals is None else functionals
        torch.testing.assert_close(out[0], plain(phi, size))
        wanted = torch.autograd.functional.jacobian(lambda at, size=size: plain(at, size), phi)
        assert isinstance(wanted, torch.Tensor)
        torch.testing.assert_close(slope[0], wanted[:, 0].T, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_the_truth_fits_and_sums_of_tokens_do_not() -> None:
    """A sum of other tokens at the same place passes every linear test; the activation tells it apart."""
    search, patches = scene(SINCOS())
    places = torch.arange(9)
    truth = search.run(places, search.start(places, patches[0]))
    torch.testing.assert_close(search.tokens(places, truth.phi).x, patches[0], rtol=1e-6, atol=1e-6)
    assert bool((truth.fit <= SOLVED).all())
    base = search.block.base  # rows and columns of sines add up
    torch.testing.assert_close(base[0] + base[4], base[1] + base[3])
    wrong = patches[0][1] + patches[0][3] - patches[0][4]  # at place 0
    phi = search.family.phi(places[:1], wrong[None])
    tokens = search.tokens(places[:1], phi)
    torch.testing.assert_close(tokens.x[0], wrong)
    off = search.span.residual(search.late(places[:1], phi))
    assert float(off) > 100 * float(search.span.residual(search.late(places, truth.phi)).max())


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "batch"),
    [(SINCOS, 1), (partial(vit, size=12, positions="none"), 1), (partial(vit, size=8), 2)],
    ids=["sin-cos", "no table", "learned, batch 2"],
)
def test_all_tokens_are_found_each_once(make: Any, batch: int) -> None:
    search, patches = scene(make(), batch)
    search.effort = Effort(rounds=20)
    roots = find_roots(search, batch)
    assert bool((roots.lacking == 0).all()) and bool((roots.fit <= SOLVED).all())
    found = search.tokens(roots.place, roots.phi).x
    first = shared_places(search.block.base)
    for place in first.unique().tolist():
        real = patches[:, first == place].flatten(0, 1)
        away = torch.cdist(found[roots.at(place)], real)
        assert float(away.min(dim=1).values.max()) < 1e-4
        assert sorted(away.argmin(dim=1).tolist()) == list(range(len(real)))


def test_time_that_is_over_leaves_a_guess_that_proves_nothing() -> None:
    search, _ = scene(SINCOS())
    search.stop = lambda: True
    roots = find_roots(search, 1)
    assert len(roots.place) == 9 and bool((roots.fit > SOLVED).all())
