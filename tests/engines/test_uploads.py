"""The guard of an engine's uploads: what leaks is withheld, nothing is believed, and a wrong set-up is no silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from rounds import RATE, X, build, step

from situs.audit.watch import Guard, Look
from situs.engines.uploads import UploadGuard
from situs.errors import SitusError


def made(**options: Any) -> UploadGuard:
    return UploadGuard(build, **{"attacks": ["patchembed"], **options})


def test_rounds_from_weights_that_the_server_moved() -> None:
    """Three rounds: each is compared with the weights that the server sent out, and every second is attacked."""
    guard, module = made(every=2), build()
    answers = []
    for number in range(3):
        before, after = step(module)
        arrays = [[value.numpy() for value in state.values()] for state in (before, after)]
        answers.append(guard.look(number, *arrays))
    assert [look and look.answer for look in answers] == ["above", None, "above"]
    assert answers[2].step == 2 and guard.withholds(answers[2])


def test_noise_goes_and_is_no_pass() -> None:
    before, after = step(build(), noise=0.01)
    for act, withheld in (("stop", False), ("strict", True), ("warn", False)):
        guard = made(act=act, defence=f"fedavg=1:{RATE}+noise={0.01 / RATE}")
        look = guard.look(0, before, after)
        assert look is not None and look.answer == "inconclusive" and "not a pass" in str(look)
        assert guard.withholds(look) is withheld


def test_images_of_the_step_are_compared_with() -> None:
    before, after = step(build())
    look = made(limit="psnr=20").look(0, before, after, images=X)
    assert look is not None and look.answer == "above" and look.metric == "psnr" and look.value > 40
    before, after = step(build(), noise=0.01)
    look = made(limit="psnr=20").look(0, before, after, images=X)
    assert look is not None and look.answer != "above"


def test_a_wrong_set_up_raises_unless_it_only_warns() -> None:
    before, after = step(build())
    broken = {**after, "head.weight": torch.full((5, 48), torch.nan)}
    with pytest.raises(SitusError, match=r"head.weight contains NaN"):
        made().look(0, before, broken)
    with pytest.raises(SitusError, match="not in the model"):
        made().look(0, {"other": torch.zeros(3)}, after)
    look = made(act="warn").look(0, before, broken)
    assert look is not None and look.answer == "inconclusive" and "contains NaN" in look.reason


@pytest.mark.parametrize(
    ("option", "value"),
    [("act", "no"), ("every", 0), ("every", True), ("batch", "2"), ("seconds", -1.0), ("limit", 20), ("limit", "psnr="),
     ("limit", "mse=1"), ("attacks", "tokens"), ("attacks", []), ("attacks", ["nosuch"]), ("attacks", ["crafted"]),
     ("defence", 5),
     ("defence", "noise=-1"), ("module", 3)],
)  # fmt: skip
def test_a_wrong_setting_is_one_sentence_before_the_job_begins(option: str, value: Any) -> None:
    with pytest.raises(SitusError) as raised:
        UploadGuard(**{"module": build, option: value})
    sentence = str(raised.value)
    assert sentence.isprintable() and (option in sentence or value[0] in sentence)


def test_a_module_is_copied_and_keeps_its_weights_and_mode() -> None:
    module, other = build().train(), build()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    look = UploadGuard(module, attacks=["patchembed"]).look(0, *step(other))
    assert look is not None and look.answer == "above"
    assert module.training and all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_what_is_logged_has_no_pixel() -> None:
    lines: list[tuple[int, str]] = []
    made().look(0, *step(build()), of="site-1", say=lambda *said: lines.append(said))
    [(level, line)] = lines
    assert level == logging.WARNING
    assert line.startswith("site-1, step 0: the upload is above") and "withheld after" in line and len(line) < 400


def test_the_weights_of_the_round_are_checked_and_not_those_of_the_module_as_built() -> None:
    module = build()
    with torch.no_grad():
        for name, value in module.named_parameters():
            if name.endswith("qkv.weight"):
                value.zero_()  # attention that sees nothing
            elif name.endswith("fc1.weight"):
                value.copy_(30 * value[:1].expand_as(value))
    before, after = step(module)
    honest = made(expect="random").look(0, *step(build(), noise=0.01))
    assert honest is not None and honest.answer == "inconclusive"
    guard = made(expect="random")
    look = guard.look(0, before, after)
    assert look is not None and look.answer == "above" and "look crafted" in look.reason and guard.withholds(look)


def test_weights_that_could_not_be_compared_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public model with another classifier leaves the check of the weights open, whatever the attacks found."""
    before, after = step(build(), noise=0.01)
    public = build().state_dict() | {"head.weight": torch.zeros(7, 48)}
    below = Look(0, "below", "psnr", 20.0, 5.0, "quiet", 0.0)
    monkeypatch.setattr(Guard, "look_upload", lambda *_, **__: below)
    lines: list[tuple[int, str]] = []
    assert made().look(0, before, after, images=X, say=lambda *said: lines.append(said)) == below
    assert lines == [(logging.INFO, f"{below}; sent after 0.0 s")]
    assert made(expect=build().state_dict()).look(0, before, after, images=X) == below
    guard = made(expect=public, act="strict")
    look = guard.look(0, before, after, images=X)
    assert look is not None and look.answer == "inconclusive" and "head.weight" in look.reason
    assert guard.withholds(look)
