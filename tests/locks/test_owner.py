from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from builders import small_swin, small_vit
from tiny_texts import write_folder
from torch import Tensor
from zoo import keyed_model, opened_model

from situs.audit.text.victim import open_text_victim
from situs.backbones import Backbone, create_backbone
from situs.data.tokeniser import Tokeniser
from situs.errors import SitusError
from situs.locks.equivariance.experiment import KeepDouble
from situs.locks.folder import names_in_file, write_model
from situs.locks.groups import invert_keys, permute_state, rename
from situs.locks.key import Key
from situs.locks.locking import check, lock, unlock
from situs.locks.manifest import NAME, permutations_of
from situs.locks.owner import model_groups, unlocking, with_key
from situs.measure import evaluate_accuracy
from situs.models import open_model

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
    if backbone.input.shape is None:
        return torch.randint(1, 31, (4, 9), generator=generator)
    return torch.randn(4, backbone.input.channels, *backbone.input.shape, generator=generator, dtype=torch.float64)


def exact(backbone: Backbone) -> Backbone:
    return backbone.double().eval()


def distance(one: Tensor, two: Tensor) -> float:
    """The largest difference, as a share of how much the logits spread."""
    return float((one - two).abs().max() / one.std())


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "cover", "seal"),
    [  # a seal is taken off before a model is looked at, whatever it is
        pytest.param(name, sealed, sealed, marks=pytest.mark.slow if sealed and name not in ("vit", "bert") else ())
        for name in MODELS
        for sealed in (False, True)
    ],
)
@torch.no_grad()
def test_identical_with_the_key_and_far_off_without(wholly_in_float64, model_folder, tmp_path, name, cover, seal):
    clear = exact(create_backbone(model_folder(name)))
    x = inputs(clear)
    wanted = clear(x)
    locked = lock(model_folder(name), KEY, tmp_path / "locked", cover=cover, seal=seal).path
    opened = exact(opened_model(locked, KEY))
    assert torch.equal(opened(x), wanted)
    assert all(torch.equal(value, clear.state_dict()[each]) for each, value in opened.state_dict().items())
    keyed = exact(keyed_model(locked, KEY))
    assert distance(wanted, keyed(x)) < 1e-10
    if not seal:
        assert distance(wanted, exact(create_backbone(locked))(x)) > 0.5


def test_a_manifest_of_another_model_is_one_sentence(model_folder, tmp_path):
    manifest = lock(model_folder("vit"), KEY, tmp_path / "locked").manifest
    with pytest.raises(SitusError, match="must both have"):
        model_groups(small_vit(width=32, heads=4), manifest)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
