"""Bytes are read where they are bytes, as the best of all bytes, and nothing is touched where they are not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from builders import small_vit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from situs.audit import Knowledge, Noise, PatchEmbedding
from situs.audit.attacks.equations import Solution, solve_pixels, whiten
from situs.audit.attacks.patchembed import (
    Limits,
    Order,
    byte_values,
    decision_order,
    in_order,
    nearest_bytes,
    posterior,
    read_bytes,
)
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.data.augment.recipes import as_floats, normalise

NORMALISATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
STEP = 1 / 255 / 0.229


def pictures(batch: int, n: int, places: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Patches [B, N, 3 · places] of random bytes, and the same moved off the lattice by up to half a step."""
    chance = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (batch, n, places, 3), generator=chance)
    values = byte_values(*NORMALISATION)
    on = torch.stack([values[c][bytes_[..., c]] for c in range(3)], dim=-1).flatten(2)
    off = on + (torch.rand(on.shape, generator=chance, dtype=torch.float64) - 0.5) * STEP
    return on, off


def bad_table(batch: int, n: int, d: int, bad: int, least: float, seed: int = 0) -> Tensor:
    """G [B, N, D] of singular values near 1, but for `bad` of them at `least`, in directions that all patches share."""
    chance = torch.Generator().manual_seed(seed)
    u, s, v = torch.linalg.svd(torch.randn(batch, n, d, generator=chance, dtype=torch.float64), full_matrices=False)
    s = s / s.mean(dim=1, keepdim=True)
    s[:, s.shape[1] - bad :] = least
    return u * s.unsqueeze(1) @ v


def attack(patches: Tensor, table: Tensor, error: float, seed: int = 0) -> tuple[Solution, Tensor, Tensor]:
    """What the attacker has of patches [B, N, K]: the real solution, and the whitened system with errors of 1."""
    chance = torch.Generator().manual_seed(seed)
    weight = table.mT @ patches
    weight = weight + error * torch.randn(weight.shape, generator=chance, dtype=torch.float64)
    # A sigma on G and W alike, of which here only W's is there.
    sigma = error / (1 + table.shape[1]) ** 0.5
    white, right = whiten(weight, table, torch.float64, sigma)
    return solve_pixels(weight, table, torch.float64, sigma), white, right


def read(found: tuple[Solution, Tensor, Tensor], limits: Limits | None = None) -> Any:
    solution, white, right = found
    return read_bytes(white, right, solution.patches, solution.rank, NORMALISATION, limits)


# --- the law -------------------------------------------------------------------------------------------------


def test_the_values_are_the_loaders() -> None:
    everything = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    mean, std = (torch.tensor(part) for part in NORMALISATION)
    loaded = normalise(as_floats(everything), mean, std)[0].flatten(1)
    assert torch.equal(byte_values(*NORMALISATION).float(), loaded)


@pytest.mark.parametrize(("bad", "least"), [(1, 2e-4), (3, 2e-4), (8, 4e-4)])
def test_bytes_are_read_where_rounding_fails(bad: int, least: float) -> None:
    on, _ = pictures(2, 40, 16)
    found = attack(on, bad_table(2, 40, 64, bad, least), 1e-5)
    real = found[0].patches
    wrong = ((real - on).abs() > STEP / 2).double().mean()
    assert wrong > 0.02, "the case is too easy"
    result = read(found)
    assert result.read.all()
    assert torch.equal(result.patches, on)


def test_more_patches_than_channels_are_read_where_the_rest_decides() -> None:
    """Four directions say nothing at all. No patch can be rounded by itself; all that follow choose among its bytes."""
    on, _ = pictures(1, 40, 16)
    chance = torch.Generator().manual_seed(0)
    spread = 0.006 * torch.randn(36, 4, generator=chance).sign() + 0.002 * torch.randn(36, 4, generator=chance)
    lost = torch.linalg.qr(torch.cat([torch.eye(4), spread]).double()).Q
    table = torch.randn(1, 40, 38, generator=chance, dtype=torch.float64)
    table[..., -1] = 0.0  # an equation without unknowns, as a norm behind the embedding makes one: it tells the error
    table = table - lost @ (lost.mT @ table)
    found = attack(on, table, 1e-6)
    assert int(found[0].rank) == 36
    assert (found[0].patches - on).abs().max() > 30 * STEP
    assert not read(found, Limits(width=1, wide=1)).read.all()
    result = read(found)
    assert result.read.all()
    assert torch.equal(result.patches, on)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.2, 0.5]))
