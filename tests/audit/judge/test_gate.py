"""The gate: the most exposed image decides, what was not attacked is no pass, limits without meaning are refused."""

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
    BLIND,
    NO_NOISE,
    NOT_JUDGED,
    PASSED,
    SCOPE,
    Judgement,
    Limit,
    Ruling,
    Worst,
    doubt_of,
    judge,
    parse_limit,
)
from situs.audit.oracle import Oracle
from situs.errors import SitusError

LIMIT = Limit("psnr", 20.0)
NAMES = list("abcdefgh")
COUNT = len(NAMES)


def scores(value: float, **others: float | None) -> dict[str, Any]:
    """Of images that all come back alike, but for what is said."""
    base = {"psnr": value, "aligned_psnr": value, "ssim": 0.1, "order_accuracy": 0.1, "reidentified": 0.0} | others
    return {name: None if each is None else [each] * COUNT for name, each in base.items()}


GUESS = {"grey": scores(10.0)}
"""What blind guesses have: images above 13 dB are above."""


def audit(*pairs: Outcome, count: int = COUNT, guess: Any = GUESS, half: bool = False) -> Audit:
    """half: an oracle has been asked as it stands; else under the least likely labels too, with the same answer."""
    twins = [replace(pair, case=replace(pair.case, hardest=True)) for pair in pairs if pair.is_bound and not half]
    pairs = (*pairs, *twins)
    stopped = "the time limit of 1 s" if any(pair.status == "not_run" for pair in pairs) else None
    about = dict.fromkeys((pair.defence for pair in pairs), "")
    images = torch.zeros(count, 3, 4, 4)
    return Audit(pairs, NAMES[:count], images, "m", Step(), guess, about, stopped=stopped)


def closed(value: float = 9.0, attack: str = "patchembed", change: Any = None, **fields: Any) -> Outcome:
    """A closed form that got so much of every image; change: values of some metrics."""
    return outcome(attack, "none", scores=scores(value) | dict(change or {}), **fields)


def search(value: float = 9.0, **fields: Any) -> Outcome:
    return closed(value, "matching", **fields)


def bound(value: float = 9.0, change: Any = None, **fields: Any) -> Outcome:
    made = scores(value) | dict(change or {})
    return outcome(Oracle(), "none", scores=made, **fields)


def judged_alone(*pairs: Outcome, limit: Limit = BLIND, **fields: Any) -> Judgement:
    [judged] = judge(audit(*pairs, **fields), limit).judgements
    return judged


def with_one(metric: str, value: float) -> dict[str, list[float]]:
    """The values of a metric, all harmless but for that of image c."""
    return {metric: [*scores(9.0)[metric][:2], value, *scores(9.0)[metric][3:]]}


def test_a_pass_needs_a_proof_and_a_bound_below_what_blind_guesses_have() -> None:
    passed = judged_alone(closed(), bound())
    assert (passed.answer, passed.status) == ("passed", PASSED)
    assert passed.said.startswith("patchembed solved all 8 images and the equations fit; the most exposed, ")
    assert judged_alone(closed()).said.startswith("the oracle, which a pass needs, was not asked")
    assert judged_alone(closed(), bound(), guess={}).said.startswith("no blind guess was measured")
    assert judged_alone(bound()).status == NOT_JUDGED


@pytest.mark.parametrize(
    ("metric", "below", "above", "limit"),
    [
        ("aligned_psnr", 13.0, 13.1, 13.0),
        ("ssim", 0.25, 0.26, 0.25),
        ("order_accuracy", 0.6, 0.61, 0.6),  # of 16 patches
    ],
)
def test_each_metric_is_held_against_the_best_blind_guess_at_that_image(
    metric: str, below: float, above: float, limit: float
) -> None:
    assert judged_alone(closed(change=with_one(metric, below)), bound()).status == PASSED
    judged = judged_alone(closed(change=with_one(metric, above)), bound())
    assert judged.status == ABOVE
    assert judged.worst == Worst("patchembed", "c", above, metric, pytest.approx(limit), scores(10.0)[metric][0])
    assert judged.said.startswith(
        f"1 of 8 images above; the most exposed, c has {metric} {above:g} by patchembed (limit "
    )
    better = {"grey": scores(10.0), "mean image": scores(10.0) | with_one(metric, above)}
    assert judged_alone(closed(change=with_one(metric, above)), bound(), guess=better).status == PASSED


