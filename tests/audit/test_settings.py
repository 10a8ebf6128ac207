"""The settings of Table 5: which image is attacked and which compared with, who is told what, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor

from situs.audit import AdaptiveConfig, AdaptiveMJP, April, Matching, MatchingConfig, PatchEmbedding, adapt
from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery
from situs.audit.cases import TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import MaskedJigsaw, NoDefence, Step
from situs.audit.settings import (
    Comparison,
    Contestant,
    compare_settings,
    contestants,
    glance,
    settings_table,
    verdict,
    with_informed,
)
from situs.core.jigsaw import move_patches
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.sources.samples import load_samples
from situs.errors import SitusError
from situs.methods.mjp import MJP, MJPConfig
from situs.methods.supervised import Supervised, SupervisedConfig
from situs.pages import make_page
from situs.results import Provenance

NORMALISATION = ((0.5,), (0.3,))
IMAGES = (load_samples("test").images[:3].float() / 255 - 0.5) / 0.3
LABELS = torch.tensor([1, 2, 3])
TEST = TestSet(IMAGES, LABELS, NORMALISATION)


def model(**fields: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 28, "width": 64, "heads": 4, "patch_size": 7, "in_chans": 1, "num_classes": 10, **fields}
    return small_vit(**given).eval()


class Spy(Attack):
    """Gives back zeros and remembers what it was told."""

    name, about, separates_hidden = "spy", "looks on", True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Knowledge | None] = []
        self.sent: list[Any] = []

    def prepare(self, backbone: Any, sent: Any, known: Any) -> Ready:
        return Ready(("model.pos_embed", "unknown"))

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        self.told.append(known)
        self.sent.append(list(uploads))
        return Recovery(torch.zeros(len(uploads), 1, 28, 28), [{} for _ in uploads])


def compare(attacks: list[Attack], **fields: Any) -> Comparison:
    backbone = model()
    models = {"plain": Contestant(backbone), "MJP": Contestant(backbone, mjp=True)}
    return compare_settings(models, TEST, attacks, ratio=0.2, **fields)


@pytest.fixture(scope="module")
def whole() -> Comparison:
    adaptive = AdaptiveMJP(AdaptiveConfig(rounds=6, starts=24, retries=4))
    return compare([PatchEmbedding(), April(), adaptive])


def row(found: Comparison, model: str, setting: str, attacker: str) -> Any:
    asked = (model, setting, attacker)
    [only] = [r for r in found.pairs if (r.case.name, r.case.setting, r.case.attacker[: len(attacker)]) == asked]
    return only


def psnr(found: Comparison, *where: str) -> float:
    values = row(found, *where).scores["psnr"]
    return sum(values) / len(values)


def test_every_row_is_there(whole: Comparison) -> None:
    assert len(whole.pairs) == 2 * 3 * 3
    assert {(r.case.name, r.case.setting, r.case.attacker) for r in whole.pairs} == {
        (m, s, a)
        for m in ("plain", "MJP")
        for s in "abc"
        for a in ("patchembed, uninformed", "april, uninformed", "adaptive-mjp, informed")
    }
    assert whole.stopped is None and whole.hidden == 3 and whole.patches == 16
    assert whole.mjp == ("MJP",)


def test_settings_attack_and_compare_with_what_they_say(whole: Comparison) -> None:
    """On a plain model the static attack is exact, so its pictures say which image was in the step."""
    for setting, truth in (("a", whole.images), ("b", whole.shuffled), ("c", whole.shuffled)):
        found = row(whole, "plain", setting, "patchembed").shown
        torch.testing.assert_close(found, truth, atol=1e-3, rtol=0)
    assert psnr(whole, "plain", "a", "patchembed") > 60
    assert psnr(whole, "plain", "b", "patchembed") > 60
    assert psnr(whole, "plain", "c", "patchembed") < 40
    assert not torch.equal(whole.images, whole.shuffled)


def test_one_who_knows_mjp_gets_what_static_attackers_do_not(whole: Comparison) -> None:
    for setting in "ac":  # in (a) it is DAL's gradient alone that blurs
        assert psnr(whole, "MJP", setting, "adaptive") > psnr(whole, "MJP", setting, "patchembed") + 15
    assert psnr(whole, "MJP", "c", "patchembed") < 15
    parts = row(whole, "MJP", "c", "adaptive").scores
    assert min(parts["shown_psnr"]) > 40 and min(parts["hidden_psnr"]) > 30
    said = verdict(whole)
    assert said.startswith("MJP's privacy claim does not hold against an attacker who knows that MJP is used.")
    assert "3 of 16 patches hidden (γ = 0.2)" in said


def test_the_shuffle_is_the_one_that_mjp_makes() -> None:
    spy = Spy()
    found = compare([spy])
    method = MJP(model(), replace(MJPConfig(), mask_ratio=0.2))
    draws = method.draw(Batch(torch.zeros(3), torch.arange(3)), When(seed=0, epoch=0))
    real = move_patches(found.images, (4, 4), draws["index"])
    torch.testing.assert_close(found.shuffled, real)
    hidden = (spy.sent[3][1]["model.pos_embed"][0, 1:] == 0).all(dim=1)  # MJP's step on shuffled images, second one
    assert torch.equal(hidden, draws["mask"][1])
    assert "unknown" in spy.sent[3][0] and "unknown" not in spy.sent[0][0]


def test_only_one_who_knows_is_told() -> None:
    static, informed = Spy(), Spy()
    static.separates_hidden = False  # type: ignore[misc]
    compare([static, informed])
    assert len(static.told) == len(informed.told) == 4  # two models, original and shuffled images
    for told in static.told:
        assert told is not None and told.method is None and told.defence.name == "none"
    names = [known.defence.label for known in informed.told if known is not None]
    assert names == ["none", "none", "mjp γ=0", "mjp γ=0.2"]
    assert isinstance(informed.told[3].method, MJP)  # type: ignore[union-attr]


def test_a_run_of_mjp_is_attacked_in_its_own_step_and_any_other_model_in_both() -> None:
    backbone = model()
    own = MJP(backbone, replace(MJPConfig(), mask_ratio=0.2))
    assert contestants("run", own) == {"run": Contestant(own, mjp=True)}
    for other in (backbone, Supervised(backbone, SupervisedConfig())):
        found = contestants("run", other)
        assert list(found.values()) == [Contestant(other), Contestant(other, mjp=True)]
        plain, hiding = found
        assert plain == "run" and "MJP" in hiding
        assert [each.backbone for each in found.values()] == [backbone] * 2
        assert [each.defence(0.2) for each in found.values()] == [NoDefence(), MaskedJigsaw(0.2)]


def test_one_who_knows_mjp_is_always_among_the_attackers_and_never_twice() -> None:
    static, knowing = PatchEmbedding(), AdaptiveMJP()
    assert with_informed([static, knowing]) == [static, knowing]
    added = with_informed([static])
    assert added[0] is static and [each.separates_hidden for each in added] == [False, True]


def test_parts_by_hand() -> None:
    """A spy that gives grey: shown and hidden patches are scored against the patches themselves."""
    found = compare([Spy()])
    only = row(found, "MJP", "c", "spy")
    real = found.images[0].double()
    grid = real.unfold(1, 7, 7).unfold(2, 7, 7).reshape(16, 49)
    draws = MJP(model(), replace(MJPConfig(), mask_ratio=0.2)).draw(
        Batch(torch.zeros(3), torch.arange(3)), When(seed=0, epoch=0)
    )
    shown = grid[~draws["mask"][0]]
    assert only.scores["shown_psnr"][0] == pytest.approx(-10 * float((shown - 0.5).square().mean().log10()))
    assert len(only.scores["hidden_order"]) == 3


def test_files_and_page(outline: Any, whole: Comparison) -> None:
    told = json.loads(json.dumps(whole.numbers(), allow_nan=False))
    assert len(told["rows"]) == 18
    last = next(r for r in told["rows"] if r["model"] == "MJP" and r["setting"] == "c" and "adaptive" in r["attacker"])
    assert len(last["images"]) == 3 and last["images"][0]["hidden"] == 3
    assert last["mean"]["shown_psnr"]["low"] is not None
    assert {b["name"] for b in told["baselines"] if b["setting"] == "c"} == {
        "grey",
        "mean image",
        "random pair",
        "the shuffled image itself",
    }
    header, rows = settings_table(whole)
    assert all(len(r) == len(header) for r in rows)
    page = make_page(replace(whole, provenance=Provenance({"seed": 0})))
    intervals = str(next(section for section in page.sections if section.title == "The table").blocks[-1])
    assert "95 % intervals" in intervals and "no gradient" not in intervals
    assert intervals.count("<tr><td") == sum(pair.attacked for pair in whole.pairs) > 0
    text = page.render()
    assert "Overview: mean PSNR in dB" in text
    assert outline(text) == [
        "First screen, 1 figure",
        "Threat model, 1 fold, facts",
        "Verdict, 3 texts, 10 rows",
        "Pictures, 1 figure",
        "The table, 1 text, 46 rows, 1 fold",
        "Visible and hidden patches, separately, 12 rows, 1 fold",
        "What the paper reports, 5 rows",
        "How this page was made, facts",
    ]
    for heading in (
        "Verdict",
        "The table",
        "Visible and hidden patches, separately",
        "Pictures",
        "What the paper reports",
    ):
        assert f">{heading}</h2>" in text
    assert text.count("<img") == 2
    assert text.index("does not hold against an attacker who knows that MJP is used") < text.index("<img")
    header, rows = glance(whole)
    assert header[2:] == [
        "(a) step on the original images, compared with the original images",
        "(b) step on the shuffled images, compared with the shuffled images",
        "(c) step on the shuffled images, compared with the original images",
    ]
    assert len(rows) == 2 * 3 + 4 and rows[0][:3] == ["plain", "patchembed, uninformed", "200 dB, 3 of 3"]


def test_what_does_not_apply_is_a_reason() -> None:
    backbone = model(positions="sincos")
    found = compare_settings(
        {"plain": Contestant(backbone)},
        TEST,
        [PatchEmbedding()],
        settings=("a",),
    )
    assert "fixed or frozen" in str(found.pairs[0].why("refused"))
    assert "no audited model was trained with MJP" in verdict(found)
    assert "not attacked here" in make_page(found).render()
    assert "Overview: mean PSNR" not in make_page(found).render()
    json.dumps(found.numbers(), allow_nan=False)


def test_mistakes_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [({"settings": ("d",)}, "settings"), ({"ratio": 1.0}, "ratio")]
    for fields, field in wrong:
        with pytest.raises(SitusError) as caught:
            compare_settings({"plain": Contestant(model())}, TEST, [], **fields)
        assert caught.value.field == field
    odd = MJP(model(), replace(MJPConfig(), shuffle="spp", unknown=False, dal="none"))
    with pytest.raises(SitusError, match="must shuffle the patches of the grid"):
        compare_settings({"odd": Contestant(odd)}, TEST, [])


def test_it_stops_in_time_and_says_so() -> None:
    ticks = iter(range(10_000))
    deadline = Deadline(seconds=1, clock=lambda: float(next(ticks)))
    found = compare([PatchEmbedding()], deadline=deadline)
    assert found.stopped is not None and len(found.pairs) < 6
    assert "partial" in verdict(found)


class Stopped(Spy):
    """Has one image when Ctrl-C comes, or none."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images = images

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        if not self.images:
            raise KeyboardInterrupt
        return Recovery(torch.zeros(self.images, 1, 28, 28), [{}] * self.images, partial="1 of 3 uploads")


