"""Linkage: fingerprints do not know the order of rows, samples are found again, repeats average noise away."""

from __future__ import annotations

import pytest
import torch
from sent import sent, streams_of

from situs.audit.split.linkage import average, company, fingerprints, found_again, link


def test_fingerprints_do_not_change_with_the_order_of_rows() -> None:
    z = streams_of(6).z
    torch.testing.assert_close(fingerprints(sent(z, "none", "rows").seen), fingerprints(z), rtol=0, atol=1e-10)
    assert not torch.allclose(fingerprints(z), fingerprints(z.flip(0)))


def test_a_sample_is_found_again() -> None:
    z = streams_of(40).z
    later = sent(z, "noise=0.2", "rows", number=1, scale=float(z.std())).seen
    assert torch.equal(link(sent(z, "none", "rows").seen, later), torch.arange(40))
    moved = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(link(z, later[moved]), moved)


def test_sendings_add_up_and_the_noise_goes_down_with_their_number() -> None:
    z = streams_of(1).z
    sendings = torch.stack([sent(z, "noise=0.1", "rows", number=k, scale=float(z.std())).seen[0] for k in range(16)])
    row = sent(z, "noise=0.1", "rows").truth.row[0]
    errors = [float((average(sendings[:k]) - z[0, row])[row > 0].square().mean()) for k in (1, 4, 16)]
    for error, k in zip(errors, (1, 4, 16), strict=True):
        assert 0.7 < error * k / (0.1 * float(z.std())) ** 2 < 1.4
    assert torch.equal(average(sendings[:1]), sendings[0])


def test_tokens_that_exchange_keep_their_company() -> None:
    z, size = streams_of(24).z, 6
    chance = torch.Generator().manual_seed(0)
    sendings, samples = [], []
    for number in range(8):
        mixed = torch.randperm(24, generator=chance)
        seen, truth = sent(z[mixed], f"batch-shuffle={size}", "rows", "columns", number=number)
        seen = seen[..., truth.channels.argsort()]  # `sent` draws a key a step; a client has one
        sendings.append(seen)
        samples.append((mixed[truth.sample], truth.row))
    sample, row = samples[0]
    patches = row > 0
    group = company(sendings, size)[patches]
    assert found_again(group, sample[patches]) == 1
    for each in range(24):  # all of a sample, and nothing else
        assert torch.equal(group == group[sample[patches] == each][0], sample[patches] == each)
    assert found_again(company(sendings[:1], size)[patches], sample[patches]) == 0


def test_a_sample_is_found_that_has_most_of_a_group_and_a_group_that_has_most_of_it() -> None:
    sample = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert found_again(sample, sample) == 1
    assert found_again(torch.tensor([0, 0, 1, 1, 1, 1, 2, 3, 4]), sample) == pytest.approx(2 / 3)
    assert found_again(torch.zeros(9, dtype=torch.long), sample) == 0
