"""The gate: the worst image decides, what was not attacked is no pass, and a limit that means nothing is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outcomes import outcome, undone

from situs.audit.cases import Outcome
from situs.audit.defences import Step
from situs.audit.gradients import Audit
from situs.audit.judge.gate import (
    ABOVE,
    NOT_JUDGED,
    PASSED,
    Judgement,
    Limit,
    Ruling,
    Worst,
    doubt_of,
    judge,
    parse_limit,
)
from situs.errors import SitusError

LIMIT = Limit("psnr", 20.0)


def audit(*pairs: Outcome, count: int = 2) -> Audit:
    stopped = "the time limit of 1 s" if any(pair.status == "not_run" for pair in pairs) else None
    about = dict.fromkeys((pair.defence for pair in pairs), "")
    return Audit(pairs, ["a", "b"][:count], torch.zeros(count, 3, 4, 4), "m", Step(), {}, about, stopped=stopped)


def closed(*values: float, attack: str = "patchembed", **fields: Any) -> Outcome:
    return outcome(attack, "none", scores={"psnr": list(values), "lpips": None}, **fields)


def search(*values: float, **fields: Any) -> Outcome:
    return outcome("matching", "none", scores={"psnr": list(values), "lpips": None}, **fields)


def judged_alone(*pairs: Outcome, **fields: Any) -> Judgement:
    [judged] = judge(audit(*pairs, **fields), LIMIT).judgements
    return judged


def test_the_worst_image_decides_and_the_limit_itself_passes() -> None:
    above = judged_alone(closed(3.0, 20.5))
    assert above == Judgement(
        "none",
        "above",
        "1 of 2 images above 20; the worst, b, has psnr 20.5 by patchembed",
        Worst("patchembed", "b", 20.5),
    )
    passed = judged_alone(closed(3.0, 20.0))
    assert passed == Judgement(
        "none",
        "passed",
        "patchembed solved all 2 images and the equations fit; the worst, b, has psnr 20 by patchembed; that is "
        "less than 0.1 dB below the limit of 20, and other images may come back above it",
        Worst("patchembed", "b", 20.0),
    )


def test_a_pass_that_is_near_its_limit_says_how_near() -> None:
    caution = "; that is only 0.2 dB below the limit of 20, and other images may come back above it"
    assert judged_alone(closed(3.0, 19.8)).said.endswith("has psnr 19.8 by patchembed" + caution)
    for far in (closed(3.0, 19.0), search(3.0, 19.8)):  # not small, and no pass
        assert "below the limit" not in judged_alone(far).said
    ssim = outcome("patchembed", "none", scores={"psnr": [3.0, 4.0], "ssim": [0.1, 0.2]})
    [judged] = judge(audit(ssim), Limit("ssim", 0.3)).judgements
    assert judged.answer == "passed" and "below the limit" not in judged.said


NOT_PASSED: dict[str, tuple[tuple[Outcome, ...], dict[str, Any], str]] = {
    "stopped in its search": (
        (search(3.0, 4.0, partial="188 of 500 iterations"),),
        {},
        (
            "matching was stopped after 188 of 500 iterations; no closed form was run, such as patchembed; what "
            "matching does not find may still be there; the worst, b, has psnr 4 by matching"
        ),
    ),
    "stopped before all images": (
        (closed(3.0, partial="1 of 2 images"),),
        {},
        (
            "patchembed was stopped after 1 of 2 images; patchembed saw 1 of 2 images; the worst, a, has psnr 3 by "
            "patchembed"
        ),
    ),
    "stopped behind its last image": (
        (closed(3.0, 4.0, partial="2 of 2 images"),),
        {},
        "patchembed was stopped after 2 of 2 images; the worst, b, has psnr 4 by patchembed",
    ),
    "a doubt about those few that were seen": (
        (closed(3.0, doubt="its equations do not fit for 1 of 1 image"),),
        {},
        "patchembed proves nothing: its equations do not fit for 1 of 1 image; the worst, a, has psnr 3 by patchembed",
    ),
    "another attack stopped": (
        (closed(3.0, 4.0), search(5.0, 1.0, partial="3 of 9 iterations")),
        {},
        "matching was stopped after 3 of 9 iterations; the worst, a, has psnr 5 by matching",
    ),
    "another attack not begun": (
        (closed(3.0, 4.0), undone("matching", "none")),
        {},
        "matching was not run before the stop; the worst, b, has psnr 4 by patchembed",
    ),
    "nothing begun": (
        (undone("patchembed", "none"),),
        {},
        "patchembed was not run before the stop; no closed form was run, such as patchembed",
    ),
    "nothing applies": (
        (outcome("patchembed", "none", reason="no table"),),
        {},
        "no closed form applies",
    ),
    "nothing closed applies and a search found nothing": (
        (outcome("patchembed", "none", reason="no table"), search(1.0, by_itself="why")),
        {},
        "no closed form applies; what matching does not find may still be there; the worst, a, has psnr 1 by matching",
    ),
    "a whole search alone": (
        (search(3.0, 4.0),),
        {},
        (
            "no closed form was run, such as patchembed; what matching does not find may still be there; the worst, "
            "b, has psnr 4 by matching"
        ),
    ),
    "equations that do not fit": (
        (closed(3.0, 4.0, doubt="its equations do not fit for 1 of 2 images"),),
        {},
        "patchembed proves nothing: its equations do not fit for 1 of 2 images; the worst, b, has psnr 4 by patchembed",
    ),
    "fewer images than there are": (
        (closed(3.0),),
        {},
        "patchembed saw 1 of 2 images; the worst, a, has psnr 3 by patchembed",
    ),
    "no number": (
        (closed(3.0, math.nan),),
        {},
        "patchembed has an image whose psnr is no number; the worst, a, has psnr 3 by patchembed",
    ),
    "another attack gave back NaN": (
        (closed(3.0, 4.0), search(5.0, 1.0, facts=[{"broken": True}, {}])),
        {},
        "matching gave back NaN for 1 of 2 images; the worst, a, has psnr 5 by matching",
    ),
    "a metric that is not there": (
        (replace(closed(3.0), scores={"psnr": None}),),
        {"count": 1},
        "psnr is not defined for images so few or so small; patchembed saw 0 of 1 image",
    ),
}


@pytest.mark.parametrize("case", NOT_PASSED)
def test_everything_else_is_not_judged(case: str) -> None:
    pairs, fields, said = NOT_PASSED[case]
    judged = judged_alone(*pairs, **fields)
    assert (judged.status, judged.outcome, judged.said) == (NOT_JUDGED, "not judged", said)
    assert judged.answer == ("nothing_applied" if case == "nothing applies" else "incomplete")


@pytest.mark.parametrize("case", [case for case, (pairs, _, _) in NOT_PASSED.items() if pairs])
def test_an_image_above_counts_whatever_else_happened(case: str) -> None:
    """Also in a stopped audit, by an attack that proves nothing."""
    pairs, fields, _ = NOT_PASSED[case]
    extra = search(99.0, partial="1 of 9 iterations")
    assert judged_alone(*pairs, extra, **fields).status == ABOVE


def test_one_proof_is_enough_and_the_other_attacks_count_for_the_worst() -> None:
    april = closed(9.0, 2.0, doubt="its equations do not fit for 2 of 2 images", attack="april")
    judged = judged_alone(closed(3.0, 4.0), april, outcome("adaptive-mjp", "none", reason="no table"))
    assert judged.status == PASSED
    assert judged.said.endswith("the worst, a, has psnr 9 by april")


def test_an_audit_is_as_good_as_its_worst_defence() -> None:
    answers: dict[int, Any] = {PASSED: "passed", ABOVE: "above", NOT_JUDGED: "nothing_applied"}
    at = {status: Judgement(f"d{status}", answer, "why") for status, answer in answers.items()}
    said = "d0, passed: why; d3, above: why; d4, not judged: why."
    assert Ruling(LIMIT, list(at.values())).status == ABOVE
    assert Ruling(LIMIT, list(at.values())).sentence == f"The gate psnr=20 is not passed. {said}"
    two = Ruling(LIMIT, [at[PASSED], at[NOT_JUDGED]])
    assert two.status == NOT_JUDGED and not two.passed
    assert two.sentence.startswith("The gate psnr=20 is not judged, which is no pass. d0, passed: why; d4")
    one = Ruling(LIMIT, [at[PASSED]])
    assert one.passed and one.sentence == "The gate psnr=20 is passed. d0, passed: why."
    three = [Judgement("d", answer, "why") for answer in ("passed", "nothing_applied", "incomplete", "above")]
    assert [Ruling(LIMIT, three[:count]).answer for count in range(5)] == [
        "incomplete",
        "passed",
        "nothing_applied",
        "incomplete",
        "above",
    ]
    none = Ruling(LIMIT, [])
    assert none.status == NOT_JUDGED and none.sentence.endswith("There was no defence to judge.")


def test_the_file_says_passed_with_status_0_alone() -> None:
    answers: dict[int, Any] = {PASSED: "passed", ABOVE: "above", NOT_JUDGED: "incomplete"}
    for status, answer in answers.items():
        told = Ruling(LIMIT, [Judgement("none", answer, "why", Worst("april", "a", 3.0))]).to_json()
        assert told["passed"] == (status == 0) and told["status"] == status
    assert told["defences"] == [
        {
            "defence": "none",
            "status": 4,
            "outcome": "not judged",
            "answer": "incomplete",
            "said": "why",
            "worst": {"attack": "april", "image": "a", "value": 3.0},
        }
    ]
    assert Judgement("none", "incomplete", "why").to_json()["worst"] is None


PAIRS = st.builds(
    outcome,
    st.sampled_from(["patchembed", "april", "matching"]),
    reason=st.sampled_from([None, None, "no table"]),
    scores=st.lists(st.floats(0, 40), min_size=1, max_size=2).map(lambda values: {"psnr": values}),
    partial=st.sampled_from([None, None, "1 of 2 images"]),
    doubt=st.sampled_from([None, None, "do not fit"]),
).map(lambda pair: pair if pair.reason is None else replace(pair, scores={}, partial=None))


@given(st.lists(PAIRS, max_size=4), st.booleans())
def test_the_three_outcomes_by_their_definition(pairs: list[Outcome], cut: bool) -> None:
    """The words of the rule once more, from the pairs alone."""
    found = [value for pair in pairs for value in pair.scores.get("psnr") or ()]
    ran = [p for p in pairs if p.closed and p.reason is None and p.doubt is None and len(p.scores["psnr"] or ()) == 2]
    stopped = cut or any(pair.partial for pair in pairs)
    expected = 3 if any(value > 20 for value in found) else 0 if ran and not stopped else 4
    left = [undone("april", "none")] if cut else []
    ruling = judge(replace(audit(*pairs, *left), about={"none": ""}), LIMIT)
    assert ruling.status == expected
    assert ruling.passed == (expected == 0)
    tried = cut or any(pair.reason is None for pair in pairs)
    assert ruling.answer == {0: "passed", 3: "above", 4: "incomplete" if tried else "nothing_applied"}[expected]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("psnr=much", "METRIC=NUMBER"),
        ("psnr", "METRIC=NUMBER"),
        ("psnr=nan", "METRIC=NUMBER"),
        ("psnr=inf", "METRIC=NUMBER"),
        ("psnr=200", "psnr is at most 200, so this gate would pass a perfect copy"),
        ("patch_psnr=1e9", "patch_psnr is at most 200"),
        ("ssim=1", "ssim is at most 1,"),
        ("order_accuracy=1.0", "order_accuracy is at most 1,"),
        ("reidentified=1", "reidentified is at most 1,"),
        ("mse=1", "falls as an image leaks"),
        ("lpips=0.1", "choose one of: order_accuracy, patch_psnr, psnr"),
        ("beauty=3", "choose one of: order_accuracy, patch_psnr, psnr"),
    ],
)
def test_limits_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(SitusError, match=said) as error:
        parse_limit(text)
    assert error.value.field == "fail_above"


def test_limits_that_mean_something() -> None:
    assert parse_limit("psnr=199.9") == Limit("psnr", 199.9)
    assert parse_limit("ssim=-0.5") == Limit("ssim", -0.5)
    assert str(parse_limit("reidentified=0.5")) == "reidentified=0.5"


# --- what proves something ------------------------------------------------------------------------------------------


FITS = {"fits": True, "rank": 4, "unknowns": 4, "residual": 1e-7, "expected_residual": 1e-7}
WRONG = {**FITS, "fits": False, "residual": 0.28}
LOOSE = {**FITS, "rank": 3}


def never() -> list[dict[str, Any]]:
    raise AssertionError("the control is made only where all else is well")


@pytest.mark.parametrize(
    ("facts", "noise", "control", "doubt"),
    [
        ([FITS, FITS], 0.0, None, None),
        ([FITS], 1e-3, [FITS], None),
        ([FITS], 0.0, [FITS], None),  # precision alone
        ([LOOSE], 1e-3, [FITS], None),  # noise drowned what is there without it
        ([{"fits": True}], 0.0, None, None),  # no linear system
        ([{**FITS, "hidden": 1}], 0.0, None, None),
        ([{**FITS, "hidden": None}], 0.0, None, None),
        ([FITS, LOOSE], 0.0, None, "its equations have more than one solution for 1 of 2 images"),
        ([LOOSE], 0.0, [FITS], "its equations have more than one solution for 1 of 1 image"),
        (
            [FITS, WRONG],
            1e-3,
            never,
            "its equations do not fit for 1 of 2 images (residual 0.28, where noise and precision predict 1e-07)",
        ),
        (
            [{**WRONG, "verdict": "up to gain"}],
            0.0,
            None,
            "its equations do not fit for 1 of 1 image (residual 0.28, where noise and precision predict 1e-07)",
        ),
        ([{**WRONG, "residual": 1e-7, "verdict": "solved up to gain"}], 0.0, None, "solved up to gain"),
        ([{"rank": 4, "unknowns": 4}], 0.0, None, "its equations do not fit for 1 of 1 image"),
        ([{"fits": "yes"}], 0.0, None, "its equations do not fit for 1 of 1 image"),
        (
            [{**FITS, "hidden": 2}],
            0.0,
            never,
            "the gradients do not say in which order the hidden patches stand, and another order may come closer",
        ),
        (
            [FITS],
            1e-3,
            [WRONG],
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32",
        ),
        (
            [LOOSE],
            1e-3,
            [LOOSE],
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32",
        ),
    ],
)
def test_doubts(facts: list[dict[str, Any]], noise: float, control: Any, doubt: str | None) -> None:
    made = control if control is None or callable(control) else lambda: control
    assert doubt_of(None, facts, noise, made) == doubt


def test_a_caveat_is_a_doubt_whatever_fits() -> None:
    assert doubt_of("a batch of 2", [FITS], 0.0, never) == "it is not exact here (a batch of 2)"


@pytest.mark.parametrize("limits", [{}, {"psnr": 20.0, "ssim": 0.5}])
def test_an_audit_is_judged_by_one_metric(limits: dict[str, float]) -> None:
    found = audit(closed(3.0, 20.5))
    with pytest.raises(SitusError) as caught:
        found.judge(**limits)
    assert (caught.value.field, caught.value.value) == ("limit", limits)
    assert str(found.judge(psnr=20)) == judge(found, LIMIT).sentence