def test_ctrl_c_keeps_the_rows_before_it_and_a_short_row_is_shown_as_one() -> None:
    deadline, attackers = Deadline(), [Spy(), Stopped(1), Stopped(0)]
    models = {"mjp": Contestant(model(), mjp=True)}
    found = compare_settings(models, TEST, attackers, settings=("c",), ratio=0.2, deadline=deadline)
    assert deadline.interrupted and found.stopped == "Ctrl-C, with 1 of 3 attacks finished"
    assert [len(row.facts) for row in found.pairs] == [3, 1]
    assert [row[3] for row in settings_table(found)[1][:2]] == ["0 of 3", "0 of 1, stopped"]
    told = json.loads(json.dumps(found.numbers(), allow_nan=False))
    assert told["partial"] and "1 of 3 uploads, 1 of 3 images" in [each["text"] for each in told["rows"][1]["remarks"]]
    page = make_page(found).render()
    assert "If an attack was stopped" in page and page.count("<img") == 1


def test_an_attacker_who_fails_or_is_stopped_proves_nothing() -> None:
    """Grey pictures refute nothing, and nothing is said to survive them."""
    mjp = {"MJP": Contestant(model(), mjp=True)}
    failed = verdict(compare_settings(mjp, TEST, [Spy()], settings=("b", "c"), ratio=0.2))
    assert failed.startswith(
        "MJP's privacy claim is not refuted by an attacker who knows that MJP is used. That does not prove privacy"
    )
    stopped = verdict(compare_settings(mjp, TEST, [Stopped(1)], settings=("c",), ratio=0.2))
    assert "spy was stopped after 1 of 3 uploads" in stopped
    assert "survive" not in failed + stopped


