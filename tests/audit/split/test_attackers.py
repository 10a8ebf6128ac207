"""Every attacker on a small model whose truth is known, and the reasons of those that are not tried."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sent import classifier, stage

from situs.audit.split.attackers import (
    ATTACKS,
    Restored,
    SplitFinding,
    _lacked,
    _together,
    attack,
    restore,
    unclustered,
)
from situs.audit.split.joint import Joint
from situs.audit.split.stage import Scene, Stage
from situs.locks.veil import parse_veil


def tuned(by: float = 0.05) -> Any:
    """The classifier with another embedding, as before a fine-tuning."""
    backbone = classifier()
    with torch.no_grad():
        for parameter in backbone.model.patch_embed.parameters():
            parameter += by * parameter.std() * torch.randn_like(parameter)
    return backbone


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's regression says enough here; what it learns beyond is tested with it."""
    monkeypatch.setattr("situs.audit.split.decoder.STEPS", 20)


@pytest.fixture(scope="module")
def held() -> Stage:
    return stage(private=12, old=tuned())


def tried(held: Stage, name: str, defence: str, *permute: str) -> SplitFinding:
    veil = parse_veil(defence, permute)
    return attack(name, Scene.of(held, veil))


@pytest.mark.parametrize("prefix", [0, 1])
def test_places_name_rows_of_the_whole_sending(prefix: int) -> None:
    """Three samples of five rows in any order: each place has a row of its own sample, and the mean it believes in."""
    chance = torch.Generator().manual_seed(0)
    fixed, clear = torch.randn(prefix, 4, generator=chance), torch.randn(3, 5 - prefix, 4, generator=chance)
    order = torch.stack([torch.randperm(5, generator=chance) for _ in range(3)])  # the clear row of each that is sent
    whole = torch.cat([fixed.expand(3, -1, -1), clear], dim=1)
    seen = whole.gather(1, order[..., None].expand_as(whole))

    def beliefs(tokens: torch.Tensor) -> torch.Tensor:
        return (torch.cdist(clear, tokens) < 1e-3).float() * 0.9 + 0.1 / (5 - prefix)

    side, model = SimpleNamespace(prefix=fixed), SimpleNamespace(beliefs=beliefs)
    index, expected = _together(seen, cast(Any, side), cast(Any, model))
    assert torch.equal(seen.flatten(0, 1)[index], clear)
    wanted = 0.9 * clear + 0.1 * clear.mean(dim=1, keepdim=True)
    torch.testing.assert_close(expected, wanted)


@pytest.mark.parametrize("permute", [(), ("rows",), ("columns",), ("rows", "columns")])
def test_permutations_hide_nothing_from_who_knows_the_embedding(held: Stage, permute: tuple[str, ...]) -> None:
    found = tried(held, "order", "none", *permute)
    assert found.figures["psnr"] > 45
    assert found.figures.get("places") == (1 if "rows" in permute else None)
    assert found.figures.get("channels") == (1 if "columns" in permute else None)
    assert found.shown is not None and found.shown.shape == held.pictures.shape
    labels = tried(held, "labels", "none", *permute)
    assert labels.figures == {"labels": 1, "unnamed labels": 1}


def test_a_batch_that_exchanged_its_tokens_is_put_together(held: Stage) -> None:
    for permute in ((), ("rows", "columns")):
        found = tried(held, "order", "batch-shuffle=4", *permute)
        assert found.figures["places"] == found.figures["samples"] == 1
        assert found.figures["psnr"] > 45
    assert tried(held, "labels", "batch-shuffle=4", "rows").figures["labels"] == 1


@pytest.mark.parametrize("defence", ["none", "noise=0.1", "batch-shuffle=4"])
@pytest.mark.parametrize("permute", [(), ("rows",)])
def test_an_old_embedding_does(held: Stage, defence: str, permute: tuple[str, ...]) -> None:
    found = tried(held, "old-embedding", defence, *permute)
    hidden = bool(permute) or "shuffle" in defence
    assert found.figures.get("places") == (1 if hidden else None)
    assert found.figures["psnr"] > 22 and ATTACKS[found.attack][1].startswith("the embedding before fine-tuning")