def test_the_search_finds_the_best_of_all_bytes(seed: int, size: float) -> None:
    """Against every combination of the 7 numbers around the mean in 4 patches, by the quadratic form itself."""
    chance = torch.Generator().manual_seed(seed)
    values = byte_values(*NORMALISATION)[:1]
    step = float(values[0, 255] - values[0, 0]) / 255
    shape = torch.randn(1, 4, 4, generator=chance, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)
    root = shape * step * size
    middle = values[0, torch.randint(4, 252, (4,), generator=chance)]
    mean = (middle + step * (torch.rand(4, generator=chance, dtype=torch.float64) - 0.5)).view(1, 4, 1)
    order = in_order(root, decision_order(root))
    found, _ = nearest_bytes(mean.gather(1, order.index.unsqueeze(2)), order, values, Limits(safe=1e9, width=5**4))
    placed = torch.empty_like(found).scatter_(1, order.index.unsqueeze(2), found).flatten()
    precision = torch.linalg.inv(root[0].mT @ root[0])

    def cost(point: Tensor) -> Tensor:
        away = point - mean.flatten()
        return torch.einsum("...i,ij,...j->...", away, precision, away)

    nearest = ((mean.flatten() - values[0, 0]) / step).round()
    tried = nearest.long() + torch.tensor(list(itertools.product(range(-3, 4), repeat=4)))
    best = cost(values[0, tried.clamp(0, 255)]).min()
    assert float(cost(placed)) == pytest.approx(float(best), rel=1e-9)


@pytest.mark.parametrize("safe", [12.0, 1e9])
def test_a_byte_is_surer_than_the_next_by_the_difference_of_their_squared_distances(safe: float) -> None:
    """One patch whose every place is a number somewhere near or beyond the range, against all 256 bytes."""
    values = torch.arange(256, dtype=torch.float64)[None] / 4 - 9  # in steps of 1/4
    at = torch.tensor([-0.47, -0.2, 0.1, 0.47, 0.9, 1.3, 254.1, 254.6, 255.1, 255.47, 1.47, 100.44, 100.5]).double()
    mean, sigma = (at / 4 - 9).view(1, 1, -1), 0.25 / 15
    order = Order(torch.zeros(1, 1).long(), torch.full((1, 1), sigma).double(), torch.zeros(1, 1, 1).double())
    near, index = ((mean[0, 0, :, None] - values) / sigma).square().sort(dim=1)
    sure = near[:, 1] - near[:, 0]
    for margin in (13.0, 30.0, 200.0, 300.0):
        limits = Limits(mean_square=1e3, mean_square_fine=1e3, largest=1e3, margin=margin, safe=safe)
        found, fits = nearest_bytes(mean, order, values, limits)
        assert torch.equal(fits[0], sure >= margin)
        assert torch.equal(found[0, 0][fits[0]], values[0][index[:, 0]][fits[0]])


def test_the_order_takes_the_least_deviation_first_and_conditions_on_it() -> None:
    """Conditional deviations and gains by Schur complements of the covariance, chosen by hand."""
    chance = torch.Generator().manual_seed(0)
    root = torch.randn(1, 40, 40, generator=chance, dtype=torch.float64)
    cov = (root.mT @ root)[0]
    order = in_order(root, decision_order(root))
    left = list(range(40))
    for t, patch in enumerate(order.index[0].tolist()):
        assert patch == min(left, key=lambda i: float(cov[i, i]))
        assert float(order.sigma[0, t]) == pytest.approx(float(cov[patch, patch]) ** 0.5)
        gains = cov[patch] / cov[patch, patch]
        left.remove(patch)
        for s in range(t + 1, 40):
            assert float(order.gain[0, t, s]) == pytest.approx(float(gains[order.index[0, s]]))
        assert (order.gain[0, t, : t + 1] == 0).all()
        cov = cov - torch.outer(cov[patch], cov[patch]) / cov[patch, patch]


def test_the_posterior_is_that_of_bayes() -> None:
    chance = torch.Generator().manual_seed(0)
    white = torch.randn(2, 5, 7, generator=chance, dtype=torch.float64)
    right = torch.randn(2, 7, 3, generator=chance, dtype=torch.float64)
    spread = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = posterior(white, right, spread)
    for i in range(2):
        precision = white[i] @ white[i].mT / spread[i] ** 2 + torch.eye(5, dtype=torch.float64)
        torch.testing.assert_close(found.root[i].mT @ found.root[i], torch.linalg.inv(precision))
        mean = torch.linalg.solve(precision, white[i] @ right[i] / spread[i] ** 2)
        torch.testing.assert_close(found.mean[i], mean)


