"""How long an attack may take, how many images it is given, and the lines of a report."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outcomes import outcome, undone

from situs.audit.attacks.base import Ready
from situs.audit.deadline import StoppedError
from situs.audit.engine import Leak, _Trial, _UploadGroup, conclude
from situs.audit.scores import METRICS
from situs.findings import Certificate
from situs.gate import BLIND, parse_limit


def trial(images: int | None = None, seconds: float | None = None, **fields: Any) -> _Trial:
    """Of twelve images."""
    client: Any = SimpleNamespace(step=SimpleNamespace(batch=fields.pop("batch", 1)), test=range(12))
    ready = Ready(None, seconds=fields.pop("most", None))
    case: Any = SimpleNamespace(images=images, seconds=seconds)
    return _Trial([case], client, ready, None, _UploadGroup(), **fields)


@pytest.mark.parametrize(
    ("batch", "asked", "images"),
    [(1, None, 12), (4, None, 12), (1, 5, 5), (1, 99, 12), (4, 9, 8), (4, 8, 8), (4, 3, 4), (4, 1, 4), (12, 5, 12)],
)
def test_images_are_attacked_in_whole_batches_and_one_at_least(batch: int, asked: int | None, images: int) -> None:
    made = trial(asked, batch=batch)
    assert (made.images, made.total) == (images, images // batch)


@pytest.mark.parametrize(
    ("case", "attack", "taken", "next_", "ended"),
    [
        (None, None, 5.0, None, False),
        (3.0, None, 5.0, 3.0, True),
        (None, 8.0, 5.0, 3.0, False),
        (None, 8.0, 8.0, 0.0, True),
        (None, 8.0, 9.0, 0.0, True),
        (2.0, 8.0, 5.0, 2.0, True),
        (4.0, 8.0, 5.0, 3.0, True),
    ],
)
def test_a_turn_takes_no_longer_than_what_is_left_of_either_limit(
    case: float | None, attack: float | None, taken: float, next_: float | None, ended: bool
) -> None:
    made = trial(seconds=case, most=attack, taken=taken)
    assert (made.seconds, made.ended) == (next_, ended)


def test_a_finding_has_the_remarks_that_say_something_and_the_doubt_of_its_control() -> None:
    closed, search = (outcome(name).case for name in ("patchembed", "matching"))
    proof = {"fits": True, "residual": 1e-9, "expected_residual": 1e-8}
    good = Certificate(True, unique=True, order_known=True)
    found = conclude(closed, {"psnr": [9.0, 8.0]}, [proof, proof], {"stopped": "", "inexact": ""}, math.inf, None)
    assert (found.status, found.remarks, len(found.certificates), found.numbers) == ("done", [], 2, (0, 1))
    stopped = conclude(search, {}, [{}], {"stopped": "1 of 2", "lower_bound": "more"}, math.inf, None)
    assert [(each.kind, each.text) for each in stopped.remarks] == [("stopped", "1 of 2"), ("lower_bound", "more")]
    assert stopped.status == "stopped" and not stopped.certificates

    def late() -> list[Certificate]:
        raise StoppedError

    doubt = conclude(closed, {}, [proof], {}, 1.0, late).remarks
    assert [each.kind for each in doubt] == ["doubt"] and "the time ended before the control run" in doubt[0].text
    assert not conclude(search, {}, [{}], {}, 1.0, late).remarks  # a search has no control
    assert good.holds


class Shown(Leak):
    def summary(self) -> Any: ...

    def numbers(self) -> Any: ...


def report(limit: Any = None) -> Leak:
    whole = {"psnr": [54.2], "aligned_psnr": [54.2]}
    findings = [
        outcome("patchembed", "noise", scores={"psnr": [9.0, 30.456], "aligned_psnr": [12.0, 31.0]}),
        outcome("tokens", "noise", reason="there are no tokens"),
        outcome("matching", "noise", scores={"psnr": []}),
        outcome("patchembed", "clip", scores=whole, pictures=torch.zeros(1, 3, 2, 2)),
        undone("tokens", "clip"),
    ]
    return Shown(findings, ["a", "b"], torch.zeros(2, 3, 2, 2), limit=limit)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (None, "aligned_psnr 31"),
        (BLIND, "aligned_psnr 31"),
        (parse_limit("psnr=20", METRICS), "psnr 30.46"),
    ],
)
def test_a_line_for_each_attack_has_its_most_exposed_image(limit: Any, said: str) -> None:
    made = report(limit)
    lines = made.lines("noise")
    assert lines[0] == f"patchembed: the most exposed of 2 images has {said}"
    assert lines[1] == "tokens: not attacked here: there are no tokens"
    assert lines[2] == f"matching: {said.split(maxsplit=1)[0]} is not defined" and len(lines) == 3
    assert made.lines("clip")[0] == "tokens: not run, because the audit was stopped first"
    assert "1 image has" in made.lines("clip")[1] and made.lines("other") == []
    assert len(made.pairs) == 4 and len(made.attacked) == 3


def test_an_image_that_came_back_whole_is_bad_and_pictures_are_private() -> None:
    made = report()
    assert made.tone == "bad" and made.private
    public = made.without_pictures()
    assert not public.private and not len(public.images) and public.names == made.names
    assert all(one.scores == other.scores for one, other in zip(public.findings, made.findings, strict=True))
    assert Shown(made.findings[:3], ["a", "b"], made.images).tone == "unsure"