def test_images_found_again_more_often_than_by_chance_are_above() -> None:
    """Of 8 images chance finds one; six and more have a probability below .1 %."""
    for again, status in ((5, PASSED), (6, ABOVE), (8, ABOVE)):
        values = {"reidentified": [1.0] * again + [0.0] * (COUNT - again)}
        assert judged_alone(closed(change=values), bound()).status == status, again
    judged = judged_alone(closed(change={"reidentified": [1.0] * COUNT}), bound())
    assert judged.worst is not None and judged.worst.metric == "reidentified"
    assert judged.worst.attack == "8 of 8 by patchembed" and judged.worst.blind == 1 / COUNT


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_too_few_images_to_tell_finding_again_from_chance_never_pass(count: int) -> None:
    def few(pair: Outcome) -> Outcome:
        return replace(pair, scores={name: values and values[:count] for name, values in pair.scores.items()})

    judged = judged_alone(few(closed()), few(bound()), count=count)
    assert judged.status == (PASSED if count == 5 else NOT_JUDGED)
    assert ("too few to tell finding them again from chance" in judged.said) == (count < 5)


def test_a_further_wish_is_held_beside_and_grey_images_are_not_above_for_nothing() -> None:
    bright = {name: closed(change=with_one("psnr", value)) for name, value in (("at", 20.0), ("over", 20.5))}
    assert judged_alone(bright["at"], bound(), limit=LIMIT).status == PASSED
    judged = judged_alone(bright["over"], bound(), limit=LIMIT)
    assert judged.worst == Worst("patchembed", "c", 20.5, "psnr", 20.0, 10.0)
    assert judged_alone(bright["over"], bound()).status == PASSED  # psnr alone is no part of it
    grey = {"grey": scores(10.0) | with_one("psnr", 19.8)}  # any grey is as near
    assert judged_alone(bright["over"], bound(), limit=LIMIT, guess=grey).status == PASSED
    lax = judged_alone(closed(change=with_one("aligned_psnr", 14.0)), bound(), limit=Limit("psnr", 40.0))
    assert lax.status == ABOVE  # a wish takes nothing away
    shares = judged_alone(
        closed(change={"reidentified": [1.0] * 3 + [0.0] * 5}), bound(), limit=Limit("reidentified", 0.2)
    )
    assert shares.status == ABOVE


@pytest.mark.parametrize("value", [9.0, 12.9, 13.1, 30.0])
def test_an_oracle_above_keeps_a_gate_from_passing_and_fails_none(value: float) -> None:
    """It is told the image: a bound, and no leak."""
    judged = judged_alone(closed(), bound(change=with_one("aligned_psnr", value)))
    assert judged.status == (PASSED if value < 13 else NOT_JUDGED)
    if value > 13:
        assert judged.said.startswith("no attack is above, but the oracle is: an attacker who knew where to look")
    assert judged_alone(closed(20.0), bound(value)).status == ABOVE
    few = bound(change={"aligned_psnr": [value], "ssim": [0.1], "order_accuracy": [0.1], "psnr": [9.0]}, numbers=(5,))
    named = judged_alone(closed(), few)
    assert named.status == judged.status and ("f has aligned_psnr" in named.said) == (value > 13)


def test_what_the_largest_gradients_give_away_counts_and_proves_nothing() -> None:
    harder = closed(change=with_one("aligned_psnr", 24.0), hardest=True)
    judged = judged_alone(closed(), harder, bound())
    assert judged.status == ABOVE and judged.worst is not None
    assert judged.worst.attack == "patchembed, least likely labels"
    assert judged_alone(closed(hardest=True), bound()).status == NOT_JUDGED


def test_a_pass_that_is_near_its_limit_says_how_near() -> None:
    caution = "; that is only 0.2 dB below the limit of 20, and other images may come back above it"
    near = closed(change=with_one("psnr", 19.8) | {"ssim": [-0.5] * COUNT})
    assert judged_alone(near, bound(), limit=LIMIT).said.endswith(caution)
    for far, limit in ((closed(change=with_one("psnr", 19.0)), LIMIT), (near, BLIND)):
        assert "below the limit of" not in judged_alone(far, bound(), limit=limit).said


@pytest.mark.parametrize(
    ("metric", "value", "told"),
    [
        ("aligned_psnr", 12.6, "only 0.4 dB below the limit of 13"),
        ("aligned_psnr", 12.98, "less than 0.1 dB below the limit of 13"),
        ("aligned_psnr", 11.9, None),
        ("ssim", 0.22, "only 0.030 below the limit of 0.25"),
        ("ssim", 0.19, None),
        ("order_accuracy", 0.58, "only 0.020 below the limit of 0.6"),
    ],
)
def test_so_does_one_that_is_near_what_blind_guesses_set(metric: str, value: float, told: str | None) -> None:
    """Limits: a blind guess + 3 dB, + 0.15, and + 2 / sqrt(patches)."""
    made = closed(change=with_one(metric, value))
    judged = judged_alone(made, bound(), limit=BLIND)
    assert judged.status == PASSED
    assert f"that is {told}, and other images" in judged.said if told else "below the limit of" not in judged.said