class Seer(Spy):
    """Knows the images."""

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        return Recovery(IMAGES, [{} for _ in uploads])


class Partly(Seer):
    """Knows the first images, and gives back grey for the others."""

    def __init__(self, right: int) -> None:
        super().__init__()
        self.right = right

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        images = IMAGES[: len(uploads)].clone()
        images[self.right :] = 0
        return Recovery(images, [{} for _ in uploads])


@pytest.mark.parametrize(
    ("images", "right", "claim"),
    [
        (3, 0, "is not refuted by"),
        (3, 1, "is refuted in part by"),
        (2, 1, "does not hold against"),
        (3, 2, "does not hold against"),
    ],
)
def test_the_claim_is_refuted_in_part_by_fewer_than_half_of_the_images(images: int, right: int, claim: str) -> None:
    mjp, test = {"MJP": Contestant(model(), mjp=True)}, TestSet(IMAGES[:images], LABELS[:images], NORMALISATION)
    said = verdict(compare_settings(mjp, test, [Partly(right)], settings=("c",), ratio=0.2))
    assert said.startswith(f"MJP's privacy claim {claim} an attacker who knows that MJP is used.")
    assert f"recovers {right} of {images} images exactly" in said
    assert ("That does not prove privacy" in said) is (right == 0)


@pytest.mark.parametrize("order", [1, -1])
def test_the_verdict_is_on_the_strongest_who_knows(order: int) -> None:
    mjp = {"MJP": Contestant(model(), mjp=True)}
    found = compare_settings(mjp, TEST, [Spy(), Seer()][::order], settings=("c",), ratio=0.2)
    assert "does not hold against" in verdict(found) and "3 of 3 images exactly" in verdict(found)


