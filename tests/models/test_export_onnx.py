"""ONNX graphs against the model, run by onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_swin, small_vit

from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.models.export import export_onnx
from situs.models.model import Model
from situs.train.private import Spent

pytestmark = pytest.mark.slow


def a_model(backbone: Any, method: Any = None, **fields: Any) -> Model:
    torch.manual_seed(0)
    with torch.no_grad():
        for value in backbone.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    data = DataConfig(
        img_size=backbone.input.shape, channels=backbone.input.channels, target=fields.pop("target", "class")
    )
    return Model("tiny", backbone.eval(), method, data, ("a", "b", "c"), {"model": backbone.name}, **fields)


def through_onnx(folder: Path, images: torch.Tensor) -> torch.Tensor:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.mark.parametrize("features", ["logits", "pooled", "patches"])
def test_a_graph_gives_what_the_model_gives_for_any_number_of_images(features: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")  # of the extra that exports
    model = a_model(small_vit((8, 12), num_classes=3, model_args={"reg_tokens": 2, "init_values": 0.3}))
    done = export_onnx(model, tmp_path / "x", features)
    assert done.error is not None and done.error < 1e-5
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 8, 12)
        with torch.no_grad():
            found = model.backbone.encode(model.backbone.embed(images), model.backbone.positions())
            wanted = {"patches": found.patches, "pooled": model.backbone.pooled(found)}.get(features)
            wanted = model.backbone.head(found) if wanted is None else wanted
        torch.testing.assert_close(through_onnx(tmp_path / "x", images), wanted, atol=1e-4, rtol=0)
    about = json.loads((tmp_path / "x" / "model.json").read_text())
    assert about["output"]["shape"] == ["batch", *wanted.shape[1:]]
    assert about["input"]["shape"] == ["batch", 3, 8, 12]
    assert about.get("classes") == (["a", "b", "c"] if features == "logits" else None)
    card = (tmp_path / "x" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: onnx\n") and f"Output `{features}`" in card
    with pytest.raises(SitusError, match="is not empty"):
        export_onnx(model, tmp_path / "x", features)


def test_a_model_without_positions_leaves_them_out(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")  # of the extra that exports
    method = small_method("mp3")
    spent = Spent(3.0, 1e-5, 1.0, 1.0, 4)
    model = a_model(method.backbone, method, classifier=False, positions=False, spent=spent)
    export_onnx(model, tmp_path / "x", "patches")
    assert f"model.json\n- Differential privacy: {spent}.\n\n" in (tmp_path / "x" / "README.md").read_text()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        wanted = model.backbone.encode(model.backbone.embed(images), None).patches
    torch.testing.assert_close(through_onnx(tmp_path / "x", images), wanted, atol=1e-4, rtol=0)


def test_swin_goes_too_and_what_does_not_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = a_model(small_swin(num_classes=3))
    assert export_onnx(model, tmp_path / "swin").error is not None
    assert through_onnx(tmp_path / "swin", torch.randn(4, 3, 32, 32)).shape == (4, 3)
    bare = a_model(small_vit(), classifier=False)
    with pytest.raises(SitusError, match="has no trained classifier"):
        export_onnx(bare, tmp_path / "y", "logits")
    with pytest.raises(SitusError, match="predicts masks"):
        export_onnx(a_model(small_vit(), target="mask"), tmp_path / "y")
    assert not (tmp_path / "y").exists()