# --- safety --------------------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("least", [1.0, 1e-2, 1e-3, 3e-4, 1e-4, 1e-5])
@pytest.mark.parametrize("error", [1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_numbers_off_the_lattice_stay_as_they_are(least: float, error: float) -> None:
    _, off = pictures(3, 24, 20, seed=1)
    found = attack(off, bad_table(3, 24, 40, 4, least), error)
    result = read(found)
    assert not result.read.any()
    assert torch.equal(result.patches, found[0].patches)


@pytest.mark.parametrize("error", [1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1.0])
def test_bytes_that_are_read_are_right_however_large_the_error(error: float) -> None:
    on, _ = pictures(3, 24, 20, seed=2)
    found = attack(on, bad_table(3, 24, 40, 4, 1e-3), error)
    result = read(found)
    where = result.read.unsqueeze(1).expand_as(on)
    assert torch.equal(result.patches[where], on[where])
    assert torch.equal(result.patches[~where], found[0].patches[~where])
    assert result.read.all() or error > 1e-5
    assert not result.read.any() or error < 1e-2


def test_a_mixture_and_other_normalisation_are_no_bytes() -> None:
    on, _ = pictures(2, 24, 20)
    table = bad_table(2, 24, 40, 4, 1e-3)
    mixed = 0.7 * on + 0.3 * on.flip(0)
    other = on * 0.229 / 0.25
    for x in (mixed, other):
        found = attack(x, table, 1e-5)
        assert not read(found).read.any()
        assert torch.equal(read(found).patches, found[0].patches)


def test_a_single_place_off_the_lattice_is_left_out_and_the_rest_read() -> None:
    on, off = pictures(1, 24, 20)
    x = on.clone()
    x[0, 5, 7] = off[0, 5, 7] = on[0, 5, 7] + STEP / 3
    found = attack(x, bad_table(1, 24, 40, 4, 1e-3), 1e-5)
    result = read(found)
    assert result.read[0].logical_not().nonzero().flatten().tolist() == [7]
    assert torch.equal(result.patches[..., 7], found[0].patches[..., 7])
    others = torch.arange(60) != 7
    assert torch.equal(result.patches[..., others], on[..., others])


@pytest.mark.parametrize("error", [0.02, 0.1, 0.3, 1.0, 3.0])
def test_two_patches_that_only_their_sum_is_known_of_are_not_guessed(error: float) -> None:
    """A byte more here and one less there changes no other patch, so that no later rounding tells."""
    on, _ = pictures(2, 24, 40)
    table = bad_table(2, 24, 40, 0, 1.0)
    apart = torch.zeros(24, 1, dtype=torch.float64)
    apart[3], apart[9] = 0.5**0.5, -(0.5**0.5)
    table = table - (1 - 1e-3) * apart @ (apart.mT @ table)
    found = attack(on, table, error * STEP * 1e-3)
    result = read(found)
    where = result.read.unsqueeze(1).expand_as(on)
    assert torch.equal(result.patches[where], on[where])
    assert torch.equal(result.patches[~where], found[0].patches[~where])
    assert bool(result.read.all()) == (error <= 0.1)


def test_few_numbers_prove_nothing() -> None:
    """Two patches known to a tenth of a step: real numbers would look like bytes too often."""
    on, _ = pictures(4, 2, 20)
    found = attack(on, bad_table(4, 2, 8, 0, 1.0), STEP / 10)
    assert not read(found).read.any()


def test_an_equation_that_does_not_hold_is_not_believed() -> None:
    on, _ = pictures(2, 24, 20)
    table = bad_table(2, 24, 40, 4, 1e-3)
    solution, white, right = attack(on, table, 1e-5)
    right = right + right.std() * torch.randn(right.shape, generator=torch.Generator().manual_seed(3)).double()
    assert not read((solution, white, right)).read.any()


def test_the_ends_of_the_range_are_bytes_like_others() -> None:
    values = byte_values(*NORMALISATION)
    on = torch.stack([values[:, 0], values[:, 255]]).repeat(12, 20).unsqueeze(0)
    found = attack(on, bad_table(1, 24, 40, 3, 2e-4), 1e-5)
    assert ((found[0].patches - on).abs() > STEP / 2).any()
    result = read(found)
    assert torch.equal(result.patches, on)
    beyond = attack(on * 1.5, bad_table(1, 24, 40, 3, 2e-4), 1e-5)
    assert not read(beyond).read.any()


def test_a_batch_is_its_images_one_by_one() -> None:
    on, off = pictures(3, 24, 8)
    x = torch.stack([on[0], off[1], on[2]])
    table = bad_table(3, 24, 40, 3, 3e-4)
    table[2] = bad_table(1, 24, 40, 0, 1.0)[0]
    solution, white, right = attack(x, table, 1e-5)
    together = read((solution, white, right))
    assert together.read.all(dim=1).tolist() == [True, False, True]
    for i in range(3):
        one = slice(i, i + 1)
        alone = read((Solution(*(field[one] for field in solution)), white[one], right[one]))
        assert torch.equal(alone.read, together.read[one])
        assert torch.equal(alone.patches, together.patches[one])


# --- in the attack -------------------------------------------------------------------------------------------


def victim(dim: int = 48, **fields: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 32, "width": dim, "heads": 4, "patch_size": 8, "num_classes": 5, **fields}
    return small_vit(**given).eval()


def photographs(count: int) -> Tensor:
    bytes_ = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    mean, std = (torch.tensor(part) for part in NORMALISATION)
    return normalise(as_floats(bytes_), mean, std)


def upload(backbone: Any, x: Tensor, known: Knowledge, **step: Any) -> list[Any]:
    return [
        victim_gradients(backbone, part, torch.arange(len(part)), defence=known.defence, step=Step(**step))
        for part in x.split(known.step.batch)
    ]


def test_an_attacker_who_knows_the_normalisation_reads_every_byte() -> None:
    backbone, x = victim(), photographs(2)
    known = Knowledge(normalisation=NORMALISATION)
    sent = upload(backbone, x, known)
    found, plain = (
        PatchEmbedding().recover(backbone, sent, known, Deadline()),
        PatchEmbedding().recover(backbone, sent, Knowledge(), Deadline()),
    )
    assert torch.equal(found.images, x)
    assert not torch.equal(plain.images, x)
    assert [(fact["bytes"], fact["bytes_share"]) for fact in found.facts] == [(True, 1.0)] * 2
    assert "bytes" not in plain.facts[0]


@pytest.mark.parametrize(
    ("fields", "step", "dim"),
    [
        ({}, {"dtype": torch.bfloat16}, 48),
        ({"defence": Noise(1e-2)}, {}, 48),
        ({"defence": Noise(1.0)}, {}, 48),
        ({"step": Step(4)}, {}, 48),
        ({}, {}, 8),
    ],
)
def test_what_cannot_be_read_stays_exactly_as_it_was(fields: Any, step: Any, dim: int) -> None:
    backbone, x = victim(dim), photographs(4)
    known, plain = Knowledge(normalisation=NORMALISATION, **fields), Knowledge(**fields)
    sent = upload(backbone, x, known, **step)
    found = PatchEmbedding().recover(backbone, sent, known, Deadline())
    assert torch.equal(found.images, PatchEmbedding().recover(backbone, sent, plain, Deadline()).images)
    assert not any(fact.get("bytes") for fact in found.facts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_images_stay_exactly_as_they_were(dtype: torch.dtype) -> None:
    backbone = victim()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(5)) * 4 - 2
    known = Knowledge(normalisation=NORMALISATION)
    sent = upload(backbone, x, known, dtype=dtype)
    found = PatchEmbedding().recover(backbone, sent, known, Deadline())
    assert torch.equal(found.images, PatchEmbedding().recover(backbone, sent, Knowledge(), Deadline()).images)
    assert [(fact["bytes"], fact["bytes_share"]) for fact in found.facts] == [(False, 0.0)] * 2


def test_the_audit_says_in_words_that_bytes_were_read_and_stays_in_range() -> None:
    import json

    from situs.audit.cases import TestSet
    from situs.audit.defences import NoDefence
    from situs.audit.gradients import attack_gradients
    from situs.audit.scores import means_of

    x = photographs(3)
    x[2] += 0.3 * STEP * torch.rand(x[2].shape, generator=torch.Generator().manual_seed(6))
    defences = [NoDefence()]
    found = attack_gradients(victim(), TestSet(x, torch.arange(3), NORMALISATION), [PatchEmbedding()], defences)
    [pair] = found.pairs
    written = json.loads(json.dumps(found.numbers(), allow_nan=False))
    assert [image["bytes"] for image in written["pairs"][0]["images"]] == [True, True, False]
    assert "2 of them with the exact byte of every pixel" in written["verdict"]
    assert [value == 200 for value in pair.scores["psnr"] or ()] == [True, True, False]
    means = means_of(pair.scores)
    assert means["psnr"] is not None
    assert means["psnr"].high == 200
