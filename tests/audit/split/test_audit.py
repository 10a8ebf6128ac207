"""`audit_split` from images to verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from safetensors.torch import save_file
from sent import CLASSES, classifier, pictures
from tiny_texts import write_folder
from torch import nn

from situs.audit.deadline import Deadline
from situs.audit.split.attackers import attack
from situs.audit.split.audit import CURVE, audit_split
from situs.backbones import BackboneConfig, create_backbone
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.locks.veil import parse_veils, token_scale
from situs.models import open_model
from situs.pages import make_page


def source(count: int = 70) -> TensorSource:
    images = (pictures(count) * 255).round().byte()
    return TensorSource(images, torch.arange(count) % CLASSES, tuple("abcd"), "waves")


def model(**fields: Any) -> Any:
    return classifier(**fields).float().model


def test_settings_are_each_defence_with_each_permutation() -> None:
    assert list(map(str, parse_veils(("none", "noise=1", "none"), ("columns", "rows"), CURVE))) == [
        "none", "columns", "rows", "rows + columns",
        "noise=1", "noise=1 + columns", "noise=1 + rows", "noise=1 + rows + columns",
    ]  # fmt: skip
    assert list(map(str, parse_veils(("none",), (), CURVE))) == ["none"]
    assert list(map(str, parse_veils(("curve", "noise=2"), (), CURVE))) == [*CURVE, "noise=2"]


def test_the_server_of_a_small_model_sees_its_samples() -> None:
    said: list[str] = []
    asked: dict[str, Any] = {"defences": ("none", "noise=0.5"), "permute": ("rows",), "count": 8, "public": 60}
    attacks = ("order", "linkage", "repeats", "labels")
    audit = audit_split(model(), source(), attacks=attacks, deadline=Deadline(said.append), **asked)
    assert said == ["none", "rows", "noise=0.5", "noise=0.5 + rows"] == [str(each.veil) for each in audit.settings]
    plain, rows, *_ = audit.settings
    assert plain.kept.accuracy is not None and plain.kept == rows.kept
    assert plain.kept.knn is not None and plain.kept.probe is not None
    assert rows.best("places") == 1 and rows.best("labels") == 1 and rows.best("linked") == 1
    assert (rows.best("psnr") or 0) > 30 > audit.blind["mean image"]["psnr"]
    assert set(audit.blind) == {"grey", "mean image", "random pair"}
    assert "the server recovers the samples" in audit.summary().sentence
    assert "repeats: there is no noise to average away (none, rows)" in audit.summary().notes[0]
    assert audit.provenance.facts["samples attacked"] == "8"
    assert all(finding.shown is None for finding in audit.findings)
    again = audit_split(model(), source(), attacks=attacks, pictures=True, **asked)
    assert again.numbers() == audit.numbers()
    assert again.private and again.pictures is not None and len(again.pictures) == 8


@pytest.mark.parametrize("limit", [None, 5.0])
def test_what_was_finished_is_kept_and_what_was_not_is_not_tried(limit: float | None, monkeypatch) -> None:
    """Ctrl-C within the third of four attacks, or the time over before it: the second setting's first one counts."""
    asked: dict[str, Any] = {"defences": ("none",), "permute": ("rows",), "attacks": ("linkage", "order")}
    asked |= {"count": 4, "public": 20}
    whole, turns, kept = audit_split(model(), source(), **asked), [0], []
    deadline = Deadline(seconds=limit, clock=lambda: float(2 * turns[0]))

    def cut(name: str, scene: Any) -> Any:
        turns[0] += 1
        if turns[0] == 4:
            raise KeyboardInterrupt
        return attack(name, scene)

    monkeypatch.setattr("situs.audit.split.audit.attack", cut)
    found = audit_split(model(), source(), deadline=deadline, keep=kept.append, **asked)
    reason = "Ctrl-C" if limit is None else "the time limit of 5 s"
    assert found.stopped == f"{reason}, with 3 of 4 attacks finished"
    assert deadline.closed
    assert found.settings[0] == whole.settings[0]
    linked, order = found.settings[1].findings
    assert linked == whole.settings[1].findings[0]
    assert (order.status, order.figures) == ("not_run", {})
    assert f"order: stopped by {found.stopped} (rows)." in found.summary().notes[1]
    assert [each.numbers() for each in kept] == [found.numbers()]
    assert "no attack on the pictures was run: inconclusive" in found.summary().sentence


