"""The audit as a whole: pairs, reasons, verdict and the file."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import outcome, undone

from situs.audit import (
    Attack,
    Matching,
    MatchingConfig,
    PatchEmbedding,
    create_attack,
    create_defence,
)
from situs.audit.cases import ImageFinding, TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.gradients import (
    FALLBACK,
    Audit,
    Fallback,
    attack_gradients,
    findings,
    opening,
    seen,
    strength,
    verdict,
)
from situs.audit.scores import means_of
from situs.errors import SitusError
from situs.findings import ACTIVE, NO_NOISE
from situs.gate import BLIND, Limit, judge
from situs.pages import make_page

NORMALISATION = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def audit(
    attacks: str = "patchembed,april", defences: str = "none,no-pe-gradient", batch: int = 1, **fields: Any
) -> Audit:
    torch.manual_seed(0)
    given = {"img_size": 32, "width": 48, "heads": 4, "patch_size": 8, "num_classes": 5, **fields}
    backbone = small_vit(**given).eval()
    images = (torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    return attack_gradients(
        backbone,
        TestSet(images, torch.arange(4), NORMALISATION),
        [create_attack(name, MatchingConfig(iterations=2)) for name in attacks.split(",")],
        [create_defence(name) for name in defences.split(",")],
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
    assert (best.exact, best.why("refused"), best.caveat) == (4, None, None)
    assert other.exact == 0
    assert all("not sent" in str(pair.why("refused")) for pair in without)
    assert "none: 4 of 4 images recovered exactly from one step (best attack patchembed" in verdict(found)
    assert "no-pe-gradient: not attacked, because no attack of this audit applies." in verdict(found)
    assert "mean image" in verdict(found)
    means = means_of(best.scores)
    assert means["psnr"] is not None and means["psnr"].low is not None
    assert means["lpips"] is None


def test_the_victims_pictures_are_the_originals() -> None:
    found = audit("patchembed", "none")
    assert found.pairs[0].shown is not None
    torch.testing.assert_close(found.pairs[0].shown, found.images, rtol=0, atol=1e-3)


def test_a_batch_has_one_solution_for_all_its_images() -> None:
    [pair] = audit("patchembed", "none", batch=2).pairs
    assert pair.shown is not None
    assert torch.equal(pair.shown[0], pair.shown[1])
    assert not torch.equal(pair.shown[0], pair.shown[2])
    assert pair.exact == 0
    assert "sums over the images" in str(pair.caveat)


def test_a_model_without_an_attack_says_so() -> None:
    found = audit(positions="sincos")
    assert all("fixed or frozen" in str(pair.why("refused")) for pair in found.pairs)
    assert verdict(found).startswith("Assumed: an honest server. No attack of this audit applies")
    assert "This does not prove privacy" in verdict(found)
    assert findings(found) == {} and found.baselines == {}


def test_a_summary_has_reasons_where_something_does_not_apply_and_there_alone() -> None:
    numbers = {"psnr": [3.0, 4.0], "ssim": [0.1, 0.2], "lpips": None, "order_accuracy": None, "reidentified": None}
    met, refused = outcome(scores=numbers), outcome(reason="no table", defence="odd")
    assert [len(said_of(*pairs).summary().tables) for pairs in ((met,), (met, refused), (refused,))] == [1, 2, 1]
    for pairs in ((met, refused), (refused,)):
        reasons = said_of(*pairs).summary().tables[-1]
        assert "do not apply" in reasons.title
        [row] = reasons.rows
        assert "no table" in " ".join(map(str, row)) and "odd" in " ".join(map(str, row))
    assert "do not apply" not in said_of(met).summary().tables[0].title
    assert said_of(met).summary().notes == ()
    gated = said_of(met, limit=Limit("psnr", 3.5))
    assert gated.ruling is not None and gated.summary().notes == (gated.ruling.sentence,)


def test_mjp_is_given_no_credit_that_an_unfinished_attack_would_give() -> None:
    found = audit("patchembed", "mjp=0.3")
    assert found.pairs[0].why("lower_bound")
    assert "MJP protects" in str(found.pairs[0].caveat)
    assert "mjp γ=0.3: at least " in verdict(found)
    assert "lower bound" in verdict(found)


def test_an_interval_ends_where_its_metric_does() -> None:
    means = means_of({"order_accuracy": [1.0, 0.5, 1.0], "ssim": [0.9, 0.1], "psnr": [0.5, 9.0], "lpips": None})
    assert means["order_accuracy"] is not None and means["order_accuracy"].high == 1.0
    assert means["ssim"] is not None and means["ssim"].high == 1.0
    assert means["psnr"] is not None and (means["psnr"].high or 0) > 9
    assert means["lpips"] is None


def test_the_file_has_every_image_and_is_json() -> None:
    found = audit()
    told = json.loads(json.dumps(found.numbers(), allow_nan=False))
    first = told["pairs"][0]
    assert [row["image"] for row in first["images"]] == ["0", "1", "2", "3"]
    assert first["images"][2]["rank"] == 16
    assert first["images"][2]["psnr"] == (found.pairs[0].scores["psnr"] or [])[2]
    assert told["pairs"][2] == {
        "attack": "patchembed",
        "defence": "no-pe-gradient",
        "status": "refused",
        "closed_form": True,
        "bound": False,
        "remarks": [{"kind": "refused", "text": found.pairs[2].why("refused")}],
    }
    assert set(told["baselines"]) == {"grey", "mean image", "random pair"}
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


def partial(
    attacks: list[Attack], deadline: Deadline, batch: int = 2, names: str = "none,noise", **fields: Any
) -> Audit:
    torch.manual_seed(0)
    backbone = small_vit(32, width=48, heads=4, patch_size=8, num_classes=5).eval()
    images = (torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    defences = [create_defence(name) for name in names.split(",")]
    test = TestSet(images, torch.arange(4), NORMALISATION)
    return attack_gradients(backbone, test, attacks, defences, step=Step(batch=batch), deadline=deadline, **fields)


def test_ctrl_c_in_a_search_keeps_what_it_has() -> None:
    deadline = Deadline()
    found = partial([PatchEmbedding(), Slow(MatchingConfig(parallel=1))], deadline)
    assert deadline.interrupted
    assert [(p.attack, p.count) for p in found.pairs] == [("patchembed", 4), ("matching", 2)]
    assert found.pairs[1].why("stopped") == "3 of 1,000 iterations, 2 of 4 images"
    assert found.stopped == "Ctrl-C, with 1 of 4 attacks finished"
    assert found.undone == [("patchembed", "noise σ=0.001"), ("matching", "noise σ=0.001")]
    told = json.loads(json.dumps(found.numbers(), allow_nan=False))
    assert told["partial"] and told["pairs"][1]["remarks"][1]["text"].startswith("3 of 1,000")
    assert [row["image"] for row in told["pairs"][1]["images"]] == ["0", "1"]
    assert told["not_attacked"][0] == {"attack": "patchembed", "defence": "noise σ=0.001"}
    assert verdict(found).startswith("Assumed: an honest server. A partial result: stopped by Ctrl-C")
    assert "noise σ=0.001: not attacked" in verdict(found)
    page = make_page(found).render()
    assert "stopped after 3 of 1,000 iterations, 2 of 4 images" in page
    assert "audit was stopped first" in page


def test_ctrl_c_in_a_closed_form_keeps_those_before() -> None:
    found = partial([PatchEmbedding(), Cut()], Deadline())
    assert len(found.pairs) == 1 and len(found.undone) == 3
    deadline = Deadline()
    nothing = partial([Cut()], deadline)
    assert deadline.interrupted and nothing.stopped == "Ctrl-C, with 0 of 2 attacks finished"
    assert nothing.judge(psnr=20.0).status == 4
    assert nothing.pairs == [] and "before any attack had a result" in verdict(nothing)
    assert nothing.numbers()["partial"] and "Verdict" in make_page(nothing).render()


def test_a_time_limit_is_shared() -> None:
    """Both searches get a part of it, and neither all."""
    ticks = itertools.count()
    deadline = Deadline(seconds=20, clock=lambda: float(next(ticks)))
    found = partial([Matching(MatchingConfig(iterations=10**6))], deadline, batch=4)
    assert [pair.count for pair in found.pairs] == [4, 4]
    assert all("of 1,000,000 iterations" in str(pair.why("stopped")) for pair in found.pairs)
    assert found.undone == []
    assert str(found.stopped).startswith("the time limit of 20 s, with 0 of 2 attacks")


class Deaf(PatchEmbedding):
    """It never asks whether its time is over. after: call number from which it computes for minutes."""

    name, calls, after = "deaf", 0, 1

    def recover(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            for _ in range(60):
                time.sleep(0.05)
                torch.ones(1).sum()
        return super().recover(*args)


@pytest.mark.parametrize(("after", "status"), [(0, ["not_run"]), (1, ["done"])])
def test_an_attack_that_never_asks_for_the_time_is_cut_off(
    after: int, status: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a result it counts as not run; with one whose control without noise was cut off, it proves nothing."""
    monkeypatch.setattr("situs.audit.deadline.GRACE", 0.1)
    monkeypatch.setattr(Deaf, "after", after)
    began, limit = time.monotonic(), Limit("psnr", 60.0)
    found = partial([Deaf()], Deadline(seconds=1.0), names="noise=10", batch=1, bounded=True, limit=limit)
    assert time.monotonic() - began < 2.9  # of 3 and more
    assert [finding.status for finding in found.findings if not finding.bound] == status
    assert after or str(found.stopped).startswith("the time limit of 1 s")
    assert found.ruling is not None and found.ruling.answer in ("incomplete", "inconclusive")
    assert all("the time ended before" in str(pair.why("doubt")) for pair in found.pairs)


