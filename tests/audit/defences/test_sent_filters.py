"""Filters of engines as defences: what they send by an independent reference, and what an attacker reads of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import timm
import torch
from builders import small_vit

from situs.audit import create_defence, victim_gradients
from situs.audit.attacks.base import Knowledge
from situs.audit.attacks.patchembed import PatchEmbedding
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.defences.sent import Percentile, SparseVector, TopK, flat, laplace
from situs.audit.victim import open_victim
from situs.backbones import create_backbone
from situs.errors import SitusError


def drawn(count: int = 4000) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {
        "a": 0.01 * torch.randn(count // 2, generator=chance),
        "b": 0.1 * torch.randn(20, count // 40, generator=chance),
    }


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_percentile_by_hand() -> None:
    gradients = drawn()
    sizes = sorted(abs(value) for g in gradients.values() for value in g.flatten().tolist())
    at = 0.3 * (len(sizes) - 1)
    cutoff = sizes[math.floor(at)] + (at % 1) * (sizes[math.floor(at) + 1] - sizes[math.floor(at)])
    sent = Percentile(30.0, 0.05).upload(gradients, 1, chance())
    for name, g in gradients.items():
        for value, got in zip(g.flatten().tolist(), sent[name].flatten().tolist(), strict=True):
            expected = 0.0 if abs(value) < cutoff else max(-0.05, min(0.05, value))
            assert got == pytest.approx(expected, rel=1e-6)
        assert sent[name].shape == g.shape


def test_topk_keeps_the_largest() -> None:
    gradients = drawn()
    before, after = flat(gradients), flat(TopK(0.05).upload(gradients, 1, chance()))
    kept = after != 0
    assert int(kept.sum()) == 200 and torch.equal(after[kept], before[kept])
    assert before[kept].abs().min() >= before[~kept].abs().max()
    for share, count in ((0.0501, 201), (1e-9, 1), (1.0, 4000)):  # rounded up
        assert int((flat(TopK(share).upload(gradients, 1, chance())) != 0).sum()) == count


def test_sparse_vector_sends_a_share_with_laplace_noise() -> None:
    """γ far above the numbers, and a large ε: what is drawn is the gradient with Laplace noise of the stated scale."""
    gradients, defence = drawn(40_000), SparseVector(0.2, 1e9, 10.0, 1.0, 0.02)
    before, after = flat(gradients).double(), flat(defence.upload(gradients, 1, chance())).double()
    sent = after != 0
    assert 0.1 * len(after) < int(sent.sum()) <= 0.2 * len(after)  # drawn with repetition
    noise = after[sent] - before[sent]
    assert float(noise.std()) == pytest.approx(defence.noise_level(1), rel=0.05)
    assert float(noise.abs().mean()) == pytest.approx(0.2, rel=0.05)  # 2 γ / noise
    assert float(before[sent].abs().min()) > 0.0199  # the threshold, whose noise is tiny here
    cut = SparseVector(0.2, 1e9, 1e6, 1e-3, 1e-6)
    assert float(flat(cut.upload(gradients, 1, chance())).abs().max()) <= 1.1e-3


@pytest.mark.parametrize(("share", "count"), [(0.2, 800), (0.2001, 801), (1e-9, 1)])
def test_the_choice_of_a_sparse_vector_spends_its_epsilon_on_threshold_and_numbers(
    share: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the ratio 1 : (2c)^⅔. Each scale of Laplace noise is a sensitivity over the ε of its part."""
    scales = list[tuple[float, int]]()

    def noting(scale: float, count: int, chance: torch.Generator) -> torch.Tensor:
        scales.append((scale, count))
        return laplace(scale, count, chance)

    monkeypatch.setattr("situs.audit.defences.sent.laplace", noting)
    SparseVector(share, 0.3, 0.5, 0.01).upload(drawn(), 1, chance())
    (threshold, one), (numbers, every), *_, (added, sent) = scales
    assert (one, every, sent) == (1, 4000, count) and added == pytest.approx(2 * 0.01 / 0.5)
    first, second = 0.01 / threshold, 2 * count * 0.01 / numbers
    assert first + second == pytest.approx(0.3) and second / first == pytest.approx((2 * count) ** (2 / 3))


def test_laplace_is_the_inverse_of_its_distribution() -> None:
    """By scipy, at the uniform numbers of the same generator."""
    uniform = torch.rand(1000, generator=chance(), dtype=torch.float64)
    expected = scipy.stats.laplace.ppf(uniform.numpy(), scale=2.0)
    np.testing.assert_allclose(laplace(2.0, 1000, chance()).numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "text", ["topk=0", "topk=2", "percentile=101", "percentile=5:0", "svt=0", "svt=0.1:0", "exclude=["]
)
def test_settings_are_checked(text: str) -> None:
    with pytest.raises(SitusError):
        create_defence(text)


