"""Weights that exist: a run, an export, a published file; what is taken, what is left, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from tiny_texts import write_folder
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.timm.create import pretrained_state
from situs.core.position import resample_table
from situs.errors import SitusError
from situs.methods import MAE, MP3, MAEConfig, Method, MP3Config, Supervised, SupervisedConfig
from situs.models.open import open_model
from situs.models.start import addressed_model, adopted, finetune_source, initialise
from situs.train.checkpoint import RunFolder
from situs.train.export import ModelProvenance, write_export


def vit(seed: int, size: int = 12, **fields: Any) -> Backbone:
    """12 pixels are 3 x 3 patches."""
    torch.manual_seed(seed)
    backbone = small_vit(size, **{"num_classes": 0, **fields})
    with torch.no_grad():  # so that no two tensors are equal by being 0 or 1
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone


def taken(backbone: Backbone, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in backbone.model.state_dict().items() if not torch.equal(value, before[name])}


def put(backbone: Backbone, source: Path, **asked: Any) -> tuple[set[str], list[str]]:
    """The names that changed, and what was said."""
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    said = initialise(backbone, str(source), **asked)
    return taken(backbone, before), said


def save_run(path: Path, method: Method, ema: dict[str, Tensor] | None = None) -> Path:
    files = {"model": method.state_dict()} | ({} if ema is None else {"ema": ema})
    RunFolder.create(path, {}).save(1, files, {}, keep=1)
    return path


def own_names(backbone: Backbone) -> set[str]:
    return set(backbone.model.state_dict())


# --- a run --------------------------------------------------------------------------------------------------


def test_a_run_gives_its_model_and_not_what_its_method_added(tmp_path: Path) -> None:
    source = vit(0)
    run = save_run(tmp_path / "run", MP3(source, MP3Config(0.5)))
    target = vit(1)
    changed, said = put(target, run)
    assert changed == own_names(target)
    assert taken(target, source.model.state_dict()) == set()
    assert said == [f"started from {run}: {len(changed)} tensors"]


def test_the_mean_of_the_weights_goes_before_the_weights(tmp_path: Path) -> None:
    method, mean = MP3(vit(0), MP3Config(0.5)), vit(2)
    ema = {f"backbone.model.{name}": value for name, value in mean.model.state_dict().items()}
    run = save_run(tmp_path / "run", method, ema)
    target = vit(1)
    put(target, run)
    assert taken(target, mean.model.state_dict()) == set()


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {})
    with pytest.raises(SitusError, match=r"run: the run has no checkpoint yet$"):
        initialise(vit(0), str(tmp_path / "run"))


POSITIONS = {
    "learned": ({"pos_embed"}, set()),
    "sincos": ({"pos_embed"}, set()),
    "none": (set(), {"pos_embed"}),
    "relative": ({f"blocks.{i}.attn.rel_pos.relative_position_bias_table" for i in range(2)}, {"pos_embed"}),
}
"""kind -> (names that stay as they were made, names of the run that the model has not)."""


@pytest.mark.parametrize("kind", POSITIONS)
def test_other_positions_take_everything_else(kind: Any, tmp_path: Path) -> None:
    source = vit(0)
    run = save_run(tmp_path / "run", MP3(source, MP3Config(0.5)))
    target = vit(1, positions=kind, num_classes=5)
    fresh, unknown = POSITIONS[kind]
    changed, said = put(target, run, positions=False)
    buffers = {name for name in own_names(target) if name.endswith("relative_position_index")}
    new = fresh | {"head.weight", "head.bias"}
    assert changed == own_names(target) - new - buffers
    assert changed == set(source.model.state_dict()) - unknown - fresh
    state = source.model.state_dict()
    assert all(torch.equal(target.model.state_dict()[name], state[name]) for name in changed - {"cls_token"})
    torch.testing.assert_close(prefix(target), prefix(source))
    assert said[0] == f"started from {run}: {len(changed)} tensors"
    told = said[1].removeprefix("left as initialised: ").split(", ")
    assert new <= set(told)


def prefix(backbone: Backbone) -> Tensor:
    """CLS and registers as the blocks see them, with their rows of the table."""
    empty = torch.zeros(1, backbone.num_tokens, backbone.dim)
    return backbone.assemble(empty, None).z[:, : backbone.num_prefix].detach()


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch16_reg4_gap_256"]
)
@pytest.mark.parametrize("size", [32, 48])
def test_prefix_tokens_stay_what_they_were(name: str, size: int, tmp_path: Path) -> None:
    """A table's first rows are added to CLS and its like: they are no place, and a new table must not lose them."""

    def made(seed: int, size: int) -> Backbone:
        torch.manual_seed(seed)
        backbone = small_vit(size, name=name, patch_size=None, num_classes=0)
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return backbone

    source, target = made(0, 32), made(1, size)
    table = target.model.pos_embed.detach().clone()
    initialise(target, str(save_run(tmp_path / "run", MP3(source, MP3Config(0.5)))), positions=False)
    assert torch.equal(target.model.pos_embed, table)
    torch.testing.assert_close(prefix(target), prefix(source))


