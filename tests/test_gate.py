"""The gate's truth table: status × certificate × remark × threshold × bound, every cell; and its sentences."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from situs.errors import SitusError
from situs.findings import ACTIVE, NO_NOISE, Certificate, Exposure, Finding, Kind, Metric, Remark, Status, doubt_of
from situs.gate import (
    ABOVE,
    BLIND,
    NOT_JUDGED,
    PASSED,
    SCOPE,
    Held,
    Judgement,
    Limit,
    Ruling,
    Worst,
    _margin,
    exposed,
    hold,
    judge,
    junit,
    parse_limit,
)

CLOSE = Metric("closeness", margin=3.0, wish=1.0, scale=3.0, most=200.0, unit="dB")
SHARE = Metric("share", wish=0.0)
FALLS = Metric("distance", rises=False)
METRICS = {metric.name: metric for metric in (CLOSE, SHARE, FALLS)}
SAMPLES = ("a", "b")

HOLDS = Certificate(True, 1e-7, 1e-7, unique=True, order_known=True)
CERTIFICATES = {
    "holds": (HOLDS, HOLDS),
    "holds, not unique beneath noise": (HOLDS, HOLDS._replace(unique=False)),
    "one does not fit": (HOLDS, Certificate(False)),
    "one has numbers unseen": (HOLDS, HOLDS._replace(unseen=3)),
    "one does not know the order": (HOLDS, HOLDS._replace(order_known=False)),
    "one is missing": (HOLDS,),
    "none": (),
}
THRESHOLDS = {
    "below": (9.0, 10.0, BLIND),
    "at the margin": (13.0, 10.0, BLIND),
    "above the margin": (13.1, 10.0, BLIND),
    "below a wish": (9.0, 10.0, Limit("closeness", 12.0)),
    "above a wish": (12.5, 10.0, Limit("closeness", 12.0)),
    "above a wish, as blind guesses are": (12.5, 11.6, Limit("closeness", 12.0)),
    "above a lax wish's margin": (14.0, 10.0, Limit("closeness", 40.0)),
    "no number": (math.nan, 10.0, BLIND),
    "no blind guess": (9.0, None, BLIND),
    "a wish for what was not measured": (9.0, 10.0, Limit("share", 0.5)),
}
OVER = {"above the margin", "above a wish", "above a lax wish's margin"}
UNKNOWN = {"no number", "no blind guess", "a wish for what was not measured"}


def finding(value: float = 9.0, blind: float | None = 10.0, **fields: Any) -> Finding:
    """A closed form that got so much of every sample."""
    exposures = [Exposure(name, CLOSE, value, blind) for name in SAMPLES]
    made: dict[str, Any] = {
        "samples": SAMPLES,
        "asked": 2,
        "exposures": exposures,
        "certificates": (HOLDS, HOLDS),
        "closed": True,
    }
    return Finding(**({"attack": "solve", "defence": "noise"} | made | fields))


def bounds(value: float = 9.0, **fields: Any) -> list[Finding]:
    made = {"attack": "oracle", "bound": True, "closed": False, "certificates": ()} | fields
    return [finding(value, **made, hardest=hardest) for hardest in (False, True)]


def status_of(*findings: Finding, limit: Limit = BLIND) -> int:
    return judge(findings, limit).status


KINDS: list[Kind | None] = [None, *get_args(Kind)]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("status", get_args(Status))
def test_every_cell_of_the_truth_table(status: Status, threshold: str) -> None:
    """Above counts whatever else is true; a pass needs everything; all else is inconclusive."""
    value, blind, limit = THRESHOLDS[threshold]
    for certificate, kind, closed, hardest in product(CERTIFICATES, KINDS, (True, False), (True, False)):
        remarks = () if kind is None else (Remark(kind, "why"),)
        fields = {"status": status, "certificates": CERTIFICATES[certificate], "remarks": remarks}
        one = finding(value, blind, **fields, closed=closed, hardest=hardest)
        proved = status == "done" and certificate.startswith("holds") and kind is None and closed and not hardest
        passes = proved and threshold not in UNKNOWN
        expected = ABOVE if threshold in OVER else PASSED if passes else NOT_JUDGED
        assert status_of(one, *bounds(), limit=limit) == expected, (certificate, kind, closed, hardest)
        judged = judge([one, *bounds()], limit).judgements[0]
        assert judged.answer == {ABOVE: "above", PASSED: "passed", NOT_JUDGED: "incomplete"}[expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", get_args(Status))
def test_beside_a_proof_what_was_stopped_or_not_run_blocks_and_what_does_not_apply_or_is_doubtful_does_not(
    status: Status, kind: Kind | None
) -> None:
    remarks = () if kind is None else (Remark(kind, "why"),)
    other = finding(attack="other", status=status, remarks=remarks, certificates=())
    blocked = status in ("stopped", "not_run") or kind in ("stopped", "few", "gap")
    assert status_of(finding(), other, *bounds()) == (NOT_JUDGED if blocked else PASSED)


BOUNDS = {
    "both below": (bounds(), PASSED),
    "above the margin": (bounds(13.1), NOT_JUDGED),
    "one of two": (bounds()[:1], NOT_JUDGED),
    "the harder alone": (bounds()[1:], NOT_JUDGED),
    "none": ([], NOT_JUDGED),
    "stopped": (bounds(status="stopped", remarks=(Remark("stopped", "1 of 2"),)), NOT_JUDGED),
    "refused": (bounds(status="refused"), NOT_JUDGED),
    "not run": (bounds(status="not_run"), NOT_JUDGED),
    "measured of nothing": (bounds(exposures=()), NOT_JUDGED),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_a_pass_needs_a_whole_bound_that_stays_below_and_a_bound_fails_no_gate(case: str) -> None:
    made, expected = BOUNDS[case]
    assert status_of(finding(), *made) == expected
    assert status_of(finding(20.0), *made) == ABOVE
    assert status_of(*made) == NOT_JUDGED


def test_samples_found_again_are_above_whatever_their_limit_and_not_of_a_bound() -> None:
    again = [Exposure("b", SHARE, 1.0, 0.1, above=True, among="1 of 2")]
    seen = finding(exposures=[*finding().exposures, *again])
    judged = judge([seen, *bounds()]).judgements[0]
    assert judged.worst == Worst("1 of 2 by solve", "b", 1.0, "share", None, 0.1)
    told = bounds(exposures=[*finding().exposures, *again])
    assert status_of(finding(), *told) == PASSED


def test_the_most_exposed_sample_decides_and_is_named_with_its_limit() -> None:
    mixed = [Exposure("a", CLOSE, 9.0, 10.0), Exposure("b", CLOSE, 20.5, 10.0)]
    judged = judge([finding(exposures=mixed), *bounds()]).judgements[0]
    assert judged.worst == Worst("solve", "b", 20.5, "closeness", 13.0, 10.0)
    assert judged.reason == (
        "1 of 2 images exceeds what the gate allows; most exposed: b has closeness 20.5 by solve (limit 13, blind "
        "guess 10)"
    )


def test_a_pass_names_its_proof_and_how_near_it_is() -> None:
    said = judge([finding(12.8), *bounds()], things="texts").judgements[0].reason
    assert said.startswith(
        "solve solved the equations of all 2 texts, and the equations fit; most exposed: a has closeness 12.8"
    )
    assert said.endswith("only 0.2 dB below the limit of 13, and other texts may exceed the limit")
    near = judge([finding(12.98), *bounds()]).judgements[0].reason
    assert "less than 0.1 dB below" in near
    assert "below the limit of" not in judge([finding(11.9), *bounds()]).judgements[0].reason
    idle = judge([finding(), *bounds()], Limit("closeness", 5.0)).judgements[0].reason
    said = (
        "; your limit closeness=5 has no effect, because blind guesses already reach 10 or more. Instead, the limit is "
    )
    assert f"{said}the blind guess + 1 dB" in idle
    for bound, told in ((10.9, True), (11.0, False)):  # a wished limit is at least the blind guess and its slack
        judged = judge([finding(), *bounds()], Limit("closeness", bound)).judgements[0]
        assert ("has no effect" in judged.reason) == told
    shares = [Exposure(name, SHARE, 0.2, 0.5) for name in SAMPLES]
    idle = judge([finding(exposures=shares), *bounds()], Limit("share", 0.3)).judgements[0].reason
    assert "already reach 0.5 or more. Instead, the limit is the blind guess" in idle and "blind guess +" not in idle
    others = [Exposure("a", SHARE, 0.2, 0.1, above=True), Exposure("b", CLOSE, 9.0, 0.0)]  # held to no wish for a share
    idle = judge([finding(exposures=[*shares, *others]), *bounds()], Limit("share", 0.3)).judgements[0].reason
    assert "your limit share=0.3 has no effect, because blind guesses already reach 0.5 or more" in idle


def test_what_has_no_limit_is_not_held_to_one() -> None:
    exposures = [Exposure("a", SHARE, 0.9, 0.1), Exposure("b", CLOSE, math.nan, 10.0), Exposure("c", CLOSE, 9.0, 10.0)]
    exposures += [
        Exposure("d", SHARE, 0.8, None),
        Exposure("e", SHARE, 0.7, 0.6),
        Exposure("f", SHARE, 0.1, above=True),
    ]
    one = finding(exposures=exposures)
    assert [(held.exposure.sample, held.limit) for held in hold(one)] == [("c", 13.0), ("f", None)]
    wished = [(held.exposure.sample, held.limit) for held in hold(one, Limit("share", 0.5))]
    assert wished == [("a", 0.5), ("c", 13.0), ("d", 0.5), ("e", 0.6), ("f", None)]
    assert [held.exposure.sample for held in exposed(one, Limit("share", 0.5))] == ["a", "d", "e", "f"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("doubt", "solve proves nothing: why"),
        ("inexact", "solve proves nothing: why"),
        (None, "solve proves nothing: for some "),
    ],
)
def test_who_proves_nothing_says_why(kind: Kind | None, said: str) -> None:
    remarks = () if kind is None else (Remark(kind, "why"),)
    certificates = (HOLDS, Certificate(False)) if kind is None else (HOLDS, HOLDS)
    judged = judge([finding(remarks=remarks, certificates=certificates), *bounds()]).judgements[0]
    assert judged.status == NOT_JUDGED and judged.reason.startswith(said)


def test_where_the_harder_bound_may_come_later_the_easier_one_is_still_needed() -> None:
    easier, harder = bounds()
    for asked, given, passed in ((False, [easier], True), (False, [harder], False), (True, [easier], False)):
        assert judge([finding(), *given], hardest=asked).passed == passed, (asked, given)
    assert judge([finding(), harder, easier], hardest=True).passed


def test_the_table_of_a_ruling_has_the_most_exposed_sample_of_each_defence() -> None:
    refused = finding(defence="clip", status="refused", exposures=(), samples=(), remarks=(Remark("refused", "no"),))
    unheld = finding(exposures=[Exposure("a", SHARE, 0.12345, None)], defence="none")
    header, rows = judge([finding(12.34567), *bounds(), refused, unheld], Limit("share", 0.5)).table()
    assert header == ["defence", "gate", "most exposed", "has", "limit", "a blind guess", "by"]
    assert rows == [
        ["noise", "inconclusive", "a", "closeness 12.35", "13", "10", "solve"],
        ["clip", "inconclusive", None, None, None, None, None],
        ["none", "inconclusive", "a", "share 0.1235", "0.5", None, "solve"],
    ]


def test_what_is_lacking_where_no_closed_form_proves_anything() -> None:
    def reason(*findings: Finding) -> str:
        return judge([*findings, *bounds()]).judgements[0].reason

    none = "no closed form (an attack that solves equations)"
    gone = {"status": "refused", "exposures": (), "samples": (), "certificates": ()}
    refused = finding(remarks=(Remark("refused", "no table"),), **gone)
    search = finding(attack="search", closed=False, certificates=())
    left = finding(attack="left", closed=False, remarks=(Remark("refused", "no labels"),), **gone)
    doubtful = finding(attack="search", closed=False, certificates=(), remarks=(Remark("doubt", "it may be stuck"),))
    assert reason(finding(hardest=True)).startswith(f"{none} finished under the conditions of the gate; most exposed")
    only = "no closed form applies (solve: no table"
    assert reason(refused, left) == f"{only}; left: no labels)"
    assert reason(refused, search, left).startswith(f"{only}); another attack may find more than search; most")
    assert reason(search).startswith(f"{none} was run; another attack may find more than search; most exposed")
    assert reason(search, left).startswith(f"{none} was run; another attack may find more than search; most exposed")
    assert reason(doubtful).startswith(f"{none} was run; another attack may find more than search; it may be stuck; ")
    few = [finding(remarks=(Remark("few", f"only {count}"),)) for count in (2, 3)]
    assert reason(finding(), *few).startswith("only 2; most exposed")


def test_a_defence_that_no_attack_applies_to_or_that_nobody_attacked_has_not_passed() -> None:
    refused = finding(status="refused", exposures=(), samples=(), remarks=(Remark("refused", "no table"),))
    assert judge([refused]).judgements[0].answer == "nothing_applied"
    ruling = judge([finding(), *bounds()], defences=["noise", "other"])
    assert [judged.answer for judged in ruling.judgements] == ["passed", "nothing_applied"]
    assert ruling.status == NOT_JUDGED and not ruling.passed
    assert judge([]).status == NOT_JUDGED and judge([]).sentence.endswith("There was no defence to judge.")


def test_some_samples_are_no_proof_of_all() -> None:
    few = finding(samples=("a",), certificates=(HOLDS,), exposures=finding().exposures[:1])
    judged = judge([few, *bounds()]).judgements[0]
    assert judged.status == NOT_JUDGED and judged.reason.startswith("solve attacked only 1 of 2 images")
    unheld = finding(exposures=finding().exposures[:1])
    assert "no blind guess was measured" in judge([unheld, *bounds()]).judgements[0].reason


def test_a_ruling_is_as_good_as_its_worst_defence_and_its_file_says_who_attacks() -> None:
    answers: list[Any] = ["passed", "nothing_applied", "incomplete", "above"]
    three = [Judgement("d", answer, "why") for answer in answers]
    limit = Limit("closeness", 20.0)
    assert [Ruling(limit, three[:count]).answer for count in range(5)] == ["incomplete", *answers]
    assert Ruling(limit, three[:1]).sentence == f"The gate closeness=20 is passed, {SCOPE}. d, passed: why."
    for count in range(1, 5):
        told = Ruling(limit, three[:count]).to_json()
        assert told["passed"] == (told["status"] == 0) == (count == 1)
    assert (told["threat"], told["scope"], told["limit"]) == ("honest-but-curious", SCOPE, "closeness=20")
    assert judge([finding(), *bounds()]).to_json()["margins"] == {"closeness": 3.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("closeness=much", "METRIC=NUMBER"),
        ("beauty", "closeness=20, or blind; metrics: closeness, share"),
        ("closeness=nan", "METRIC=NUMBER"),
        ("closeness=200", "closeness is never above 200, so this gate would pass even a perfect copy"),
        ("share=1", "share is never above 1,"),
        ("distance=1", "means a good copy"),
        ("beauty=3", "choose one of: closeness, share"),
    ],
)
def test_limits_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(SitusError, match=said) as error:
        parse_limit(text, METRICS)
    assert error.value.field == "fail_above"


def test_limits_that_mean_something() -> None:
    assert parse_limit("closeness=199.9", METRICS) == Limit("closeness", 199.9)
    assert parse_limit("blind", METRICS) == BLIND and str(BLIND) == "blind"
    with pytest.raises(SitusError):  # nothing is guessed blindly there
        parse_limit("blind", {"share": SHARE})


# --- what proves something ------------------------------------------------------------------------------------------


WRONG, LOOSE = HOLDS._replace(fits=False, residual=0.28), HOLDS._replace(unique=False)
MISFIT = "its equations do not fit for 1 of 1 image (the residual is 0.28, but noise and rounding predict 1e-07)"
CONTROL = "on the same model without noise and in float32, its equations do not hold, or have more than one solution"


def never() -> list[Certificate]:
    raise AssertionError("the control is made only where all else is well")


@pytest.mark.parametrize(
    ("certificates", "noise", "control", "doubt"),
    [
        ([HOLDS, HOLDS], 0.0, None, NO_NOISE),
        ([HOLDS], 1e-3, [HOLDS], None),
        ([HOLDS], 0.0, [HOLDS], NO_NOISE),  # precision alone
        ([LOOSE], 1e-3, [HOLDS], None),  # noise drowned what is there without it
        ([HOLDS, LOOSE], 0.0, None, "its equations have more than one solution for 1 of 2 images"),
        ([LOOSE], 0.0, [HOLDS], "its equations have more than one solution for 1 of 1 image"),
        ([HOLDS, WRONG], 1e-3, never, MISFIT.replace("1 of 1 image", "1 of 2 images")),
        ([WRONG._replace(verdict="up to gain")], 0.0, None, MISFIT),
        ([WRONG._replace(residual=1e-7, verdict="solved up to gain")], 0.0, None, "solved up to gain"),
        ([Certificate(False)], 0.0, None, "its equations do not fit for 1 of 1 image"),
        (
            [HOLDS._replace(unseen=3)],
            1.0,
            never,
            (
                "the attacked layer ignores 3 numbers of an image, and an attacker who guesses these numbers "
                "better may come closer to the image"
            ),
        ),
        (
            [HOLDS._replace(order_known=False)],
            0.0,
            never,
            (
                "the gradients do not reveal the order of the hidden patches, and an attacker who guesses another "
                "order may come closer to the image"
            ),
        ),
        ([HOLDS], 1e-3, [WRONG], CONTROL),
        ([LOOSE], 1e-3, [LOOSE], CONTROL),
    ],
)
def test_doubts(certificates: list[Certificate], noise: float, control: Any, doubt: str | None) -> None:
    made: Any = control if control is None or callable(control) else lambda: control
    assert doubt_of(None, certificates, noise, made) == doubt


def test_a_caveat_is_a_doubt_whatever_fits() -> None:
    assert doubt_of("a batch of 2", [HOLDS], 0.0, never) == "it is not exact here, because a batch of 2"


def test_a_finding_says_what_it_is_and_why_not() -> None:
    one = replace(finding(), remarks=(Remark("inexact", "x"), Remark("lower_bound", "y"), Remark("doubt", "z")))
    assert (one.caveat, one.why("doubt"), one.why("stopped")) == ("x; y", "z", None)
    assert one.to_json() == {
        "attack": "solve",
        "defence": "noise",
        "status": "done",
        "closed_form": True,
        "bound": False,
        "remarks": [
            {"kind": "inexact", "text": "x"},
            {"kind": "lower_bound", "text": "y"},
            {"kind": "doubt", "text": "z"},
        ],
    }


@pytest.mark.parametrize(
    ("metric", "left", "below"),
    [
        (CLOSE, 1.0, ""), (CLOSE, 0.96, "only 1.0 dB"), (CLOSE, 0.52, "only 0.5 dB"), (CLOSE, 0.09, "less than 0.1 dB"),
        (SHARE, 0.0501, ""), (SHARE, 0.0499, "only 0.050"), (SHARE, 0.01, "only 0.010"),
        (SHARE, 0.0009, "less than 0.001"),
    ],
)  # fmt: skip
def test_a_pass_is_close_below_one_decibel_or_a_twentieth_of_a_share(metric: Metric, left: float, below: str) -> None:
    nearest = Held(finding(), Exposure("a", metric, 0.5 - left), 0.5)
    text = _margin(nearest, "clips")
    assert text == (
        f"; this value is {below} below the limit of 0.5, and other clips may exceed the limit" if below else ""
    )
    assert _margin(nearest._replace(limit=None), "clips") == _margin(None, "clips") == ""


@pytest.mark.parametrize("guess", [None, math.nan, math.inf])
def test_every_metric_that_has_a_margin_needs_a_guess_that_is_a_number(guess: float | None) -> None:
    other = Metric("likeness", margin=0.1)
    exposures = [Exposure(name, CLOSE, 9.0, 10.0) for name in SAMPLES]
    exposures += [Exposure(name, other, 0.9, guess) for name in SAMPLES]
    assert status_of(finding(exposures=exposures), *bounds()) != PASSED
    assert status_of(finding(), *bounds(exposures=exposures)) != PASSED


def test_an_oracle_that_saw_no_sample_was_not_asked() -> None:
    empty = [Finding("oracle", "noise", bound=True, hardest=hardest) for hardest in (False, True)]
    assert status_of(finding(), *empty) == NOT_JUDGED


def test_a_certificate_that_says_little_proves_nothing() -> None:
    assert not Certificate(True).holds
    assert status_of(finding(certificates=(Certificate(True), Certificate(True))), *bounds()) == NOT_JUDGED


def test_nothing_passes_against_a_server_that_chooses_the_weights() -> None:
    """The same findings pass for an honest server; above stays above."""
    findings = [finding(), *bounds()]
    assert judge(findings).status == PASSED
    ruling = judge(findings, threat=ACTIVE)
    assert ruling.status == NOT_JUDGED and ACTIVE.unproved in ruling.sentence and ACTIVE.server in ruling.sentence
    assert ruling.to_json()["threat"] == "active" and "chooses the weights" in ruling.to_json()["scope"]
    assert judge([finding(14.0)], threat=ACTIVE).status == ABOVE


def test_a_junit_file_says_all_of_a_ruling() -> None:
    judgements = [
        Judgement("none", "above", "closeness 14\x00 is above"),
        Judgement("noise", "passed", "closeness 9 is below"),
        Judgement("drop", "incomplete", "too few"),
    ]
    ruling = Ruling(Limit("closeness", 12.0), judgements)
    facts = {"made": "2026-01-02T03:04:05+00:00", "model": "vit", "seed": 0, "nothing": None}
    root = ET.fromstring(junit("suite", ruling, facts, lambda defence: [f"{defence} 1", f"{defence} 2"]))
    (suite,) = root
    counts = {"tests": "3", "failures": "1", "errors": "1", "skipped": "0"}
    assert (root.tag, root.attrib) == ("testsuites", counts)
    assert (suite.tag, suite.attrib) == ("testsuite", {"name": "suite", **counts, "timestamp": "2026-01-02T03:04:05"})
    properties, *cases = suite
    assert [(one.tag, *one.attrib.values()) for one in properties] == [
        ("property", "limit", str(ruling.limit)),
        ("property", "threat", ruling.threat.name),
        *(("property", name, str(value)) for name, value in facts.items() if value is not None),
    ]
    assert [(one.tag, one.get("classname"), one.get("name")) for one in cases] == [
        ("testcase", "suite", f"{ruling.limit} under {judged.defence}") for judged in judgements
    ]
    assert [[part.tag for part in one] for one in cases] == [
        ["failure", "system-out"], ["system-out"], ["error", "system-out"],
    ]  # fmt: skip
    assert [one[-1].text for one in cases] == [f"{judged.defence} 1\n{judged.defence} 2" for judged in judgements]
    assert cases[0][0].attrib == {"message": "closeness 14� is above", "type": judgements[0].outcome}
    assert (cases[0][0].text, cases[2][0].text) == ("closeness 14� is above", "too few")
