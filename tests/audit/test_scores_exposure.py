"""The gate: the most exposed image decides, what was not attacked is no pass, limits without meaning are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outcomes import held, outcome, undone

from situs.audit.cases import ImageFinding
from situs.audit.defences import Step
from situs.audit.gradients import Audit
from situs.audit.oracle import Oracle
from situs.audit.scores import METRICS
from situs.errors import SitusError
from situs.findings import NO_NOISE
from situs.gate import ABOVE, BLIND, NOT_JUDGED, PASSED, Judgement, Limit, Worst, judge, parse_limit

LIMIT = Limit("psnr", 20.0)
NAMES = list("abcdefgh")
COUNT = len(NAMES)


def scores(value: float, **others: float | None) -> dict[str, Any]:
    """Of images that all come back alike, but for what is said."""
    base = {"psnr": value, "aligned_psnr": value, "ssim": 0.1, "order_accuracy": 0.1, "reidentified": 0.0} | others
    return {name: None if each is None else [each] * COUNT for name, each in base.items()}


GUESS = {"grey": scores(10.0)}
"""What blind guesses have: images above 13 dB are above."""


def audit(*pairs: ImageFinding, count: int = COUNT, guess: Any = GUESS, half: bool = False) -> Audit:
    """half: an oracle has been asked as it stands; else under the least likely labels too, with the same answer."""
    twins = [
        replace(pair, attack=f"{pair.attack}, least likely labels", hardest=True)
        for pair in pairs
        if pair.bound and not half
    ]
    pairs = tuple(held([*pairs, *twins], guess, NAMES[:count]))
    stopped = "the time limit of 1 s" if any(pair.status == "not_run" for pair in pairs) else None
    about = dict.fromkeys((pair.defence for pair in pairs), "")
    images = torch.zeros(count, 3, 4, 4)
    return Audit(pairs, NAMES[:count], images, "m", Step(), guess, about=about, stopped=stopped)


def closed(value: float = 9.0, attack: str = "patchembed", change: Any = None, **fields: Any) -> ImageFinding:
    """A closed form that got so much of every image; change: values of some metrics."""
    return outcome(attack, "none", scores=scores(value) | dict(change or {}), **fields)


def search(value: float = 9.0, **fields: Any) -> ImageFinding:
    return closed(value, "matching", **fields)


def bound(value: float = 9.0, change: Any = None, **fields: Any) -> ImageFinding:
    made = scores(value) | dict(change or {})
    return outcome(Oracle(), "none", scores=made, **fields)


def judged_alone(*pairs: ImageFinding, limit: Limit = BLIND, **fields: Any) -> Judgement:
    made = audit(*pairs, **fields)
    [judged] = judge(made.findings, limit, defences=made.about).judgements
    return judged


def with_one(metric: str, value: float) -> dict[str, list[float]]:
    """The values of a metric, all harmless but for that of image c."""
    return {metric: [*scores(9.0)[metric][:2], value, *scores(9.0)[metric][3:]]}


def test_a_pass_needs_a_proof_and_a_bound_below_what_blind_guesses_have() -> None:
    passed = judged_alone(closed(), bound())
    assert (passed.answer, passed.status) == ("passed", PASSED)
    assert passed.reason.startswith(
        "patchembed solved the equations of all 8 images, and the equations fit; most exposed: "
    )
    assert judged_alone(closed()).reason.startswith("a pass needs the oracle (a bound")
    assert judged_alone(closed(), bound(), guess={}).reason.startswith(
        "for some images that patchembed attacked, no blind guess was measured"
    )
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
    assert judged.reason.startswith(
        f"1 of 8 images exceeds what the gate allows; most exposed: c has {metric} {above:g} by patchembed (limit "
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
    def few(pair: ImageFinding) -> ImageFinding:
        scores = {name: values and values[:count] for name, values in pair.scores.items()}
        certificates = pair.certificates[:count]
        return replace(
            pair, scores=scores, numbers=range(count), samples=[*"abcdefgh"][:count], certificates=certificates
        )

    judged = judged_alone(few(closed()), few(bound()), count=count)
    assert judged.status == (PASSED if count == 5 else NOT_JUDGED)
    assert ("re-identification may be chance" in judged.reason) == (count < 5)


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
        assert judged.reason.startswith("no attack is above the limit, but the oracle (a bound) is: ")
    assert judged_alone(closed(20.0), bound(value)).status == ABOVE
    few = bound(change={"aligned_psnr": [value], "ssim": [0.1], "order_accuracy": [0.1], "psnr": [9.0]}, numbers=(5,))
    named = judged_alone(closed(), few)
    assert named.status == judged.status and ("f has aligned_psnr" in named.reason) == (value > 13)


def test_what_the_largest_gradients_give_away_counts_and_proves_nothing() -> None:
    harder = closed(change=with_one("aligned_psnr", 24.0), hardest=True)
    judged = judged_alone(closed(), harder, bound())
    assert judged.status == ABOVE and judged.worst is not None
    assert judged.worst.attack == "patchembed, least likely labels"
    assert judged_alone(closed(hardest=True), bound()).status == NOT_JUDGED


def test_a_pass_that_is_near_its_limit_says_how_near() -> None:
    caution = "; this value is only 0.2 dB below the limit of 20, and other images may exceed the limit"
    near = closed(change=with_one("psnr", 19.8) | {"ssim": [-0.5] * COUNT})
    assert judged_alone(near, bound(), limit=LIMIT).reason.endswith(caution)
    for far, limit in ((closed(change=with_one("psnr", 19.0)), LIMIT), (near, BLIND)):
        assert "below the limit of" not in judged_alone(far, bound(), limit=limit).reason


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
    assert (
        f"this value is {told}, and other images" in judged.reason
        if told
        else "below the limit of" not in judged.reason
    )


@pytest.mark.parametrize(("wish", "idle"), [("psnr=5", True), ("psnr=10.9", True), ("psnr=11.1", False)])
def test_a_wish_below_what_blind_guesses_have_says_that_it_decides_nothing(wish: str, idle: bool) -> None:
    said = (
        f"; your limit {wish} has no effect, because blind guesses already reach 10 or more. Instead, the "
        "limit is the blind guess + 1 dB"
    )
    for value in (9.0, 24.0):  # passed, above
        assert (said in judged_alone(closed(value), bound(), limit=parse_limit(wish, METRICS)).reason) == idle
    assert (
        "your limit ssim=0.05 has no effect, because blind guesses already reach 0.1 or more. Instead, the "
        "limit is the blind guess" in (judged_alone(closed(), bound(), limit=parse_limit("ssim=0.05", METRICS)).reason)
    )
    for other in ("blind", "reidentified=0.1", "ssim=0.2"):
        assert "has no effect" not in judged_alone(closed(), bound(), limit=parse_limit(other, METRICS)).reason


@pytest.mark.parametrize("hardest", [False, True])
def test_half_an_oracle_is_no_pass(hardest: bool) -> None:
    """Ctrl-C between its two questions."""
    judged = judged_alone(closed(), bound(hardest=hardest), half=True)
    assert judged.status == NOT_JUDGED and "needs the oracle twice" in judged.reason


NO_CLOSED_FORM = "no closed form (an attack that solves equations)"

NOT_PASSED: dict[str, tuple[tuple[ImageFinding, ...], str]] = {
    "stopped in its search": (
        (search(partial="188 of 500 iterations"),),
        f"matching was stopped after 188 of 500 iterations; {NO_CLOSED_FORM} was run; another attack may ",
    ),
    "stopped before all images": (
        (outcome("patchembed", partial="1 of 8 images", scores={"psnr": [3.0], "aligned_psnr": [3.0], "ssim": [0.1]}),),
        "patchembed was stopped after 1 of 8 images; patchembed attacked only 1 of 8 images; most exposed: ",
    ),
    "stopped behind its last image": (
        (closed(partial="8 of 8 images"), bound()),
        f"patchembed was stopped after 8 of 8 images; {NO_CLOSED_FORM} finished under the conditions of ",
    ),
    "another attack stopped": (
        (closed(), search(partial="3 of 9 iterations"), bound()),
        "matching was stopped after 3 of 9 iterations; most exposed: ",
    ),
    "another attack not begun": (
        (closed(), undone("matching", "none"), bound()),
        "matching was not run, because the audit was stopped first; most exposed: ",
    ),
    "the oracle stopped": (
        (closed(), bound(partial="1 of 4 images")),
        "oracle was stopped after 1 of 4 images; oracle, least likely labels was stopped after 1 of 4 images; ",
    ),
    "nothing begun": (
        (undone("patchembed", "none"),),
        f"patchembed was not run, because the audit was stopped first; {NO_CLOSED_FORM} was run",
    ),
    "nothing applies": (
        (outcome("patchembed", "none", reason="no table"),),
        "no closed form applies (patchembed: no table)",
    ),
    "nothing closed applies and a search found nothing": (
        (outcome("patchembed", "none", reason="no table"), search(fallback="why"), bound()),
        "no closed form applies (patchembed: no table); another attack may find more than matching; most exposed: ",
    ),
    "a whole search alone": (
        (search(), bound()),
        f"{NO_CLOSED_FORM} was run; another attack may find more than matching; most exposed: ",
    ),
    "equations that do not fit": (
        (closed(doubt="its equations do not fit for 1 of 8 images"), bound()),
        "patchembed proves nothing: its equations do not fit for 1 of 8 images; most exposed: ",
    ),
    "no noise": ((closed(doubt=NO_NOISE), bound()), f"patchembed proves nothing: {NO_NOISE}; most exposed: "),
    "no number": (
        (closed(change=with_one("ssim", math.nan)), bound()),
        "patchembed has an image whose ssim is not a number; most exposed: ",
    ),
    "another attack gave back NaN": (
        (closed(), search(facts=[{"broken": True}, {}]), bound()),
        "matching returned NaN for 1 of 8 images; most exposed: ",
    ),
    "a metric that is not there": (
        (closed(change={"ssim": None}), bound()),
        "ssim is not defined for so few images or such small images; most exposed: ",
    ),
}


@pytest.mark.parametrize("case", NOT_PASSED)
def test_everything_else_is_inconclusive(case: str) -> None:
    pairs, reason = NOT_PASSED[case]
    judged = judged_alone(*pairs)
    assert (judged.status, judged.outcome) == (NOT_JUDGED, "inconclusive")
    assert judged.reason.startswith(reason)
    assert judged.answer == ("nothing_applied" if case == "nothing applies" else "incomplete")


@pytest.mark.parametrize("case", NOT_PASSED)
def test_an_image_above_counts_whatever_else_happened(case: str) -> None:
    """Also in a stopped audit, by an attack that proves nothing."""
    pairs, _ = NOT_PASSED[case]
    assert judged_alone(*pairs, search(99.0, partial="1 of 9 iterations")).status == ABOVE


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
def test_the_three_outcomes_by_their_definition(pairs: list[ImageFinding], cut: bool, oracle: list[float]) -> None:
    """The words of the rule once more, from the pairs alone."""
    values = [value for pair in pairs for value in pair.scores.get("aligned_psnr") or ()]
    ran = [pair for pair in pairs if pair.closed and pair.why("refused") is None and pair.why("doubt") is None]
    stopped = cut or any(pair.why("stopped") for pair in pairs)
    unsure = stopped or not ran or oracle[0] > 13
    expected = 3 if any(value > 13 for value in values) else 4 if unsure else 0
    left = [undone("april", "none")] if cut else []
    bounds = [bound(change={"aligned_psnr": oracle * COUNT})]
    ruling = judge(audit(*pairs, *left, *bounds).findings)
    assert ruling.status == expected
    assert ruling.passed == (expected == 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("psnr=much", "METRIC=NUMBER"),
        ("psnr", "METRIC=NUMBER"),
        ("psnr=nan", "METRIC=NUMBER"),
        ("psnr=inf", "METRIC=NUMBER"),
        ("psnr=200", "psnr is never above 200, so this gate would pass even a perfect copy"),
        ("patch_psnr=1e9", "patch_psnr is never above 200"),
        ("ssim=1", "ssim is never above 1,"),
        ("order_accuracy=1.0", "order_accuracy is never above 1,"),
        ("reidentified=1", "reidentified is never above 1,"),
        ("mse=1", "means a good copy"),
        ("lpips=0.1", "choose one of: aligned_psnr, order_accuracy, patch_psnr, psnr"),
        ("beauty=3", "choose one of: aligned_psnr, order_accuracy, patch_psnr, psnr"),
    ],
)
def test_limits_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(SitusError, match=said) as error:
        parse_limit(text, METRICS)
    assert error.value.field == "fail_above"


def test_limits_that_mean_something() -> None:
    assert parse_limit("psnr=199.9", METRICS) == Limit("psnr", 199.9)
    assert parse_limit("blind", METRICS) == BLIND and str(BLIND) == "blind"
    assert parse_limit("ssim=-0.5", METRICS) == Limit("ssim", -0.5)
    assert str(parse_limit("reidentified=0.5", METRICS)) == "reidentified=0.5"


def test_an_audit_is_judged_by_one_further_metric_at_most() -> None:
    made = audit(closed(3.0), bound())
    with pytest.raises(SitusError) as caught:
        made.judge(psnr=20.0, ssim=0.5)
    assert (caught.value.field, caught.value.value) == ("limit", {"psnr": 20.0, "ssim": 0.5})
    assert str(made.judge(psnr=20)) == judge(made.findings, LIMIT).sentence
    assert str(made.judge()) == judge(made.findings).sentence
