"""The short fine-tuning: what is sent under a setting moves the weights, and nothing else does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from situs.audit import find_defences
from situs.audit.deadline import StoppedError
from situs.audit.defences import Clip, NoDefence, Noise, Step, Withhold
from situs.audit.remedies.ladders import CostConfig, Rung
from situs.audit.remedies.tune import Tuned, Tuning
from situs.audit.victim import Victim, open_victim
from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.pages import make_page

STEP = Step(batch=4)
PLAIN = Rung("no defence", NoDefence(), STEP)
CONFIG = CostConfig(tune_data="samples", tune_images=48, tune_test=80, tune_lr=8e-3)


@pytest.fixture(scope="module")
def victim() -> Victim:
    torch.manual_seed(0)
    args = {"depth": 2, "embed_dim": 48, "num_heads": 2}
    asked = {"img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 10, "model_args": args}
    return open_victim(create_backbone("vit_tiny_patch16_224", **asked).eval())


@pytest.fixture(scope="module")
def tuning(victim: Victim) -> Tuning:
    """On images that a few steps tell apart: dark ones and light ones."""
    made = Tuning(victim, CONFIG, PLAIN)
    assert [len(part) for part in (*made.learned, *made.judged)] == [48, 48, 80, 80]
    chance = torch.Generator().manual_seed(0)
    for name, count in (("learned", 48), ("judged", 80)):
        labels = torch.arange(count) % 2
        pixels = 0.5 * torch.randn(count, 1, 28, 28, generator=chance) + (labels - 0.5).view(-1, 1, 1, 1)
        setattr(made, name, (pixels, labels))
    return made


def test_without_a_defence_it_is_adamw_on_the_loss(victim: Victim, tuning: Tuning) -> None:
    """Held to a loop of its own, which knows neither clients nor defences."""
    from copy import deepcopy

    backbone = deepcopy(victim.model.backbone)
    own = torch.optim.AdamW(backbone.parameters(), lr=2e-3, weight_decay=0.0)
    pixels, labels = tuning.learned
    for x, y in zip(pixels.split(4), labels.split(4), strict=True):
        own.zero_grad()
        F.cross_entropy(backbone(x), y).backward()
        own.step()
    with torch.no_grad():
        right = backbone(tuning.judged[0]).argmax(dim=-1) == tuning.judged[1]
    cost = tuning.cost(PLAIN)
    assert cost is not None and cost.accuracy == cost.plain == float(right.double().mean())
    assert cost.plain > cost.before + 0.3 and (cost.images, cost.judged) == (48, 80)
    assert (cost.lost, cost.margin) == (0, 0)


def test_noise_that_drowns_the_gradient_costs_the_accuracy_and_a_drop_of_it_nothing(tuning: Tuning) -> None:
    drowned = tuning.cost(Rung("drowned", Noise(10.0), STEP))
    drop = tuning.cost(Rung("drop", Noise(1e-12), STEP))
    assert drowned is not None and drop is not None
    assert drowned.lost > drowned.margin > 0 and "none that shows" not in drowned.told
    assert abs(drop.lost) <= 0.05


def test_what_is_withheld_does_not_move_and_a_larger_batch_takes_fewer_and_larger_steps(
    tuning: Tuning, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = tuning._tune(Rung("w", Withhold(1), STEP), lambda: True)
    assert method is not None
    before, after = victim.model.backbone.state_dict(), method.backbone.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".blocks.1." in name or ".norm." in name or ".head." in name}
    seen: list[float] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda o: (seen.append(o.param_groups[0]["lr"]), step(o))[1])
    tuning._tune(Rung("batch 16", NoDefence(), replace(STEP, batch=16)), lambda: True)
    assert seen == pytest.approx([8e-3 * math.sqrt(16 / 64)] * 3)


def test_every_step_has_noise_of_its_own(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def upload(self: Clip, gradients: dict[str, torch.Tensor], batch: int, chance: torch.Generator) -> object:
        seen.append(float(torch.randn(1, generator=chance)))
        return gradients

    monkeypatch.setattr(Clip, "upload", upload)
    tuning._tune(Rung("c", Clip(1.0, 1.0), STEP), lambda: True)
    assert len(seen) == len(set(seen)) == 12


def test_the_margin_is_that_of_the_paired_difference(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"no defence": [1, 1, 1, 0], "x": [1, 0, 0, 0]}
    monkeypatch.setattr(tuning, "_right", lambda rung, _: (torch.tensor(answers[rung.label]).bool(), 1.0))
    cost = tuning.cost(Rung("x", NoDefence(), STEP))
    assert (cost.plain, cost.accuracy) == (0.75, 0.25)
    assert cost.margin == pytest.approx(1.96 * math.sqrt(1 / 3) / 2)  # of 0, 1, 1, 0


def test_a_stop_and_labels_that_do_not_fit(victim: Victim, tuning: Tuning, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        tuning.cost(Rung("stopped", NoDefence(), STEP), lambda: False)
    left = iter([True] * 20)  # the first of its steps has a thousand of its own
    with pytest.raises(StoppedError):
        tuning.cost(Rung("local steps", NoDefence(), replace(STEP, local_steps=1000)), lambda: next(left, False))
    from PIL import Image

    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    for data, said in (("nowhere", "nowhere"), (str(tmp_path), "held out|no labels|empty")):
        with pytest.raises(SitusError, match=said) as error:
            Tuning(victim, replace(CONFIG, tune_data=data), PLAIN)
        assert error.value.field == "tune_data"
    few = open_victim(create_backbone("test_vit", img_size=32, in_chans=1, num_classes=3))
    with pytest.raises(SitusError, match="10 classes are not those of the model's 3 outputs"):
        Tuning(few, CONFIG, PLAIN)


def test_the_table_says_the_accuracy_or_that_it_was_not_measured(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs = {"noise": [Rung("drop", Noise(1e-9), Step()), Rung("flood", Noise(1e3), Step())]}
    monkeypatch.setattr("situs.audit.remedies.find.ladders", lambda *_: rungs)
    asked = {"attacks": ["patchembed"], "count": 5, "tune_images": 8, "tune_test": 40}
    found = find_defences(victim.model, "samples", "psnr=20", tune_data="samples", **asked)
    [each] = found.found
    assert each.named == "flood" and isinstance(each.tuned, Tuned) and each.tuned.judged == 40
    assert "points" in str(found) and "not measured" not in str(found)
    [row] = found.to_json()["defences"]
    assert row["tuned"]["accuracy"] == each.tuned.accuracy and row["cost"]["epsilon"] is None
    page = make_page(found).render()
    assert "lost against no defence" in page and "Poisson" in page
    bare = replace(found, tuned=False, remedies=[replace(each, tuned=None)])
    assert "was not measured: no labelled images" in str(bare) and "not measured" in make_page(bare).render()


def test_a_training_that_wears_the_model_down_by_itself_is_said() -> None:
    worn, sane = (Tuned(0.69, plain, 0.79, 0.04, 256, 500, 1.0).told for plain in (0.38, 0.77))
    assert "hides the cost: choose a lower rate (tune_lr)" in worn and "lower rate" not in sane