@pytest.mark.parametrize("defence", ["none", "batch-shuffle=4"])
def test_clusters_have_places_where_an_old_embedding_alone_takes_some_tokens_for_others(defence: str) -> None:
    scene = Scene.of(stage(private=12, old=tuned(0.8)), parse_veil(defence, ("rows",)))
    assert scene.old is not None and restore(scene, scene.old, scene.view).scores["places"] < 1
    assert attack("old-embedding", scene).figures["places"] == 1


@pytest.mark.parametrize(
    "defence", ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lowpass=0.5", "batch-shuffle=4"))]
)
def test_a_decoder_behind_the_order_attack_sees_what_it_does_not_see_before(held: Stage, defence: str) -> None:
    blind, first = (tried(held, name, defence, "rows", "columns") for name in ("decoder", "ordered-decoder"))
    plain = tried(held, "ordered-decoder", defence)
    assert first.figures["psnr"] == pytest.approx(plain.figures["psnr"]) and first.figures["psnr"] > 20
    assert blind.figures["psnr"] < 17


def test_a_decoder_is_learned_once_a_defence(held: Stage) -> None:
    assert held.decoder(parse_veil("none")) is held.decoder(parse_veil("none"))


def test_repeats_see_through_noise(held: Stage) -> None:
    once, often = (tried(held, name, "noise=0.3", "rows").figures for name in ("order", "repeats"))
    assert often["psnr"] > once["psnr"] + 2


@pytest.mark.parametrize(
    "defence", ["none", "noise=0.2", pytest.param("lowpass=0.5", marks=pytest.mark.slow), "batch-shuffle=4"]
)
def test_samples_are_linked(held: Stage, defence: str) -> None:
    """Behind a batch shuffle too: by the batches their tokens share."""
    assert tried(held, "linkage", defence, "rows", "columns").figures == {"linked": 1}


@pytest.mark.parametrize("defence", ["none", "batch-shuffle=4"])
def test_pooled_labels_are_read_behind_a_batch_shuffle_too(defence: str) -> None:
    pooled = stage(private=8, public=30, global_pool="avg")
    for permute in ((), ("rows", "columns")):
        assert tried(pooled, "labels", defence, *permute).figures == {"labels": 1, "unnamed labels": 1}


def test_clusters_need_no_embedding_behind_noise_and_a_batch_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.audit.split.attackers.LAYOUT_NEEDS", 48)
    many = stage(private=48, public=30)
    clear = tried(many, "no-embedding", "none", "rows").figures["places"]
    assert clear > 0.4  # of 16 places, 48 samples lay out most; what stands before the layout must lose none of them
    assert tried(many, "no-embedding", "batch-shuffle=8", "rows").figures["places"] == pytest.approx(clear, abs=0.3)
    assert tried(many, "no-embedding", "noise=0.001", "rows").status == "done"


@pytest.mark.parametrize(
    ("name", "defence", "permute", "why"),
    [
        ("no-embedding", "none", (), "the rows are not permuted"),
        ("no-embedding", "none", ("rows",), "needs 100 samples, but there are only 12"),
        ("no-embedding", "batch-shuffle=4", (), "needs 100 samples, but there are only 12"),
        ("linkage", "batch-shuffle", (), "all samples are in one batch"),
        ("linkage", "batch-shuffle=12", (), "all samples are in one batch"),
        ("repeats", "none", ("rows",), "there is no noise to average away"),
    ],
)
def test_what_says_nothing_is_not_tried(
    held: Stage, name: str, defence: str, permute: tuple[str, ...], why: str
) -> None:
    found = tried(held, name, defence, *permute)
    assert (found.status, found.figures, found.shown) == ("refused", {}, None)
    assert why in found.reason


def test_reasons_that_lie_in_the_model_or_the_samples() -> None:
    one = stage(private=1)
    for name, defence, why in (
        ("old-embedding", "none", "no base model was given"),
        ("linkage", "none", "a single sample is always re-identified"),
    ):
        found = tried(one, name, defence, "rows")
        assert (found.status, why in found.reason) == ("refused", True), name
    one.labels = None
    assert tried(one, "labels", "none").reason == "the images have no labels"


def test_a_grid_that_is_not_square_has_no_layout(held: Stage) -> None:
    wide = copy(held)
    wide.grid = (2, 8)
    found = tried(wide, "no-embedding", "none", "rows")
    assert found.status == "refused" and "needs a square grid, but the grid is 2 × 8" in found.reason


