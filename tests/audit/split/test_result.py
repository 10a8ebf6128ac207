"""One setting: the best of each score, the best pictures of whom one asks, and whether anything is hidden."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sent import not_tried, setting
from sent import split_audit as audit
from sent import tried as done

from situs.audit.split.attackers import ATTACKS, SplitFinding
from situs.audit.split.result import (
    UNDOING,
    SettingResult,
    exposures_of,
    paper_table,
    strengths,
    table,
    tables,
    trade_off,
    verdict,
    who_was_tried,
)
from situs.audit.split.stage import Kept
from situs.findings import Remark
from situs.locks.veil import parse_veil


def found(*findings: SplitFinding, defence: str = "none", rows: bool = True, columns: bool = False) -> SettingResult:
    return setting(replace(parse_veil(defence), rows=rows, columns=columns), Kept(0.9), *findings)


@pytest.mark.parametrize(
    ("score", "limit"),
    [("psnr", 13.0), ("best psnr", 20.0), ("patch psnr", 20.0), ("places", 0.35), ("channels", 0.1), ("linked", 0.35),
     ("labels", 0.6), ("unnamed labels", 0.6), ("samples", 0.6)],
)  # fmt: skip
def test_a_score_is_above_where_it_is_clearly_more_than_a_guess(score: str, limit: float) -> None:
    """Of 4 samples; with blind guesses of 10 dB and of a quarter of the places."""
    blind = {"mean": {"psnr": 10.0, "best psnr": 11.0, "patch psnr": 12.0, "places": 0.25}, "noise": {"psnr": 9.0}}
    for value in (limit - 1e-6, limit + 1e-6):
        (exposure,) = exposures_of({score: value}, blind, 4)
        assert exposure.above is (value > limit)
        assert exposure.metric.name == score
    (exposure,) = exposures_of({score: limit}, blind, 4)
    assert exposure.above is (limit == 20)  # a picture counts as recognised from there on


def test_the_best_of_a_score_and_of_the_pictures() -> None:
    weak, strong, linked = done("decoder", psnr=8.0), done(psnr=30.0), done("linkage", linked=0.5)
    both = found(weak, strong, linked)
    assert (both.best("psnr"), both.best("linked"), both.best("ssim")) == (30, 0.5, None)
    best, other = both.pictured(), both.pictured(("decoder",))
    assert best and other and (best.attack, other.attack) == ("order", "decoder")
    assert both.pictured(("repeats",)) is None
    assert found(linked).pictured() is None


@pytest.mark.parametrize(
    ("given", "hidden"),
    [({}, False), ({"defence": "noise=1"}, False), ({"rows": True}, True), ({"columns": True}, True),
     ({"defence": "batch-shuffle"}, True)],
)  # fmt: skip
def test_what_hides_rows_or_channels(given: dict[str, object], hidden: bool) -> None:
    assert found(**{"rows": False, **given}).hidden is hidden  # pyright: ignore[reportArgumentType]


def test_who_undoes_is_an_attacker() -> None:
    assert set(UNDOING) < set(ATTACKS)


BLIND = {"mean image": {"psnr": 9.0}}
SKIPPED = not_tried("labels", "the images have no labels")


def test_the_table_has_blind_guesses_first_and_the_scores_that_somebody_has() -> None:
    made = table("m", [found(done(psnr=30.0, places=1.0), SKIPPED), found(SKIPPED, defence="noise=1")], BLIND)
    assert list(made.header) == ["client sends", "features", "attacker", "knows", "places", "psnr"]
    assert [list(row) for row in made.rows] == [
        ["nothing", None, "guess: mean image", "nothing", None, "9.0 dB"],
        ["rows", "0.900", "order", "the embedding", "100.0 %", "30.0 dB"],
        ["noise=1 + rows", "0.900", "none was tried", None, None, None],
    ]


def test_every_attacker_has_a_row_and_the_first_names_the_setting() -> None:
    """Utility in percent, but for the features' cosine; the paper's table has the two most telling measures."""
    kept = Kept(0.9, neighbours=0.8, knn=0.7, probe=0.6, accuracy=0.5)
    one = setting(parse_veil("noise=1"), kept, done("decoder", psnr=8.0), done(psnr=30.0))
    made = table("m", [one], {})
    telling = ["50.0 %", "70.0 %", "60.0 %", "80.0 %", "0.900"]
    assert list(made.header) == [
        "client sends", "accuracy", "kNN", "probe", "neighbours", "features", "attacker", "knows", "psnr",
    ]  # fmt: skip
    assert [list(row) for row in made.rows] == [
        ["noise=1", *telling, "decoder", "the embedding (this attacker does not undo permutations)", "8.0 dB"],
        ["", *[""] * 5, "order", "the embedding", "30.0 dB"],
    ]
    paper = paper_table([one])
    assert list(paper.header[:4]) == ["", "accuracy", "kNN", "decoder ssim"]
    assert list(paper.rows[0][:3]) == ["GN (noise=1)", *telling[:2]]


@pytest.mark.parametrize(
    ("trained", "tested", "said"),
    [
        ("noise=1", [1.0], "noise=1 (the unit of σ is the standard deviation of the run's tokens after training)."),
        (
            "noise=1",
            [0.5, 1.01],
            "noise=1 (the unit of σ is the standard deviation of the run's tokens after training).",
        ),
        (
            "noise=0.5",
            [0.25, 0.51],
            (
                "noise=0.5 (the unit of σ is the standard deviation of the run's tokens after training). In that "
                "training, the server received less noise than in the strongest setting of this page."
            ),
        ),
        (
            "noise=1",
            [],
            (
                "noise=1 (the unit of σ is the standard deviation of the run's tokens after training). This audit did "
                "not test that defence."
            ),
        ),
        ("lowpass=0.5", [3.0], "lowpass=0.5. This audit did not test that defence."),
    ],
)
def test_the_defence_of_the_training_is_compared_with_those_audited(
    trained: str, tested: list[float], said: str
) -> None:
    settings = [found(done(psnr=8.0)), *(found(done(psnr=8.0), defence=f"noise={each}") for each in tested)]
    one = audit(*settings, trained=parse_veil(trained))
    assert one.summary().notes[0] == f"This run was trained with the defence {said}"
    assert one.numbers()["trained_under"] == trained and audit().numbers()["trained_under"] is None


@pytest.mark.parametrize(
    ("skipped", "tested", "said"),
    [(1, 1, "noise=1 + rows"), (2, 2, "everywhere"), (6, 8, ", ".join(f"noise={n} + rows" for n in range(1, 7))),
     (7, 8, "7 of 8 settings"), (8, 8, "everywhere")],
)  # fmt: skip
def test_settings_of_a_reason_are_named_as_long_as_they_are_few(skipped: int, tested: int, said: str) -> None:
    settings = [
        found(done(psnr=8.0), *([SKIPPED] if number <= skipped else []), defence=f"noise={number}")
        for number in range(1, tested + 1)
    ]
    assert audit(*settings).summary().notes[0].endswith(f"the images have no labels ({said}).")


def test_settings_that_were_never_started_are_left_out() -> None:
    never = found(SplitFinding("order", "", "not_run"), SplitFinding("decoder", "", "not_run"), defence="noise=1")
    begun = found(done("decoder", psnr=8.0), SplitFinding("order", "", "not_run"))
    assert [str(one.veil) for one in audit(begun, never).settings] == ["rows"]
    assert verdict(audit(never)) == "No attack was run, so nothing is known about privacy."
    assert audit(never).summary().notes == ()
    stopped = audit(begun, never, stopped="Ctrl-C")
    assert "Not tried (such an attack may still succeed): order: stopped by Ctrl-C (rows)." in stopped.summary().notes


def test_a_picture_counts_as_recognised_from_twenty_decibels_on() -> None:
    for value, said in ((20.0, "the server recovers the samples"), (19.999, "the best attack that ran reaches")):
        assert said in verdict(audit(found(done(psnr=value))))


def test_the_papers_table_has_its_rows_its_attacker_and_the_one_who_undoes_permutations() -> None:
    blind, knowing = done("decoder", psnr=6.0, ssim=0.1), done(psnr=55.0, places=1.0)
    better = done("ordered-decoder", psnr=56.0, ssim=0.99, places=1.0, channels=1.0)
    settings = [
        found(blind, knowing, better, defence=defence, rows=rows, columns=columns)
        for defence in ("none", "noise=0.2", "lowpass=0.3", "batch-shuffle=8")
        for rows in (False, True)
        for columns in (False, True)
    ]
    made = paper_table(settings)
    assert [row[0] for row in made.rows] == [
        "SL", "columns", "SL+ (rows)", "rows + columns", "GN (noise=0.2)", "GN+ (noise=0.2)", "LP (lowpass=0.3)",
        "LP+ (lowpass=0.3)", "BS (batch-shuffle=8)", "BS+ (batch-shuffle=8)",
    ]  # fmt: skip
    held = dict(zip(made.header, made.rows[-1], strict=True))
    assert (held["decoder psnr"], held["decoder ssim"]) == ("6.0 dB", "0.100")
    assert "psnr, 16 uploads" not in made.header
    noisy = [found(blind, knowing, done("repeats", psnr=60.0), defence="noise=1")]
    often = dict(zip(paper_table(noisy).header, paper_table(noisy).rows[0], strict=True))
    assert (often["undone by"], often["psnr"], often["psnr, 16 uploads"]) == ("order", "55.0 dB", "60.0 dB")
    assert (held["undone by"], held["psnr"], held["channels"]) == ("ordered-decoder", "56.0 dB", "100.0 %")
    assert made in tables("m", settings, BLIND) and len(tables("m", [found(knowing)], BLIND)) == 1


def test_strengths_stand_beside_the_best_attacker_of_each() -> None:
    some = [found(done(psnr=30.0 - 10 * s), done("linkage", linked=1.0), defence=f"noise={s}") for s in (0.5, 1)]
    assert strengths(some) == ["noise"] and strengths(some[:1]) == []
    made = trade_off(some)
    assert [list(row) for row in made.rows] == [
        ["noise=0.5 + rows", "0.900", "order", None, "25.0 dB", None, None, "100.0 %"],
        ["noise=1 + rows", "0.900", "order", None, "20.0 dB", None, None, "100.0 %"],
    ]
    assert tables("m", some, BLIND)[-1] == made


def test_every_setting_and_attacker_is_said_to_be_tried_or_not() -> None:
    [row] = who_was_tried([found(done(psnr=30.0), SKIPPED)]).rows
    assert dict(zip(ATTACKS, row[1:], strict=True)) == {
        name: {"order": "tried", "labels": "not tried"}.get(name, "not asked for") for name in ATTACKS
    }


@pytest.mark.parametrize("findings", [(SKIPPED,), (done("linkage", linked=0.0),), (done("no-embedding", places=0.1),)])
def test_what_was_not_tried_is_no_protection(findings: tuple[SplitFinding, ...]) -> None:
    said = verdict(audit(found(*findings)))
    assert "no attack on the pictures was run: inconclusive" in said
    assert "private" not in said and "safe" not in said


def test_the_best_attacker_speaks() -> None:
    weak, strong = done("decoder", psnr=8.0), done(psnr=30.0, places=1.0)
    both = found(weak, strong)
    assert both.best("psnr") == 30 and both.best("ssim") is None
    assert verdict(audit(both)) == (
        "Rows: the server recovers the samples (mean PSNR 30.0 dB); 100.0 % of the patches were assigned to their "
        "positions."
    )
    assert "the best attack that ran reaches a PSNR of 8.0 dB" in verdict(audit(found(weak)))


def test_who_was_beaten_by_a_permutation_alone_is_no_protection() -> None:
    """A decoder that undoes nothing says nothing of permuted rows, and a mean says nothing of the best sample."""
    weak = done("decoder", psnr=8.0)
    assert "no attack that undoes the permutation was run" in verdict(audit(found(weak)))
    assert "undoes the permutation" not in verdict(audit(found(weak, rows=False)))
    assert "undoes the permutation" not in verdict(audit(found(weak, done(psnr=9.0))))
    assert "undoes the permutation" in verdict(audit(found(weak, defence="batch-shuffle", rows=False)))
    one = found(done(psnr=12.0, best_psnr=31.0))
    assert "the server recovers some of the samples (PSNR of the most exposed sample 31.0 dB, mean 12.0 dB)" in verdict(
        audit(one)
    )
    patches = found(done(psnr=12.0, best_psnr=14.0, patch_psnr=24.0))
    assert "the server recovers patches but not their positions (PSNR 24.0 dB if a patch may be at any " in verdict(
        audit(patches)
    )


def test_attackers_that_were_not_asked_for_are_named() -> None:
    asked = audit(found(done(psnr=8.0))).summary().notes[-1]
    assert asked.startswith(
        "Attacks that were not selected (they may still succeed): old-embedding, no-embedding, decoder"
    )


def test_settings_that_come_to_the_same_are_said_once() -> None:
    same = [found(done(psnr=25.0), defence=defence, rows=False) for defence in ("none", "noise=0.1")]
    assert verdict(audit(*same)) == "None, noise=0.1: the server recovers the samples (mean PSNR 25.0 dB)."
    both = [found(done(psnr=25.0 + rows), rows=rows) for rows in (False, True)]
    assert (
        verdict(audit(*both))
        == "None (rows permuted or not): the server recovers the samples (mean PSNR 25.0 to 26.0 dB)."
    )
    three = [*both, found(done(psnr=25.0), rows=False, columns=True)]
    assert verdict(audit(*three)).startswith("None, rows, columns: ")  # both at once were not attacked
    every = [*three, found(done(psnr=25.0), columns=True)]
    assert verdict(audit(*every)).startswith("None (permuted or not): ")


def test_what_was_stopped_says_so_before_anything_else() -> None:
    one = audit(found(done(psnr=8.0)), stopped="Ctrl-C, with 1 of 4 settings finished")
    assert verdict(one).startswith("A partial result: stopped by Ctrl-C, with 1 of 4 settings finished. Rows: ")
    assert "were not attacked, so nothing is known about their privacy." in one.summary().notes[0]
    assert "starts from the beginning" in one.summary().notes[0]
    assert (one.numbers()["partial"], one.numbers()["stopped"]) == (True, "Ctrl-C, with 1 of 4 settings finished")
    assert audit(found(done(psnr=8.0))).numbers()["partial"] is False
    nothing = audit(stopped="Ctrl-C, with 0 of 4 settings finished")
    assert verdict(nothing).endswith("before any attack was finished, so this page says nothing about privacy.")


def test_labels_are_in_the_verdict() -> None:
    settings = [found(done("labels", labels=share), rows=share < 1) for share in (0.5, 1.0)]
    assert verdict(audit(*settings)).endswith("from the gradients at the cut: 50.0 % to 100.0 %.")
    guessed = verdict(audit(*settings, blind={"commonest": {"labels": 0.25}, "other": {"labels": 0.125}}))
    assert guessed.endswith("from the gradients at the cut: 50.0 % to 100.0 % (25.0 % by a blind guess).")
    unnamed = verdict(audit(found(done("labels", unnamed_labels=0.9))))
    assert unnamed.endswith("cannot name the classes): 90.0 %.")


def test_the_numbers_hold_every_score_and_every_reason() -> None:
    result = audit(found(done(patch_psnr=30.0), SKIPPED))
    numbers = json.loads(json.dumps(result.to_json()))
    [setting] = numbers["settings"]
    assert setting["attacks"][0]["patch_psnr"] == 30
    assert setting["attacks"][1]["reason"] == "the images have no labels"
    assert numbers["blind_guesses"] == {"mean image": {"psnr": 9.0}}
    assert (
        result.summary().notes[0]
        == "Not tried (such an attack may still succeed): labels: the images have no labels (rows)."
    )
    assert (setting["feature_cosine"], setting["knn"]) == (0.9, None)
    assert not result.private


def test_an_attacker_that_did_not_come_to_an_end_is_in_the_sentence() -> None:
    """Another that was tried does not speak for it: rows permuted or not, undone by another or not."""
    cut = SplitFinding("order", "", "not_run")
    for rows, other in ((False, "decoder"), (True, "old-embedding"), (True, "decoder")):
        said = verdict(audit(found(done(other, psnr=8.0), cut, rows=rows)))
        assert "inconclusive, because these attacks were not finished: order" in said
    assert "come to an end" not in verdict(audit(found(done(psnr=8.0), SKIPPED)))


def test_what_an_attacker_lacked_is_said() -> None:
    weak = replace(done("old-embedding", psnr=8.0), remarks=[Remark("lower_bound", "only 2 samples")])
    one = audit(found(weak))
    said = "Weaker variants of attacks (such an attack may still succeed): old-embedding: only 2 samples (rows)."
    assert said in one.summary().notes
    thin = replace(audit(found(done(psnr=8.0))), thin="2 public images have 32 tokens of 24 channels")
    said, _, rows = verdict(thin).partition("Rows: ")
    assert "too few public images" in said.lower() and str(thin.thin) in said
    assert "may have failed" in said and "8.0 dB" in rows
    assert thin.numbers()["too_few_public_images"] == thin.thin and audit().numbers()["too_few_public_images"] is None


def test_the_one_gate_reads_it_and_nothing_ever_passes() -> None:
    """Above where an attacker came to clearly more than a guess; else inconclusive, however little was found."""
    for findings, outcome in (
        ((done(psnr=30.0), done("linkage", linked=0.1)), "above"),
        ((done(psnr=5.0, ssim=0.9),), "incomplete"),
        ((SKIPPED,), "nothing_applied"),
        ((done(psnr=5.0), SplitFinding("linkage", "", "not_run")), "incomplete"),
    ):
        one = audit(found(*findings))
        [judgement] = one.judge().judgements
        assert (judgement.answer, judgement.defence) == (outcome, "rows")
        assert (one.tone == "bad") == (outcome == "above")
