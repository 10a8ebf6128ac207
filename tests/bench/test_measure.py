"""The step that is measured is the one that a run makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from situs.bench import measure
from situs.bench.cases import StepCase, Timing
from situs.bench.measure import OBJECTS, StepRow, make_batch, make_method, make_update, measure_case, precision_on
from situs.core.when import When
from situs.data.objects import objects_of
from situs.errors import SitusError

SMALL = dict(model="vit_tiny_patch16_224", img_size=(8, 16), patch_size=4, in_chans=1, num_classes=3, batch=4,
             model_args={"depth": 1, "embed_dim": 12, "num_heads": 3})  # fmt: skip
CPU = torch.device("cpu")


def test_a_case_is_measured_and_comes_back_from_json() -> None:
    case = StepCase(method="mp3", settings={"mask_ratio": 0.5}, accumulate=2, ema=0.9, **SMALL)
    row = measure_case(case, Timing(warmup=1, steps=2, repeats=3), CPU)
    assert (row.case.precision, row.case.compile, row.case.graph) == ("fp32", False, False)
    assert row.case.work == case.work
    assert len(row.times.seconds) == 3 and row.times.gib is None and row.times.kernels is None
    assert row.images_per_second == 4 / row.times.median
    assert row.to_json()["steps_per_second"] == 1 / row.times.median
    assert StepRow.from_json(row.to_json()) == row


def test_every_update_moves_the_weights_with_draws_of_its_own() -> None:
    case = StepCase(method="mp3", compile=False, **SMALL)
    torch.manual_seed(0)
    method = make_method(case)
    seen = []
    plain = method.draw
    method.draw = lambda batch, when: seen.append(plain(batch, when)) or seen[-1]  # type: ignore[method-assign]
    update = make_update(method, case, CPU)
    before = method.position_head.weight.detach().clone()
    update()
    after = method.position_head.weight.detach().clone()
    update()
    assert not torch.equal(before, after) and not torch.equal(after, method.position_head.weight)
    assert not torch.equal(seen[0]["order"], seen[1]["order"])


def test_images_have_the_shape_of_the_case() -> None:
    case = StepCase(**SMALL)
    batch = make_batch(make_method(case), case, 4, CPU)
    assert batch.inputs.shape == (4, 1, 8, 16) and int(batch.targets["label"].max()) < 3
    whole = StepCase(model="test_resnet", img_size=32, batch=2)
    assert make_batch(make_method(whole), whole, 2, CPU).inputs.shape == (2, 3, 32, 32)


def test_masks_are_as_large_as_the_images() -> None:
    case = StepCase(method="segmentation", **SMALL)
    method = make_method(case)
    targets = make_batch(method, case, 4, CPU).targets
    assert {name: target.shape for name, target in targets.items()} == {"mask": (4, 8, 16)}
    assert 0 <= int(targets["mask"].min()) < int(targets["mask"].max()) < 3


@pytest.mark.parametrize(("method", "head"), [("supervised", (3, 12)), ("mp3", None), ("backbone", None)])
def test_only_who_learns_labels_has_a_classifier(method: str, head: tuple[int, int] | None) -> None:
    weights = dict(make_method(StepCase(method=method, **SMALL)).backbone.named_parameters())
    found = [value.shape for name, value in weights.items() if name.endswith("head.weight")]
    assert found == ([] if head is None else [head])


@pytest.mark.parametrize(
    ("given", "device", "precision"),
    [(None, "cpu", "fp32"), (None, "cuda", "bf16"), ("fp32", "cuda", "fp32"), ("bf16", "cpu", "bf16")],
)
def test_the_precision_is_a_runs_where_none_is_asked_for(given: Any, device: str, precision: str) -> None:
    assert precision_on(StepCase(precision=given), torch.device(device)) == precision


def test_the_update_is_that_of_a_run_with_the_cases_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, in batches of one size, half-way through the training."""
    asked: list[Any] = []
    steps: list[Any] = []

    def stepper(*given: Any, **more: Any) -> Any:
        asked.append((given, more))
        return SimpleNamespace(update=lambda *step, **how: steps.append((*step, how)))

    monkeypatch.setattr(measure, "Stepper", stepper)
    case = StepCase(method="mp3", clip=0.5, ema=0.9, accumulate=2, compile=True, graph=False, **SMALL)
    method = make_method(case)
    update = make_update(method, case, CPU)
    update(), update()  # type: ignore[func-returns-value]
    [((trained, config), more)] = asked
    assert trained is method and (config.clip, config.ema) == (0.5, 0.9)
    assert (more["precision"], more["accumulate"], more["compiled"], more["graph"]) == ("fp32", 2, True, False)
    assert [(when.step, when.epoch, when.progress, how) for _, when, _, how in steps] == [
        (number, number, 0.5, {"ragged": False}) for number in (0, 1)
    ]
    assert steps[0][0] is steps[1][0] and len(steps[0][0].inputs) == 4


def test_objects_of_chance_are_whole_boxes_inside_the_image() -> None:
    case = StepCase(method="detection", settings={"width": 8, "hidden": 8}, **{**SMALL, "img_size": (64, 32)})
    torch.manual_seed(0)
    method = make_method(case)
    batch = make_batch(method, case, 3, CPU)
    for each in objects_of(batch.targets):
        assert len(each.boxes) == OBJECTS and each.sides == (64, 32) and int(each.classes.max()) < 3
        assert each.boxes.min() >= 0 and each.boxes[:, 2].max() <= 32 and each.boxes[:, 3].max() <= 64
        areas = (each.boxes[:, 2:] - each.boxes[:, :2]).prod(1)
        sides = (each.boxes[:, 2:] - each.boxes[:, :2]).sum(1)
        assert bool(((each.masks.sum((1, 2)) - areas).abs() <= sides + 1).all())
    assert float(method(batch, method.draw(batch, When(seed=0, epoch=0))).metrics["loss_mask"]) > 0


def test_the_model_alone_is_measured_like_any_step() -> None:
    row = measure_case(StepCase(method="backbone", **SMALL), Timing(warmup=1, steps=1, repeats=1), CPU)
    assert row.flops > 0 and row.case.label == "backbone" and StepRow.from_json(row.to_json()) == row


def test_a_model_that_does_not_bear_the_method_says_so() -> None:
    with pytest.raises(SitusError, match="test_resnet"):
        measure_case(StepCase(method="mp3", model="test_resnet", batch=2), Timing(), CPU)