def test_an_attacker_that_breaks_down_is_not_tried(held: Stage, monkeypatch) -> None:
    def singular(_: object) -> None:
        torch.linalg.cholesky(torch.zeros(2, 2))

    monkeypatch.setitem(ATTACKS, "linkage", (singular, "nothing"))
    found = tried(held, "linkage", "none")
    assert (found.status, found.figures) == ("refused", {})
    assert found.reason.startswith("the attack failed with an error: linalg.cholesky")


def test_every_attacker_says_what_it_knows() -> None:
    assert all(knows for _, knows in ATTACKS.values())


@pytest.mark.parametrize(
    ("scores", "samples", "first", "why"),
    [
        ({"channels": 0.9}, 15, "", "with only 15 samples, some channels may not be identified"),
        ({"channels": 0.9}, 16, "", ""),
        ({"channels": 1.0}, 15, "", ""),
        ({}, 2, "", ""),
        ({"channels": 0.9}, 15, "another reason", "another reason"),
    ],
)
def test_few_samples_are_a_reason_where_channels_are_not_known(
    scores: dict[str, float], samples: int, first: str, why: str
) -> None:
    scene: Any = SimpleNamespace(stage=SimpleNamespace(z=torch.zeros(samples)))
    assert _lacked(scene, Restored(torch.zeros(0), torch.zeros(0), scores, torch.zeros(0)), first) == why


@pytest.mark.parametrize(("samples", "width", "few"), [(3, 8, False), (3, 9, True), (1, 1, True)])
def test_a_covariance_needs_as_many_tokens_beyond_the_clusters_centres_as_channels(
    samples: int, width: int, few: bool
) -> None:
    assert unclustered(samples, 4, width) is few


def test_what_an_attacker_lacked_stands_beside_what_it_did() -> None:
    """Too few samples to cluster, too few public images to learn borders from, images that are all alike."""
    few = stage(private=2, public=5, old=tuned())
    assert few.thin == "5 public images have 80 tokens of 24 channels"
    assert "too few public images (5)" in tried(few, "order", "noise=0.5", "rows").reason
    assert tried(few, "order", "none", "rows").reason == ""
    assert "2 samples, too few" in tried(few, "old-embedding", "none", "rows").reason
    assert tried(few, "old-embedding", "none").reason == ""
    enough = stage(private=3)
    assert enough.thin is None and tried(enough, "order", "noise=0.5", "rows").reason == ""


def test_sixteen_sendings_gain_by_neighbours_too(held: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    veil = parse_veil("noise=4", ("rows",))
    with monkeypatch.context() as without:
        without.setattr(Stage, "joint", lambda *_: Joint())
        before = attack("repeats", Scene.of(held, veil)).figures
    now = attack("repeats", Scene.of(held, veil)).figures
    assert now["psnr"] > before["psnr"] + 0.2 and now["places"] >= before["places"]


STAGE = stage(private=10, old=classifier())


@pytest.mark.parametrize("drifted", [False, True])
@pytest.mark.parametrize("defence", ["none", "lowpass=0.6", "batch-shuffle=4", "batch-shuffle"])
@pytest.mark.parametrize("permute", [(), ("rows",), ("columns",), ("rows", "columns")])
def test_tokens_are_where_they_belong(defence: str, permute: tuple[str, ...], drifted: bool) -> None:
    veil = parse_veil(defence, permute)
    scene = Scene.of(STAGE, veil)
    side = scene.old if drifted else scene.side
    assert side is not None
    found = restore(scene, side, scene.view, drifted=drifted)
    assert set(found.scores.values()) <= {1}
    exchanged = "shuffle" in defence
    hidden = {"channels": bool("columns" in permute), "places": "rows" in permute or exchanged, "samples": exchanged}
    assert found.scores.keys() == {name for name, is_so in hidden.items() if is_so}
    truth = scene.view.truth
    sample, row = (each.flatten()[found.index] for each in (truth.sample, truth.row))
    assert torch.equal(row, torch.arange(1, 17).expand(10, 16))
    assert torch.equal(sample, sample[:, :1].expand(10, 16)) and len(sample[:, 0].unique()) == 10
    if "lowpass" not in defence:
        torch.testing.assert_close(found.tokens, STAGE.z[sample, row], rtol=0, atol=0)


def test_mistakes_are_counted() -> None:
    scene = Scene.of(STAGE, parse_veil("noise=3", ("rows",)))
    assert 0 < restore(scene, scene.side, scene.view).scores["places"] < 0.8
