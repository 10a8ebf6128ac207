"""The gate: the worst image decides, what was not attacked is no pass, and a limit that means nothing is refused."""

from __future__ import annotations

import pytest
import torch

from situs.audit.gate import Limit, parse_limit, rule
from situs.audit.gradients import Audit, Pair, Step
from situs.errors import SitusError


def audit(*pairs: Pair, undone: tuple[tuple[str, str], ...] = ()) -> Audit:
    stopped = "the time limit of 1 s" if undone else None
    return Audit("m", Step(), ["a", "b"], torch.zeros(2, 3, 4, 4), list(pairs), {}, {}, stopped, list(undone))


def pair(*values: float) -> Pair:
    return Pair("patchembed", "none", scores={"psnr": list(values), "lpips": None})


def test_the_worst_image_decides_and_the_limit_itself_passes() -> None:
    limit = parse_limit("psnr=20")
    ruling = rule(audit(pair(3.0, 20.5)), limit)
    assert not ruling.passed
    assert ruling.leaks == ["patchembed against none: 1 of 2 images have psnr above 20, the worst 20.5"]
    assert ruling.sentence.startswith("The gate psnr=20 is not passed: patchembed against none")
    ruling = rule(audit(pair(3.0, 20.0)), limit)
    assert ruling.passed and ruling.sentence == "The gate psnr=20 is passed: no attack brings an image above it."


def test_what_was_not_attacked_is_no_pass() -> None:
    limit = Limit("psnr", 20.0)
    assert rule(audit(pair(3.0)), limit).leaks == [
        "patchembed against none: only 1 of 2 images were attacked before the stop"
    ]
    ruling = rule(audit(pair(3.0, 4.0), undone=(("matching", "noise"),)), limit)
    assert ruling.leaks == ["matching against noise: not attacked before the stop"] and not ruling.passed


def test_where_no_attack_applies_it_is_passed_and_says_by_what() -> None:
    ruling = rule(audit(Pair("april", "none", reason="no table")), Limit("psnr", 20.0))
    assert ruling.passed and not ruling.tested
    assert "only because no attack applies" in ruling.sentence
    assert ruling.to_json() == {"limit": "psnr=20", "passed": True, "tested": False, "leaks": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("psnr=much", "must be METRIC=NUMBER"),
        ("psnr", "must be METRIC=NUMBER"),
        ("psnr=nan", "must be METRIC=NUMBER"),
        ("psnr=inf", "must be METRIC=NUMBER"),
        ("mse=1", "falls as an image leaks"),
        ("lpips=0.1", "choose one of: order_accuracy, patch_psnr, psnr"),
        ("beauty=3", "choose one of: order_accuracy, patch_psnr, psnr"),
    ],
)
def test_limits_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(SitusError, match=said) as error:
        parse_limit(text)
    assert "--fail-above" in str(error.value)
