"""`export_model`: what is written is what was trained, in timm, in transformers and on the hub's terms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit

from situs.backbones import create_backbone
from situs.backbones.base import join
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.models import export
from situs.models.export import export_model, export_onnx
from situs.models.model import Model
from situs.models.open import MANIFEST
from situs.train.export import ModelProvenance
from situs.train.private import Spent

VITS = {
    "classes": ("supervised", {}),
    "no bias, a rectangle": ("supervised", {"qkv_bias": False}),
    "relu": ("supervised", {"act_layer": "relu"}),
    "no classifier": ("droppos", {}),
    "no positions": ("mp3", {}),
}


def told(name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch, /, **fields: Any) -> Any:
    """A method with every weight drawn anew, as the run that `export_model` reads."""
    torch.manual_seed(0)
    size = (8, 12) if shape.get("qkv_bias") is False else 8
    classes = {"num_classes": 3} if name == "supervised" else {}
    vit = small_vit(size, model_args=shape, **classes, **fields)
    settings = (
        {"decoder_width": 8, "decoder_heads": 2, "affinity": None, "mask_ratio": 0.25} if name == "droppos" else {}
    )
    method = small_method(name, vit, **settings).eval()
    with torch.no_grad():
        for value in method.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    provenance = ModelProvenance(name, classes=("a", "b", "c") if classes else None)
    monkeypatch.setattr(export, "_read", lambda *_: (method, provenance))
    return method


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", VITS)
def test_transformers_makes_the_same_of_a_plain_vit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModel, AutoModelForImageClassification

    name, shape = VITS[case]
    method = told(name, shape, monkeypatch)
    vit = method.backbone
    images = torch.randn(2, 3, *vit.input.shape)
    with torch.no_grad():
        features = vit.encode(vit.embed(images), vit.positions() if method.sees_positions else None)
        logits = vit.head(features)
    written = export_model("run", tmp_path / "x", form="hf")
    assert written.library == "transformers"
    assert written.error is not None and written.error < 1e-5
    base = AutoModel.from_pretrained(tmp_path / "x").eval()
    assert type(base).__name__ == "ViTModel"
    with torch.no_grad():
        torch.testing.assert_close(base(images).last_hidden_state, join(features), atol=1e-5, rtol=0)
    if "label" in method.needs_targets:
        whole = AutoModelForImageClassification.from_pretrained(tmp_path / "x").eval()
        with torch.no_grad():
            torch.testing.assert_close(whole(images).logits, logits, atol=1e-5, rtol=0)
        assert whole.config.id2label == {0: "a", 1: "b", 2: "c"}
    held = {path.name for path in (tmp_path / "x").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"} == held


def test_a_folder_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = told("supervised", {}, monkeypatch)
    error = export_model("run", tmp_path / "x").error
    assert error is not None and error < 1e-5
    real = export.run_reloaded

    def bent(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        return found._replace(logits=found.logits + 0.01 * found.logits.abs().max())

    monkeypatch.setattr(export, "run_reloaded", bent)
    with pytest.raises(SitusError, match=r"differ from the outputs of the model by 1\.0e-02"):
        export_model("run", tmp_path / "y")
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    with pytest.raises(SitusError, match="so nothing was written"):
        export_model("run", tmp_path / "x", force=True)  # what was there stays, and nothing lies beside it
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert method.backbone.source["library"] == "timm"


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_difference_counts_beside_the_largest_output_however_small_that_is(
    size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, real = told("supervised", {}, monkeypatch), export.run_reloaded
    with torch.no_grad():
        for value in method.backbone.model.head.parameters():
            value.mul_(size)

    def bent(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        return found._replace(logits=found.logits * torch.tensor([1.01, 1.0, 1.0]))

    expected = export._outputs(method)
    assert expected is not None and expected.logits is not None
    share = 0.01 * float(expected.logits[:, 0].abs().max() / expected.logits.abs().max())
    monkeypatch.setattr(export, "run_reloaded", bent)
    with pytest.raises(
        SitusError, match=rf"differ from the outputs of the model by {share:.1e} \(relative to the largest value"
    ):
        export_model("run", tmp_path / "y")


@pytest.mark.parametrize("scale", [{}, {"mean": [0.5], "std": [0.25]}])
@pytest.mark.parametrize("method", [None, "mp3"])
def test_the_card_of_a_graph_says_how_it_is_called(scale: dict[str, Any], method: str | None) -> None:
    about = {
        "model": "tiny", "method": method, "situs": "1.0", "input": {"shape": ["batch", 1, 8, 12], **scale},
        "output": {"name": "pooled"}, "protected": ["One.", "Two."],
    }  # fmt: skip
    card = export._card(about, "clips").splitlines()
    title, trained = "# tiny", "" if method is None else ", trained with the method mp3"
    assert f"{title}{trained}, as an ONNX graph" in card
    how = "by mean [0.5] and standard deviation [0.25]" if scale else "as in model.json"
    assert f"- Input `images`: float32, any number of clips of 1 × 8 × 12, normalised {how}" in card
    assert card[card.index("- Classes and preprocessing: see model.json") + 1 :][:2] == ["- One.", "- Two."]
    assert 'images = np.zeros([2, 1, 8, 12], dtype="float32")  # yours, normalised' in card
    assert 'pooled = session.run(None, {"images": images})[0]' in card


GRAPHS: dict[str, tuple[Any, dict[str | None, tuple[str, list[int]]]]] = {
    "vit": (
        lambda: small_vit((8, 12), num_classes=3),
        {None: ("logits", [3]), "pooled": ("pooled", [16]), "patches": ("patches", [6, 16])},
    ),
    "convolutional": (
        lambda: create_backbone("resnet26", num_classes=3, model_args={"channels": (8, 8, 8, 8)}),
        {"logits": ("logits", [3]), "pooled": ("pooled", [32])},
    ),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_beside_a_graph_lies_what_goes_in_and_what_comes_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra that writes the graph itself."""
    monkeypatch.setattr(export, "_write_graph", lambda graph, images, file, name: file.write_bytes(name.encode()))
    monkeypatch.setattr(export, "_check_graph", lambda *_: 0.0)
    make, wanted = GRAPHS[kind]
    data = DataConfig(img_size=(8, 12), channels=3, target="class")
    model = Model("tiny", make().eval(), None, data, ("a", "é", "c"))
    named, spent = ("tiny", None), None
    if kind == "vit":
        named, spent = ("ours", "supervised"), Spent(3.0, 1e-5, 1.0, 1.0, 4)
        model = replace(model, facts={"model": "ours", "method": "supervised"}, spent=spent)
    for features, (name, shape) in wanted.items():
        folder = tmp_path / str(features)
        export_onnx(model, folder, features)  # type: ignore[arg-type]
        assert (folder / "model.onnx").read_text() == name
        text = (folder / "model.json").read_text(encoding="utf-8")
        about = json.loads(text)
        assert (about["model"], about["method"]) == named
        assert about.get("protected") == (None if spent is None else [f"Differential privacy: {spent}."])
        assert about["input"]["shape"] == ["batch", 3, 8, 12]
        assert about["output"] == {"name": name, "shape": ["batch", *shape]}
        if name == "logits":
            assert (about["classes"], about["multi_label"]) == (["a", "é", "c"], False) and "é" in text
        else:
            assert "classes" not in about and "multi_label" not in about


