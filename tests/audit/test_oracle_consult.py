"""What a pass needs beside the attacks: the largest gradients, every path from pixels to logits, the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import small_vit
from torch import Tensor, nn

from situs.audit import adapt, create_attack, create_defence
from situs.audit.attacks.base import Knowledge
from situs.audit.cases import TestSet
from situs.audit.client import least_likely, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step, method_of
from situs.audit.gradients import Audit, attack_gradients
from situs.audit.oracle import estimate
from situs.gate import ABOVE, NOT_JUDGED, PASSED, exposed

CHANCE = torch.Generator().manual_seed(0)
PICTURES = torch.randn(6, 3, 8, 8, generator=CHANCE).cumsum(-1).cumsum(-2).div(12).clamp(-1, 1)
HALVES = ([0.5] * 3, [0.5] * 3)


def audited(backbone: Any, noise: float, labels: Tensor | None = None, **fields: Any) -> Audit:
    test = TestSet(PICTURES, torch.arange(6) % 3 if labels is None else labels, HALVES)
    attacks, defences = [create_attack("patchembed")], [create_defence(f"noise={noise}")]
    return attack_gradients(backbone, test, attacks, defences, bounded=True, **fields)


@pytest.fixture
def vit() -> Any:
    torch.manual_seed(0)
    return small_vit(8, depth=1, width=32, num_classes=3).eval()


def test_a_pass_has_both_and_neither_is_asked_where_it_could_change_nothing(
    vit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("situs.audit.oracle.IMAGES", 2)
    passed = audited(vit, 1e3)
    assert passed.judge().status == PASSED
    assert [(pair.attack, pair.count) for pair in passed.pairs] == [
        ("patchembed", 6),
        ("patchembed, least likely labels", 6),
        ("oracle", 2),
        ("oracle, least likely labels", 2),
    ]
    above = []  # by how many margins each image is above what blind guesses allow, in its worst metric
    for number in range(6):
        every = []
        for pair in passed.pairs[:2]:
            for metric, margin in (("aligned_psnr", 3.0), ("ssim", 0.15), ("order_accuracy", 2 / 4**0.5)):
                guess = max((scores[metric] or [])[number] for scores in passed.baselines.values())
                unit = margin if metric != "order_accuracy" else 0.1
                every.append(((pair.scores[metric] or [])[number] - guess - margin) / unit)
        above.append(max(every))
    assert list(passed.pairs[2].numbers) == sorted(range(6), key=lambda i: -above[i])[:2]
    assert len(audited(vit, 1e-9).pairs) == 1 and len(attack_pairs(vit, "none")) == 1


def attack_pairs(backbone: Any, defence: str) -> list[Any]:
    test = TestSet(PICTURES, torch.arange(6) % 3, HALVES)
    return attack_gradients(
        backbone, test, [create_attack("patchembed")], [create_defence(defence)], bounded=True
    ).pairs


def test_an_oracle_that_was_stopped_is_no_pass(vit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.audit.oracle.IMAGES", 4)

    class Late(Deadline):
        def over(self) -> bool:
            return True

    cut = audited(vit, 3.0, deadline=Late()).judge()
    assert cut.status == NOT_JUDGED and "unfinished" in cut.sentence


def test_what_fits_best_is_also_looked_for_around_what_the_oracle_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise as large as the gradient leaves little of the image, and there the upload is another function of it."""
    torch.manual_seed(0)
    backbone = small_vit(8, depth=2, width=32, num_classes=3).eval()
    judged = audited(backbone, 1.0).judge()
    assert judged.status == NOT_JUDGED and "but the oracle (a bound) is: " in judged.sentence
    monkeypatch.setattr("situs.audit.oracle.LINEARISED", 1)
    assert audited(backbone, 1.0).judge().status == PASSED


