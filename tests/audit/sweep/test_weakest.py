"""The search for remedies on a small victim: what it names passes on other images, and the rung below does not."""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from situs.audit import (
    Deadline,
    audit_gradients,
    create_attack,
    create_defence,
    find_defences,
    trace_defences,
    trace_texts,
)
from situs.audit.attacks.base import Attack, Ready, Recovery
from situs.audit.attacks.matching import MatchingConfig
from situs.audit.attacks.tokens.attack import TokensConfig
from situs.audit.cases import TestSet
from situs.audit.client import victim_gradients
from situs.audit.deadline import StoppedError
from situs.audit.defences import Clip, NoDefence, Noise, Step, Withhold
from situs.audit.sweep.ladder import (
    Answer,
    CostConfig,
    Remedies,
    Remedy,
    Rung,
    Trial,
    cost_of,
    exposures_by_metric,
    ladders,
    scale_of,
    verdict,
)
from situs.audit.sweep.weakest import Search, part_of
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.gate import BLIND, Judgement, Limit, Ruling
from situs.pages import make_page


@pytest.fixture(scope="module")
def victim() -> Backbone:
    torch.manual_seed(0)
    args = {"depth": 2, "embed_dim": 48, "num_heads": 2}
    asked = {"img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 5, "model_args": args}
    return create_backbone("vit_tiny_patch16_224", **asked).eval()


@pytest.fixture(scope="module")
def found(victim: Backbone) -> Remedies:
    fewer = {"oracle.IMAGES": 1, "oracle.ITERATIONS": 6, "sweep.ladder.A_DECADE": 1}
    with ExitStack() as stack:
        for name, value in fewer.items():
            stack.enter_context(mock.patch(f"situs.audit.{name}", value))
        return find_defences(victim, "samples", "psnr=20", attacks=["patchembed"], count=5)


@pytest.mark.slow
def test_what_it_names_passes_on_images_it_did_not_see_and_the_next_weaker_one_fails(
    found: Remedies, victim: Backbone
) -> None:
    by = {each.defence: each for each in found.remedies}
    assert [*by] == ["noise", "clip", "batch", "withhold", "precision"]
    for name in ("noise", "clip"):
        each = by[name]
        assert each.named is not None and each.unseen is not None and each.weaker is not None
        assert (each.unseen.answer, each.unseen.unseen) == ("passed", True)
        assert each.weaker.answer != "passed"
    # By an audit of its own, on the same images: the first five.
    weaker = next(d for d in _noises(victim) if d.label == by["noise"].weaker.setting)
    named = next(d for d in _noises(victim) if d.label == by["noise"].named)
    assert named.sigma / weaker.sigma == pytest.approx(10, rel=0.01)
    asked = {"attacks": ["patchembed"], "defences": [named], "fail_above": "psnr=20"}
    seen = audit_gradients(victim, "samples", count=5, **asked).ruling
    assert seen is not None
    assert [each.answer for each in seen.judgements] == ["passed"]


def _noises(victim: Backbone) -> list[Noise]:
    from situs.audit.public import AuditConfig, open_audit

    test = open_audit(victim, "samples", ["patchembed"], AuditConfig(count=5), {}).test
    rungs = ladders(victim, test, Step())["noise"]
    return [rung.defence for rung in rungs if isinstance(rung.defence, Noise)]


@pytest.mark.slow
def test_where_no_attack_applies_nothing_is_named_and_the_reason_is_given(found: Remedies) -> None:
    by = {each.defence: each for each in found.remedies}
    for name in ("batch", "withhold"):
        assert by[name].named is None and "not a pass" in by[name].reason, name
    said = "images still exceed the limit at bf16; from int8 on, the result is inconclusive (not a pass): "
    assert by["precision"].named is None and by["precision"].reason.startswith(said)
    assert "attackers that know the defence. A setting to which nothing" not in found.summary().sentence
    assert (
        "Defences for which the search found no setting that passes: batch, withhold, precision"
        in found.summary().sentence
    )
    numbers = found.to_json()
    assert [each["named"] for each in numbers["defences"]][2:] == [None] * 3
    assert "not a pass" in make_page(found).render()


def test_a_setting_that_fails_on_other_images_gives_way_to_a_stronger_one(
    victim: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = TestSet(torch.zeros(6, 1, 28, 28), torch.zeros(6, dtype=torch.int64), ([0.5], [0.5]))
    rungs = [Rung(str(i), NoDefence(), Step()) for i in range(6)]
    parts = [part_of(test, slice(at, at + 2)) for at in (0, 2, 4)]
    search = Search(victim, (), None, Deadline())  # pyright: ignore[reportArgumentType]
    passes = {"0": 3, "2": 4, "4": 4}  # the weakest rung that passes on each part, by the name of its first image

    def ask(rung: Rung, part: TestSet, *, unseen: bool = False) -> Trial:
        answer = "passed" if int(rung.label) >= passes[part.names[0]] else "above"
        return Trial(rung.label, answer, 1.0, "x", "", 2, unseen)

    monkeypatch.setattr(search, "ask", ask)
    each = search.remedy("noise", rungs, parts[0], parts[1:])
    assert each.named == "4" and each.unseen is not None and each.unseen.answer == "passed"
    assert each.reason == "3 passed in the search, but not on unseen images"
    passes["2"] = 0
    easy = search.remedy("noise", rungs, parts[0], parts[1:])
    assert easy.named == "3" and easy.reason == "" and easy.weaker is not None and easy.weaker.answer == "above"
    passes |= {"2": 9, "4": 9}
    none = search.remedy("noise", rungs, parts[0], parts[1:])
    assert none.named is None and "3 passed in the search, but not on unseen images" in none.reason
    assert none.untried_from == "4" and none.reason.endswith("; no setting stronger than 4 was tried")
    whole = search.remedy("noise", rungs[:5], parts[0], parts[1:])  # which ends with what was tried last
    assert whole.named is None and whole.untried_from is None and "stronger" not in whole.reason


@pytest.mark.parametrize("answer", ["incomplete", "nothing_applied", "above", "passed"])
def test_the_file_has_the_gates_own_words(victim: Backbone, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was judged without a proof is inconclusive there as in an audit."""
    test = TestSet(torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64), ([0.5], [0.5]))
    search = Search(victim, (), Limit("psnr", 20.0), Deadline())
    judged = Judgement("x", answer, "why")
    monkeypatch.setattr(search, "_judge", lambda *_: judged)
    trial = search.ask(Rung("x", NoDefence(), Step()), test)
    [told] = Remedies("m", search.limit, [Remedy("noise", None, "", trial)], 1, 1, []).numbers()["defences"]
    assert told["seen"]["answer"] == judged.outcome == trial.cell


def test_a_stronger_setting_that_the_search_did_not_pass_is_not_named(
    victim: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = TestSet(torch.zeros(6, 1, 28, 28), torch.zeros(6, dtype=torch.int64), ([0.5], [0.5]))
    rungs = [Rung(str(i), NoDefence(), Step()) for i in range(3)]
    search = Search(victim, (), None, Deadline())  # pyright: ignore[reportArgumentType]
    searched: list[Answer] = ["above", "passed", "inconclusive"]
    others: list[Answer] = ["above", "above", "passed"]

    def ask(rung: Rung, part: TestSet, *, unseen: bool = False) -> Trial:
        return Trial(rung.label, (others if unseen else searched)[int(rung.label)], 1.0, "x", "", len(part), unseen)

    monkeypatch.setattr(search, "ask", ask)
    parts = [part_of(test, slice(at, at + 2)) for at in (0, 2, 4)]
    assert search.remedy("noise", rungs, parts[0], parts[1:]).named is None


@pytest.mark.parametrize(
    ("answers", "named", "reason"),
    [
        (["passed"] * 3, "0", "no weaker setting was tried"),
        (["above", "passed", "passed"], "1", ""),
        (["inconclusive", "passed", "passed"], "1", "the next weaker setting is inconclusive"),
        (["above"] * 3, None, "images exceed the limit even at the strongest setting (2)"),
        (["inconclusive"] * 3, None, "from 0 on, the result is inconclusive (not a pass): why 0"),
        (
            ["above", "above", "inconclusive"],
            None,
            "images still exceed the limit at 1; from 2 on, the result is inconclusive (not a pass): why 2",
        ),
    ],
)
def test_what_a_reader_must_know_of_a_search_is_said(
    answers: list[Answer], named: str | None, reason: str, victim: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = TestSet(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64), ([0.5], [0.5]))
    search = Search(victim, (), None, Deadline())  # pyright: ignore[reportArgumentType]

    def ask(rung: Rung, part: TestSet, *, unseen: bool = False) -> Trial:
        return Trial(rung.label, answers[int(rung.label)], 1.0, "x", f"why {rung.label}", len(part), unseen)

    monkeypatch.setattr(search, "ask", ask)
    rungs = [Rung(str(i), NoDefence(), Step()) for i in range(3)]
    each = search.remedy("noise", rungs, part_of(test, slice(0, 2)), [part_of(test, slice(2, 4))])
    assert (each.named, each.reason) == (named, reason)


@pytest.mark.parametrize(("batch", "named"), [(2, "batch"), (3, None)])
def test_a_batch_larger_than_what_is_left_is_not_named(
    batch: int, named: str | None, victim: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = TestSet(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64), ([0.5], [0.5]))
    search, passed = Search(victim, (), None, Deadline()), Trial("batch", "passed", 1.0, "x", "", 2, True)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(search, "ask", lambda *_, **__: passed)
    rungs, parts = [Rung("batch", NoDefence(), Step(batch=batch))], [part_of(test, slice(at, at + 2)) for at in (0, 2)]
    each = search.remedy("batch", rungs, parts[0], parts[1:])
    assert each.named == named
    assert each.reason == (
        "too few images were left to test a setting on" if named is None else "no weaker setting was tried"
    )


def test_the_cost_is_that_of_the_setting_that_is_named(victim: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[Rung, TestSet, list[int]]] = {}

    def remedy(_: Search, name: str, rungs: list[Rung], searched: TestSet, others: list[TestSet]) -> Remedy:
        seen[name] = rungs[1], searched, [len(part) for part in others]
        return Remedy(name, rungs[1].label if name == "withhold" else None, "")

    monkeypatch.setattr(Search, "remedy", remedy)
    found = find_defences(victim, "samples", "psnr=20", attacks=["patchembed"], count=3)
    assert [each.defence for each in found.remedies if each.cost is not None] == ["withhold"]
    for each in found.remedies:
        rung, searched, others = seen[each.defence]
        assert len(searched) == 3 and others == [3] * len(others) and others
        assert each.cost == (None if each.named is None else cost_of(victim, rung, searched, CostConfig()))


def test_one_image_and_a_server_that_chooses_the_weights_are_refused(victim: Backbone) -> None:
    with pytest.raises(SitusError, match="there is only one image, but the search keeps half of the images") as caught:
        find_defences(victim, [torch.zeros(1, 28, 28)], "psnr=20", attacks=["patchembed"])
    assert caught.value.fields == ("data", "count")
    said = "server=active: `situs audit sweep` assumes an honest server"
    for sweep in (
        lambda: find_defences(victim, "samples", "psnr=20", server="active"),
        lambda: trace_defences(victim, "samples", ["noise"], server="active"),
        lambda: trace_texts("bert", "lines.txt", server="active"),
    ):
        with pytest.raises(SitusError, match=said) as caught:
            sweep()
        assert caught.value.fields == ("server",)


def test_the_cost_is_the_cosine_with_the_gradient_what_is_sent_and_what_is_promised(victim: Backbone) -> None:
    chance = torch.Generator().manual_seed(0)
    test = TestSet(torch.randn(2, 1, 28, 28, generator=chance), torch.tensor([0, 1]), ([0.5], [0.5]))
    step = Step()
    free = cost_of(victim, Rung("none", NoDefence(), step), test, CostConfig())
    assert free.cosine == pytest.approx(1) and free.share == 1 and free.epsilon is None
    scale = scale_of(victim, test, step)
    noisy = cost_of(victim, Rung("n", Noise(scale.rms), step), test, CostConfig())
    assert noisy.cosine == pytest.approx(1 / math.sqrt(2), abs=0.05)  # as much noise as gradient
    withheld = Withhold(2)
    cost = cost_of(victim, Rung("w", withheld, step), test, CostConfig())
    sent = victim_gradients(victim, test.pixels[:1], test.labels[:1], defence=withheld)
    assert {name.split(".")[1] for name in sent} == {"norm", "head"}
    assert cost.share == sum(g.numel() for g in sent.values()) / sum(p.numel() for p in victim.parameters())
    local = cost_of(victim, Rung("c", Clip(1.0, 1.0), Step(local_steps=2)), test, CostConfig())
    assert local.epsilon is None and local.promise.startswith("no ε: after 2 local steps")
    assert "no useful ε" in cost_of(victim, Rung("c", Clip(1.0, 0.01), step), test, CostConfig()).promise


def test_epsilon_is_that_of_the_training_that_is_named(victim: Backbone) -> None:
    pytest.importorskip("opacus")
    from situs.train.private import epsilon_of

    test = TestSet(torch.zeros(2, 1, 28, 28), torch.tensor([0, 1]), ([0.5], [0.5]))
    cost = cost_of(
        victim, Rung("c", Clip(1.0, 1.0), Step(batch=2)), test, CostConfig(private_images=1000, private_epochs=2)
    )
    assert cost.epsilon == pytest.approx(epsilon_of(1.0, 2 / 1000, 1000, 1e-5))
    assert cost.promise.endswith("(n = 1,000, batch 2, 2 epochs, δ = 1e-05)")


def test_a_search_that_is_stopped_says_how_far_it_came(victim: Backbone, tmp_path: Path) -> None:
    stopped = find_defences(
        victim, "samples", "psnr=20", attacks=["patchembed"], count=2, deadline=Deadline(seconds=1e-6)
    )
    assert stopped.stopped is not None and not stopped.with_setting
    assert str(stopped).count("0 defences finished") == 1 and "there is no result for any defence" in str(stopped)
    page = make_page(stopped).render()
    assert "0 defences finished" in page and "weakest setting that passes" not in page + str(stopped)  # no empty table
    with pytest.raises(SitusError, match="a low mse means a good copy") as error:
        find_defences(victim, "samples", "mse=1", attacks=["patchembed"])
    assert error.value.field == "find_defence"
    for text in ("withhold=1.5", "withhold=-1"):
        with pytest.raises(SitusError, match="whole number of blocks"):
            create_defence(text)


def test_what_was_tried_before_a_stop_is_kept_and_names_nothing(
    victim: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[str](), Search.ask

    def four(search: Search, rung: Rung, test: TestSet, *, unseen: bool = False) -> Trial:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(rung.label)
        return ask(search, rung, test, unseen=unseen)

    monkeypatch.setattr(Search, "ask", four)
    stopped = find_defences(victim, "samples", "psnr=20", attacks=["patchembed"], count=2)
    [each] = stopped.remedies
    assert [trial.setting for trial in each.tried] == asked and each.cut and each.named is None
    by = {trial.setting: trial.answer for trial in each.tried}
    last = max((label for label in asked if by[label] == "above"), key=asked.index)
    assert each.reason.startswith(f"stopped before a setting was found; images still exceed the limit at {last}")
    assert "0 defences finished" in str(stopped) and each.reason in make_page(stopped).render()


@pytest.mark.parametrize("answer", ["above", "passed", "incomplete"])
def test_an_image_above_counts_however_the_time_ends(
    answer: Any, victim: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judgement("noise", answer, "why")
    cut = SimpleNamespace(stopped="the time limit", ruling=Ruling(Limit("psnr", 20.0), [judged]))
    monkeypatch.setattr("situs.audit.sweep.weakest.attack_gradients", lambda *_, **__: cut)
    deadline, test = Deadline(), TestSet(torch.zeros(1, 1, 28, 28), torch.zeros(1), ([0.5], [0.5]))
    deadline.interrupt()
    search, rung = Search(victim, [], Limit("psnr", 20.0), deadline), Rung("none", NoDefence(), Step())
    with nullcontext() if answer == "above" else pytest.raises(StoppedError):
        assert search._judge(rung, test, []) == judged


@pytest.mark.slow
def test_none_was_found_is_said_of_ladders_that_were_climbed_to_their_end(found: Remedies) -> None:
    [cut] = [replace(each, cut=True) for each in found.remedies if each.defence == "precision"]
    assert "Defences for which the search found no setting that passes: batch, withhold, precision." in verdict(found)
    said = verdict(replace(found, remedies=[*found.remedies[:-1], cut], stopped="Ctrl-C"))
    assert "Defences for which the search found no setting that passes: batch, withhold." in said


def test_an_attack_that_used_up_its_own_time_ends_no_search_and_names_nothing(victim: Backbone) -> None:
    chance = torch.Generator().manual_seed(0)
    test = TestSet(torch.randn(4, 1, 28, 28, generator=chance), torch.arange(4), ([0.5], [0.5]))
    attack = create_attack("tokens", TokensConfig(seconds=0.02, steps=1))
    search = Search(victim, [attack], Limit("psnr", 20.0), Deadline())
    trial = search.ask(Rung("batch 2", NoDefence(), Step(batch=2)), test)
    assert trial.answer != "passed" and not search.deadline.spent()


def test_the_sentence_says_no_more_unseen_images_than_each_setting_was_tried_on() -> None:
    tried = [Trial("", "passed", 1.0, "x", "", images, unseen=True) for images in (12, 8)]
    each = [Remedy(name, name, "", unseen=trial) for name, trial in zip(("noise", "batch 8"), tried, strict=True)]
    found = Remedies("model", Limit("psnr", 20.0), each, 12, 12, ["x"])
    assert "Each setting was tested on 8 images or more that the search did not use" in str(found)


@pytest.mark.slow
def test_all_attacks_together_decide_whichever_is_first(victim: Backbone) -> None:
    chance = torch.Generator().manual_seed(0)
    test = TestSet(torch.randn(5, 1, 28, 28, generator=chance), torch.arange(5), ([0.5], [0.5]))
    both = [create_attack(name) for name in ("patchembed", "april")]
    for sigma, answer in ((1e-9, "above"), (1e3, "passed")):
        rung = Rung("noise", Noise(sigma), Step())
        one, other = (
            Search(victim, each, Limit("psnr", 20.0), Deadline()).ask(rung, test) for each in (both, both[::-1])
        )
        assert one.answer == other.answer == answer
        if answer == "passed":
            assert (one.worst, one.by, one.images) == (other.worst, other.by, 5)
        else:  # the first upload is enough where it alone is above
            assert (one.images, one.by, other.images, other.by) == (1, "patchembed", 5, "patchembed")


def test_labels_that_are_known_are_known_in_every_trial(victim: Backbone) -> None:
    told: list[Any] = []

    class Spy(Attack):
        name, about, Config = "spy", "looks on", MatchingConfig

        def prepare(self, *_: Any) -> Ready:
            return Ready(None)

        def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
            told.append(known.labels)
            return Recovery(torch.zeros(len(uploads) * known.step.batch, 1, 28, 28), [{}] * len(uploads))

    find_defences(victim, "samples", "psnr=90", attacks=[Spy()], count=1, labels="known")
    searched = len(told)
    trace_defences(victim, "samples", ["dropout"], attacks=[Spy()], count=1, labels="known")
    assert 5 <= searched < len(told) and all(labels is not None for labels in told)


def test_a_search_for_the_gate_blind_has_bars_by_the_metrics_that_decided() -> None:
    by_psnr, by_ssim = (
        Trial("1", "above", worst, "patchembed", "", 2, metric=metric)
        for metric, worst in (("aligned_psnr", 31.5), ("ssim", 0.4))
    )
    remedies = [Remedy("noise", "noise=1", "", by_psnr), Remedy("clip", None, "why", tried=(by_ssim,))]
    search = Remedies("a-model", BLIND, [*remedies, Remedy("batch", None, "why")], 2, 2, ["patchembed"])
    assert exposures_by_metric(search) == {
        "aligned_psnr": {"noise=1": (31.5, True)},
        "ssim": {"clip, 1": (0.4, False)},
    }
    text = make_page(search).render()
    assert "noise=1: 31.5 aligned_psnr" in text and "clip, 1: 0.4 ssim" in text
