"""Gradient matching brings images back: one and several, with labels inferred, under defences; and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import reason

from situs.audit import (
    AprilOptimisation,
    Clip,
    Defence,
    Knowledge,
    MaskedJigsaw,
    Matching,
    MatchingConfig,
    NoDefence,
    NoPositionGradient,
)
from situs.audit.attacks import matching
from situs.audit.attacks.base import Ready
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.scores import pictures_of, psnr
from situs.backbones import create_backbone
from situs.errors import SitusError

NORMALISATION = ((0.5,), (0.25,))


def victim(depth: int) -> Any:
    """torch's own initialisation and places of unit spread, as the published MJP begins: gradients that tell much."""
    torch.manual_seed(0)
    made = small_vit(8, depth=depth, width=32, in_chans=1, num_classes=10).eval()
    for module in made.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.reset_parameters()
    torch.nn.init.normal_(made.model.pos_embed)
    return made


@pytest.fixture(scope="module")
def backbone() -> Any:
    return victim(1)


def pictures(count: int, seed: int = 1) -> torch.Tensor:
    """Smooth grey pictures in [0, 1], [count, 1, 8, 8]."""
    coarse = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=8, mode="bilinear", align_corners=True)


def attack(
    backbone: Any,
    real: torch.Tensor,
    kind: type[Matching] = Matching,
    defence: Defence | None = None,
    batch: int = 1,
    labels: list[int] | None = None,
    deadline: Deadline | None = None,
    local_steps: int = 1,
    **settings: Any,
) -> Any:
    defence = defence or NoDefence()
    x, y = (real - 0.5) / 0.25, torch.tensor(labels or [(3 * i + 1) % 10 for i in range(len(real))])
    parts = zip(x.split(batch), y.split(batch), torch.arange(len(x)).split(batch), strict=True)
    uploads = [
        victim_gradients(backbone, a, b, step=Step(local_steps=local_steps), defence=defence, ids=i)
        for a, b, i in parts
    ]
    known = Knowledge(defence, Step(batch, local_steps=local_steps), normalisation=NORMALISATION)
    assert isinstance(kind().prepare(backbone, uploads[0], known), Ready)
    return kind(MatchingConfig(**{"iterations": 120, **settings})).recover(
        backbone, uploads, known, deadline or Deadline()
    )


def quality(found: Any, real: torch.Tensor, batch: int = 1) -> float:
    return float(psnr(pictures_of(found, real, batch, NORMALISATION), real[: len(found.facts) * batch]).min())


@pytest.mark.parametrize("distance", ["l2", pytest.param("cosine", marks=pytest.mark.slow)])
def test_one_image(backbone: Any, distance: str) -> None:
    real = pictures(1)
    found = attack(backbone, real, distance=distance)
    assert quality(found, real) > 18
    assert found.labels.tolist() == [[1]]
    assert found.partial is None
    assert found.facts[0]["iterations"] == 120 and found.facts[0]["distance"] < 1e-3


@pytest.mark.slow
def test_a_batch_whose_closed_form_fails(backbone: Any) -> None:
    real = pictures(2)
    found = attack(backbone, real, batch=2, iterations=200)
    assert found.images.shape == (2, 1, 8, 8)
    assert quality(found, real, 2) > float(psnr(real.flip(0), real).max()) + 5
    assert found.labels.tolist() == [[1, 4]]


def searches(backbone: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, list[Any]]:
    """A recovery, and of each search at once where it began [P, B, C, H, W] and what it found."""
    seen, optimise = [], matching.optimise

    def spy(objective: Any, start: torch.Tensor, *given: Any) -> Any:
        seen.append((start, optimise(objective, start, *given)))
        return seen[-1][1]

    monkeypatch.setattr(matching, "optimise", spy)
    found = attack(backbone, pictures(8), iterations=2, **settings)
    monkeypatch.undo()
    return found, seen


