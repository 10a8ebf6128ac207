"""Curves over strength: what their points say is what an audit of the same setting says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import outcome
from PIL import Image

from situs.audit import audit_gradients, trace_defences
from situs.audit.deadline import Deadline
from situs.audit.defences import NoDefence, Noise, NoPositionGradient, Step
from situs.audit.sweep.curve import (
    IMAGES,
    SHARES,
    Curves,
    Line,
    Point,
    _with,
    curve_table,
    exact_patches,
    point_of,
    verdict,
)
from situs.audit.sweep.ladder import Ladder, Scale, curve_ladder
from situs.errors import SitusError


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chance = tmp_path_factory.mktemp("photographs"), torch.Generator().manual_seed(0)
    for number in range(2):
        levels = torch.randint(0, 256, (32, 32, 3), generator=chance, dtype=torch.uint8)
        Image.fromarray(levels.numpy()).save(folder / f"{number}.png")
    return folder


NAME = "test_vit"  # timm's own tiny model for tests: patches of 16, 64 channels


def test_points_are_audits_of_their_settings_and_a_line_is_one_defence_beside_them(photographs: Path) -> None:
    kept: list[Any] = []
    given = {"img_size": 32, "count": 2, "attacks": ("patchembed",), "model_args": {"depth": 1}}
    found = trace_defences(NAME, photographs, ["noise"], keep=kept.append, **given)
    sent, withheld = found.lines
    assert [line.beside for line in found.lines] == ["none", "no-pe-gradient"] and kept
    # Nothing applies where the table's gradient stays at home: no figure, and the reason.
    assert all(not p.values and "model.pos_embed is not sent" in p.reason and not p.by for p in withheld.points)
    assert "no-pe-gradient: not attacked here." in verdict(found)
    first, last = sent.points[0], sent.points[-1]
    assert first.strength == "0" and first.values["exact"] == first.values["patches"] == 1.0 and first.reason == ""
    assert last.values["worst"] < 20 and last.values["exact"] == last.values["patches"] == 0.0
    middle = sent.points[3]
    sigma = "noise=" + middle.defence.partition("σ=")[2]
    [pair] = audit_gradients(NAME, photographs, defences=[sigma], **given).pairs
    assert middle.values["psnr"] == pytest.approx(pair.mean_psnr) and middle.ends is not None
    assert f"below 20 dB at {', '.join(p.strength for p in sent.points if p.values['worst'] < 20)}" in verdict(found)
    told = found.to_json()
    assert told["lines"][0]["points"][0]["values"]["exact"] == 1.0 and str(photographs) not in str(told)


def test_what_was_not_reached_is_no_point(photographs: Path) -> None:
    found = trace_defences(NAME, photographs, ["precision"], img_size=32, count=2, deadline=Deadline(seconds=1e-9))
    assert found.stopped is not None and not any(point.values for line in found.lines for point in line.points)
    assert verdict(found).startswith(
        f"A partial result: stopped by {found.stopped}. precision, none: not attacked, because the audit was stopped"
    )
    assert "not attacked here" not in verdict(found)
    both = found.lines[1].points[0].reason  # what does not apply, and what was not come to
    assert "model.pos_embed is not sent" in both and both.endswith("stopped first")
    none = {"img_size": 32, "count": 2, "attacks": ("patchembed",), "deadline": Deadline(seconds=1e-9)}
    found = trace_defences(NAME, photographs, ["precision"], **none)
    assert "the audit was stopped first. precision, no-pe-gradient: not attacked here." in verdict(found)


def ladder(name: str) -> Ladder:
    return curve_ladder(name, Scale(rms=1e-4, norm=2.0), Step())


def test_strengths_grow_and_names_are_known() -> None:
    for name in ("noise", "clip", "dropout", "fedavg"):
        strengths = [float(rung.label) for rung in ladder(name).rungs]
        assert strengths == sorted(strengths)
    assert [rung.defence.noise_level(1) for rung in ladder("noise").rungs][1] == pytest.approx(1e-10)
    assert {rung.defence.label[:8] for rung in ladder("clip").rungs} == {"clip C=2"}
    assert [rung.label for rung in ladder("precision").rungs] == ["fp32", "fp16", "autocast", "bf16", "int8"]
    with pytest.raises(SitusError, match="fog"):
        ladder("fog")


def test_a_patch_is_found_where_its_error_is_below_half_a_grey_level() -> None:
    real = torch.full((1, 3, 16, 16), 0.5)
    found = real.clone()
    found[..., :4, :4] += 0.49 / 255
    found[..., 4:8, 4:8] += 0.51 / 255
    found[..., 8:12, 8:12] = 0.0
    assert exact_patches(found, real, small_vit()) == 14 / 16


def _pair(attack: str, psnr: list[float], partial: str | None = None) -> Any:
    return outcome(attack, "none", scores={"psnr": psnr}, facts=[{} for _ in psnr], partial=partial)


def test_the_image_that_came_back_best_is_any_attacks_and_what_was_cut_short_is_not_below() -> None:
    def point(*pairs: Any, undone: tuple[Any, ...] = ()) -> Any:
        audit: Any = SimpleNamespace(pairs=pairs, undone=undone, images=())
        return point_of(audit, "1", "none", small_vit(), None)  # pyright: ignore[reportArgumentType]

    def said(found: Any) -> str:
        return verdict(Curves("m", [Line("noise", "none", "σ", [found])], IMAGES, 2))

    mean, one = _pair("patchembed", [15.0, 15.0]), _pair("tokens", [5.0, 24.0])
    both = point(mean, one)
    assert (
        both.by == "patchembed"
        and both.values["worst"] == 24.0
        and "no strength at which the attacks finished and" in said(both)
    )
    assert "below 20 dB at 1." in said(point(mean))
    for cut in (point(_pair("tokens", [15.0], "1 of 2 images")), point(mean, undone=(("tokens", "none"),))):
        assert "below 20 dB at 1" not in said(cut) and "; inconclusive at 1 (an attack was" in said(cut)
    assert "no finished attack recovered all images exactly" in said(point(_pair("tokens", [99.0], "1 of 2 images")))


def test_a_point_says_why_no_more_came_back() -> None:
    """An attack's own verdicts and what it leaves out stand for the general doubt; what is exact needs no reason."""

    def why(psnr: float = 5.0, **fields: Any) -> str:
        facts = fields.pop("facts", [{}])
        audit: Any = SimpleNamespace(
            pairs=[outcome("patchembed", "none", scores={"psnr": [psnr]}, facts=facts, **fields)], undone=(), images=()
        )
        return point_of(audit, "1", "none", small_vit(), None).reason  # pyright: ignore[reportArgumentType]

    verdicts = [{"verdict": "no span"}, {"verdict": "no span"}, {}]
    assert why(doubt="unclear") == "unclear"
    assert why(doubt="unclear", facts=verdicts) == "no span"
    assert why(doubt="unclear", caveat="rounded") == "rounded"
    assert why(doubt="unclear", caveat="rounded", facts=verdicts, partial="1 of 2 images") == (
        "stopped after 1 of 2 images; rounded; no span"
    )
    assert why(99.0, caveat="rounded") == ""