def test_an_audit_that_was_stopped_at_once_says_nothing(monkeypatch) -> None:
    def cut(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("situs.audit.split.audit.attack", cut)
    found = audit_split(model(), source(), defences=("none",), attacks=("order",), count=4, public=20)
    assert not found.settings
    assert found.stopped == "Ctrl-C, with 0 of 4 attacks finished"
    make_page(found)


def test_labels_of_other_classes_are_not_compared() -> None:
    unlabelled = TensorSource((pictures(12) * 255).byte(), None, None, "waves")
    audit = audit_split(model(), unlabelled, defences=("none",), attacks=("labels",), count=4, public=8)
    assert audit.settings[0].kept.accuracy is None and audit.settings[0].kept.knn is None
    assert audit.settings[0].findings[0].reason == "the images have no labels"
    several = TensorSource(unlabelled.images, torch.ones(12, 2, dtype=torch.int8), ("a", "b"), "waves")
    audit = audit_split(model(), several, defences=("none",), attacks=("labels",), count=4, public=8)
    assert "has no trained classifier" in audit.settings[0].findings[0].reason


def test_any_number_of_labels_is_read_beside_what_the_commonest_come_to() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(40, CLASSES, generator=generator) < 0.2).to(torch.int8)
    labels[::3, 1] = -1
    several = TensorSource((pictures(40) * 255).byte(), labels, tuple("abcd"), "waves")
    asked: dict[str, Any] = {"attacks": ("labels",), "count": 12, "public": 28}
    audit = audit_split(model(), several, defences=("none", "batch-shuffle=4"), **asked)
    assert all(found.findings[0].figures == {"labels": 1} for found in audit.settings)
    assert audit.settings[0].kept.knn is None
    guess = audit.blind["commonest labels"]["labels"]
    assert 0.6 < guess < 0.95
    assert f"100.0 % ({100 * guess:.1f} % by a blind guess)." in audit.summary().sentence
    make_page(audit)
    unknown = TensorSource(several.images, torch.full_like(labels, -1), tuple("abcd"), "waves")
    audit = audit_split(model(), unknown, defences=("none",), **asked)
    assert audit.settings[0].findings[0].reason.startswith("no label")
    many = TensorSource(
        several.images, torch.zeros(40, 23, dtype=torch.int8), tuple("abcdefghijklmnopqrstuvw"), "waves"
    )
    audit = audit_split(model(num_classes=23), many, defences=("none",), **asked)
    assert audit.settings[0].findings[0].reason == "there are too many classes (23) for 24 channels"


def test_a_run_is_held_to_the_noise_that_it_was_trained_under_as_its_tokens_are_now() -> None:
    """Its tokens have grown: half of the deviation that they had is less of the one that they have."""
    opened = open_model(model(), img_size=16)
    now = token_scale(opened.backbone.embed(pictures(70).float() * 2 - 1) + opened.backbone.positions().table)
    run = replace(opened, facts={"defence": "noise=0.5", "defence_scale": now / 4})
    asked: dict[str, Any] = {
        "defences": ("noise=0.5",),
        "permute": (),
        "attacks": ("linkage",),
        "count": 8,
        "public": 60,
    }
    found = audit_split(run, source(), **asked)
    assert found.trained is not None
    assert found.trained.strength == pytest.approx(0.125, rel=0.05)
    note = found.summary().notes[0]
    assert f" {found.trained} (the unit of σ is the" in note and "received less noise" in note
    other = audit_split(replace(run, facts={"defence": "lowpass=0.3", "defence_scale": 1.0}), source(), **asked)
    assert other.summary().notes[0].endswith("This audit did not test that defence.")
    assert audit_split(opened, source(), **asked).trained is None