def test_every_search_begins_elsewhere_and_wherever_it_runs_at_the_same_place(
    backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, [(starts, _)] = searches(backbone, monkeypatch)
    apart = torch.corrcoef(starts.flatten(1)) - torch.eye(8)
    assert float(apart.abs().max()) < 0.5  # 64 independent numbers each: a deviation of 1/8
    assert float(starts.mean().abs()) < 0.2 and 0.8 < float(starts.std()) < 1.2
    _, groups = searches(backbone, monkeypatch, parallel=1)
    assert torch.equal(torch.cat([start for start, _ in groups]), starts)


def test_what_overflowed_is_not_matched_to_zero(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is lost of a gradient, the true image still has distance 0."""
    x, y = (pictures(1) - 0.5) / 0.25, torch.tensor([1])
    upload = victim_gradients(backbone, x, y)
    lost = {name: g.clone() for name, g in upload.items()}
    lost["model.patch_embed.proj.weight"][:5] = torch.inf
    lost["model.blocks.0.attn.qkv.weight"][3, 3] = torch.nan
    seen = []

    class Watched(Matching):
        def measure(self, target: Any, *given: Any) -> Any:
            distance = super().measure(target, *given)
            return lambda guess: seen.append(distance(guess)) or seen[-1]

    monkeypatch.setattr(matching, "_noise", lambda *_: x)
    found = Watched(MatchingConfig(iterations=1)).recover(backbone, [lost], Knowledge(), Deadline())
    assert float(seen[0]) < 1e-9
    assert found.images.isfinite().all()


def test_together_as_in_turn(backbone: Any) -> None:
    real = pictures(3)
    single, mapped = (attack(backbone, real, iterations=3, signed=False, parallel=p) for p in (1, 8))
    # Adam's first steps turn on the sign of a slope that may be all rounding: a few pixels go the other way.
    apart = (single.images - mapped.images).abs()
    assert float((apart > 1e-3).double().mean()) < 0.05
    for one, other in zip(single.facts, mapped.facts, strict=True):
        assert float(one["distance"]) == pytest.approx(float(other["distance"]), rel=0.01)


def test_same_seed_same_images(backbone: Any) -> None:
    first, second = (attack(backbone, pictures(1), iterations=5) for _ in range(2))
    assert torch.equal(first.images, second.images)


def from_nearby(monkeypatch: pytest.MonkeyPatch, real: torch.Tensor) -> float:
    """Searches begin beside the image, as they would end after 100 iterations more; the start's quality."""
    noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(5))
    start = (real - 0.5) / 0.25 + 0.6 * noise
    monkeypatch.setattr(matching, "_noise", lambda *_: start)
    return float(psnr((start * 0.25 + 0.5).clamp(0, 1), real).min())


def test_without_the_table_it_still_finds_the_image(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pictures(1)
    begun = from_nearby(monkeypatch, real)
    assert quality(attack(backbone, real, defence=NoPositionGradient(), iterations=30), real) > begun + 2


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", [{"defence": Clip(0.05, 0.0), "batch": 2}, {"local_steps": 3}], ids=["clip", "steps"])
def test_clipping_and_local_steps_are_part_of_what_is_matched(backbone: Any, case: dict[str, Any]) -> None:
    """That the gradients are the victim's own is settled in test_simulate; here they are descended on."""
    real, batch = pictures(2), case.get("batch", 1)
    found = attack(backbone, real, iterations=1, **case)
    later = attack(backbone, real, iterations=8, **case)
    for first, last in zip(found.facts, later.facts, strict=True):
        assert float(last["distance"]) < float(first["distance"])
    assert found.images.shape == real.shape and len(found.facts) == 2 // batch


@pytest.mark.slow
def test_mjp_hides_the_order_alone() -> None:
    """Every patch comes back; those of the mask in some order."""
    from situs.audit.scores import match_patches

    real = pictures(1)
    found = attack(victim(2), real, defence=MaskedJigsaw(0.5))
    seen = pictures_of(found, real, 1, NORMALISATION)
    assert float(match_patches(seen, real.double(), 4).psnr) > 18


def test_april_optimisation(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pictures(1)
    begun = from_nearby(monkeypatch, real)
    assert quality(attack(backbone, real, AprilOptimisation, iterations=30), real) > begun + 2
    sincos = create_backbone("vit_tiny_patch16_224", positions="sincos", model_args={"depth": 1})
    assert "fixed or frozen" in str(reason(AprilOptimisation(), sincos))
    upload = victim_gradients(backbone, real, torch.tensor([1]), defence=NoPositionGradient())
    assert "model.pos_embed is not sent" in str(reason(AprilOptimisation(), backbone, upload))


def test_the_second_term_is_the_cosine_of_the_table(backbone: Any) -> None:
    table = "model.pos_embed"
    guess, target = ({table: torch.randn(2, 1, 5, 32), "model.norm.weight": torch.randn(2, 32)} for _ in range(2))
    plain, more = (
        kind(MatchingConfig(table=2.5)).measure(target, backbone, 0.0) for kind in (Matching, AprilOptimisation)
    )
    cosine = torch.nn.functional.cosine_similarity(guess[table].flatten(1), target[table].flatten(1))
    torch.testing.assert_close(more(guess), plain(guess) + 2.5 * (1 - cosine))


def test_a_time_limit_keeps_the_uploads_done_so_far(backbone: Any) -> None:
    real = pictures(3)
    deadline = Deadline(seconds=0.05)
    found = attack(backbone, real, deadline=deadline, parallel=1, iterations=5000)
    assert len(found.facts) == len(found.images) == len(found.labels) == 1
    assert found.partial is not None and found.partial.endswith("of 5,000 iterations")


def test_ctrl_c_before_the_next_search_keeps_those_before(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = Matching.measure, iter(range(9))

    def measure(self: Any, *given: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return plain(self, *given)

    monkeypatch.setattr(Matching, "measure", measure)
    lines: list[str] = []
    deadline = Deadline(lines.append)
    found = attack(backbone, pictures(3), deadline=deadline, parallel=2, iterations=2)
    assert deadline.interrupted and len(found.facts) == 2 and found.partial is None
    assert [line for line in lines if "uploads" in line] == ["matching: uploads 1 to 2", "matching: uploads 3 to 3"]
    calls = iter(range(1, 9))
    with pytest.raises(KeyboardInterrupt):  # nothing to keep
        attack(backbone, pictures(1), iterations=2)


def test_a_search_without_a_number_says_none(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matching, "measure", lambda *_: lambda guess: sum(g.sum() for g in guess.values()) * torch.nan)
    assert attack(backbone, pictures(1), iterations=2).facts[0]["distance"] is None


def test_without_labels_there_is_a_reason(backbone: Any) -> None:
    upload = victim_gradients(backbone, pictures(1), torch.tensor([1]))
    bare = {name: g for name, g in upload.items() if "head" not in name}
    assert "labels" in str(reason(Matching(), backbone, bare))
    assert reason(Matching(), backbone, bare, labels=torch.tensor([[1]])) is None


def test_models_without_tokens_and_with_windows() -> None:
    """A convolutional network, Swin, and rotated queries: whatever they are made of."""
    torch.manual_seed(0)
    small = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 24}
    cases = {
        "test_resnet": (32, {}),
        "swin_tiny_patch4_window7_224": (28, {"img_size": 28, "model_args": small}),
        "vit_small_patch16_rope_224": (
            32,
            {"img_size": 32, "model_args": {"depth": 1, "embed_dim": 32, "num_heads": 4}},
        ),
    }
    for name, (size, given) in cases.items():
        other = create_backbone(name, num_classes=5, **given).eval()
        x = torch.randn(1, 3, size, size)
        upload = victim_gradients(other, x, torch.tensor([2]))
        known = Knowledge(size=(size, size))
        found = Matching(MatchingConfig(iterations=2)).recover(other, [upload], known, Deadline())
        assert found.images.shape == x.shape and found.images.isfinite().all()
        assert found.labels is not None and found.labels.tolist() == [[2]]
    with pytest.raises(SitusError, match=r"Knowledge\.size"):
        Matching().recover(create_backbone("test_resnet", num_classes=5), [upload], Knowledge(), Deadline())


@pytest.mark.slow
@pytest.mark.shared_data
def test_four_cifar_images_of_one_batch(shared_data: Any) -> None:
    """The whole size, cut short: 32 pixels in 64 patches, 100 classes, labels inferred."""
    from situs.audit.cases import TestSet
    from situs.audit.defences import Step
    from situs.audit.gradients import attack_gradients
    from situs.audit.scores import means_of
    from situs.data.config import DataConfig
    from situs.data.loader import make_loader

    torch.manual_seed(0)
    victim = small_vit(32, width=192, heads=6, num_classes=100)
    for module in victim.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.reset_parameters()
    torch.nn.init.normal_(victim.model.pos_embed)
    data = DataConfig(
        path=str(shared_data / "cifar100"), split="val", img_size=32, batch=4, workers=0, resident="never"
    )
    batch = next(iter(make_loader(data, None, "cpu")))
    found = attack_gradients(
        victim.eval(),
        TestSet(batch.inputs, batch.targets["label"], data.normalisation),
        [Matching(MatchingConfig(iterations=250))],
        [NoDefence()],
        step=Step(batch=4),
    )
    [pair] = found.pairs
    reached, guess = (means_of(scores)["psnr"] for scores in (pair.scores, found.baselines["random pair"]))
    assert reached.mean > guess.mean + 6
    assert pair.scores["reidentified"] == [1.0] * 4
    assert pair.facts[0]["labels_right"] == 4