def images(strength: str, psnr: float, worst: float, exact: float, **more: Any) -> Point:
    return Point(strength, "d", "tokens", {"psnr": psnr, "worst": worst, "exact": exact}, **more)


def test_the_sentence_names_where_all_came_back_and_where_little_did() -> None:
    line = Line("noise", "none", "σ", [
        images("0", 60.0, 70.0, 1.0),
        images("0.1", 30.0, 70.0, 0.5),
        images("0.2", 12.0, 20.0, 0.0),
        images("0.3", 12.0, 19.99, 0.0),
        images("0.4", 12.0, 12.0, 1.0, whole=False),
        Point("0.5", "d", "", {}, reason="tokens: it does not apply"),
    ])  # fmt: skip
    said = verdict(Curves("m", [line], IMAGES, 2))
    assert said == (
        "noise, none: all images were recovered exactly at 0; the PSNR of the most exposed image is below 20 dB at "
        "0.3; inconclusive at 0.4, 0.5 (an attack was stopped, was not run or does not apply). If these attacks "
        "fail, another attack may still succeed."
    )
    header, rows = curve_table(Curves("m", [line], IMAGES, 2))
    assert header[:5] == ["curve", "beside it", "strength", "attack", "PSNR, dB"] and len(header) == 9
    assert rows[1] == ["noise", "none", "0.1", "tokens", "30", "70", "0.5", None, None]
    assert rows[5][3:] == ["not attacked here", None, None, None, None, "tokens: it does not apply"]
    ended = Line("noise", "none", "σ", [images("1", 33.333, 40.0, 0.5, ends=(30.0, 36.666))])
    assert curve_table(Curves("m", [ended], IMAGES, 2))[1][0][4] == "33.3 [30, 36.7]"


def test_words_are_counted_where_not_all_sentences_came_back() -> None:
    def point(strength: str, sentences: float, words: float, **more: Any) -> Point:
        return Point(strength, "d", "sentences", {"sentences": sentences, "words": words, "tokens": 0.0}, **more)

    points = [point("fp32", 1.0, 1.0), point("fp16", 0.5, 0.75), point("int8", 0.0, 0.128, whole=False)]
    said = verdict(Curves("m", [Line("precision", "sent", "type", points)], SHARES, 2))
    assert said.startswith(
        "precision, sent: all sentences were recovered exactly at fp32; words recovered: 75 % at fp16, 13 % at int8; "
        "inconclusive at int8 (an attack was stopped, was not run or does not apply)."
    )
    assert "exactly at fp32. If" in verdict(Curves("m", [Line("p", "sent", "type", points[:1])], SHARES, 2))


def test_no_defence_beside_another_is_that_other_alone() -> None:
    noise, none, withheld = Noise(1.0), NoDefence(), NoPositionGradient()
    assert _with(noise, none) is noise and _with(none, noise) is noise and _with(none, none) == none
    assert _with(noise, withheld).label == f"{noise.label} + {withheld.label}"
