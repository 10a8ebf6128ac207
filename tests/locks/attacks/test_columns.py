"""The column attacker: the whole key, under any order of rows and channels, with a fixed row and without."""

from __future__ import annotations

import pytest
import torch
from builders import small_hf
from sent import classifier, pictures, sent, streams_of

from situs.errors import SitusError
from situs.locks.attacks.columns import recover_columns, recover_with_activations, split_prefix
from situs.locks.groups import random_keys

PUBLIC = streams_of(60, sample=1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("count", [1, 6])
def test_the_whole_key_from_any_order_of_rows(seed: int, count: int) -> None:
    public = streams_of(60, seed=seed, sample=1)
    seen, truth = sent(streams_of(count, seed=seed).z, "none", "rows", "columns")
    found = recover_columns(seen, public.z, public.fixed)
    assert torch.equal(found.q, truth.channels)
    clear = streams_of(count, seed=seed).z
    order = truth.row[..., None].expand_as(clear)
    assert torch.equal(seen[..., found.q.argsort()], clear.gather(1, order))


def test_another_key_gives_the_same_channels_in_its_order() -> None:
    seen = streams_of(4).z
    first = recover_columns(seen, PUBLIC.z, PUBLIC.fixed).q
    key = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    assert torch.equal(recover_columns(seen[..., key], PUBLIC.z, PUBLIC.fixed).q, first[key])


def test_without_a_fixed_row_many_samples_tell() -> None:
    seen, truth = sent(streams_of(60).z[:, 1:], "none", "rows", "columns", prefix=0)
    found = recover_columns(seen, PUBLIC.z[:, 1:], PUBLIC.fixed[:0])
    assert torch.equal(found.q, truth.channels)


def test_noise_does_not_hide_the_key() -> None:
    z, scale = streams_of(8).z, float(PUBLIC.z.std())
    seen, truth = sent(z, "noise=0.1", "rows", "columns", scale=scale)
    public = sent(PUBLIC.z, "noise=0.1", number=2, scale=scale).seen
    assert torch.equal(recover_columns(seen, public, PUBLIC.fixed).q, truth.channels)


def test_fixed_rows_are_known_by_their_sorted_values() -> None:
    z = streams_of(5).z
    seen, truth = sent(z, "none", "rows", "columns")
    found, others = split_prefix(seen, PUBLIC.fixed)
    assert torch.equal(found, PUBLIC.fixed[:, truth.channels].expand(5, 1, -1))
    assert torch.equal(others, seen[truth.row > 0])
    none, every = split_prefix(seen, PUBLIC.fixed[:0])
    assert none.shape == (5, 0, 24) and torch.equal(every, seen.flatten(0, 1))


def test_another_width_is_refused() -> None:
    with pytest.raises(SitusError, match=r"have 23 channels, .*has 24"):
        recover_columns(PUBLIC.z[..., :23], PUBLIC.z, PUBLIC.fixed)


def test_a_server_reads_the_key_of_a_locked_model_off_its_stream() -> None:
    backbone = classifier()
    groups = backbone.groups()
    truth = random_keys(groups, torch.Generator().manual_seed(0))
    found = recover_with_activations(backbone, groups, pictures(24).split(1), truth=truth)
    assert (found.attacker, found.right, found.size, found.bits) == ("activations", 24, 24, 0)
    assert found.cost == "the unlocked embedding, the blocks' inputs for 12 samples, and 12 other samples"
    other = random_keys(groups, torch.Generator().manual_seed(1))
    assert recover_with_activations(backbone, groups, pictures(24).split(1), truth=other).right == 24


def test_texts_of_several_lengths_are_rows() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    backbone = small_hf("BertModel", vocab_size=40, max_position_embeddings=24, **sizes).eval()
    texts = [torch.randint(40, (1, 8 + n % 12), generator=torch.Generator().manual_seed(n)) for n in range(120)]
    groups = backbone.groups()
    truth = random_keys(groups, torch.Generator().manual_seed(0))
    found = recover_with_activations(backbone, groups, texts, truth=truth)
    assert found.right is not None and found.right >= 12  # of 16; a guess has one


@pytest.mark.parametrize(("truth", "samples", "field"), [(None, 4, "key"), ({}, 1, "count")])
def test_what_the_server_lacks_is_said(truth: dict[str, torch.Tensor] | None, samples: int, field: str) -> None:
    backbone = classifier()
    with pytest.raises(SitusError, match="attacker=activations") as caught:
        recover_with_activations(backbone, backbone.groups(), pictures(samples).split(1), truth=truth)
    assert caught.value.field == field
