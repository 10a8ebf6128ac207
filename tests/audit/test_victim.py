"""Own modules however they are given, and the epoch that a run's method stands at."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_vit
from outcomes import reason
from PIL import Image
from torch import Tensor
from torch.nn import functional

import situs
from situs.audit import PatchEmbedding, audit_gradients
from situs.audit.client import victim_gradients
from situs.audit.victim import labels_for, load_test_set, open_predictor, open_victim
from situs.config import from_dict
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.locks import lock, new_key
from situs.models import open_model
from situs.pages import publish
from situs.train.run import RunConfig, train_run

MODULE = """
import torch
from torch import nn
from situs.audit import adapt


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.patch, self.table = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 16, width))
        self.block, self.out = nn.TransformerEncoderLayer(width, 2, 48, 0.0, batch_first=True), nn.Linear(width, 6)

    def forward(self, x):
        return self.out(self.block(self.patch(x).flatten(2).transpose(1, 2) + self.table).mean(dim=1))


class Wide(Net):
    def __init__(self, width):
        super().__init__(width)


def half():
    return Net().half()


def double():
    return adapt(Net().double(), 16)


def broken():
    return {}["missing"]


instance, number = Net(), 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_victim_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_torn.py").write_text("raise ValueError('not today')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize(
    ("which", "told"),
    [("Net", None), ("instance", None), ("half", "weights in float16"), ("double", "weights in float64")],
)
def test_own_modules_of_every_kind(which: str, told: str | None, own: str) -> None:
    victim = open_victim(f"{own}:{which}", img_size=(16, 16))
    backbone = victim.model.backbone
    assert {p.dtype for p in backbone.parameters()} == {torch.float32}
    assert reason(PatchEmbedding(), backbone) is None
    assert told is None or victim.notes["precision"].startswith(told)
    assert told is not None or "precision" not in victim.notes
    assert backbone(torch.zeros(1, 3, 16, 16)).shape == (1, 6)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (":Wide", "called with no arguments, it raised TypeError.*'width'"),
        (":broken", "it raised KeyError"),
        (":number", "is int; it must be an nn.Module"),
        ("_torn:Net", "ValueError: not today"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(which: str, said: str, own: str) -> None:
    with pytest.raises(SitusError, match=said):
        open_victim(f"{own}{which}", img_size=(16, 16))


def test_a_multi_label_model_is_no_victim_of_attackers_who_know_one_class() -> None:
    model = open_model(small_vit(num_classes=3).eval())
    assert model.input is not None and open_victim(model).model is model
    with pytest.raises(SitusError, match="is multi-label, and attacks support only one class"):
        open_victim(replace(model, input=replace(model.input, multi_label=True)))


@pytest.mark.parametrize(("asked", "outputs"), [({"model_args": {"num_classes": 0}}, 7), ({}, 1000)])
def test_a_name_without_weights_or_classes_has_random_ones_and_as_many_as_asked(
    asked: dict[str, Any], outputs: int
) -> None:
    """timm has no weights of test_vit4. Without a classifier it gives its pooled features."""
    victim = open_victim("test_vit4", img_size=32, classes=7, **asked)
    assert victim.model.backbone(torch.zeros(1, 3, 32, 32)).shape == (1, outputs)
    assert victim.model.facts["weights"] == "random"


def test_a_model_without_a_gradient_is_no_victim() -> None:
    with pytest.raises(SitusError, match=r"^MODEL .*its cross entropy is always 0"):
        open_victim(small_vit(num_classes=1))
    broken = small_vit(num_classes=5)
    with torch.no_grad():
        next(broken.parameters())[0] = torch.nan
    with pytest.raises(SitusError, match=r"contains NaN or infinity, so no gradient is finite$"):
        open_victim(broken)


def test_data_without_an_image_are_refused() -> None:
    nothing = TensorSource(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), None, None, "nothing")
    with pytest.raises(SitusError, match="nothing: holds no images that can be read: it is empty") as caught:
        load_test_set(open_victim(small_vit(num_classes=3).eval()), nothing)
    assert caught.value.field == "data"


def test_sentences_are_no_images_and_the_flag_for_them_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("a sentence\n")
    with pytest.raises(SitusError, match=r"holds sentences, .*audit_texts"):
        load_test_set(open_victim(small_vit(num_classes=5)), file)


