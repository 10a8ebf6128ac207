"""Pixels through blocks of which nothing is sent, on images that nobody told the attack of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from victims import as_trained, vit

from situs.audit.attacks.base import Knowledge, Ready, Refused
from situs.audit.attacks.spans import FORWARD, SOLVED
from situs.audit.attacks.tokens.attack import TokensConfig, TokenSpans
from situs.audit.attacks.tokens.descent import Range
from situs.audit.attacks.tokens.later import Through, derivable, later_block
from situs.audit.client import victim_gradients
from situs.audit.defences import Withhold
from situs.audit.stem import Stem, find_embedding, patches_of
from situs.backbones import create_backbone
from situs.findings import doubt_of

IMAGE = 0.8 * torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(3))
ATTACK = {"config": TokensConfig(seconds=600.0)}


def deep(depth: int = 3) -> Any:
    """4 patches of 48 values, 64 channels; matrices of gain 1/2, so that the first blocks say as much as the pixels."""
    victim = vit(8, width=64, depth=depth).float()
    with torch.no_grad():
        for name, parameter in victim.named_parameters():
            if parameter.dim() == 2 and "blocks" in name:
                parameter.normal_(std=0.5 * parameter.shape[1] ** -0.5)
            if "pos_embed" in name or "patch_embed.proj.weight" in name:
                parameter.normal_(std=0.2)
    return victim


@pytest.mark.slow
def test_nothing_of_the_embedding_and_the_first_block_and_the_pixels_all_the_same() -> None:
    victim, defence = deep(), Withhold(1)
    sent = victim_gradients(victim, IMAGE, torch.tensor([2]), defence=defence)
    assert not any("blocks.0" in name or "embed" in name for name in sent)
    attack, known = TokenSpans(**ATTACK), Knowledge(defence)
    ready = attack.prepare(victim, sent, known)
    assert isinstance(ready, Ready) and "nothing is sent of the first block" in str(ready.caveat)
    assert ready.reads is not None and all("blocks.1" in name for name in ready.reads)
    found = attack.recover(victim, [{name: sent[name] for name in ready.reads}], known)
    assert float((found.images - IMAGE).abs().max()) < 1e-3
    [fact] = found.facts
    assert fact["fits"] is True and fact["blocks_before"] == 1 and fact["proof"] is None
    assert "not exact here" in str(doubt_of(ready.caveat, found.certificates, 0.0, None))  # no gate is passed by it


def test_where_the_embedding_is_sent_few_directions_are_looked_for() -> None:
    """4 patches span 4 of 48 directions, which its gradient tells."""
    victim, attack = deep(), TokenSpans(**ATTACK)
    sent = victim_gradients(victim, IMAGE, torch.tensor([2]))
    sent = {name: g for name, g in sent.items() if "blocks.0" not in name and "pos_embed" not in name}
    ready = attack.prepare(victim, sent, Knowledge())
    assert isinstance(ready, Ready) and any("patch_embed" in name for name in ready.reads or ())
    assert "nothing is sent of the first block" in str(ready.caveat)
    found = attack.recover(victim, [sent], Knowledge())
    assert found.facts[0]["fits"] is True and float((found.images - IMAGE).abs().max()) < 1e-3


@pytest.mark.parametrize(("depth", "withheld", "before"), [(3, 1, 1), (4, 2, 2), (3, 2, None), (2, 1, None)], ids=str)
def test_a_block_needs_another_behind_it_and_all_of_its_matrices(depth: int, withheld: int, before: int | None) -> None:
    victim = deep(depth)
    gone = Withhold(withheld).withheld(victim)
    sent = [name for name, _ in victim.named_parameters() if name not in gone]
    found = later_block(victim, sent, 5)
    assert (None if found is None else found.before) == before
    if found is not None:
        assert later_block(victim, [name for name in sent if name != found.names[0]], 5) != found
        assert later_block(victim, sent, 64) is None  # as many tokens as channels
    answer = TokenSpans().prepare(victim, sent, Knowledge(Withhold(withheld)))
    assert isinstance(answer, Refused if before is None else Ready)
    if isinstance(answer, Refused):
        assert "only a search tells (matching)" in answer.reason
    for more in ({"batch": 2}, {"local_steps": 2}):
        assert isinstance(TokenSpans().prepare(victim, sent, Knowledge(Withhold(withheld), **more)), Refused)
    with torch.no_grad():
        next(p for name, p in victim.named_parameters() if "pos_embed" in name).zero_()
    assert isinstance(TokenSpans().prepare(victim, sent, Knowledge(Withhold(withheld))), Refused)  # places are alike


def test_products_by_passes_are_those_of_the_whole_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = deep()
    sent = victim_gradients(victim, IMAGE, torch.tensor([2]), defence=Withhold(1))
    later = later_block(victim, sent, 5)
    assert later is not None
    ends = torch.full((48,), 2.0, dtype=torch.float64)
    through = Through(victim.double(), later, sent, 48, Range(-ends, ends))
    at = torch.randn(4, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with derivable():
        out = through.residual(at)
        whole = through._turns(at, out)
        monkeypatch.setattr("situs.audit.attacks.tokens.later.WHOLE", 0)
        passed = through._turns(at, out)
        for number, given in enumerate((at, out)):
            assert torch.allclose(whole[number](given), passed[number](given), rtol=1e-9, atol=1e-12)
        near = through.residual(at + 1e-6 * at) - through.residual(at - 1e-6 * at)
        assert torch.allclose(passed[0](at), near / 2e-6, rtol=1e-5, atol=1e-7)


def hugging_face() -> Any:
    """Queries, keys and values have a matrix each."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.ViTConfig(**shape, image_size=8, patch_size=4)
    return as_trained(create_backbone(config, num_classes=5).eval())


