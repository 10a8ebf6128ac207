"""Every attack against every defence: a reason or a recovery, the same each time, finite, with no image in sight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.audit import ATTACKS, DEFENCES, Attack, Knowledge, MatchingConfig, create_attack, create_defence
from situs.audit.attacks.base import Recovery, Refused
from situs.audit.attacks.tokens.attack import TokensConfig
from situs.audit.cases import TestSet
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.gradients import Audit, attack_gradients, table, verdict
from situs.gate import Limit, judge
from situs.pages import make_page

NORMALISATION = ((0.5,) * 3, (0.25,) * 3)
QUICK = (MatchingConfig(iterations=1), TokensConfig(rounds=1, steps=4))
"""Searches as short as can be: what they must hold to holds however well they end."""

IMAGES = (torch.rand(4, 3, 16, 12, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25  # 4 x 3 patches
LABELS = torch.tensor([4, 0, 2, 2])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As short is what patchembed-prior, which has no config, learns of a model and searches."""
    monkeypatch.setattr("situs.audit.attacks.prior.GRADIENTS", 2)
    monkeypatch.setattr("situs.audit.attacks.prior.ROUNDS", 1)


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    return small_vit((16, 12), width=32, num_classes=5).eval()


OF_BATCHES = ("none", "noise", "clip", "clip-batch", "mjp", "accumulate", "fedavg", "no-pe-gradient")
"""Defences that do with a batch what they do not do with one image, or that the law of a batch is made of."""

PAIRS = [
    pytest.param(name, batch, marks=pytest.mark.slow if batch > 1 and name not in OF_BATCHES else ())
    for name in DEFENCES
    for batch in (1, 2)
]
CASES = [
    pytest.param(attack, *pair.values, marks=(*pair.marks, *[pytest.mark.slow] * twin))
    for attack in ATTACKS
    for pair in PAIRS
    # It is matching from another start: what a defence changes of the search is asked of matching.
    for twin in (attack == "april-optimisation" and pair.values[0] not in ("none", "noise", "no-pe-gradient", "mjp"),)
]


@pytest.fixture(scope="module")
def sent_once(backbone: Any) -> Callable[[str, int], list[dict[str, torch.Tensor]]]:
    """What is sent under a defence, for all attacks."""
    return cache(lambda defence, batch: uploads(backbone, defence, batch))


def uploads(backbone: Any, defence: str, batch: int) -> list[dict[str, torch.Tensor]]:
    parts = zip(IMAGES[:2].split(batch), LABELS[:2].split(batch), torch.arange(2).split(batch), strict=True)
    return [victim_gradients(backbone, x, y, defence=create_defence(defence), ids=i) for x, y, i in parts]


def recover(
    backbone: Any, attack: Attack, defence: str, batch: int, sent: list[dict[str, torch.Tensor]]
) -> Recovery | str:
    """The recovery of what is sent, or the reason why there is none."""
    step = create_defence(defence).step(Step(batch))
    known = Knowledge(create_defence(defence), replace(step, batch=batch), normalisation=NORMALISATION)
    sent = [known.read(upload) for upload in sent]
    found = attack.prepare(backbone, sent[0], known)
    return found.reason if isinstance(found, Refused) else attack.recover(backbone, sent, known, Deadline())


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "defence", "batch"), CASES)
def test_reason_or_recovery(
    name: str, defence: str, batch: int, backbone: Any, sent_once: Callable[[str, int], list[dict[str, torch.Tensor]]]
) -> None:
    if (defence, batch) == ("accumulate", 1):
        pytest.skip("one image is no two batches")
    before = {n: p.clone() for n, p in backbone.named_parameters()}
    sent = sent_once(defence, batch)
    kept = [{n: g.clone() for n, g in upload.items()} for upload in sent]
    found = recover(backbone, create_attack(name, *QUICK), defence, batch, sent)
    assert all(torch.equal(g, upload[n]) for upload, old in zip(sent, kept, strict=True) for n, g in old.items())
    if isinstance(found, str):
        assert found and not found.endswith(".")
        return
    count = 2 // batch
    assert found.images.shape[0] in (count, 2)  # one an upload, or all
    assert found.images.shape[1:] == IMAGES.shape[1:]
    assert found.images.isfinite().all()
    assert not found.images.requires_grad
    assert len(found.facts) == count
    assert found.partial is None
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in backbone.named_parameters())
    if defence not in ("none", "noise", "mjp") or (batch > 1 and defence != "none"):
        return  # what the others send is the same each time too: tests/audit/test_client.py
    again = recover(backbone, create_attack(name, *QUICK), defence, batch, uploads(backbone, defence, batch))
    assert isinstance(again, Recovery)
    assert torch.equal(found.images, again.images)
    assert found.facts == again.facts