def test_a_time_limit_begins_with_the_first_attack() -> None:
    now = [0.0]
    deadline = Deadline(seconds=20, clock=lambda: now[0])
    now[0] = 100.0  # a model was opened
    assert partial([PatchEmbedding()], deadline).stopped is None


def test_a_batch_of_matching_is_scored_in_the_best_order() -> None:
    torch.manual_seed(0)
    [pair] = audit("matching", "none", batch=2).pairs
    assert pair.shown is not None and pair.shown.shape[0] == 4
    assert not torch.equal(pair.shown[0], pair.shown[1])
    assert [fact["labels_right"] for fact in pair.facts] == [2, 2, 2, 2]


def test_images_must_fill_their_batches() -> None:
    with pytest.raises(SitusError, match=r"4 images .*batches of 3"):
        audit("patchembed", "none", batch=3)


# --- every branch of what is said -----------------------------------------------------------------------------


def said_of(*pairs: ImageFinding, steps: int = 1, **fields: Any) -> Audit:
    guesses: Any = {"mean image": {"psnr": [10.0, 12.0]}, "random pair": {"psnr": [8.0, 9.0]}}
    about, images = dict.fromkeys(["none", "noise"], ""), torch.zeros(2, 3, 4, 4)
    return Audit(list(pairs), ["a", "b"], images, "m", Step(local_steps=steps), guesses, about=about, **fields)