FAMILIES = {
    "ViT": deep,
    "Hugging Face": hugging_face,
    "registers": lambda: vit(8, width=64, depth=3, name="vit_small_patch14_reg4_dinov2").float(),
    "no CLS": lambda: vit(8, width=64, depth=3, model_args={"class_token": False, "global_pool": "avg"}).float(),
}


def at_the_truth(victim: Any, dtype: torch.dtype = torch.float32, lost: str = "") -> tuple[Through, torch.Tensor]:
    """What is looked for in an upload, and where the truth is. lost: a matrix whose gradient overflowed its type."""
    sent = victim_gradients(victim.to(dtype), IMAGE.to(dtype), torch.tensor([2]), defence=Withhold(1))
    victim = victim.double()
    later = later_block(victim, sent, victim.num_tokens + victim.num_prefix)
    assert later is not None
    sent = {name: g * torch.inf if lost and lost in name else g for name, g in sent.items()}
    ends = torch.full((48,), 2.0, dtype=torch.float64)
    through, stem = Through(victim, later, sent, 48, Range(-ends, ends)), find_embedding(victim)
    assert isinstance(stem, Stem)
    return through, patches_of(IMAGE.double(), victim, stem)[0] - through.grey


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_truth_fits_and_what_is_near_it_does_not(family: str, dtype: torch.dtype) -> None:
    """Keys alone hold no token: their gradients add up to nothing over the places."""
    through, truth = at_the_truth(FAMILIES[family](), dtype)
    assert len(through.spans) == 4  # queries, keys and values are fed the same
    assert through._judged(truth).fits
    assert not through._judged(truth + 0.01 * torch.randn(truth.shape).to(truth)).fits


def test_how_much_may_stick_out_is_what_the_models_own_forward_rounds_off() -> None:
    """Large numbers that every norm takes away, as trained models have: what stands beside them is rounded by far more
    than what a plain model's is. In float64 the same equations hold to the last digits."""
    victim = deep()
    with torch.no_grad():
        victim.model.pos_embed.add_(100.0)
    through, truth = at_the_truth(victim)
    fed = through._inputs(through.patches(truth))
    assert max(float(through.spans[at].residual(h).max()) for at, h in fed) > 5 * SOLVED * FORWARD
    assert 0.3 < through._judged(truth).residual < 2.0 and through._judged(truth).fits
    assert not through._judged(truth + 0.01 * torch.randn(truth.shape).to(truth)).fits
    exact = victim_gradients(victim, IMAGE.double(), torch.tensor([2]), defence=Withhold(1), dtype=torch.float64)
    law = Through(victim, through.later, exact, 48, through.pixels)
    for at, h in law._inputs(law.patches(truth)):
        assert float(law.spans[at].residual(h).max()) < 1e-10


def test_what_overflowed_is_left_out_and_what_is_no_number_does_not_fit() -> None:
    through, truth = at_the_truth(deep(), lost="blocks.1.mlp.fc2")
    assert len(through.spans) == 3 and through._judged(truth).fits
    assert not through._judged(truth * torch.nan).fits
    with derivable():
        assert through._metric(truth * torch.nan, lambda: False).isfinite().all()


def test_an_upload_of_zeros_tells_nothing() -> None:
    victim = deep()
    sent = victim_gradients(victim, IMAGE, torch.tensor([2]), defence=Withhold(1))
    zeros = {name: torch.zeros_like(g) for name, g in sent.items()}
    found = TokenSpans().recover(victim, [zeros], Knowledge(Withhold(1)))
    assert found.facts[0]["fits"] is False and found.facts[0]["residual"] is None and found.images.isfinite().all()


def test_the_clock_is_asked_before_the_model_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    through, truth = at_the_truth(deep())
    monkeypatch.setattr("situs.audit.attacks.tokens.later.jvp", None)  # any derivative would raise
    found = through.solve(lambda: True)
    assert not found.fits and torch.equal(found.patches, through.grey.expand_as(truth))


def test_a_wrong_picture_does_not_fit() -> None:
    victim = deep()
    sent = victim_gradients(victim, IMAGE, torch.tensor([2]), defence=Withhold(1))
    attack = TokenSpans(TokensConfig(seconds=1e-9))  # stopped at once: grey
    found = attack.recover(victim, [sent], Knowledge(Withhold(1)))
    assert found.facts[0]["fits"] is False and float((found.images - IMAGE).abs().max()) > 0.1
