"""Uploads without anything to solve: the attack says so, ends in no error, and proves nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.audit import Knowledge, create_attack
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import NoDefence, Step, create_defence
from situs.findings import doubt_of

VICTIMS = {"learned": small_vit, "no table": partial(small_vit, model_args={"pos_embed": "none"})}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_classifier_of_zeros_sends_zeros_and_nothing_is_proved(victim: str, batch: int) -> None:
    backbone: Any = VICTIMS[victim](num_classes=5).eval()
    with torch.no_grad():
        backbone.model.head.weight.zero_()
    sent = victim_gradients(backbone, torch.rand(batch, 3, 16, 16), torch.arange(batch))
    attack, known = create_attack("tokens"), Knowledge(step=Step(batch), size=(16, 16))
    found = attack.recover(backbone, [sent], known, Deadline())
    [fact] = found.facts
    assert not found.images.any() and fact["fits"] is False and fact["proof"] is None
    assert "nothing can be recovered from this upload" in str(fact["verdict"])
    assert "nothing can be recovered from this upload" in str(doubt_of(None, found.certificates, 0.0, None))


def test_local_steps_that_diverge_send_no_numbers_and_nothing_is_proved() -> None:
    backbone = small_vit(num_classes=5).eval()
    defence = create_defence("fedavg=3:1e30")
    sent = victim_gradients(backbone, torch.rand(1, 3, 16, 16), torch.tensor([1]), defence=defence)
    assert not sent["model.patch_embed.proj.weight"].isfinite().all()
    known = Knowledge(NoDefence(), Step(local_steps=3), size=(16, 16))
    [fact] = create_attack("tokens").recover(backbone, [sent], known, Deadline()).facts
    assert fact["fits"] is False and fact["proof"] is None
