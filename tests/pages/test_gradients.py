"""The page: threat model first, then the verdict, the table, pictures and remedies; reasons where nothing applies."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import held, outcome, passing, undone

from situs.audit.cases import ImageFinding
from situs.audit.defences import Step
from situs.audit.gradients import COLUMNS, Audit, findings, grid, reasons, table, verdict
from situs.audit.scores import measure_all
from situs.audit.sweep.ladder import Cost, Remedies, Remedy, Trial
from situs.findings import ACTIVE, NO_NOISE, Remark
from situs.gate import SCOPE, Judgement, Limit, Ruling, Worst
from situs.pages import PRIVATE, gradients, make_page, publish
from situs.report import figures
from situs.results import Provenance

REAL = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def example(*pairs: ImageFinding, **fields: Any) -> Audit:
    scores = {"mean image": measure_all(REAL.flip(0), REAL, 8)}
    about = {"none": "as it is"}
    return Audit(held(pairs, scores, [*"abc"]), ["a", "b", "c"], REAL, "a-model", Step(), scores, about=about, **fields)


SCORES = measure_all(REAL, REAL, 8)
FACTS = [{"rank": 4 - i, "unknowns": 4, "condition": (20.0, 10.0, None)[i]} for i in range(3)]
WORKED = outcome("patchembed", "none", None, "a caveat", SCORES, FACTS, REAL)
REFUSED = outcome("april", "none", "there is <no> table")


# Whether its pictures can be drawn is seen in tests/cli/test_audit_gradients.py.
pytestmark = pytest.mark.usefixtures("undrawn")


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_order_of_the_page(outline: Any) -> None:
    told = Provenance({"seed": 0})
    text = make_page(example(WORKED, REFUSED, limit=Limit("psnr", 20), provenance=told)).render()
    assert outline(text) == [
        "First screen, 1 figure",
        "Threat model, 1 fold, facts",
        "Verdict, 2 texts, 1 note, 1 row, facts",
        "Defences that help, 4 texts, 1 fold",
        "Attacks and defences, 9 rows",
        "Pictures, 1 figure",
        "How this page was made, facts",
    ]
    assert "3 of 3 images recovered exactly from one step" in text
    assert "there is &lt;no&gt; table" in text
    assert "and no image exceeds psnr=20.</p>" in text
    said = f"The gate psnr=20 is not passed, {SCOPE}. none, above: 2 of 3 images exceed what the gate allows; most "
    assert said in text  # the middle one is its own mirror, so that a blind guess has it too
    assert text.count("<img") == 2
    ruling = Ruling(
        Limit("psnr", 20), [Judgement("none", "above", "a leak", Worst("patchembed", "b", 31.5, "ssim", 20, 9))]
    )
    rows = [["none", "above", "b", "ssim 31.5", "20", "9", "patchembed"]]
    assert ruling.table() == (["defence", "gate", "most exposed", "has", "limit", "a blind guess", "by"], rows)
    nothing = Ruling(Limit("psnr", 20), [Judgement("none", "incomplete", "no closed form applies")])
    assert nothing.table()[1] == [["none", "inconclusive", *[None] * 5]]


def test_a_pass_names_no_attack_and_no_decibels_and_what_to_do_next() -> None:
    """Its headline is read alone: whom it holds against stands beside it, and what a blind guess scores."""
    audit = passing(limit=Limit("psnr", 20), provenance=Provenance({"command": "situs audit gradients mine"}))
    assert audit.ruling is not None and audit.ruling.passed, audit.ruling
    page = make_page(audit)
    text, (first, rest) = page.render(), page.headline
    names = {pair.attack for pair in audit.pairs}
    for said in (first, page.mark, *rest):
        assert "dB" not in said and not any(name in said for name in names), said
    assert "against these attacks" in page.mark and "only against the attacks of this page" in rest[0]
    assert SCOPE in rest[0] and "worst" not in re.sub(r"<[^>]*>", "", text)
    blind = max((scores["psnr"] or [])[3] for scores in audit.baselines.values())  # the fourth came back best
    tiles = {of: value for value, of in page.numbers}
    assert tiles["PSNR of a blind guess of the same image"] == f"{blind:.1f} dB"
    assert tiles["attack finished"] == "1 of 1"  # the oracle is none
    box = text[text.index("<h2>What to do next</h2>") :].split("</section>")[0]
    assert "situs audit gradients mine" in box and "Repeat the audit" in box
    assert "oracle (a bound" in text and "<dt>bound oracle</dt>" in text
    assert "best attack patchembed" in verdict(audit)  # and not the oracle, whose picture is the better one
    for other in (example(WORKED), replace(audit, limit=None), replace(audit, stopped="Ctrl-C")):
        assert "What to do next" not in make_page(other).render()


def test_a_page_with_private_pictures_says_so_at_its_top() -> None:
    private, public = example(WORKED), example(WORKED).without_pictures()
    full, bare = make_page(private).render(), make_page(public).render()
    assert private.private and f"{PRIVATE}</p></header>" in full and full.count("<img") == 2
    assert not public.private and PRIVATE not in bare and "<img" not in bare and "Pictures" not in headings(bare)
    assert PRIVATE not in make_page(example(REFUSED)).render()  # nothing was recovered and nothing is shown
    assert public.numbers() == private.numbers()


def test_a_private_page_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "gradients.html").write_text("the page before, for all to read")
    path = publish(example(WORKED), tmp_path)
    assert path == tmp_path / "gradients.html" and path.stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "gradients.json").read_text())["model"] == "a-model"
    (tmp_path / "plain").touch()
    path = publish(example(WORKED).without_pictures(), tmp_path / "mine.html")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode and (tmp_path / "mine.json").is_file()


def test_a_model_without_an_attack_has_reasons_and_no_empty_table() -> None:
    text = make_page(example(REFUSED, limit=Limit("psnr", 20))).render()
    assert "No attack applies, so there is no table of results." in text
    assert "there is &lt;no&gt; table" in text
    assert "Pictures" not in headings(text)
    assert (
        f"The gate psnr=20 is inconclusive (not a pass), {SCOPE}. none, inconclusive: no closed form applies (" in text
    )
    cut = replace(example(undone("april", "none")), stopped="Ctrl-C")
    assert "No attack was run, so there is no table of results." in make_page(cut).render()


def doubted(doubt: str) -> ImageFinding:
    return replace(WORKED, remarks=[Remark("doubt", doubt)])


def test_table_and_reasons() -> None:
    header, rows = table(example(WORKED, REFUSED))
    assert len(header) == 4 + len(COLUMNS) + 2
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][:5] == ["patchembed", "none", "3 of 3", "200", "200 [200, 200]"]
    assert rows[0][-2:] == ["2 of 4", "20"]  # the least rank, the median condition
    assert rows[1][2] == "not attacked here" and set(rows[1][3:]) == {None}
    assert rows[2][:4] == ["baseline", "mean image", None, "200"]  # its middle image is its own mirror
    assert reasons(example(WORKED, REFUSED)) == [
        ("patchembed against none", "a caveat"),
        ("april against none", "there is <no> table"),
    ]
    plain = doubted("its equations do not fit")
    assert reasons(example(plain)) == [("patchembed against none", "proves nothing: its equations do not fit")]
    twice = replace(plain, facts=[{"verdict": "its equations do not fit"}, {"verdict": "another"}])
    assert [said for _, said in reasons(example(twice))] == ["another", "proves nothing: its equations do not fit"]
    assert reasons(example(doubted(NO_NOISE))) == []  # it has every image
    fuzzy = replace(doubted(NO_NOISE), scores=measure_all(REAL.flip(0), REAL, 8))
    assert reasons(example(fuzzy)) == [("patchembed against none", f"proves nothing: {NO_NOISE}")]
    said_already = replace(WORKED, remarks=[*WORKED.remarks, Remark("doubt", "it is not exact here, because a caveat")])
    assert reasons(example(said_already)) == [("patchembed against none", "a caveat")]


def test_the_most_exposed_image_stands_beside_the_mean() -> None:
    """The gate takes it, so the page may not give means alone."""
    scores = {**SCORES, "psnr": [10.0, 33.3, 20.0]}
    found = example(replace(WORKED, scores=scores))
    assert table(found)[1][0][3] == "33.3"
    assert grid(found)[1] == [["patchembed", "mean 21.1, most exposed 33.3; exact 0 of 3"]]
    text = make_page(found).render()
    assert "(best attack patchembed, mean PSNR 21.1 dB, most exposed image 33.3 dB, 3 of 3 re-identified" in text
    assert '<th scope="col" class="number">PSNR of the most exposed image, dB</th>' in text


def test_an_image_without_error_is_called_so_and_any_other_by_its_decibels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = REAL.clone()
    found[1] += torch.where(REAL[1] > 0.5, -0.1, 0.1)  # 20 dB
    drawn: list[Any] = []
    made = figures.image_rows

    def image_rows(rows: Any, titles: Any) -> Any:
        drawn.append((rows, list(titles)))
        return made(rows, titles)

    monkeypatch.setattr(figures, "image_rows", image_rows)
    make_page(example(outcome("patchembed", "none", None, None, measure_all(found, REAL, 8), FACTS, found)))
    [(rows, titles)] = drawn
    assert titles == ["no error", "20.0 dB", "no error"]
    assert [name for name, _ in rows] == ["original", "recovered", "difference"]
    torch.testing.assert_close(
        torch.cat([images for _, images in rows]), torch.cat([REAL, found, (REAL - found).abs()])
    )


def test_one_image_cannot_be_re_identified() -> None:
    real = REAL[:1]
    one = outcome("patchembed", "none", None, None, measure_all(real * 0.5, real, 8), [{}], real * 0.5)
    audit = Audit([one], ["a"], real, "a-model", Step(), {}, about={"none": "as it is"})
    text = make_page(audit).render()
    assert "Re-identified: not defined for a single image" in text
    assert "of 1 re-identified" not in text
    header, rows = table(audit)
    assert rows[0][header.index("re-identified")] is None
    assert "nearest original (of 3)" in make_page(example(WORKED)).render()


def test_how_a_search_went() -> None:
    facts = [{"distance": 0.5, "iterations": 9, "labels_right": 1}, *[{}] * 2]
    inferred = [{**facts[0], "labels_right": right, "distance": far} for right, far in ((1, 0.5), (0, None), (1, 0.7))]
    text = make_page(example(outcome("matching", "none", None, None, SCORES, inferred, REAL))).render()
    assert re.search("matching against none: 9 iterations, .* 0.6; 2 of 3 labels .*inferred correctly", text)
    given = [{"distance": None, "iterations": 1200}] * 3
    text = make_page(example(outcome("matching", "none", None, None, SCORES, given, REAL))).render()
    assert re.search("1,200 iterations, .*unknown; labels .*known", text)


def test_the_same_reason_of_several_defences_is_said_once() -> None:
    refused = [outcome("april", defence, "no table") for defence in ("none", "noise")]
    assert reasons(example(*refused, REFUSED)) == [
        ("april against none | noise", "no table"),
        ("april against none", "there is <no> table"),
    ]
    labels = ("none", "noise", "clip")
    audit = replace(example(*(outcome("april", name, "no table") for name in labels)), about=dict.fromkeys(labels, ""))
    assert reasons(audit) == [("april against every defence", "no table")]


def test_an_attack_that_solves_a_system_for_some_images_only() -> None:
    """adaptive-mjp: rank and condition where nothing is hidden, other facts where something is."""
    facts = [{"hidden": 3}, {"rank": 3, "unknowns": 4, "condition": 7.0}, {"hidden": 2}]
    _, rows = table(example(outcome("adaptive-mjp", "mjp", None, None, SCORES, facts, REAL)))
    assert rows[0][-2:] == ["3 of 4", "7"]
    _, rows = table(example(outcome("adaptive-mjp", "mjp", None, None, SCORES, facts[:1] * 3, REAL)))
    assert rows[0][-2:] == [None, None]


def test_a_pair_that_was_stopped() -> None:
    """Its count in the table, its iterations as a range, and no vote for the attack that merely saw more images."""
    short = {name: None if values is None else values[:1] for name, values in SCORES.items()}
    searched = [{"distance": 0.5, "iterations": done} for done in (9, 4, 4)]
    poor = outcome("matching", "none", None, None, measure_all(REAL.flip(0), REAL, 8), searched, REAL.flip(0))
    cut = outcome("patchembed", "none", None, None, short, FACTS[:1], REAL[:1], partial="1 of 3 images")
    found = replace(example(poor, cut, undone("april", "none")), stopped="Ctrl-C")
    assert "1 of 1 image recovered exactly from one step (best attack patchembed" in verdict(found)
    assert table(found)[1][1][2] == "1 of 1, stopped"
    assert grid(found) == (
        ["attack", "none"],
        [
            ["matching", f"mean {poor.mean_psnr:.3g}, most exposed 200; exact 1 of 3"],
            ["patchembed", "mean 200, most exposed 200; exact 1 of 1, stopped"],
            ["april", "not attacked"],
        ],
    )
    text = make_page(found).render()
    assert "<h1>1 of 1 image was recovered exactly from one step of training, by an honest server.</h1>" in text
    assert "1 of 1 image recovered exactly from one step (best attack patchembed, " in text
    assert "4 to 9 iterations, mean" in text
    assert "has results for only some of the images" in text
    assert "has results for only some of the images" not in make_page(example(poor)).render()
    assert "topped after 1 of 3 images." in text
    assert ": april against none." in text


def test_what_was_not_measured_has_no_column() -> None:
    text = make_page(example(WORKED)).render()
    assert "LPIPS was not measured" in text and ">LPIPS</th>" not in text
    scores = {**SCORES, "lpips": [0.0, 0.1, 0.2]}
    text = make_page(example(replace(WORKED, scores=scores))).render()
    assert "LPIPS was not measured" not in text and ">LPIPS</th>" in text


BYTE = "with the exact byte of every pixel"
MOST = "of training; the most exposed image was recovered with a PSNR of"
ELSE = "recovered byte for byte, but {} not in the data; to compare them, prepare the data as the client did"


@pytest.mark.parametrize(
    ("psnr", "proved", "leak"),
    [
        ((60, 60, 10), (), "2 of 3 images recovered exactly from one step"),
        ((60, 60, 60), (0, 1, 2), "3 of 3 images recovered exactly from one step, 3 of them " + BYTE),
        ((60, 60, 10), (1,), "2 of 3 images recovered exactly from one step, 1 of them " + BYTE),
        ((60, 10, 10), (1,), "1 of 3 images recovered exactly from one step; 1 image was " + ELSE.format("is")),
        ((60, 60, 10), (0, 2), f"2 of 3 images recovered exactly from one step, 1 of them {BYTE}; 1 image was "
         + ELSE.format("is")),
        ((10, 10, 10), (0, 1), "0 of 3 images recovered exactly from one step; 2 images were " + ELSE.format("are")),
    ],
)  # fmt: skip
def test_a_finding_parts_images_of_the_data_from_others(
    psnr: tuple[float, ...], proved: tuple[int, ...], leak: str
) -> None:
    facts = [{**fact, "bytes": number in proved} for number, fact in enumerate(FACTS)]
    audit = example(replace(WORKED, facts=facts, scores={**SCORES, "psnr": [float(value) for value in psnr]}))
    assert findings(audit)["none"].startswith(f"{leak} (best attack patchembed, ")


def test_what_a_search_found_stands_in_the_box_and_is_never_too_kind() -> None:
    def tried(answer: Any, worst: float | None, *, unseen: bool = False) -> Trial:
        return Trial("a setting", answer, worst, "patchembed", "why", 2, unseen)

    high, kept, dark = tried("above", 31.5), tried("passed", 14.2), tried("inconclusive", None)
    found = Remedies(
        "a-model",
        Limit("psnr", 20),
        [
            Remedy("noise", "noise=0.1", "", kept, kept, cost=Cost(0.49, 1.0, None, ""), tried=(high, kept)),
            Remedy("clip", None, "why", tried=(high, high)),
            Remedy("batch", None, "why", tried=(high, dark)),
            Remedy("withhold", None, "why", tried=(kept, tried("above", 22.0, unseen=True))),
            Remedy("precision", None, "no images are left that the search has not seen", tried=(high, kept)),
            Remedy("names", None, "why"),
            Remedy("noise", None, "why", tried=(tried("above", 22.0, unseen=True),), untried_from="noise=0.2"),
        ],
        2,
        2,
        ["patchembed"],
    )

    def rows(found: Remedies) -> list[list[str]]:
        text = make_page(example(WORKED, remedies=found)).render()
        box = text[text.index("<h2>Defences that help</h2>") :].split("</table>")[0]
        return [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", box)][1:]

    assert rows(found) == [
        ["noise=0.1", "14.2", "cosine 0.49 with the gradient", "✓ within the limit"],
        ["clip, as a setting", "31.5", "–", "✗ no defence"],
        ["batch, as a setting", "not attacked", "–", "? inconclusive"],
        ["withhold, as a setting", "22", "–", "✗ no defence"],
        ["precision, as a setting", "14.2", "–", "? inconclusive"],
        ["names", "not attacked", "–", "? inconclusive"],
        ["noise, as a setting", "22", "–", "✗ no setting up to noise=0.2 passed; nothing stronger was tried"],
    ]
    cut = replace(found, remedies=[Remedy("clip", None, "why", tried=(high, high), cut=True)], stopped="Ctrl-C")
    assert rows(cut) == [["clip, as a setting", "31.5", "–", "? inconclusive"]]  # the next setting might have held
    nothing = make_page(example(WORKED, remedies=replace(found, remedies=[], stopped="Ctrl-C"))).render()
    assert "<table" not in nothing[nothing.index("<h2>Defences that help</h2>") :].split("</section>")[0]
    half = replace(found, remedies=found.remedies[:1], stopped="Ctrl-C, with 1 defence finished")
    text = make_page(example(WORKED, remedies=half)).render()
    assert "topped by Ctrl-C, with 1 defence finished" in text and "defences without a row" in text
    text = make_page(example(WORKED, remedies=found)).render()
    assert "This audit did not search for a defence" not in text and "topped by" not in text
    assert '<td class="good">✓ within the limit' in text and '<td class="bad">✗ no defence' in text


def test_no_remedy_that_is_known_to_fail() -> None:
    """Without the table's gradient, and with fixed or rotary positions, the patches are read off the first block."""
    for pairs in ((WORKED,), (REFUSED,), (WORKED, REFUSED)):
        text = make_page(example(*pairs)).render()
        assert "Do not send the gradient of the position table" not in text
        assert "instead of a learned table" not in text
        assert "fixed (sin-cos) or" in text
        assert "differential privacy" in text
    assert "not attacked here" in make_page(example(WORKED, REFUSED)).render()