def test_positions_may_stay_as_the_model_was_made(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", MP3(vit(0), MP3Config(0.5)))
    table = vit(1).model.pos_embed.detach().clone()
    for positions, stays in ((False, True), (True, False)):
        target = vit(1)
        initialise(target, str(run), positions=positions)
        assert torch.equal(target.model.pos_embed, table) is stays


def test_a_classifier_for_other_classes_stays_new(tmp_path: Path) -> None:
    source = vit(0, num_classes=3)
    run = save_run(tmp_path / "run", Supervised(source, SupervisedConfig()))
    target = vit(1, num_classes=5)
    changed, said = put(target, run)
    assert changed == own_names(target) - {"head.weight", "head.bias"}
    assert said == [f"started from {run}: {len(changed)} tensors", "left as initialised: head.bias, head.weight"]
    same, _ = put(vit(1, num_classes=3), run)
    assert {"head.weight", "head.bias"} <= same


def swin(seed: int, size: int = 32, **fields: Any) -> Backbone:
    """Swin with a table of its own: 32 pixels are 8 x 8 patches."""
    torch.manual_seed(seed)
    made = {"positions": "learned", "num_classes": 0, "model_args": {"window_size": 4}, **fields}
    return small_swin(size, width=8, **made)


@pytest.mark.parametrize("way", ["run", "export"])
def test_swins_table_beside_the_model_comes_along(way: str, tmp_path: Path) -> None:
    source = swin(0, num_classes=3)
    method = Supervised(source, SupervisedConfig())
    if way == "run":
        save_run(tmp_path / "run", method)
    else:
        write_export(method, tmp_path / "export", ModelProvenance(method="supervised"))
    target = swin(1, num_classes=3)
    said = initialise(target, str(tmp_path / way))
    assert torch.equal(target.table, source.table)
    assert said[0].endswith(f": {len(source.state_dict())} tensors")
    larger = swin(1, 64)
    initialise(larger, str(tmp_path / way))
    assert torch.equal(larger.table, resample_table(source.table.detach(), (8, 8), (16, 16)))
    for fields, asked in ((dict(), dict(positions=False)), (dict(positions="sincos"), dict(positions=False))):
        target, made = swin(1, **fields), swin(1, **fields)
        said = initialise(target, str(tmp_path / way), **asked)
        assert torch.equal(target.table, made.table) and said[1] == "left as initialised: table"
    without = swin(1, positions=None, num_classes=3)
    assert len(initialise(without, str(tmp_path / way))) == 1
    plain = MP3(vit(0), MP3Config(0.5))
    with pytest.raises(SitusError, match="does not fit"):
        initialise(swin(1), str(save_run(tmp_path / "vit", plain)))


# --- an export, a published file ----------------------------------------------------------------------------


def test_an_export_gives_the_same_features(tmp_path: Path) -> None:
    method = MAE(vit(0), MAEConfig(0.5, 16, 1, 2))
    write_export(method, tmp_path / "export", ModelProvenance(method="mae"))
    target = vit(1)
    changed, _ = put(target, tmp_path / "export")
    assert changed == own_names(target)
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(target.eval()(images), method.backbone.eval()(images))


def published(backbone: Backbone) -> dict[str, Any]:
    """A checkpoint as MAE's authors publish theirs: the encoder among the decoder's tensors, under "model"."""
    beside = {
        "mask_token": torch.randn(1, 1, 8),
        "decoder_pos_embed": torch.randn(1, 10, 8),
        "decoder_embed.weight": torch.randn(8, 16),
        "decoder_blocks.0.norm1.weight": torch.randn(8),
        "decoder_pred.bias": torch.randn(48),
    }
    return {"model": {**backbone.model.state_dict(), **beside}, "epoch": 799}


def test_a_published_file_for_another_size_has_its_table_resampled(tmp_path: Path) -> None:
    source = vit(0)
    torch.save(published(source), tmp_path / "mae.pth")
    target = vit(1, size=24)
    changed, said = put(target, tmp_path / "mae.pth")
    assert changed == own_names(target)
    assert said[0] == f"started from {tmp_path / 'mae.pth'}: {len(changed)} tensors"
    assert said[1].endswith(
        "not of the model): mask_token, decoder_pos_embed, decoder_embed, decoder_blocks, decoder_pred"
    )
    given, found = source.model.pos_embed[0].detach(), target.model.pos_embed[0].detach()
    assert torch.equal(found[0], given[0])  # the row of CLS has no place on the grid
    torch.testing.assert_close(found[1:], resample_table(given[1:], (3, 3), (6, 6)))
    rest = own_names(target) - {"pos_embed"}
    state = source.model.state_dict()
    assert all(torch.equal(target.model.state_dict()[name], state[name]) for name in rest)


def test_a_name_with_a_file_and_a_module_of_a_file_give_their_weights(tmp_path: Path) -> None:
    source = vit(0, num_classes=3)
    torch.save(source.model.state_dict(), tmp_path / "w.pth")
    (tmp_path / "own.py").write_text(
        "import timm, torch\n\n\ndef net():\n"
        "    shape = dict(img_size=12, patch_size=4, depth=2, embed_dim=16, num_heads=2, num_classes=3)\n"
        "    made = timm.create_model('vit_tiny_patch16_224', **shape)\n"
        f"    made.load_state_dict(torch.load({str(tmp_path / 'w.pth')!r}))\n    return made\n"
    )
    for given in (f"vit_tiny_patch16_224={tmp_path / 'w.pth'}", f"{tmp_path / 'own.py'}:net"):
        target = vit(1, num_classes=3)
        _, said = put(target, given)
        assert said == [f"started from {given}: {len(own_names(target))} tensors"]
        state = source.model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in target.model.state_dict().items())
    for weights_alone in (tmp_path / "w.pth", f"{tmp_path / 'own.py'}:net", "no_such_model", f"{tmp_path / 'none'}"):
        assert adopted(str(weights_alone)) == {}
    assert adopted(f"vit_tiny_patch16_224={tmp_path / 'w.pth'}")["backbone"]["name"] == "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("make", "positions", "beside"),
    [(small_swin, "learned", "learned"), (small_swin, None, None), (small_vit, "learned", None)],
)
def test_a_model_is_made_again_with_the_table_beside_it(make: Any, positions: Any, beside: Any, tmp_path: Path) -> None:
    """In memory as from its folder. The table of a ViT is within the model, which brings it."""
    backbone = make(positions=positions)
    write_export(Supervised(backbone, SupervisedConfig()), tmp_path / "x", ModelProvenance("supervised"))
    in_memory = addressed_model(open_model(tmp_path / "x"))
    assert [finetune_source(str(source)).backbone.positions for source in (tmp_path / "x", in_memory)] == [beside] * 2