def test_a_base_is_opened_for_the_same_images_and_one_of_another_shape_refused(tmp_path: Path) -> None:
    """A name is made for images of its own size."""
    asked: dict[str, Any] = {"defences": ("none",), "permute": ("rows",), "attacks": ("old-embedding",)}
    asked |= {"count": 8, "public": 30}
    name = "test_vit"
    torch.manual_seed(0)
    tuned = create_backbone(BackboneConfig(name, img_size=32)).model.eval()
    save_file(tuned.state_dict(), tmp_path / "base.safetensors")
    images = (pictures(40).repeat_interleave(2, 2).repeat_interleave(2, 3) * 255).byte()
    audit = audit_split(
        tuned, TensorSource(images, None, None, "waves"), base=f"{name}={tmp_path}/base.safetensors", **asked
    )
    assert audit.settings[1].findings[0].status == "done"
    with pytest.raises(SitusError, match=r"test_vit: has a grid of \(1, 1\), 1 prefix tokens and 64 .*, but"):
        audit_split(model(), source(), base=f"{name}=random", **asked)


def test_labels_of_classes_that_the_model_does_not_know_still_have_neighbours() -> None:
    other = TensorSource((pictures(40) * 255).byte(), torch.arange(40) % 9, tuple("abcdefghi"), "waves")
    audit = audit_split(model(), other, defences=("none",), attacks=("labels",), count=12, public=28)
    assert audit.settings[0].kept.accuracy is None and audit.settings[0].kept.knn is not None
    assert "has no trained classifier" in audit.settings[0].findings[0].reason


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({"attacks": ("thief",)}, "attacks", "unknown attack 'thief'; choose one of: .*order"),
        ({"defences": ("fog",)}, "defences", "fog"),
        ({"defences": ()}, "defences", "one or more names"),
        ({"permute": ("tiles",)}, "permute", "rows or columns"),
        ({"public": 1}, "public", ">= 2"),
        ({"count": 0}, "count", "count=0: must be >= 2"),
        ({"defences": ("noise=-1",)}, "defences", "defences='noise=-1': must be noise=σ"),
        ({"defences": ("blur=1",)}, "defences", "defences='blur=1': must be none, noise"),
        ({"public": 69}, "public", "70 images, but at least 71 are needed: 69"),
    ],
)
def test_a_mistake_names_its_field(asked: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(SitusError, match=said) as caught:
        audit_split(model(), source(), **asked)
    assert caught.value.field == field


def test_two_images_beside_the_public_ones_are_enough() -> None:
    audit = audit_split(model(), source(10), defences=("none",), attacks=("linkage",), count=2, public=8)
    assert audit.provenance.facts["samples attacked"] == "2"
    with pytest.raises(SitusError, match="9 images, but at least 10 are needed: 8"):
        audit_split(model(), source(9), defences=("none",), attacks=("linkage",), count=2, public=8)


def test_models_that_cannot_be_attacked_are_refused() -> None:
    rotary = small_vit(32, name="vit_small_patch16_rope_224", depth=1, width=24, patch_size=None).model
    with pytest.raises(SitusError, match="RoPE"):
        audit_split(rotary, source())
    whole = nn.Sequential(nn.Conv2d(3, 4, 16), nn.Flatten())
    with pytest.raises(SitusError, match=r"does not support running on a sequence of tokens: .*it is your own module"):
        audit_split(open_model(whole, img_size=16), source())
    without = open_model(model(), img_size=16)
    with pytest.raises(SitusError, match="was trained without positions"):
        audit_split(replace(without, positions=False), source())


def test_a_model_of_words_is_told_to_bring_texts(tmp_path: Path) -> None:
    words = open_model(write_folder(tmp_path / "it", "bert"), any_weights=True)
    with pytest.raises(SitusError, match=r"takes no images, .*; for a language model give a \.txt file$"):
        audit_split(words, source())
