from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from situs.backbones import Backbone, create_backbone
from situs.locks.folder import names_in_file, write_model
from situs.locks.groups import invert_keys, permute_state
from situs.locks.key import Key
from situs.locks.lock import check, lock, rename, unlock
from situs.locks.manifest import NAME, permutations_of
from situs.locks.owner import keyed_blocks, open_locked, with_key
from situs.locks.precise import KeepDouble

pytest.importorskip("cryptography")

KEY = Key(bytes(range(32)))
MODELS = ("vit", "eva", "swin", "bert", "gpt2", "llama", "hf_vit")


@pytest.fixture
def wholly_in_float64():
    """RMSNorm computes in float32 whatever it is given; what is compared here is the law, not that cast."""
    with KeepDouble():
        yield


def inputs(backbone: Backbone) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if backbone.img_size is None:
        return torch.randint(1, 31, (4, 9), generator=generator)
    return torch.randn(4, backbone.in_chans, *backbone.img_size, generator=generator, dtype=torch.float64)


def exact(backbone: Backbone) -> Backbone:
    return backbone.double().eval()


def distance(one: Tensor, two: Tensor) -> float:
    """The largest difference, as a share of how much the logits spread."""
    return float((one - two).abs().max() / one.std())


@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("groups", ["residual", "all"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_identical_with_the_key_and_far_off_without(wholly_in_float64, model_folder, tmp_path, name, groups, seal):
    clear = exact(create_backbone(model_folder(name)))
    x = inputs(clear)
    wanted = clear(x)
    locked = lock(model_folder(name), KEY, tmp_path / "locked", groups=groups, seal=seal).path
    opened = exact(open_locked(locked, KEY))
    assert torch.equal(opened(x), wanted)
    assert all(torch.equal(value, clear.state_dict()[each]) for each, value in opened.state_dict().items())
    keyed = exact(keyed_blocks(locked, KEY))
    assert distance(wanted, keyed(x)) < 1e-10
    if not seal:
        assert distance(wanted, exact(create_backbone(locked))(x)) > 0.5


@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
@torch.no_grad()
def test_inner_groups_alone_leave_the_function(wholly_in_float64, model_folder, tmp_path, name):
    """Cover is no lock: with the residual key taken off, the model works whatever the inner keys are."""
    clear = exact(create_backbone(model_folder(name)))
    locked = lock(model_folder(name), KEY, tmp_path / "locked", groups="all").path
    manifest = check(locked, KEY)
    backbone = exact(create_backbone(locked))
    names = names_in_file(backbone, {spec.name: spec for spec in manifest.specs()})
    groups = rename(manifest.groups, {name: own for own, name in names.items()})
    residual = [group for group in groups if group.kind == "residual"]
    inverse = invert_keys(permutations_of(manifest, KEY))
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), residual, inverse))
    x = inputs(clear)
    assert distance(clear(x), backbone(x)) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_training_with_the_key_is_normal_training(wholly_in_float64, model_folder, tmp_path, name):
    """Gradients, and the weights after 20 AdamW steps in float64, agree after un-permuting."""
    clear = exact(create_backbone(model_folder(name)))
    manifest = lock(model_folder(name), KEY, tmp_path / "locked", groups="all").manifest
    locked = exact(create_backbone(tmp_path / "locked"))
    keys = permutations_of(manifest, KEY)
    names = names_in_file(locked, {spec.name: spec for spec in manifest.specs()})
    groups = rename(manifest.groups, {name: own for own, name in names.items()})
    owner = with_key(locked, groups, keys)
    x = inputs(clear)
    target = torch.randn(clear(x).shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def gradients(backbone: Backbone) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in backbone.model.named_parameters() if p.grad is not None}

    optimisers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.05) for each in (clear, owner)]
    before = {name: p.detach().clone() for name, p in clear.model.named_parameters()}
    for step in range(20):
        for backbone, optimiser in zip((clear, owner), optimisers, strict=True):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(backbone(x), target).backward()
            optimiser.step()
        if step == 0:
            mine = permute_state(gradients(locked), groups, invert_keys(keys))
            scale = max(float(each.abs().max()) for each in mine.values())
            for each, value in gradients(clear).items():
                assert float((mine[each] - value).abs().max()) < 1e-11 * max(scale, 1), each
    after = permute_state(dict(locked.model.named_parameters()), groups, invert_keys(keys))
    assert max(float((value - before[each]).abs().max()) for each, value in clear.model.named_parameters()) > 1e-3
    for each, value in clear.model.named_parameters():
        assert float((after[each] - value).abs().max()) < 1e-9, each


@pytest.mark.parametrize("name", ["vit", "hf_vit"])
def test_an_authorised_fine_tune_is_opened(model_folder, tmp_path, name):
    locked = tmp_path / "locked"
    lock(model_folder(name), KEY, locked)
    owner = keyed_blocks(locked, KEY).eval()
    x = inputs(owner).float()
    optimiser = torch.optim.AdamW(owner.parameters(), lr=1e-3)
    for _ in range(3):
        optimiser.zero_grad()
        owner(x).square().mean().backward()
        optimiser.step()
    trained = tmp_path / "trained"
    trained.mkdir()
    write_model(owner, trained)
    shutil.copy(locked / NAME, trained)
    opened = unlock(trained, KEY, tmp_path / "open", retrained=True)
    got = create_backbone(Path(opened.path)).eval()
    with torch.no_grad():
        assert distance(owner(x), got(x)) < 1e-4
        assert distance(owner(x), create_backbone(model_folder(name)).eval()(x)) > 1e-3
    assert "accepted as retrained" in opened.notes[0]


def test_the_view_shares_weights_and_keeps_the_context(model_folder, tmp_path):
    manifest = lock(model_folder("vit"), KEY, tmp_path / "locked").manifest
    backbone = exact(create_backbone(tmp_path / "locked"))
    owner = with_key(backbone, manifest.groups, permutations_of(manifest, KEY))
    assert owner.model is backbone.model
    clear = exact(create_backbone(model_folder("vit")))
    x = inputs(clear)
    with torch.no_grad():
        context = torch.tensor([2, 0])
        got, wanted = (b.encode(b.embed(x), b.positions(), context).patches for b in (owner, clear))
        assert distance(wanted, got) < 1e-10
        plain = backbone.encode(backbone.embed(x), backbone.positions(), context).patches
        assert distance(wanted, plain) > 0.5
