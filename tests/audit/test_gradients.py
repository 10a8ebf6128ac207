"""The audit as a whole: pairs, reasons, verdict and the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from situs.audit import Attack, Matching, MatchingConfig, PatchEmbedding, create_attack, create_defence
from situs.audit.gradients import Audit, Step, audit_gradients, summary, to_json, verdict
from situs.audit.page import make_page
from situs.audit.watch import Watch
from situs.backbones import create_backbone
from situs.errors import SitusError

NORMALISATION = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
SHAPE = {"depth": 2, "embed_dim": 48, "num_heads": 4}


def audit(
    attacks: str = "patchembed,april", defences: str = "none,no-pe-gradient", batch: int = 1, **fields: Any
) -> Audit:
    torch.manual_seed(0)
    given = {"img_size": 32, "patch_size": 8, "num_classes": 5, "model_args": SHAPE, **fields}
    backbone = create_backbone("vit_tiny_patch16_224", **given).eval()
    images = (torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    return audit_gradients(
        backbone,
        images,
        torch.arange(4),
        [create_attack(name, MatchingConfig(iterations=2)) for name in attacks.split(",")],
        [create_defence(name) for name in defences.split(",")],
        normalisation=NORMALISATION,
        step=Step(batch=batch),
    )


def test_every_pair_is_there_and_the_leak_is_found() -> None:
    found = audit()
    assert [(p.attack, p.defence) for p in found.pairs] == [
        ("patchembed", "none"),
        ("april", "none"),
        ("patchembed", "no-pe-gradient"),
        ("april", "no-pe-gradient"),
    ]
    best, other, *without = found.pairs
    assert (best.exact, best.reason, best.caveat) == (4, None, None)
    assert other.exact == 0
    assert all("not sent" in str(pair.reason) for pair in without)
    assert "none: 4 of 4 images recovered exactly from one step (best attack patchembed" in verdict(found)
    assert "no-pe-gradient: no attack of this audit applies" in verdict(found)
    assert "mean image" in verdict(found)
    means = summary(best.scores)
    assert means["psnr"] is not None and means["psnr"].low is not None
    assert means["lpips"] is None


def test_the_victims_pictures_are_the_originals() -> None:
    found = audit("patchembed", "none")
    assert found.pairs[0].images is not None
    torch.testing.assert_close(found.pairs[0].images, found.images, rtol=0, atol=1e-3)


def test_a_batch_has_one_solution_for_all_its_images() -> None:
    [pair] = audit("patchembed", "none", batch=2).pairs
    assert pair.images is not None
    assert torch.equal(pair.images[0], pair.images[1])
    assert not torch.equal(pair.images[0], pair.images[2])
    assert pair.exact == 0
    assert "sums over the images" in str(pair.caveat)


def test_a_model_without_an_attack_says_so() -> None:
    found = audit(positions="sincos")
    assert all("fixed or frozen" in str(pair.reason) for pair in found.pairs)
    assert verdict(found).startswith("No attack of this audit applies")
    assert "no proof" in verdict(found)


def test_mjp_is_given_no_credit_that_an_unfinished_attack_would_give() -> None:
    found = audit("patchembed", "mjp=0.3")
    assert found.pairs[0].lower_bound
    assert "no credit to MJP" in str(found.pairs[0].caveat)
    assert "mjp γ=0.3: at least " in verdict(found)
    assert "lower bound" in verdict(found)


def test_an_interval_ends_where_its_metric_does() -> None:
    means = summary({"order_accuracy": [1.0, 0.5, 1.0], "ssim": [0.9, 0.1], "psnr": [0.5, 9.0], "lpips": None})
    assert means["order_accuracy"] is not None and means["order_accuracy"].high == 1.0
    assert means["ssim"] is not None and means["ssim"].high == 1.0
    assert means["psnr"] is not None and (means["psnr"].high or 0) > 9
    assert means["lpips"] is None


def test_the_file_has_every_image_and_is_json() -> None:
    found = audit()
    told = json.loads(json.dumps(to_json(found), allow_nan=False))
    first = told["pairs"][0]
    assert [row["image"] for row in first["images"]] == ["0", "1", "2", "3"]
    assert first["images"][2]["rank"] == 16
    assert first["images"][2]["psnr"] == (found.pairs[0].scores["psnr"] or [])[2]
    assert told["pairs"][2] == {
        "attack": "patchembed",
        "defence": "no-pe-gradient",
        "applies": False,
        "reason": found.pairs[2].reason,
    }
    assert set(told["baselines"]) == {"mean image", "random pair"}
    made = {"batch": 1, "local_steps": 1, "dtype": "float32", "seed": 0, "labels_known": False, "epoch": 0}
    assert told["step"] == made


class Slow(Matching):
    """Interrupted in the midst of its search."""

    def measure(self, target: Any, backbone: Any, noise: float) -> Any:
        plain, looks = super().measure(target, backbone, noise), iter(range(100))

        def distance(guess: Any) -> Any:
            if next(looks) == 3:
                raise KeyboardInterrupt
            return plain(guess)

        return distance


class Cut(PatchEmbedding):
    """Ctrl-C where nothing can be kept."""

    def recover(self, *_: Any) -> Any:
        raise KeyboardInterrupt


def partial(attacks: list[Attack], watch: Watch, batch: int = 2) -> Audit:
    torch.manual_seed(0)
    fields = {"img_size": 32, "patch_size": 8, "num_classes": 5, "model_args": SHAPE}
    backbone = create_backbone("vit_tiny_patch16_224", **fields).eval()
    images = (torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    defences = [create_defence(name) for name in ("none", "noise")]
    step = Step(batch=batch)
    return audit_gradients(
        backbone, images, torch.arange(4), attacks, defences, normalisation=NORMALISATION, step=step, watch=watch
    )


def test_ctrl_c_in_a_search_keeps_what_it_has() -> None:
    watch = Watch()
    found = partial([PatchEmbedding(), Slow(MatchingConfig(parallel=1))], watch)
    assert watch.interrupted
    assert [(p.attack, p.count) for p in found.pairs] == [("patchembed", 4), ("matching", 2)]
    assert found.pairs[1].partial == "3 of 1,000 iterations, 2 of 4 images"
    assert found.stopped == "Ctrl-C, with 1 of 4 pairs of attack and defence finished"
    assert found.undone == [("patchembed", "noise σ=0.001"), ("matching", "noise σ=0.001")]
    told = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert told["partial"] and told["pairs"][1]["partial"].startswith("3 of 1,000")
    assert [row["image"] for row in told["pairs"][1]["images"]] == ["0", "1"]
    assert told["not_attacked"][0] == {"attack": "patchembed", "defence": "noise σ=0.001"}
    assert verdict(found).startswith("A partial result: stopped by Ctrl-C")
    assert "noise σ=0.001: not attacked" in verdict(found)
    page = make_page(found, {}).render()
    assert "stopped after 3 of 1,000 iterations, 2 of 4 images" in page
    assert "not attacked before the stop" in page


def test_ctrl_c_in_a_closed_form_keeps_those_before() -> None:
    found = partial([PatchEmbedding(), Cut()], Watch())
    assert len(found.pairs) == 1 and len(found.undone) == 3
    nothing = partial([Cut()], Watch())
    assert nothing.pairs == [] and "before anything was attacked" in verdict(nothing)
    assert to_json(nothing)["partial"] and "Verdict" in make_page(nothing, {}).render()


def test_a_time_limit_is_shared() -> None:
    """Both searches get a part of it, and neither all."""
    found = partial([Matching(MatchingConfig(iterations=10**6))], Watch(seconds=1.5), batch=4)
    assert [pair.count for pair in found.pairs] == [4, 4]
    assert all("of 1,000,000 iterations" in str(pair.partial) for pair in found.pairs)
    assert found.undone == []
    assert str(found.stopped).startswith("the time limit of 1.5 s, with 0 of 2 pairs")


def test_a_batch_of_matching_is_scored_in_the_best_order() -> None:
    torch.manual_seed(0)
    [pair] = audit("matching", "none", batch=2).pairs
    assert pair.images is not None and pair.images.shape[0] == 4
    assert not torch.equal(pair.images[0], pair.images[1])
    assert [fact["labels_right"] for fact in pair.facts] == [2, 2, 2, 2]


def test_images_must_fill_their_batches() -> None:
    with pytest.raises(SitusError, match="4 images do not make whole batches of 3"):
        audit("patchembed", "none", batch=3)