def test_a_page_for_a_server_that_chooses_the_weights_does_not_recommend_aggregation() -> None:
    honest = example(outcome("patchembed", "none", None, None, SCORES, FACTS, REAL))
    active = make_page(replace(honest, threat=ACTIVE)).render()
    assert "by a server that chooses the weights" in active and "Secure aggregation does not help" in active
    assert "Use secure aggregation" in make_page(honest).render() and "Use secure aggregation" not in active


@pytest.mark.parametrize(
    ("psnr", "proved", "lower", "first"),
    [
        ((60, 60, 10), (), False, "2 of 3 images were recovered exactly from one step of training, by an honest"),
        ((60, 60, 10), (0,), False, "2 of 3 images were recovered exactly from one step"),
        ((60, 60, 10), (0, 1), False, "2 of 3 images were recovered byte for byte from one step"),
        ((60, 60, 10), (), True, "At least 2 of 3 images were recovered exactly from one step"),
        ((60, 10, 10), (1,), False, "1 of 3 images was recovered exactly from one step"),
        ((10, 12.34, 10), (), False, f"An honest server recovered no image exactly from one step {MOST} 12.3 dB."),
        ((10, 10, 10), (0, 1), False, "2 images were " + ELSE.format("are")
         + ". The attack is patchembed, without a defence."),
    ],
)  # fmt: skip
def test_the_headline_says_how_well_the_strongest_attack_recovered(
    psnr: tuple[float, ...], proved: tuple[int, ...], lower: bool, first: str
) -> None:
    facts = [{**fact, "bytes": number in proved} for number, fact in enumerate(FACTS)]
    scores = {**SCORES, "psnr": [float(value) for value in psnr]}
    pair = outcome("patchembed", "none", None, None, scores, facts, REAL, lower_bound=lower)
    assert make_page(example(pair)).lead.startswith(first)
    other = make_page(example(replace(pair, defence="clip=1"))).lead
    assert "The attack is patchembed, against clip=1." in other and "without a defence" not in other