def pair(*values: float, known: tuple[float, ...] | None = (1.0, 0.0), **fields: Any) -> ImageFinding:
    scores = {"psnr": list(values), "reidentified": None if known is None else list(known[: len(values)])}
    return outcome(
        **{"attack": "patchembed", "defence": "none", "scores": scores, "facts": [{}] * len(values), **fields}
    )


NOISE = outcome("patchembed", "noise", reason="no table")
GUESS = "mean image 11.0 dB, random pair 8.5 dB."


def test_openings() -> None:
    refused = outcome("patchembed", "none", reason="no table")
    nothing = "The audit was stopped by Ctrl-C before any attack had a result, so this page says nothing about privacy."
    assert opening(said_of(refused, undone("april", "noise"), stopped="Ctrl-C")) == nothing
    assert opening(said_of(undone("april", "noise"), stopped="Ctrl-C")) == nothing
    assert opening(said_of(refused)) == (
        "No attack of this audit applies to the gradients of this model; the reasons are listed below. This does "
        "not prove privacy. If this audit did not try the attack `matching`, try it: it applies to almost every model."
    )
    assert opening(said_of(pair(3.0, 4.0))) == ""
    assert opening(said_of(pair(3.0), stopped="Ctrl-C, with 0 of 2 attacks finished")) == (
        "A partial result: stopped by Ctrl-C, with 0 of 2 attacks finished."
    )


@pytest.mark.parametrize(
    ("best", "found"),
    [
        (
            pair(60.0, 3.0),
            (
                "1 of 2 images recovered exactly from one step (best attack patchembed, mean PSNR 31.5 dB, most "
                "exposed image 60.0 dB, 1 of 2 re-identified)."
            ),
        ),
        (
            pair(60.0, 3.0, known=None, facts=[{"bytes": True}, {"bytes": False}]),
            (
                "1 of 2 images recovered exactly from one step, 1 of them with the exact byte of every pixel (best "
                "attack "
                "patchembed, mean PSNR 31.5 dB, most exposed image 60.0 dB)."
            ),
        ),
        (
            pair(6.0, 3.0, lower_bound=True),
            (
                "at least 0 of 2 images recovered exactly from one step (best attack patchembed, mean PSNR 4.5 dB, "
                "most exposed image 6.0 dB, 1 of 2 re-identified; a lower bound, see below)."
            ),
        ),
        (
            pair(6.0, partial="1 of 2 images"),
            (
                "0 of 1 image recovered exactly from one step (best attack patchembed, mean PSNR 6.0 dB, most "
                "exposed image 6.0 dB, 1 of 1 re-identified; stopped after 1 of 2 images)."
            ),
        ),
    ],
)
def test_findings(best: ImageFinding, found: str) -> None:
    told = findings(said_of(best, NOISE))
    assert told == {
        "none": found,
        "noise": "not attacked, because no attack of this audit applies.",
        "Without any gradient": GUESS,
    }
    audit = said_of(best, undone("april", "noise"), stopped="Ctrl-C")
    assert findings(audit)["noise"] == "not attacked, because the audit was stopped first."
    assert verdict(audit) == (
        f"Assumed: an honest server. A partial result: stopped by Ctrl-C. none: {found} noise: not attacked, "
        f"because the audit was stopped first. Without any gradient: {GUESS}"
    )
    assert "from 3 local steps" in findings(said_of(best, steps=3))["none"]


