"""The guard and an audit on the same upload come to the same finding."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from test_watch import Own
from torch import nn

from situs import audit
from situs.audit import create_attack, create_defence
from situs.audit.cases import Case, TestSet
from situs.audit.defences import Step
from situs.audit.engine import Client
from situs.audit.gradients import attack_gradients
from situs.findings import Finding
from situs.gate import Limit, exposed

HALVES = ((0.5,) * 3, (0.5,) * 3)
LIMIT = Limit("psnr", 20.0)


def vit(**fields: Any) -> nn.Module:
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **(shape | fields))


MODELS = {
    "own": Own,
    "own, fixed positions": lambda: Own(learned=False),
    "vit": vit,
    "vit, two blocks": lambda: vit(depth=2),
    "vit, no class token": lambda: vit(class_token=False, global_pool="avg"),
}
DEFENCES = ("none", "noise=30", "no-pe-gradient")
ATTACKS = ("patchembed", "april")


def said(finding: Finding) -> dict[str, Any]:
    """What a finding says, whoever made it; that one image is too few is the audit's own remark."""
    kinds = sorted({remark.kind for remark in finding.remarks if remark.kind not in ("few", "gap")})
    return {
        "attack": finding.attack,
        "status": finding.status,
        "closed": finding.closed,
        "remarks": kinds,
        "refused": finding.why("refused"),
        "fits": [(each.fits, each.unique, each.unseen) for each in finding.certificates],
        "above": bool(exposed(finding, LIMIT)),
    }


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("model", MODELS)
def test_the_guard_and_an_audit_find_the_same_in_the_same_upload(model: str, defence: str, attack: str) -> None:
    torch.manual_seed(0)
    module = MODELS[model]().eval()
    image, label = torch.rand(1, 3, 16, 16) * 2 - 1, torch.tensor([3])
    asked = {"img_size": 16} if isinstance(module, Own) else {}
    watch = audit.guard(
        module, None, attacks=[attack], defence=defence, act="log", limit="psnr=20", normalisation=HALVES, **asked
    )
    test = TestSet(image, label, HALVES)
    chosen = create_defence(defence)
    case = Case("", watch.backbone, chosen, create_attack(attack))
    upload = Client(case, test, Step(), None).upload(0)
    theirs = {ours: name for name, ours in watch._names.items()}  # pyright: ignore[reportPrivateUsage]
    look = watch.look(image, {theirs[name]: gradient for name, gradient in upload.items()})
    [here] = [each for each in watch.findings if not (each.hardest or each.bound)] or watch.findings[:1]
    [there] = attack_gradients(watch.backbone, test, [create_attack(attack)], [chosen]).findings
    assert said(here) == said(there), look
    if here.attacked:
        ours, others = (each.scores["psnr"] or [0.0] for each in (here, there))
        assert ours[0] == pytest.approx(others[0], abs=0.5)
    assert (look.answer == "above") == bool(exposed(there, LIMIT))
