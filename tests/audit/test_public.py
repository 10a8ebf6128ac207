"""One call from a model and a folder to a judgement, and what it refuses before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor, nn

from situs.audit import audit_gradients, audit_settings
from situs.audit.defences.sent import OwnDp
from situs.audit.gradients import Audit
from situs.audit.public import ATTACKED, CHOSEN, AuditConfig, open_audit
from situs.audit.scores import Lpips
from situs.audit.victim import Victim
from situs.errors import SitusError
from situs.findings import ACTIVE, HONEST
from situs.models import open_model


def test_one_call_from_a_name_to_a_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python users write: a model by name, images by place, defences by name."""
    monkeypatch.setattr("situs.audit.run.KEEP_EVERY", 0.0)
    kept: list[Audit] = []
    fields = {"count": 5, "img_size": (32, 32), "keep": kept.append, "model_args": {"depth": 1}}
    found = audit_gradients("test_vit", "samples", attacks=["patchembed"], defences=["none", "noise=1e3"], **fields)
    assert found.judge(psnr=20).judgements[1].reason.startswith("a pass needs the oracle (a bound")
    assert found.limit is None and found.numbers()["gate"] is None
    kept.clear()
    fields |= {"fail_above": "psnr=20"}
    found = audit_gradients("test_vit", "samples", attacks=["patchembed"], defences=["none", "noise=1e3"], **fields)
    assert found.names == [f"samples (train) {i}" for i in range(5)] and found.stopped is None
    judged = found.judge(psnr=20)
    assert (judged.answer, judged.passed, judged.status) == ("above", False, 3)
    assert [each.answer for each in judged.judgements] == ["above", "passed"]
    assert [len(each.attacked) for each in kept] == [1, 2, 2, 3]  # as it goes, and what is left says so
    assert kept[0].stopped == "the end of the audit's process, with 1 of 2 attacks finished" and kept[-1] is found
    assert [each.answer for each in kept[0].judge(psnr=20).judgements] == ["above", "incomplete"]
    assert found.numbers()["gate"]["status"] == 3
    facts = found.to_json()
    assert facts["images"] == "5 of samples, 32 × 32 pixels" and len(facts["weights_sha256"]) == 64