def test_the_first_screen_says_that_images_are_not_those_of_the_data() -> None:
    """They came back byte for byte and are others; where only some are, the others are not said to be."""
    facts = [{**fact, "bytes": True} for fact in FACTS]
    for psnr, tile in (
        ((10.0, 10.0, 10.0), ("3 of 3", "images exact, but not in the data")),
        ((60.0, 10.0, 10.0), ("3 of 3", "images exact")),
    ):
        page = make_page(example(replace(WORKED, facts=facts, scores={**SCORES, "psnr": [*psnr]})))
        assert page.numbers[0] == tile


MANY = torch.rand(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PSNR = [20.0, 60.0, 10.0, 30.0, 25.0, 55.0, 40.0, 15.0]


@pytest.mark.parametrize("things", ["images", "clips"])
def test_six_images_come_first_the_most_exposed_before_the_others_and_four_below(
    things: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spectrograms stand with low frequencies at the bottom."""
    first: list[Any] = []
    below: list[Any] = []
    draw, rows_of = gradients.pixel_rows, figures.image_rows
    monkeypatch.setattr(gradients, "pixel_rows", lambda rows: first.append(rows) or draw(rows))
    monkeypatch.setattr(figures, "image_rows", lambda *given: below.append(given) or rows_of(*given))
    scores = {**measure_all(MANY, MANY, 8), "psnr": PSNR}
    found = outcome("patchembed", "none", None, None, scores, [{}] * 8, 1 - MANY)
    told = Provenance({"seed": 0}, things=things)
    make_page(Audit([found], [*"abcdefgh"], MANY, "m", Step(), {}, about={"none": ""}, provenance=told))
    seen = MANY.flip(2) if things == "clips" else MANY
    [(real, recovered)] = first
    best = [1, 5, 6, 3, 4, 0]
    torch.testing.assert_close(real, seen[best])
    torch.testing.assert_close(recovered, 1 - seen[best])
    [(strips, titles)] = below
    assert list(titles) == ["20.0 dB", "60.0 dB", "10.0 dB", "30.0 dB"]
    torch.testing.assert_close(torch.stack([images for _, images in strips[:2]]), torch.stack([seen, 1 - seen])[:, :4])


@pytest.mark.parametrize("pictures", [None, MANY[:, :2]])
def test_what_cannot_be_drawn_has_bars_the_most_exposed_first(pictures: Any) -> None:
    """Nothing was kept, or images of two channels."""
    pairs = [
        outcome("patchembed", name, None, None, {**measure_all(MANY, MANY, 8), "psnr": [5.0] * 7 + [psnr]}, [{}] * 8,
                pictures)
        for name, psnr in (("noise", 20.0), ("none", 60.0), ("clip", 30.0))
    ]  # fmt: skip
    shown = MANY if pictures is None else pictures
    page = make_page(Audit(pairs, [*"abcdefgh"], shown, "m", Step(), {}, about={}))
    [bars] = map(str, page.opening.blocks)
    assert re.findall(r"patchembed, (\w+): ([\d.]+) dB", html.unescape(bars)) == [
        ("none", "60.0"), ("clip", "30.0"), ("noise", "20.0"),
    ]  # fmt: skip
    assert bars.count('"bad"') == 1  # only the first is exact


def test_each_table_has_the_columns_that_fit_a_page() -> None:
    text = make_page(example(WORKED, REFUSED)).render()
    tables = text.partition("Attacks and defences</h2>")[2].partition("Pictures</h2>")[0].split("</table>")
    heads = [re.findall(r"<th [^>]*>(.*?)</th>", each) for each in tables if "<th " in each]
    who = ["attack", "defence"]
    assert heads == [
        ["attack", "none"],
        [*who, "exact", "PSNR of the most exposed image, dB", *(COLUMNS[name] for name in gradients.BRIEF[:4])],
        [*who, *(COLUMNS[name] for name in gradients.CERTAIN)],
        [*who, "rank of G", "condition of G"],
        ["attack and defences", "why it does not apply, or is not exact"],
    ]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", each)[:2] for each in tables[1].split("</tr>")[1:]]
    assert [row for row in rows if row] == [["patchembed", "none"], ["baseline", "mean image"]]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_search_of_an_upload_is_counted_once(batch: int) -> None:
    """Every image of an upload has its facts."""
    facts = [{"distance": 0.25 * (1 + number // batch), "iterations": 5, "labels_right": 1} for number in range(4)]
    scores = measure_all(MANY[:4], MANY[:4], 8)
    found = outcome("matching", "none", None, None, scores, facts, MANY[:4])
    text = gradients._searched(found, batch)
    assert text is not None
    mean = {1: 0.625, 2: 0.375}[batch]
    assert f"distance of the gradients {mean:.2g}; {4 // batch} of 4 labels were inferred correctly" in text