@pytest.mark.parametrize(("wish", "idle"), [("psnr=5", True), ("psnr=10.9", True), ("psnr=11.1", False)])
def test_a_wish_below_what_blind_guesses_have_says_that_it_decides_nothing(wish: str, idle: bool) -> None:
    said = f"; the wish {wish} decides nothing: blind guesses have 10 or more, and their own + 1 dB is the limit"
    for value in (9.0, 24.0):  # passed, above
        assert (said in judged_alone(closed(value), bound(), limit=parse_limit(wish)).said) == idle
    assert "the wish ssim=0.05 decides nothing: blind guesses have 0.1 or more, and their own is the limit" in (
        judged_alone(closed(), bound(), limit=parse_limit("ssim=0.05")).said
    )
    for other in ("blind", "reidentified=0.1", "ssim=0.2"):
        assert "decides nothing" not in judged_alone(closed(), bound(), limit=parse_limit(other)).said


@pytest.mark.parametrize("hardest", [False, True])
def test_half_an_oracle_is_no_pass(hardest: bool) -> None:
    """Ctrl-C between its two questions."""
    judged = judged_alone(closed(), bound(hardest=hardest), half=True)
    assert judged.status == NOT_JUDGED and "was not asked under both the own and the least likely" in judged.said


NOT_PASSED: dict[str, tuple[tuple[Outcome, ...], str]] = {
    "stopped in its search": (
        (search(partial="188 of 500 iterations"),),
        "matching was stopped after 188 of 500 iterations; no closed form was run, such as patchembed; what matching ",
    ),
    "stopped before all images": (
        (replace(closed(partial="1 of 8 images"), scores={"psnr": [3.0], "aligned_psnr": [3.0], "ssim": [0.1]}),),
        "patchembed was stopped after 1 of 8 images; patchembed saw 1 of 8 images; the most exposed, ",
    ),
    "stopped behind its last image": (
        (closed(partial="8 of 8 images"), bound()),
        "patchembed was stopped after 8 of 8 images; the most exposed, ",
    ),
    "another attack stopped": (
        (closed(), search(partial="3 of 9 iterations"), bound()),
        "matching was stopped after 3 of 9 iterations; the most exposed, ",
    ),
    "another attack not begun": (
        (closed(), undone("matching", "none"), bound()),
        "matching was not run before the stop; the most exposed, ",
    ),
    "the oracle stopped": (
        (closed(), bound(partial="1 of 4 images")),
        "oracle was stopped after 1 of 4 images; oracle, least likely labels was stopped after 1 of 4 images; the ",
    ),
    "nothing begun": (
        (undone("patchembed", "none"),),
        "patchembed was not run before the stop; no closed form was run, such as patchembed",
    ),
    "nothing applies": ((outcome("patchembed", "none", reason="no table"),), "no closed form applies"),
    "nothing closed applies and a search found nothing": (
        (outcome("patchembed", "none", reason="no table"), search(by_itself="why"), bound()),
        "no closed form applies; what matching does not find may still be there; the most exposed, ",
    ),
    "a whole search alone": (
        (search(), bound()),
        "no closed form was run, such as patchembed; what matching does not find may still be there; the most ",
    ),
    "equations that do not fit": (
        (closed(doubt="its equations do not fit for 1 of 8 images"), bound()),
        "patchembed proves nothing: its equations do not fit for 1 of 8 images; the most exposed, ",
    ),
    "no noise": ((closed(doubt=NO_NOISE), bound()), f"patchembed proves nothing: {NO_NOISE}; the most exposed, "),
    "no number": (
        (closed(change=with_one("ssim", math.nan)), bound()),
        "patchembed has an image whose ssim is no number; the most exposed, ",
    ),
    "another attack gave back NaN": (
        (closed(), search(facts=[{"broken": True}, {}]), bound()),
        "matching gave back NaN for 1 of 2 images; the most exposed, ",
    ),
    "a metric that is not there": (
        (closed(change={"ssim": None}), bound()),
        "ssim is not defined for images so few or so small; the most exposed, ",
    ),
}


@pytest.mark.parametrize("case", NOT_PASSED)
def test_everything_else_is_inconclusive(case: str) -> None:
    pairs, reason = NOT_PASSED[case]
    judged = judged_alone(*pairs)
    assert (judged.status, judged.outcome) == (NOT_JUDGED, "inconclusive")
    assert judged.said.startswith(reason)
    assert judged.answer == ("nothing_applied" if case == "nothing applies" else "incomplete")


@pytest.mark.parametrize("case", NOT_PASSED)
def test_an_image_above_counts_whatever_else_happened(case: str) -> None:
    """Also in a stopped audit, by an attack that proves nothing."""
    pairs, _ = NOT_PASSED[case]
    assert judged_alone(*pairs, search(99.0, partial="1 of 9 iterations")).status == ABOVE