@torch.no_grad()
def test_inner_groups_alone_leave_the_function(wholly_in_float64, model_folder, tmp_path, name):
    """Cover is no lock: with the residual key taken off, the model works whatever the inner keys are."""
    clear = exact(create_backbone(model_folder(name)))
    locked = lock(model_folder(name), KEY, tmp_path / "locked", cover=True).path
    manifest = check(locked, KEY)
    backbone = exact(create_backbone(locked))
    names = names_in_file(backbone, {spec.name: spec for spec in manifest.specs()})
    groups = rename(manifest.groups, {name: own for own, name in names.items()})
    residual = [group for group in groups if group.kind == "residual"]
    inverse = invert_keys(permutations_of(manifest, KEY))
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), residual, inverse))
    x = inputs(clear)
    assert distance(clear(x), backbone(x)) < 1e-10


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "name", [name if name in ("vit", "bert") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_training_with_the_key_is_normal_training(wholly_in_float64, model_folder, tmp_path, name):
    """Gradients, and the weights after 8 AdamW steps in float64, agree after un-permuting."""
    clear = exact(create_backbone(model_folder(name)))
    manifest = lock(model_folder(name), KEY, tmp_path / "locked", cover=True).manifest
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
    for step in range(8):
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
    owner = keyed_model(locked, KEY).eval()
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


# --- every way into the blocks ------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["vit", "eva", "hf_vit"])
@torch.no_grad()
def test_features_of_every_layer_go_through_the_key(wholly_in_float64, model_folder, tmp_path, name):
    clear = exact(create_backbone(model_folder(name)))
    locked = lock(model_folder(name), KEY, tmp_path / "locked", cover=True).path
    owner, plain = exact(keyed_model(locked, KEY)), exact(create_backbone(locked))
    x = inputs(clear)

    def layers(backbone: Backbone) -> list[Tensor]:
        found: list[Tensor] = []
        stream = backbone.assemble(backbone.embed(x), backbone.positions())
        backbone.run_layers(stream, None, (lambda _, z: found.append(z),))
        return found

    wanted, got, wrong = layers(clear), layers(owner), layers(plain)
    assert len(wanted) == len(got) == clear.depth
    for depth in range(clear.depth):
        assert distance(wanted[depth], got[depth]) < 1e-10
        assert distance(wanted[depth], wrong[depth]) > 0.5
    torch.testing.assert_close(owner.blocks(owner.assemble(owner.embed(x), owner.positions())).z, got[-1])


@torch.no_grad()
def test_kept_users_of_layers_and_attention_see_the_clear_model(model_folder, tmp_path):
    """Per-layer features and attention maps as the commands take them."""
    from situs.backbones.attention_maps import watch_attention
    from situs.measure.features import layer_features

    clear = create_backbone(model_folder("vit")).eval()
    lock(model_folder("vit"), KEY, tmp_path / "locked")
    owner, plain = keyed_model(tmp_path / "locked", KEY).eval(), create_backbone(tmp_path / "locked").eval()
    x = inputs(clear).float()
    features = [layer_features(each, x) for each in (clear, owner, plain)]
    assert distance(features[0], features[1]) < 1e-4 < 0.3 < distance(features[0], features[2])
    maps: list[list[Tensor]] = [[], [], []]
    for backbone, seen in zip((clear, owner, plain), maps, strict=True):
        stream = backbone.assemble(backbone.embed(x), backbone.positions())
        watch_attention(backbone, stream, lambda _, weights, seen=seen: seen.append(weights))
    for depth in range(clear.depth):
        assert (maps[0][depth] - maps[1][depth]).abs().max() < 1e-4 < (maps[0][depth] - maps[2][depth]).abs().max()


@torch.no_grad()
def test_a_quarter_of_a_swin_goes_through_the_key(tmp_path):
    from situs.backbones.timm.backbone import enable_cells, encode_cells

    torch.manual_seed(0)
    dict(embed_dim=12, depths=(1, 1), num_heads=(2, 2), window_size=4)
    made = small_swin(64, heads=(2, 2), model_args={"window_size": 4})
    for parameter in made.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    lock(made, KEY, tmp_path / "locked")
    clear, owner, plain = (
        made.eval(),
        keyed_model(tmp_path / "locked", KEY).eval(),
        create_backbone(tmp_path / "locked"),
    )
    columns = clear.out_grid[1]
    cells = torch.arange(clear.out_grid[0] * columns // 4)
    units = (2 * (cells // (columns // 2)) * columns + 2 * (cells % (columns // 2))).expand(2, -1)
    x, unknown = torch.randn(2, 3, 64, 64), torch.zeros(12)
    got = []
    for backbone in (clear, owner, plain.eval()):
        enable_cells(backbone)
        none = torch.zeros(units.shape[1], dtype=torch.bool)
        got.append(encode_cells(backbone, backbone.embed(x), units, backbone.table, none, unknown).patches)
    assert distance(got[0], got[1]) < 1e-4 < 0.3 < distance(got[0], got[2])


def test_a_copy_of_the_owners_view_has_weights_and_key_of_its_own(model_folder, tmp_path):
    """What EMA and exports do: a deep copy must run on its own weights, with the key."""
    lock(model_folder("vit"), KEY, tmp_path / "locked")
    owner = keyed_model(tmp_path / "locked", KEY).eval()
    twin = copy.deepcopy(owner)
    x = inputs(owner).float()
    with torch.no_grad():
        before = owner(x)
        assert torch.equal(twin(x), before)
        for parameter in twin.parameters():
            parameter.add_(1)
        assert torch.equal(owner(x), before) and not torch.allclose(twin(x), before)
    assert set(owner.state_dict()) == set(create_backbone(tmp_path / "locked").state_dict())


def test_stages_show_only_their_last_layer_with_a_key(model_folder, tmp_path):
    lock(model_folder("swin"), KEY, tmp_path / "locked")
    owner = keyed_model(tmp_path / "locked", KEY)
    stream = owner.assemble(owner.embed(inputs(owner).float()), owner.positions())
    with pytest.raises(SitusError, match="the last layer"):
        owner.run_layers(stream, None, (lambda *_: None,))


@pytest.mark.thin(2)
@pytest.mark.parametrize("way", [check, opened_model, keyed_model])
@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_no_way_of_the_owner_trusts_an_altered_manifest(model_folder, tmp_path, way, seal):
    """Fields that nothing but the HMAC covers; and the tensors' codes exchanged for those of other bytes."""
    locked = lock(model_folder("vit"), KEY, tmp_path / "locked", seal=seal).path
    tables = json.loads((locked / NAME).read_text())
    for change in (dict(model="other"), dict(situs="0"), dict(hmac="0" * 64)):
        (locked / NAME).write_text(json.dumps(tables | change, indent=1) + "\n")
        with pytest.raises(SitusError, match="HMAC is wrong"):
            way(locked, KEY)
    (locked / NAME).write_text(json.dumps(tables, indent=2) + "\n")
    with pytest.raises(SitusError, match="altered"):
        way(locked, KEY)
    (locked / NAME).write_text(json.dumps(tables, indent=1) + "\n")
    assert way(locked, KEY)
    with pytest.raises(SitusError, match="locked with the key"):
        way(locked, Key(bytes(32)))


@pytest.mark.parametrize("way", [check, opened_model, keyed_model])
def test_no_way_of_the_owner_takes_an_altered_file(model_folder, tmp_path, way):
    locked = lock(model_folder("vit"), KEY, tmp_path / "locked").path
    for name in ("config.json", "README.md", "model.safetensors"):
        whole = (locked / name).read_bytes()
        (locked / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(SitusError, match="altered"):
            way(locked, KEY)
        (locked / name).write_bytes(whole)
    assert way(locked, KEY)


def test_a_sealed_model_of_words_is_evaluated_with_its_key(tmp_path):
    """Its tokeniser is sealed too: sentences become the ids of the clear folder, and no file is left behind."""
    pytest.importorskip("transformers")
    clear, sealed = write_folder(tmp_path / "clear", "bert", id2label={0: "no", 1: "yes"}), tmp_path / "sealed"
    lock(clear, KEY, sealed, seal=True)
    (tmp_path / "val.csv").write_text("sentence,label\nw1 w2 w3,no\nw4 w5,yes\n")
    before = sorted(path.name for path in sealed.iterdir())
    with pytest.raises(SitusError, match=r"is sealed .* incomplete without its key"):
        open_model(sealed)
    with pytest.raises(SitusError, match=r"tokenizer\.json is sealed"):
        Tokeniser(sealed)
    owner = unlocking(KEY)
    ours, theirs = (
        evaluate_accuracy(open_model(folder, unlock=unlock), tmp_path / "val.csv").accuracy
        for folder, unlock in ((sealed, owner), (clear, None))
    )
    assert ours == theirs and ours.count == 2
    victims = open_text_victim(sealed, unlock=owner), open_text_victim(clear)
    assert victims[0].coded(["w1 w2", "w9"]) == victims[1].coded(["w1 w2", "w9"])
    assert sorted(path.name for path in sealed.iterdir()) == before
    (sealed / "tokenizer.json").write_text("{")  # another model may lie there later: its own tokeniser is read
    with pytest.raises(SitusError, match="cannot be read"):
        Tokeniser(sealed)