def test_a_step_that_hides_nothing_leaves_the_other_images_their_numbers() -> None:
    """A run may play its puzzle in some steps alone: hidden patches are then measured of no image, not of the wrong."""

    class Sometimes(MJP):
        def draw_mask(self, batch: Batch, when: When) -> Tensor:
            return super().draw_mask(batch, when) & (batch.ids % 2 == 0)[:, None]

    run = Sometimes(model(), replace(MJPConfig(), mask_ratio=0.2))
    found = compare_settings({"run": Contestant(run, mjp=True)}, TEST, [Spy()], settings=("c",), ratio=0.2, step=Step())
    masks = run.draw(Batch(torch.zeros(3), torch.arange(3)), When(seed=0, epoch=0))["mask"].sum(dim=1)
    assert 0 < int((masks == 0).sum()) < 3 and found.hidden == round(float(masks.double().mean()))
    [only] = json.loads(json.dumps(found.numbers(), allow_nan=False))["rows"]
    assert [image["hidden_psnr"] for image in only["images"]] == [None] * 3
    assert all(image["shown_psnr"] > 0 for image in only["images"])


def test_without_pictures_it_holds_none(whole: Comparison) -> None:
    bare = whole.without_pictures()
    assert not len(bare.images) and not len(bare.shuffled) and not bare.private
    assert all(each.shown is None for each in bare.findings)
    assert bare.numbers() == whole.numbers()


def test_an_attack_that_reads_all_is_given_all() -> None:
    attackers = [Matching(MatchingConfig(iterations=1))]
    plain = {"plain": Contestant(model())}
    found = compare_settings(plain, TEST, attackers, settings=("a",), ratio=0.2)
    assert found.pairs[0].why("refused") is None and len(found.pairs[0].facts) == 3


def test_what_has_no_patches_to_shuffle_is_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    own = {"own": Contestant(adapt(net, 28, in_chans=1))}
    with pytest.raises(SitusError, match="cannot be shuffled: "):
        compare_settings(own, TEST, [])