def test_an_audit_is_as_good_as_its_worst_defence() -> None:
    answers: dict[int, Any] = {PASSED: "passed", ABOVE: "above", NOT_JUDGED: "nothing_applied"}
    at = {status: Judgement(f"d{status}", answer, "why") for status, answer in answers.items()}
    reasons = f"{SCOPE}. d0, passed: why; d3, above: why; d4, inconclusive: why."
    assert Ruling(LIMIT, list(at.values())).status == ABOVE
    assert Ruling(LIMIT, list(at.values())).sentence == f"The gate psnr=20 is not passed, {reasons}"
    two = Ruling(LIMIT, [at[PASSED], at[NOT_JUDGED]])
    assert two.status == NOT_JUDGED and not two.passed
    assert two.sentence.startswith(f"The gate psnr=20 is inconclusive (not a pass), {SCOPE}. d0, passed: why; d4")
    one = Ruling(BLIND, [at[PASSED]])
    assert one.passed and one.sentence == f"The gate blind is passed, {SCOPE}. d0, passed: why."
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
    assert (told["scope"], told["limit"]) == (SCOPE, "psnr=20")
    assert told["defences"] == [
        {
            "defence": "none",
            "status": 4,
            "outcome": "inconclusive",
            "answer": "incomplete",
            "said": "why",
            "worst": {"attack": "april", "image": "a", "value": 3.0, "metric": "psnr", "limit": None, "blind": None},
        }
    ]
    assert Judgement("none", "incomplete", "why").to_json()["worst"] is None


VALUES = st.lists(st.floats(0, 40), min_size=COUNT, max_size=COUNT)
PAIRS = st.builds(
    lambda attack, reason, values, partial, doubt: outcome(
        attack,
        reason=reason,
        scores={} if reason else scores(0.0) | {"aligned_psnr": values},
        partial=None if reason else partial,
        doubt=doubt,
    ),
    st.sampled_from(["patchembed", "april", "matching"]),
    st.sampled_from([None, None, "no table"]),
    VALUES,
    st.sampled_from([None, None, "1 of 2 images"]),
    st.sampled_from([None, None, "do not fit"]),
)


@given(st.lists(PAIRS, max_size=4), st.booleans(), st.lists(st.floats(0, 40), min_size=1, max_size=1))
def test_the_three_outcomes_by_their_definition(pairs: list[Outcome], cut: bool, oracle: list[float]) -> None:
    """The words of the rule once more, from the pairs alone."""
    values = [value for pair in pairs for value in pair.scores.get("aligned_psnr") or ()]
    ran = [pair for pair in pairs if pair.closed and pair.reason is None and pair.doubt is None]
    stopped = cut or any(pair.partial for pair in pairs)
    unsure = stopped or not ran or oracle[0] > 13
    expected = 3 if any(value > 13 for value in values) else 4 if unsure else 0
    left = [undone("april", "none")] if cut else []
    bounds = [bound(change={"aligned_psnr": oracle * COUNT})]
    ruling = judge(replace(audit(*pairs, *left, *bounds), about={"none": ""}))
    assert ruling.status == expected
    assert ruling.passed == (expected == 0)


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
        ("lpips=0.1", "choose one of: aligned_psnr, order_accuracy, patch_psnr, psnr"),
        ("beauty=3", "choose one of: aligned_psnr, order_accuracy, patch_psnr, psnr"),
    ],
)
def test_limits_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(SitusError, match=said) as error:
        parse_limit(text)
    assert error.value.field == "fail_above"


def test_limits_that_mean_something() -> None:
    assert parse_limit("psnr=199.9") == Limit("psnr", 199.9)
    assert parse_limit("blind") == BLIND and str(BLIND) == "blind"
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
        ([FITS, FITS], 0.0, None, NO_NOISE),
        ([FITS], 1e-3, [FITS], None),
        ([FITS], 0.0, [FITS], NO_NOISE),  # precision alone
        ([LOOSE], 1e-3, [FITS], None),  # noise drowned what is there without it
        ([{"fits": True}], 0.0, None, NO_NOISE),  # no linear system
        ([{"fits": True}], 1e-3, [{"fits": True}], None),
        ([{**FITS, "hidden": 1}], 1e-3, [FITS], None),
        ([{**FITS, "hidden": None}], 0.0, None, NO_NOISE),
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


def test_an_audit_is_judged_by_one_further_metric_at_most() -> None:
    made = audit(closed(3.0), bound())
    with pytest.raises(SitusError) as caught:
        made.judge(psnr=20.0, ssim=0.5)
    assert (caught.value.field, caught.value.value) == ("limit", {"psnr": 20.0, "ssim": 0.5})
    assert str(made.judge(psnr=20)) == judge(made, LIMIT).sentence
    assert str(made.judge()) == judge(made).sentence