def test_the_best_attack_is_by_exact_images_then_the_worst_then_the_mean() -> None:
    one, all_, high, even = pair(200.0, 3.0), pair(60.0, 60.0), pair(9.0, 1.0), pair(5.5, 5.0)
    assert sorted([high, one, even, all_], key=strength) == [even, high, one, all_]
    assert strength(pair(9.0, 2.0)) > strength(pair(9.0, 1.0))
    audit = said_of(pair(5.5, 5.0, attack="april"), pair(9.0, 1.0, attack="matching"), NOISE)
    assert "best attack matching" in findings(audit)["none"]
    assert seen(outcome("april", "none", scores={"psnr": []})) == "mean PSNR 0.0 dB, most exposed image 0.0 dB"


# --- what an audit runs by itself, and its control ------------------------------------------------------------


def test_matching_runs_by_itself_where_no_closed_form_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Fallback(images=4, seconds=120.0, iterations=300) == FALLBACK
    monkeypatch.setattr("situs.audit.gradients.FALLBACK", Fallback(images=2, iterations=2))
    lines: list[str] = []
    torch.manual_seed(0)
    backbone = small_vit(32, width=48, heads=4, patch_size=8, num_classes=5).eval()
    images = (torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    found = attack_gradients(
        backbone,
        TestSet(images, torch.arange(4), NORMALISATION),
        [PatchEmbedding()],
        [create_defence(name) for name in ("none", "no-pe-gradient")],
        search=MatchingConfig(),
        deadline=Deadline(lines.append),
    )
    assert [(p.attack, p.defence, bool(p.case.fallback), p.count) for p in found.pairs] == [
        ("patchembed", "none", False, 4),
        ("patchembed", "no-pe-gradient", False, 0),
        ("matching", "no-pe-gradient", True, 2),
    ]
    said = (
        "no closed form applies, so the attack `matching` runs instead on 2 of 4 images (2 iterations, at most 120 s)"
    )
    assert str(found.pairs[2].caveat).startswith(f"{said}; ")
    assert f"no-pe-gradient: {said}" in lines
    assert found.stopped is None and found.undone == [] and found.pairs[2].why("stopped") is None
    assert found.numbers()["pairs"][2]["remarks"][0]["kind"] == "fallback"


class Cutting(Matching):
    """Ctrl-C at the third look."""

    def measure(self, target: Any, backbone: Any, noise: float) -> Any:
        plain, looks = super().measure(target, backbone, noise), iter(range(1000))

        def distance(guess: Any) -> Any:
            if next(looks) == 2:
                raise KeyboardInterrupt
            return plain(guess)

        return distance


@pytest.mark.parametrize("cut", [True, False])
def test_a_search_made_by_itself_that_is_stopped_is_no_pass(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if cut:
        monkeypatch.setattr("situs.audit.gradients.Matching", Cutting)
    else:
        monkeypatch.setattr("situs.audit.gradients.FALLBACK", Fallback(seconds=0.02))
    deadline = Deadline()
    found = partial([], deadline, batch=4, search=MatchingConfig())
    search = found.pairs[0]
    assert search.case.fallback and "of 300 iterations" in str(search.why("stopped"))
    assert deadline.interrupted == cut
    assert (found.stopped is not None) == cut  # its own 120 s are no stop of the audit
    assert judge(found.findings, Limit("psnr", 200.0)).status == 4


def test_what_is_finished_is_counted_once_for_sentence_box_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused is not finished, and a search made by itself is an attack, also where it was never begun."""
    monkeypatch.setattr("situs.audit.gradients.Matching", Cutting)
    found = partial([PatchEmbedding()], Deadline(), names="no-pe-gradient,withhold=0", search=MatchingConfig())
    assert [each.status for each in found.findings] == ["refused", "stopped", "refused", "not_run"]
    said = "0 of 2 attacks finished (2 do not apply)"
    assert found.stopped == found.numbers()["stopped"] == f"Ctrl-C, with {said}" and said in str(found)
    page = make_page(found).render()
    assert said in page and "<b>0 of 2</b> attacks finished (2 do not apply)" in page
    assert found.undone == [("matching", "withhold the embedding")] and "matching against withhold" in page


class Half(PatchEmbedding):
    """Equations that hold of no model, as those of APRIL do not hold of a standard ViT; noise hides it."""

    name = "half"

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Any:
        found = super().recover(backbone, uploads, known, deadline)
        noisy = known.defence.noise_level(1) > 0 or next(iter(uploads[0].values())).dtype != torch.float32
        facts = [{**fact, "fits": noisy, "rank": fact["unknowns"]} for fact in found.facts]
        return replace(found, images=torch.zeros_like(found.images), facts=facts)


class Fitting(Half):
    """The same where they hold, and noise drowns a direction."""

    name = "fitting"

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Any:
        found = super().recover(backbone, uploads, known, deadline)
        lost = int(known.defence.noise_level(1) > 0)
        facts = [{**fact, "fits": True, "rank": int(str(fact["unknowns"])) - lost} for fact in found.facts]
        return replace(found, facts=facts)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equations_that_fit_only_under_noise_are_found_out(dtype: torch.dtype) -> None:
    """The control: the same attack on the first upload without noise and in float32."""
    torch.manual_seed(0)
    backbone = small_vit(32, width=48, heads=4, patch_size=8, num_classes=5).eval()
    images = (torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    found = attack_gradients(
        backbone,
        TestSet(images, torch.arange(2), NORMALISATION),
        [Half(), Fitting()],
        [create_defence(name) for name in ("none", "noise", "clip")],
        step=Step(dtype=dtype),
    )
    doubts = {(p.attack, p.defence.split()[0]): p.why("doubt") for p in found.pairs}
    assert all(doubts["fitting", defence] is None for defence in ("noise", "clip"))
    rounded = dtype != torch.float32  # and nothing but that: what it hides is no proof either
    assert ("rounding to bfloat16 is not random noise" in str(doubts["fitting", "none"])) is rounded
    assert rounded or doubts["fitting", "none"] == NO_NOISE
    hidden = "without noise and in float32"
    assert all(hidden in str(doubts["half", defence]) for defence in ("noise", "clip"))
    assert ("rounding to bfloat16" if rounded else "do not fit") in str(doubts["half", "none"])
    alone = replace(found, findings=[p for p in found.pairs if p.attack == "half"])
    assert {judged.status for judged in judge(alone.findings, Limit("psnr", 50.0)).judgements} == {4}
    test = TestSet(images, torch.arange(2), NORMALISATION)
    found = attack_gradients(backbone, test, [Fitting()], [create_defence("noise=1e-30")], step=Step(dtype=dtype))
    said = "rounding to bfloat16 is not random noise" if rounded else "more than one solution for 2 of 2 images"
    assert said in str(found.pairs[0].why("doubt"))  # noise below what is rounded off is none


def test_a_server_that_chooses_the_weights_reads_what_an_honest_one_does_not() -> None:
    """The client's model stays as it is; its step is made on the weights that the server wrote."""
    torch.manual_seed(0)
    model = small_vit(16, width=96, depth=5, num_classes=5).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    test = TestSet(torch.randn(4, 3, 16, 16).cumsum(2) / 2, torch.arange(4) % 5, ((0.5,) * 3, (0.25,) * 3))
    options = {"step": Step(batch=4), "limit": BLIND}
    attacks, defences = [create_attack("crafted")], [create_defence(name) for name in ("none", "noise=1e6", "fedavg")]
    with pytest.raises(SitusError, match=r"crafted.*server=active"):
        attack_gradients(model, test, attacks, defences, **options)
    found = attack_gradients(model, test, attacks, defences, threat=ACTIVE, **options)
    assert [pair.exact for pair in found.pairs] == [4, 0, 0] and found.pairs[2].status == "refused"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert found.ruling is not None
    assert [judged.outcome for judged in found.ruling.judgements] == ["above", "inconclusive", "inconclusive"]
    assert verdict(found).startswith("Assumed: a server that chooses the weights. none: 4 of 4 images recovered")
    assert found.numbers()["threat"] == "active"