class Net(nn.Module):
    """What a user may have: patches, a table, a block, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.table = nn.Conv2d(1, 24, 4, 4), nn.Parameter(torch.randn(1, 16, 24))
        self.block, self.out = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.patch(x).flatten(2).transpose(1, 2) + self.table).mean(dim=1))


def test_a_module_and_the_same_as_an_open_model() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    shape: dict[str, Any] = {"img_size": 16, "in_chans": 1}
    given: dict[str, Any] = {"attacks": ["patchembed"], "defences": ["none", "noise=1e-3"], "count": 2}
    found = audit_gradients(net, "samples", **given, **shape)
    assert found.pairs[0].exact == 2 and found.pairs[0].to_the_byte == 2
    assert not found.judge(psnr=20).passed and found.private
    again = audit_gradients(open_model(net, **shape), "samples", **given)
    assert again.numbers() == found.numbers()


@pytest.mark.parametrize(("count", "end"), [(4, ""), (5, " …")])
def test_an_audit_of_uploads_says_what_it_was_given(count: int, end: str) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    loss = nn.functional.cross_entropy(net(torch.randn(1, 1, 16, 16)), torch.tensor([2]))
    gradients = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
    asked: dict[str, Any] = {"attacks": ["patchembed"], "img_size": 16, "in_chans": 1, "facts": {"by": "a test"}}
    found = audit_gradients(net, upload=[gradients] * count, **asked)
    facts, names = found.provenance.facts, ", ".join(one.name for one in found.uploads[:4])
    assert (facts["uploads"], facts["taken as"]) == (f"{count}: {names}{end}", "gradient")
    assert (facts["gradients"], facts["labels"], facts["by"]) == ("batch 1", "inferred", "a test")
    assert facts["images"] == f"{count}, originals not given, 16 × 16 pixels"


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"attacks": []}, ("attacks",)),
        ({"attacks": ["magic"]}, ("attacks",)),
        ({"attacks": ["crafted"]}, ("attacks", "server")),
        ({"attacks": ["patchembed", "crafted-head"], "defences": ["none"]}, ("attacks", "server")),
        ({"defences": []}, ("defences",)),
        ({"defences": ["fog"]}, ("defences",)),
        ({"count": 0}, ("count",)),
        ({"precision": "bf16"}, ("defences",)),
        ({"local_steps": 2}, ("defences",)),
        ({"fail_above": "lpips=0.1"}, ("fail_above",)),
        ({"predictor": "runs/mp3", "attacks": ["patchembed"]}, ("predictor", "attacks")),
        ({"count": 1, "fail_above": "reidentified=0.5"}, ("fail_above", "count")),
        ({"count": 3, "batch": 2}, ("count", "batch")),
    ],
)
def test_mistakes_name_their_fields(options: dict[str, Any], fields: tuple[str, ...]) -> None:
    with pytest.raises(SitusError) as caught:
        audit_gradients("test_vit", "samples", img_size=32, **options)
    assert caught.value.fields == fields


def test_what_has_no_part_in_the_settings_is_refused() -> None:
    with pytest.raises(SitusError, match="one step on one image") as caught:
        audit_settings("test_vit", "samples", ("a",), batch=2)
    assert caught.value.fields == ("batch", "settings")


@pytest.mark.parametrize("defences", [["noise"], ["mjp=0.1", "clip"], ["mjp=0.1", "mjp=0.2"]])
def test_a_defence_that_would_not_be_made_is_refused(defences: list[str]) -> None:
    with pytest.raises(SitusError) as caught:
        audit_settings("test_vit", "samples", ("a",), defences=defences)
    assert caught.value.fields == ("defences", "settings")


@pytest.mark.parametrize(("classes", "count"), [(None, 1000), (7, 7)])
def test_a_model_without_a_classifier_gets_one(classes: int | None, count: int) -> None:
    """Of as many classes as the help says."""
    config = AuditConfig(classes=classes, count=1)
    shape = {"img_size": 28, "model_args": {"depth": 1, "embed_dim": 48, "num_heads": 2}}
    opened = open_audit("vit_small_patch14_reg4_dinov2=random", "samples", ["patchembed"], config, shape)
    assert opened.victim.model.backbone.num_classes == count


def test_images_that_lpips_cannot_measure_are_refused_before_anything_is_attacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("situs.audit.public.Lpips", lambda _: Lpips.__new__(Lpips))
    monkeypatch.setattr("situs.audit.public.attack_gradients", None)
    with pytest.raises(SitusError) as caught:
        audit_gradients("test_vit", "samples", img_size=16, count=1, lpips=Path("weights.safetensors"))
    assert caught.value.fields == ("lpips",)


@pytest.mark.parametrize(
    ("asked", "defences", "attacks", "searched", "bounded"),
    [
        ({}, ["none", "noise", "clip", "no-pe-gradient"], ATTACKED, False, False),
        ({"fail_above": "psnr=20"}, ["none"], ATTACKED, True, True),
        ({"fail_above": "blind", "attacks": ["matching"]}, ["none"], ["matching"], False, True),
        ({"attacks": ["matching"]}, ["none", "noise", "clip", "no-pe-gradient"], ["matching"], False, False),
        ({"server": "active"}, ["none", "noise", "clip", "no-pe-gradient"], CHOSEN, False, False),
        ({"server": "active", "fail_above": "psnr=20"}, ["none"], CHOSEN, False, False),
        ({"server": "active", "attacks": ["crafted"], "defences": ["noise=1"]}, ["noise"], ["crafted"], False, False),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_what_is_attacked_by_whom_unless_it_is_said(
    asked: dict[str, Any],
    defences: list[str],
    attacks: list[str],
    searched: bool,
    bounded: bool,
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run's own defence comes first, and a gate judges it alone: it is what would be sent."""
    seen: dict[str, Any] = {}

    def attack(_model: Any, _test: Any, tried: Any, against: Any, **fields: Any) -> Any:
        seen.update(fields, tried=[each.name for each in tried], against=[each.name for each in against])

    monkeypatch.setattr("situs.audit.public.attack_gradients", attack)
    if own:
        monkeypatch.setattr(Victim, "own_defence", OwnDp(1.0, 2.0, "ε = 3"))
    audit_gradients(small_vit(16).model, "samples", count=2, img_size=16, **asked)
    if own and "defences" not in asked:
        defences = ["dp-sgd"] if "fail_above" in asked else ["dp-sgd", *defences]
    assert (seen["against"], seen["tried"]) == (defences, list(attacks))
    assert (seen["search"] is not None, seen["bounded"]) == (searched, bounded)
    assert seen["threat"] is (ACTIVE if "server" in asked else HONEST)
    assert (seen["limit"] is not None) is ("fail_above" in asked)


@pytest.mark.parametrize(
    ("options", "fields", "said"),
    [
        ({"sent": "weights"}, ("sent", "upload"), "sent=weights: applies only to a captured upload, but none is given"),
        ({"upload": {"a": 1}, "server": "active"}, ("server", "upload"), "server=active: does not apply to captured"),
        ({"upload": {"a": 1}, "defences": ["accumulate=2"]}, ("defences", "batch"), "`accumulate` does not apply to"),
        ({"upload": {"a": 1}, "labels": "known", "data": None}, ("labels", "data"), "labels=known: needs the images"),
    ],
)
def test_what_has_no_part_in_captured_uploads_is_refused(
    options: dict[str, Any], fields: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SitusError, match=said) as caught:
        audit_gradients("test_vit", **{"data": "samples", "img_size": 32} | options)
    assert caught.value.fields == fields