@pytest.mark.parametrize("name", ATTACKS)
def test_what_an_attack_is_given(name: str, backbone: Any) -> None:
    """A model, gradients by name, and what the threat model says: no argument could hold an image."""
    kind = ATTACKS[name]
    assert kind.name == name and kind.about and not kind.about.endswith(".")
    assert list(inspect.signature(kind.recover).parameters) == ["self", "backbone", "uploads", "known", "deadline"]
    told = Knowledge(create_defence("noise"), Step(1))  # one of them needs noise
    held = [value for value in vars(told).values() if isinstance(value, torch.Tensor)]
    assert held == []  # not even labels, unless they are given
    own = {n for n, _ in backbone.named_parameters()}
    ready = kind().prepare(backbone, own, told)
    if kind.active and isinstance(ready, Refused):
        return  # it needs LoRA, or more channels
    assert not isinstance(ready, Refused) and set(ready.reads or ()) <= own | {"unknown"}  # E_unk, which MJP adds
    assert is_dataclass(kind.Config) and kind.Config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind().config == kind.Config()


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ATTACKS)
def test_other_images_with_the_same_gradients_change_nothing(name: str, backbone: Any) -> None:
    """What comes back depends on what was sent alone: garbage in, the same garbage out, twice."""
    sent = {n: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for n, p in backbone.named_parameters()}
    attack = create_attack(name, *QUICK)
    if isinstance(attack.prepare(backbone, sent, Knowledge(create_defence("noise"), Step(1))), Refused):
        pytest.skip("it needs LoRA")
    one, two = (attack.recover(backbone, [sent], Knowledge(normalisation=NORMALISATION), Deadline()) for _ in range(2))
    assert torch.equal(one.images, two.images)
    assert one.images.isfinite().all()


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def whole(backbone: Any, request: pytest.FixtureRequest) -> Audit:
    # Every pair is recovered above; here a reason, a proof, a bound and a guess are enough.
    defences = ("none", "no-pe-gradient", *(("mjp", "withhold") if request.param == 1 else ("accumulate",)))
    return attack_gradients(
        backbone,
        TestSet(IMAGES[: 2 * request.param], LABELS[: 2 * request.param], NORMALISATION),  # two uploads
        [create_attack(name, *QUICK) for name, kind in ATTACKS.items() if not kind.active],
        [create_defence(name) for name in defences],
        step=Step(batch=request.param),
    )


@pytest.mark.usefixtures("undrawn")
def test_the_whole_audit_is_figures_and_reasons(whole: Audit) -> None:
    assert len(whole.pairs) == sum(not kind.active for kind in ATTACKS.values()) * len(whole.about)
    for pair in whole.pairs:
        if pair.why("refused") is not None:
            assert not pair.scores
            continue
        assert pair.count == len(pair.facts) == 2 * whole.step.batch
        figures = [value for values in pair.scores.values() for value in values or ()]
        assert torch.tensor(figures).isfinite().all()
    assert whole.stopped is None and whole.undone == []
    judged = {each.defence.split()[0]: each.status for each in judge(whole.findings, Limit("psnr", 300.0)).judgements}
    assert 0 not in judged.values()  # nothing passes without noise, on two images or without the oracle
    assert verdict(whole) and whole.judge(psnr=1.0).status == 3
    header, rows = table(whole)
    assert all(len(row) == len(header) for row in rows)
    assert not whole.numbers()["partial"]
    some = replace(whole, findings=whole.pairs[:4])  # pictures take time
    assert "Which defences reduce the leak" in make_page(some).render()


def test_half_precision_is_attacked_too(backbone: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        upload = victim_gradients(backbone, IMAGES[:1], LABELS[:1], step=Step(dtype=dtype))
        for name in (name for name, kind in ATTACKS.items() if not kind.active):
            found = create_attack(name, *QUICK).recover(
                backbone, [upload], Knowledge(normalisation=NORMALISATION), Deadline()
            )
            assert found.images.isfinite().all()
