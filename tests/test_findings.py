"""What proves something and what is doubted, each condition alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from situs.findings import (
    ACTIVE,
    FIT,
    HONEST,
    NO_NOISE,
    Certificate,
    Exposure,
    Finding,
    Kind,
    Metric,
    Remark,
    doubt_of,
)

SURE = Certificate(fits=True, residual=1.0, expected=1.0, unique=True, order_known=True)
PROOF = Finding("peel", "none", samples=("a", "b"), asked=2, certificates=(SURE, SURE), closed=True)


@pytest.mark.parametrize(("fits", "known", "unseen"), [*product([True, False], [True, False], [0, 1])])
def test_a_certificate_holds_where_nothing_is_open(fits: bool, known: bool, unseen: int) -> None:
    for unique in (True, False):
        certificate = Certificate(fits, unique=unique, order_known=known, unseen=unseen)
        assert certificate.holds is (fits and known and unseen == 0)
    assert not Certificate(fits=True).holds  # which says nothing of the order


def test_a_closed_form_that_solved_all_samples_proves_something() -> None:
    assert PROOF.proof
    assert replace(PROOF, remarks=[Remark("gap", "?"), Remark("few", "?")]).proof


@pytest.mark.parametrize(
    "changes",
    [
        {"closed": False}, {"bound": True}, {"hardest": True}, {"status": "stopped"}, {"status": "refused"},
        {"status": "not_run"}, {"asked": 3}, {"certificates": (SURE,)}, {"certificates": ()},
        {"certificates": (SURE, SURE._replace(unseen=1))}, {"samples": (), "asked": 0, "certificates": ()},
        *({"remarks": [Remark(kind, "?")]} for kind in get_args(Kind) if kind not in ("gap", "few")),
    ],
    ids=str,
)  # fmt: skip
def test_each_of_these_proves_nothing(changes: dict[str, Any]) -> None:
    assert not replace(PROOF, **changes).proof


@pytest.mark.parametrize(
    ("status", "attacked"), [("done", True), ("stopped", True), ("refused", False), ("not_run", False)]
)
def test_what_was_begun_is_attacked(status: Any, attacked: bool) -> None:
    assert replace(PROOF, status=status).attacked is attacked


def test_remarks_are_joined_by_their_kinds() -> None:
    finding = replace(PROOF, remarks=[Remark(kind, f"by {kind}") for kind in get_args(Kind)])
    assert finding.why("gap", "refused") == "by refused; by gap"
    assert finding.caveat == "by fallback; by inexact; by lower_bound"
    assert PROOF.why(*get_args(Kind)) is None and PROOF.caveat is None
    assert PROOF.key == ("peel", "none") and PROOF.count == 2
    assert replace(finding, bound=True).to_json() == {
        "attack": "peel",
        "defence": "none",
        "status": "done",
        "closed_form": True,
        "bound": True,
        "remarks": [{"kind": kind, "text": f"by {kind}"} for kind in get_args(Kind)],
    }


@pytest.mark.parametrize(
    ("blind", "margin", "limit"), [(10.0, 3.0, 13.0), (0.0, 0.0, 0.0), (None, 3.0, None), (10.0, None, None)]
)
def test_a_blind_guess_and_a_margin_set_a_limit(blind: float | None, margin: float | None, limit: float | None) -> None:
    assert Exposure("a", Metric("psnr", margin), 5.0, blind).limit == limit


def test_a_verdict_begins_with_its_server() -> None:
    assert HONEST.assumed == "Assumed: an honest server."
    assert ACTIVE.assumed == "Assumed: a server that chooses the weights." and ACTIVE.unproved and not HONEST.unproved


LOOSE = SURE._replace(unique=False)
BAD = SURE._replace(fits=False, residual=2.0)
UNSEEN = SURE._replace(unseen=7, order_known=False)
UNFIT = "its equations do not fit for 1 of 1 image"
WORDS = "two images have these equations"


@pytest.mark.parametrize(
    ("certificates", "noise", "control", "doubt"),
    [
        ((SURE, SURE), 0.0, None, NO_NOISE),
        ((SURE, SURE), 0.1, None, None),
        ((SURE, SURE), 0.1, (SURE, SURE), None),
        ((SURE, LOOSE), 0.1, (SURE, SURE), None),  # noise hides what the control shows
        ((SURE, SURE), 0.1, (SURE, LOOSE), "on the same model without noise"),
        ((SURE, SURE), 0.1, (SURE, BAD), "on the same model without noise"),
        ((SURE, LOOSE), 0.0, None, "its equations have more than one solution for 1 of 2 images"),
        ((SURE, SURE._replace(order_known=False)), 0.1, None, "the gradients do not reveal the order"),
        ((SURE._replace(unseen=5), UNSEEN), 0.1, None, "the attacked layer ignores 7 "),
        ((SURE._replace(unseen=5), BAD), 0.1, None, "its equations do not fit for 1 of 2 images (the residual is 2, "),
        ((BAD._replace(residual=None), BAD), 0.1, None, "its equations do not fit for 2 of 2 images$"),
        ((BAD._replace(residual=FIT, verdict=WORDS), SURE), 0.1, None, WORDS),
        ((BAD._replace(residual=2.9, verdict=WORDS), SURE), 0.1, None, WORDS),
        ((BAD._replace(residual=3.2, verdict=WORDS), SURE), 0.1, None, UNFIT.replace("1 image", "2 images")),
        ((BAD._replace(residual=math.nextafter(FIT, 9), verdict=WORDS),), 0.1, None, UNFIT),
        ((BAD._replace(residual=None, verdict=WORDS),), 0.1, None, WORDS),
        ((BAD._replace(expected=None, verdict=WORDS),), 0.1, None, UNFIT),
    ],
)  # fmt: skip
def test_the_first_doubt_is_told(certificates: Any, noise: float, control: Any, doubt: str | None) -> None:
    reason = doubt_of(None, certificates, noise, None if control is None else lambda: control)
    if doubt is None or reason is None:
        assert reason is doubt
    else:
        assert f"{reason}$".startswith(doubt)
    assert doubt_of("of fp16", certificates, noise, None) == "it is not exact here, because of fp16"