def test_scrambled_blocks_go_into_no_graph(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / MANIFEST).write_text('{"format": "situs-lock"}')
    for form in ("onnx", "timm"):
        with pytest.raises(SitusError, match="it is a locked folder; unlock it first"):
            export_model(tmp_path / "locked", tmp_path / "x", form=form)
    assert [path.name for path in tmp_path.iterdir()] == ["locked"]


def test_what_transformers_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, said in (
        ({"init_values": 0.1, "qk_norm": True}, "norms of queries and keys and LayerScale"),
        ({"reg_tokens": 2}, "3 prefix tokens instead of CLS alone"),
        (
            {"class_token": False, "global_pool": "avg"},
            "0 prefix tokens .* a head whose input is not only the CLS token",
        ),
        ({"pre_norm": True}, "a norm before its blocks"),
    ):
        told("supervised", shape, monkeypatch)
        with pytest.raises(
            SitusError, match=f"{said}.*, which transformers' ViT does not have; export the model for timm"
        ):
            export_model("run", tmp_path / "x", form="hf")
    told("mp3", {}, monkeypatch, name="vit_small_patch16_rope_224")
    with pytest.raises(SitusError, match="Eva is not a plain ViT"):
        export_model("run", tmp_path / "x", form="hf")
    with pytest.raises(SitusError, match="applies only to an ONNX graph"):
        export_model("run", tmp_path / "x", features="patches")
    assert not (tmp_path / "x").exists()


def test_a_rotation_that_stays_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told("mp3", {}, monkeypatch, name="vit_small_patch16_rope_224")
    written = export_model("run", tmp_path / "x")
    assert written.differs and written.error is None
    assert "does not give the trained features" in written.notes[0]


def test_a_card_has_the_head_that_a_hub_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, task in (("supervised", "image-classification"), ("mp3", "image-feature-extraction")):
        told(name, {}, monkeypatch)
        export_model("run", tmp_path / name)
        head = (tmp_path / name / "README.md").read_text().split("---\n")[1]
        assert head == f"library_name: timm\npipeline_tag: {task}\ntags:\n- situs\n- {name}\n"
        assert json.loads((tmp_path / name / "config.json").read_text())["architecture"] == "vit_tiny_patch16_224"


def test_a_model_of_transformers_does_not_go_to_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from situs.backbones.hf.convert import as_transformers

    method = told("supervised", {}, monkeypatch)
    other = as_transformers(method.backbone)
    assert as_transformers(other) is other
    method.backbone = other
    with pytest.raises(SitusError, match="is not a model of the library timm"):
        export_model("run", tmp_path / "x", form="timm")
    assert replace(export_model("run", tmp_path / "x"), notes=[]).library == "transformers"