def test_a_locked_model_that_is_open_already(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    locked = lock(small_vit(), new_key(tmp_path / "key"), tmp_path / "locked")
    by_place, open_already = open_victim(locked.path), open_victim(open_model(locked.path))
    assert by_place.notes["lock"].startswith(f"locked with the key {locked.manifest.key_id}: the channels")
    assert open_already.notes["lock"].startswith("locked: the channels")


@pytest.mark.parametrize(("train", "epoch"), [({"epochs": None, "max_steps": 7}, 2), ({"epochs": 2}, 1)])
def test_a_run_stands_at_the_epoch_of_its_last_step(train: dict[str, Any], epoch: int, tmp_path: Path) -> None:
    for number in range(36):
        folder = tmp_path / "data" / "train" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (7 * number, 90, 255 - number)).save(folder / f"{number}.png")
    config = from_dict(
        RunConfig,
        {
            "method": {"name": "mjp", "mask_ratio": 0.4},
            "backbone": {"name": "vit_tiny_patch16_224", "patch_size": 4,
                         "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2}},
            "data": {"path": str(tmp_path / "data"), "img_size": 8, "batch": 12, "workers": 0, "held_out": 0.0},
            "train": {**train, "seed": 0, "precision": "fp32"},
        },
    )  # fmt: skip
    train_run(config, out=tmp_path / "run", device="cpu")
    assert open_victim(str(tmp_path / "run")).when.epoch == epoch


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tones of two words, one of them silent for a while."""
    import soundfile

    root, chance = tmp_path_factory.mktemp("clips"), np.random.default_rng(0)
    for number, (word, pitch) in enumerate((("yes", 300), ("no", 900), ("no", 2500))):
        wave = 0.4 * np.sin(2 * np.pi * pitch * np.arange(16000) / 16000) + 0.05 * chance.standard_normal(16000)
        wave[: 3000 * number] = 0.0
        (root / word).mkdir(exist_ok=True)
        soundfile.write(root / word / f"{number:08x}_nohash_0.wav", wave, 16000)
    (root / "testing_list.txt").write_text("")
    return root


def test_spectrograms_come_back_in_the_range_that_is_stated(clips: Path, tmp_path: Path) -> None:
    """A ViT on a rectangular grid: exact, without bytes to read, and scored in deviations, not in grey levels."""
    torch.manual_seed(0)
    victim = small_vit((40, 98), patch_size=(8, 14), in_chans=1, width=48, depth=1, num_classes=4)
    audit = audit_gradients(victim, clips, count=3, attacks=["patchembed"], defences=["none", "noise=1e-4"])
    exact, noisy = audit.pairs
    assert (exact.exact, exact.to_the_byte) == (3, 0) and "clips recovered exactly" in audit.summary().sentence
    assert all("bytes" not in fact for fact in exact.facts)
    test = load_test_set(open_victim(victim), clips, 3)
    assert (test.stored, test.things, len(test), test.names[0]) == (False, "clips", 3, "no/00000001_nohash_0.wav")
    cut = test.pixels.double().clamp(-3, 3)
    assert torch.allclose(6 * audit.images.double() - 3, cut, atol=1e-6)
    assert abs(float(test.pixels.mean())) < 0.02  # normalised by the set's own mean
    found = 6 * noisy.shown.double() - 3
    by_hand = 10 * (36 / (found - cut).square().mean(dim=(1, 2, 3))).log10()
    assert torch.allclose(torch.tensor(noisy.scores["psnr"]).double(), by_hand, atol=1e-3)
    page = publish(audit, tmp_path).read_text()
    assert (
        "The whole range is 6 standard deviations" in page
        and "The attacker assumes nothing about the values of clips or their range" in page
        and "pixel value is a byte" not in page
    )
    assert "3 of 3 clips were recovered" in page and "the normalisation of clips" in page
    assert "Time runs from left to right" in page
    assert (
        "recovered no clip exactly"
        in publish(
            replace(audit, findings=[each for each in audit.findings if each.defence != "none"]), tmp_path / "noisy"
        ).read_text()
    )


def test_the_paper_s_model_over_frames_says_why_it_is_not_solved(clips: Path) -> None:
    torch.manual_seed(0)
    frames = {"patch_size": (40, 1), "in_chans": 1, "num_classes": 4, "depth": 1}
    fixed = small_vit((40, 98), positions="sincos", width=32, **frames)
    audit = audit_gradients(fixed, clips, count=2, attacks=["patchembed"], defences=["none"])
    assert "the position table is fixed or frozen" in str(audit.pairs[0].why("refused"))
    loose = small_vit((40, 98), positions="learned", width=32, **frames)
    found = audit_gradients(loose, clips, count=1, attacks=["patchembed"], defences=["none"]).pairs[0]
    assert found.exact == 0 and str(found.caveat).endswith("he solution of least norm is shown")
    wide = small_vit((40, 98), positions="learned", width=112, **frames)  # more channels than frames
    found = audit_gradients(wide, clips, count=2, attacks=["patchembed"], defences=["none"]).pairs[0]
    assert found.exact == 2


def test_a_predictor_that_is_not_there_is_named_as_such() -> None:
    with pytest.raises(SitusError, match="predictor=nowhere: 'nowhere' is neither") as stop:
        open_predictor("nowhere", open_victim(small_vit()).model.backbone)
    assert stop.value.field == "predictor"


@pytest.mark.parametrize("named", ["multi_label_classification", "regression", "single_label_classification", None])
def test_another_loss_than_the_audited_one_is_said(named: str | None, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(image_size=8, patch_size=4, num_labels=3, problem_type=named, **shape)
    asked = {"attacks": ["patchembed"], "defences": ["none"], "count": 1}
    found = audit_gradients(ViTForImageClassification(config), "samples", **asked)
    publish(found, tmp_path)
    said = "" if named in (None, "single_label_classification") else f"problem_type {named}"
    for file in ("gradients.html", "gradients.json"):
        assert ("another loss" in (tmp_path / file).read_text()) == bool(said) and said in found.notes.get("loss", "")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.multi_margin_loss(logits, labels)


def test_a_loss_of_ones_own_makes_the_gradients(tmp_path: Path) -> None:
    """To autograd's own; the closed form reads the image of a hinge as it does of cross entropy; by file as well."""
    (tmp_path / "own_loss.py").write_text("from torch.nn.functional import multi_margin_loss as margin\nfive = 5\n")
    torch.manual_seed(0)
    backbone = small_vit(num_classes=5, width=48).eval()
    images, labels = torch.randn(3, 3, 16, 16), torch.tensor([1, 4, 0])
    parameters = dict(backbone.named_parameters())
    wanted = torch.autograd.grad(margin(backbone(images), labels), list(parameters.values()), allow_unused=True)
    for loss in (margin, f"{tmp_path}/own_loss.py:margin"):
        victim = open_victim(backbone, loss=loss)
        sent = victim_gradients(victim.trains, images, labels)
        for name, gradient in zip(parameters, wanted, strict=True):
            assert torch.equal(sent[name], torch.zeros_like(sent[name]) if gradient is None else gradient), name
        assert "margin" in victim.notes["loss"] and "the attacker knows" in victim.notes["loss"]
        assert "/" not in victim.notes["loss"].partition(":")[0]  # no folders
        data = [(torch.rand(3, 16, 16), index) for index in range(2)]
        found = audit_gradients(backbone, data, loss=loss, attacks=["patchembed"], defences=["none"])
        assert [pair.exact for pair in found.pairs] == [2]
        assert "margin" in found.notes["loss"]
    refused: list[tuple[Any, str]] = [
        (
            lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none"),
            r"a tensor \[2\], but must",
        ),
        (lambda _, labels: labels.float().mean(), "depends on the logits"),
        (lambda logits: logits.mean(), "raised TypeError"),
        (f"{tmp_path}/own_loss.py:five", "must be a function"),
        (f"{tmp_path}/none.py:margin", "there is no file"),
    ]
    for loss, said in refused:
        with pytest.raises(SitusError, match=said):
            open_victim(backbone, loss=loss)

    def one_sided(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits[:, 0], labels.float())

    one = open_victim(small_vit(num_classes=1), loss=one_sided)
    assert labels_for(one.model, torch.tensor([0, 1]), 2).tolist() == [0, 1]


def test_a_run_is_audited_on_its_own_data(tmp_path: Path) -> None:
    data = [(torch.rand(3, 16, 16), index % 2) for index in range(6)]
    small: dict[str, Any] = {"steps": 1, "batch": 6, "device": "cpu", "quiet": True}
    tiny = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    shape = {"name": "vit_tiny_patch16_224", "patch_size": 8, "model_args": tiny}
    table = {"path": data, "img_size": 16, "held_out": 0.0}
    run = situs.pretrain(table, method="supervised", backbone=shape, out=tmp_path / "run", **small)
    asked: dict[str, Any] = {"count": 2, "attacks": ["april"], "defences": ["none"]}
    own, named = audit_gradients(run, **asked), audit_gradients(run, data, **asked)
    assert [pair.scores["psnr"] for pair in own.pairs] == [pair.scores["psnr"] for pair in named.pairs]
    with pytest.raises(SitusError, match="does not say on which data it was trained; give the images"):
        audit_gradients(small_vit(num_classes=3), **asked)


def test_recordings_are_audited_as_any_other_samples(tmp_path: Path) -> None:
    """A run on series, of which nothing in the audit knows: windows come back exactly from one step."""
    chance = np.random.default_rng(0)
    for name in ("calm", "fast"):
        (tmp_path / "series" / name).mkdir(parents=True)
        for number in range(6):
            wave = chance.normal(size=(2, 40)).cumsum(axis=1).astype(np.float32)
            np.save(tmp_path / "series" / name / f"{number}.npy", wave)
    shape = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    asked = {
        "data": {"path": str(tmp_path / "series"), "kind": "series", "series": {"steps": 32}, "workers": 0, "batch": 4},
        "backbone": {"name": "vit_tiny_patch16_224", "patch_size": (1, 4), "model_args": shape},
        "method": {"name": "supervised"},
        "optim": {"warmup_epochs": 0},
        "train": {"max_steps": 1},
    }
    train_run(from_dict(RunConfig, asked), out=tmp_path / "run", device="cpu", quiet=True)
    audit = audit_gradients(
        tmp_path / "run", count=5, attacks=["patchembed"], defences=["none"], fail_above="blind", device="cpu"
    )
    assert audit.provenance.things == "recordings" and audit.findings[0].exact == 5
    assert audit.ruling is not None and audit.ruling.status == 3
    assert "5 of 5 recordings" in str(audit)
