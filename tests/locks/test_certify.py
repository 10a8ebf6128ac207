"""No lock without its check: the very layout, with the very keys, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zoo import ZOO, make

from situs.backbones import Backbone
from situs.errors import SitusError
from situs.locks import certify as module
from situs.locks.certify import certify, certify_folder
from situs.locks.folder import structure_of
from situs.locks.groups import random_keys, residual_only
from situs.locks.key import Key
from situs.locks.locking import lock

EXACT = 1e-10
MODELS = ("vit", "eva", "swin", "bert", "gpt2", "llama", "hf_vit")


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_passes_with_its_inner_groups(name: str) -> None:
    backbone = make(name)
    groups = backbone.groups()
    assert certify(backbone, groups, random_keys(groups, random())) < EXACT


def test_certify_passes_the_right_groups_and_no_others() -> None:
    backbone = make("eva_inner_norms")
    groups = backbone.groups()
    assert certify(backbone, groups, random_keys(groups, random())) < EXACT
    (residual,) = residual_only(groups)
    for lost in (0, len(residual.members) // 2, -1):
        kept = [m for m in residual.members if m != residual.members[lost]]
        with pytest.raises(SitusError, match="permuting the channels changes its output"):
            certify(backbone, [replace(residual, members=tuple(kept))], random_keys([residual], random()))


def test_certify_sees_an_axis_whose_weights_are_all_alike() -> None:
    """A fresh norm is all ones: forward, its key is no matter. Its gradient tells."""
    backbone = make("vit")
    norm = backbone.model.blocks[0].norm1
    with torch.no_grad():
        norm.weight.fill_(1)
        norm.bias.zero_()
    (residual,) = residual_only(backbone.groups())
    kept = tuple(m for m in residual.members if m.tensor != "blocks.0.norm1.weight")
    with pytest.raises(SitusError, match="permuting the channels changes its output"):
        certify(backbone, [replace(residual, members=kept)], random_keys([residual], random()))


def test_a_key_that_moves_nothing_proves_nothing() -> None:
    backbone = make("vit")
    groups = residual_only(backbone.groups())
    still = {group.name: torch.arange(group.size) for group in groups}
    with pytest.raises(SitusError, match=r"a wrong key, .* also passes the test, so the test proves nothing"):
        certify(backbone, groups, still)


# --- the folder that is locked --------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("large", [module.LARGE, 0], ids=["whole", "one block"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_certified_whole_or_by_one_block(model_folder, name, large):
    structure = structure_of(model_folder(name))
    assert next(structure.model.parameters()).is_meta
    groups = structure.groups()
    before = torch.random.get_rng_state()
    assert certify_folder(model_folder(name), structure, groups, random_keys(groups, random()), large=large) < EXACT
    assert torch.equal(torch.random.get_rng_state(), before)


def wrong(backbone: Backbone, name: str, axis: int, whole=Backbone.groups):
    """The groups with one square matrix moved along the wrong axis."""
    return tuple(
        replace(g, members=tuple(replace(m, axis=axis) if m.tensor == name else m for m in g.members))
        if g.kind == "residual"
        else g
        for g in whole(backbone)
    )


@pytest.mark.parametrize("block", [0, 1])
def test_a_wrong_layout_is_not_locked_and_nothing_is_written(model_folder, tmp_path, monkeypatch, block):
    pytest.importorskip("cryptography")
    name = f"blocks.{block}.attn.proj.weight"
    assert any(m.tensor == name and m.axis == 0 for m in structure_of(model_folder("vit")).groups()[0].members)
    monkeypatch.setattr(Backbone, "groups", lambda backbone: wrong(backbone, name, 1))
    with pytest.raises(SitusError, match="permuting the channels changes its output by"):
        lock(model_folder("vit"), Key(bytes(range(32))), tmp_path / "locked")
    assert not list(tmp_path.iterdir())
    # Of a large model only one block is run; another that is laid out otherwise is refused all the same.
    structure = structure_of(model_folder("vit"))
    groups = structure.groups()
    with pytest.raises(SitusError, match="have different layouts"):
        certify_folder(model_folder("vit"), structure, groups, random_keys(groups, random()), large=0)


def test_an_inner_axis_of_another_block_is_seen_too(model_folder):
    structure = structure_of(model_folder("vit"))
    groups = structure.groups()
    keys = random_keys(groups, random())
    lost = [replace(g, members=g.members[1:]) if g.name == "blocks.1.mlp" else g for g in groups]
    for large, said in ((0, "have different layouts"), (module.LARGE, "permuting the channels changes its output")):
        with pytest.raises(SitusError, match=said):
            certify_folder(model_folder("vit"), structure, lost, keys, large=large)