@pytest.fixture(scope="module")
def victim() -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 192, "depth": 1, "num_heads": 2}
    return open_victim(timm.create_model("vit_tiny_patch16_224", **shape, num_classes=5)).model.backbone


X = torch.randint(0, 256, (1, 3, 16, 16), generator=torch.Generator().manual_seed(1)) / 255 * 2 - 1


def recovered(victim: Any, text: str, informed: bool) -> tuple[float, dict[str, Any]]:
    """The error of patchembed's picture by an attacker that knows the filter, or does not."""
    defence = create_defence(text)
    upload = victim_gradients(victim, X, torch.tensor([2]), defence=defence)
    known = Knowledge(defence, Step()) if informed else Knowledge()
    result = PatchEmbedding().recover(victim, [upload], known, Deadline())
    return float((result.images - X).square().mean().sqrt()), result.facts[0]


@pytest.mark.parametrize("text", ["percentile=10:10", "percentile=10:0.05", "topk=0.9"])
def test_an_informed_attacker_solves_without_what_is_left_out(victim: Any, text: str) -> None:
    error, facts = recovered(victim, text, informed=True)
    assert error < 1e-3 and facts["fits"] is True
    worse, facts = recovered(victim, text, informed=False)
    assert worse > 10 * error and facts["fits"] is False


def test_no_filter_proves_privacy(victim: Any) -> None:
    for text in ("percentile", "topk", "svt", "noise=1+topk"):
        known = Knowledge(create_defence(text), Step())
        assert "not random noise" in (PatchEmbedding().spoiled(known, 1.0) or "")
    assert PatchEmbedding().spoiled(Knowledge(create_defence("noise=1"), Step()), 1.0) is None


def test_exclude_withholds_by_name(victim: Any) -> None:
    names = {name for name, _ in victim.named_parameters()}
    assert create_defence("exclude").withheld(victim) == {"model.head.weight", "model.head.bias"}
    assert create_defence("exclude=pos|cls").withheld(victim) == {"model.pos_embed", "model.cls_token"}
    assert create_defence("exclude=nothing").refuses(victim)
    assert create_defence("exclude=.").withheld(victim) == names


def test_a_defence_that_cannot_be_kept_is_refused_and_one_that_can_is_not(victim: Any) -> None:
    assert create_defence("exclude").refuses(victim) is None
    assert create_defence("exclude=nothing").refuses(victim) == (
        f"no parameter of {victim.name} has a name that matches nothing, so nothing is withheld"
    )
    assert create_defence("withhold=1").refuses(victim) is None
    assert create_defence("withhold=2").refuses(victim) == f"{victim.name} has 1 block"
    convolutions = create_backbone("test_resnet")
    assert "belong to its first blocks" in str(create_defence("withhold").refuses(convolutions))
    assert [create_defence(f"withhold={depth}").label for depth in (0, 1, 2)] == [
        "withhold the embedding",
        "withhold the embedding and 1 block",
        "withhold the embedding and 2 blocks",
    ]
    mjp = create_defence("mjp=0.3")
    assert create_defence(mjp) is mjp and mjp.refuses(victim) is None
    assert "masked jigsaw training does not work with" in str(mjp.refuses(convolutions))
    assert "position table" in str(mjp.refuses(small_vit(16, positions="none")))


@pytest.mark.slow
def test_nvflare_sends_the_same() -> None:
    """Their own filters on the same numbers: percentile is equal, of the sparse vector the law is."""
    pytest.importorskip("nvflare", reason="nvflare is not installed")
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.filters.exclude_vars import ExcludeVars
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy

    def theirs(kind: Any) -> dict[str, np.ndarray]:
        arrays = {name: g.numpy().copy() for name, g in drawn(40_000).items()}
        dxo = DXO(DataKind.WEIGHT_DIFF, data=arrays)
        return (kind.process_dxo(dxo, Shareable(), FLContext()) or dxo).data

    ours = Percentile(30.0, 0.05).upload(drawn(40_000), 1, chance())
    for name, array in theirs(PercentilePrivacy(30, 0.05)).items():
        np.testing.assert_allclose(ours[name].numpy(), array, rtol=1e-6)
    np.random.seed(0)
    settings = {"fraction": 0.2, "epsilon": 100.0, "noise_var": 1.0, "gamma": 0.05, "tau": 0.02}
    sent = np.concatenate([array.ravel() for array in theirs(SVTPrivacy(**settings)).values()])
    mine = flat(SparseVector(0.2, 100.0, 1.0, 0.05, 0.02).upload(drawn(40_000), 1, chance())).numpy()
    assert np.count_nonzero(mine) == pytest.approx(np.count_nonzero(sent), rel=0.05)
    assert np.abs(mine[mine != 0]).mean() == pytest.approx(np.abs(sent[sent != 0]).mean(), rel=0.05)
    assert set(theirs(ExcludeVars("^a$"))) == {"b"}