@pytest.mark.parametrize(("lost", "more"), [(5, ""), (6, ""), (7, " …")])
def test_six_of_the_tensors_that_stay_new_are_named(lost: int, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = vit(1, num_classes=3)
    state = dict(vit(0, num_classes=3).model.state_dict())
    names = sorted(state)[:lost]
    monkeypatch.setattr("situs.models.start.MAY_BE_NEW", tuple(names))
    monkeypatch.setattr("situs.models.start._read", lambda *_: ({n: v for n, v in state.items() if n not in names}, {}))
    said = initialise(target, "x")
    assert said[0] == f"started from x: {len(state) - lost} tensors"
    assert said[1] == f"left as initialised: {', '.join(names[:6])}{more}"


def test_mean_pooling_takes_a_new_norm(tmp_path: Path) -> None:
    """MAE fine-tunes so: the encoder's last norm gives way to one after the mean."""
    torch.save(published(vit(0)), tmp_path / "mae.pth")
    target = vit(1, num_classes=5, model_args={"global_pool": "avg"})
    changed, said = put(target, tmp_path / "mae.pth")
    new = {"fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"}
    assert changed == own_names(target) - new
    assert said[1] == f"left as initialised: {', '.join(sorted(new))}"


# --- what does not fit --------------------------------------------------------------------------------------


def refusal(backbone: Backbone, source: Path) -> str:
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    with pytest.raises(SitusError) as caught:
        initialise(backbone, str(source))
    assert taken(backbone, before) == set()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_does_not_fit_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    deep = vit(0, depth=3)
    torch.save(deep.model.state_dict(), tmp_path / "deep.pth")
    said = refusal(vit(1), tmp_path / "deep.pth")
    assert said.startswith(
        f"init={tmp_path / 'deep.pth'} does not fit the model: 12 tensors not in the model (first: blocks.2"
    )
    wide = vit(0, width=32)
    torch.save(wide.model.state_dict(), tmp_path / "wide.pth")
    assert "of another shape (first: cls_token [1, 1, 32] where the model has [1, 1, 16]" in refusal(
        vit(1), tmp_path / "wide.pth"
    )
    with pytest.raises(SitusError, match="of another shape"):
        initialise(vit(1), str(tmp_path / "wide.pth"), positions=False)
    half = {name: value for name, value in vit(0).model.state_dict().items() if "blocks.1" not in name}
    torch.save(half, tmp_path / "half.pth")
    assert "12 tensors missing (first: blocks.1" in refusal(vit(1), tmp_path / "half.pth")


def test_a_table_that_is_no_square_is_refused(tmp_path: Path) -> None:
    state = vit(0).model.state_dict()
    torch.save(state | {"pos_embed": torch.randn(1, 1 + 8, 16)}, tmp_path / "odd.pth")
    said = refusal(vit(1), tmp_path / "odd.pth")
    assert "its position table has 9 rows. The model needs 1 row for prefix tokens. The other rows must" in said


@pytest.mark.parametrize("field", ["init", "weights"])
def test_published_weights_out_of_reach_are_one_sentence(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("timm.create_model", unreachable)
    with pytest.raises(SitusError, match=r"^vit_tiny_patch16_224: .*\(ConnectionError\).*") as caught:
        pretrained_state("vit_tiny_patch16_224", field)
    assert caught.value.field == field


def test_neither_a_file_nor_a_name(tmp_path: Path) -> None:
    said = refusal(vit(1), Path("vit_nosuch"))
    assert said == "init=vit_nosuch: must be a run, an export, a weight file or a timm model"
    (tmp_path / "text.pth").write_text("no weights")
    assert "text.pth: is not a torch file that can be loaded" in refusal(vit(1), tmp_path / "text.pth")


def test_a_head_that_is_the_table_of_words_is_not_called_new(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_folder(tmp_path / "gpt2", "gpt2", width=16)
    backbone = open_model(tmp_path / "gpt2").backbone
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(1)
    said = initialise(backbone, str(tmp_path / "gpt2"))
    assert all(torch.equal(value, state[name]) for name, value in backbone.model.state_dict().items())
    assert "lm_head.weight" in state and len(said) == 1  # and nothing is left as initialised
