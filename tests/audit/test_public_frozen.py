"""What a client gives away that trains the classifier or LoRA alone: features are read off what it sends."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from situs.audit import audit_gradients
from situs.audit.cases import TestSet
from situs.audit.client import names_sent, victim_gradients
from situs.audit.defences import NoDefence, Step
from situs.audit.gradients import Fallback
from situs.audit.public import describe_upload
from situs.backbones import create_backbone
from situs.gate import NOT_JUDGED
from situs.methods.base import Method
from situs.methods.supervised import Supervised, SupervisedConfig
from situs.models import Model
from situs.models.open import samples_for
from situs.train.tuning import TuningConfig, attach, freeze


def victim(tuning: TuningConfig) -> Method:
    torch.manual_seed(0)
    args = {"depth": 2, "embed_dim": 24, "num_heads": 2}
    backbone = create_backbone("vit_tiny_patch16_224", img_size=28, patch_size=14, num_classes=5, model_args=args)
    method = Supervised(backbone, SupervisedConfig(label_smoothing=0.0)).eval()
    attach(method, tuning)
    with torch.no_grad():
        for name, parameter in method.named_parameters():
            if name.endswith("0.up"):
                parameter.normal_(std=0.1)
    freeze(method, tuning, new_positions=False)
    return method


def test_a_client_sends_the_gradients_of_what_it_trains_and_no_other() -> None:
    head = {"model.head.weight", "model.head.bias"}
    assert names_sent(victim(TuningConfig("head")), NoDefence()).keys() == head
    lora = names_sent(victim(TuningConfig("lora", rank=3)), NoDefence())
    held = "model.blocks.{}.attn.qkv.parametrizations.weight.0.{}"
    assert lora.keys() == head | {held.format(block, part) for block in (0, 1) for part in ("up", "down")}


def test_loras_gradient_shows_as_many_directions_of_the_tokens_as_its_rank() -> None:
    method = victim(TuningConfig("lora", rank=3)).double()
    images, fed = torch.randn(1, 3, 28, 28, dtype=torch.float64), []
    block = method.backbone.model.blocks[0]
    handle = block.norm1.register_forward_hook(lambda *given: fed.append(given[2]))
    upload = victim_gradients(method, images, torch.tensor([1]), step=Step(dtype=torch.float64))
    handle.remove()
    down = upload["model.blocks.0.attn.qkv.parametrizations.weight.0.down"]
    tokens = fed[0][0].detach()
    assert tokens.shape[0] == 5 and int(torch.linalg.matrix_rank(down)) == 3
    inside = torch.linalg.lstsq(tokens.T, down.T, driver="gelsd").solution
    torch.testing.assert_close(tokens.T @ inside, down.T, rtol=1e-8, atol=1e-12)  # within the span of the tokens
    assert float(F.mse_loss(torch.zeros_like(down), down)) > 0


def test_an_audit_of_such_a_run_says_what_is_sent_and_never_that_it_is_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("situs.audit.gradients.FALLBACK", Fallback(iterations=2))
    for parts in ("head", "lora"):
        tuning = TuningConfig(parts, rank=3)
        method = victim(tuning)
        model = Model(
            "tuned",
            method.backbone,
            method,
            samples_for(method.backbone, {}),
            facts={"kind": "run", "method": "supervised"},
            tuning=tuning,
        )
        audit = audit_gradients(model, "samples", count=2, fail_above="psnr=20", attacks=["patchembed", "april"])
        assert audit.ruling is not None and audit.ruling.status == NOT_JUDGED
        refused = {each.attack: each.why("refused") for each in audit.findings if each.status == "refused"}
        assert refused.keys() == {"patchembed", "april"} and all("frozen" in str(said) for said in refused.values())
        searched = [each for each in audit.findings if each.attack == "matching"]
        assert [each.status for each in searched] == ["done"]
        assert "other attacks may" in audit.notes["sent"].lower()
        assert "reveals the features and the label" in audit.notes["left by the classifier"]
        assert ("3 of the" in audit.notes.get("left by LoRA", "")) == (parts == "lora")


@pytest.mark.parametrize(("rank", "shown"), [(1, "at most 1"), (4, "at most 4"), (5, "all")])
def test_a_reader_learns_how_many_directions_lora_shows(rank: int, shown: str) -> None:
    method = victim(TuningConfig("lora", rank=rank))
    inputs, labels = torch.randn(2, 3, 28, 28), torch.tensor([4, 0])
    notes = describe_upload(method, TestSet(inputs, labels, ((0.5,) * 3, (0.25,) * 3)))
    numbers = 2 * rank * (24 + 72) + 5 * 24 + 5
    every = sum(1 for _ in method.backbone.named_parameters())
    assert notes["sent"].startswith(f"6 of {every} tensors ({numbers:,} numbers), ")
    assert f"2 frozen matrices have a LoRA product of rank {rank}. " in notes["left by LoRA"]
    assert (
        f"span 5 directions, and the gradient of each product reveals {shown} of these directions"
        in notes["left by LoRA"]
    )