@pytest.mark.thin(2)
@pytest.mark.parametrize("at", range(4))
def test_ctrl_c_inside_the_oracle_is_no_pass(vit: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first image, its second, and at both under the least likely labels."""
    monkeypatch.setattr("situs.audit.oracle.IMAGES", 2)
    calls: list[int] = []

    def pressed(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > at:
            raise KeyboardInterrupt
        return estimate(*given)

    monkeypatch.setattr("situs.audit.oracle.estimate", pressed)
    deadline = Deadline()
    cut = audited(vit, 1e3, deadline=deadline)
    assert cut.judge().status == NOT_JUDGED and deadline.interrupted and deadline.closed
    assert str(cut.stopped).startswith("Ctrl-C, before the oracle")
    assert [pair.attack for pair in cut.pairs] == [
        "patchembed",
        "patchembed, least likely labels",
        *["oracle"] * (at >= 2),
    ]


def test_an_image_that_is_above_stays_so_after_ctrl_c_in_another_defences_oracle(
    vit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above under the least likely labels alone, which are tried with what a pass needs."""
    with torch.no_grad():
        vit.model.head.weight.mul_(100)
        labels = vit(PICTURES).argmax(dim=1)

    def pressed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("situs.audit.oracle.estimate", pressed)
    defences = [create_defence("noise=0.01"), create_defence("noise=1e6")]
    test = TestSet(PICTURES, labels, HALVES)
    cut = attack_gradients(vit, test, [create_attack("patchembed")], defences, bounded=True)
    assert [judged.outcome for judged in cut.judge().judgements] == ["above", "inconclusive"]


@pytest.mark.parametrize(("scale", "noise"), [(30.0, 0.01), (100.0, 0.01), (300.0, 0.001)])
def test_samples_that_are_known_by_heart_are_judged_by_the_labels_with_the_largest_gradient(
    vit: Any, scale: float, noise: float
) -> None:
    """Their own gradient is next to nothing, so that a little noise hides it; under another label it is not."""
    with torch.no_grad():
        vit.model.head.weight.mul_(scale)
        labels = vit(PICTURES).argmax(dim=1)
    audit = audited(vit, noise, labels)
    judged = audit.judge()
    assert judged.status == ABOVE and {pair.case.hardest for pair in audit.pairs} == {False, True}
    plain = [one for pair in audit.pairs if not pair.case.hardest for one in exposed(pair)]
    assert plain == [] and "least likely labels" in judged.sentence
    assert torch.equal(least_likely(method_of(create_defence("none"), vit), PICTURES), vit(PICTURES).argmin(1))


class Paths(nn.Module):
    """A patch embedding with a table, a block and a head; and a second path from the pixels to the logits."""

    def __init__(self, second: str | None, first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.second, self.first = second, first
        self.patch, self.table = nn.Conv2d(3, 32, 4, 4), nn.Parameter(0.1 * torch.randn(1, 4, 32))
        self.block = nn.TransformerEncoderLayer(32, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(32, 3)
        if second == "pixels":
            self.other: nn.Module = nn.Linear(192, 3)
        elif second == "stem":
            self.other, self.others = nn.Conv2d(3, 64, 2, 2), nn.Parameter(torch.randn(1, 16, 64))
            self.more = nn.Linear(64, 3)
        elif second == "tokens":
            self.other = nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:  # the order of the calls
            more = self.aside(x)
            return more + self.main(x)
        return self.main(x) + self.aside(x)

    def embedded(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).mT + self.table

    def main(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embedded(x)).mean(dim=1)) * 0.03

    def aside(self, x: Tensor) -> Tensor:
        if self.second == "pixels":
            return self.other(x.flatten(1))
        if self.second == "stem":
            return self.more(F.gelu(self.other(x).flatten(2).mT + self.others).mean(dim=1))
        if self.second == "tokens":
            return self.other(self.embedded(x).flatten(1))
        return x.new_zeros(len(x), 3)


@pytest.mark.parametrize("second", ["pixels", "stem", "tokens"])
@pytest.mark.parametrize("noise", [1e-3, pytest.param(1e-2, marks=pytest.mark.slow)])
def test_a_second_path_is_attacked_whichever_is_called_first(second: str, noise: float) -> None:
    """The main path alone is drowned; a pass would be one of the second path's too."""
    answers = {
        audited(adapt(Paths(second, first), 8, normalisation=HALVES), noise).judge().answer for first in (False, True)
    }
    assert len(answers) == 1 and answers != {"passed"}


def test_the_oracle_is_asked_of_every_path_whatever_is_withheld() -> None:
    """Pictures without a graph, which no score takes: a second path without the table's gradient had one."""
    backbone, defence = adapt(Paths("pixels"), 8, normalisation=HALVES), create_defence("noise=0.1+no-pe-gradient")
    labels = torch.tensor([1])
    upload = victim_gradients(backbone, PICTURES[:1], labels, defence=defence)
    method = method_of(defence, backbone)
    made = estimate(method, upload, PICTURES[:1], labels, {}, Knowledge(defence, Step(1), method=method))
    assert len(made.pictures) == 2 and not any(picture.requires_grad for picture in made.pictures)


def test_without_noise_every_path_gives_its_image() -> None:
    for second in ("pixels", "stem"):
        for first in (False, True):
            backbone = adapt(Paths(second, first), 8, normalisation=HALVES)
            test = TestSet(PICTURES[:2], torch.arange(2), HALVES)
            audit = attack_gradients(backbone, test, [create_attack("patchembed")], [create_defence("none")])
            assert audit.judge(psnr=20).status == ABOVE and audit.pairs[0].exact == 2


def test_samples_of_one_name_are_told_apart() -> None:
    test = TestSet(PICTURES, torch.arange(6) % 3, HALVES, names=["a", "b", "a", "a"])
    assert test.names == ["a (number 1)", "b", "a (number 3)", "a (number 4)", "4", "5"]
