"""A published result is whole or not there, says the same in its three forms, and every type of result has a page."""

from __future__ import annotations

import ast
import html
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kinds import IMAGE, NAME, RESULTS, provenance
from matplotlib.figure import Figure
from outcomes import passing
from sent import setting, split_audit

from situs.audit import NoDefence, PatchEmbedding
from situs.audit.cases import Case
from situs.audit.defences import Step
from situs.audit.gradients import Audit
from situs.audit.scores import METRICS, measure_all
from situs.audit.settings import Comparison
from situs.audit.split.attackers import SplitFinding
from situs.audit.split.result import SplitAudit
from situs.audit.split.stage import Kept
from situs.audit.sweep.curve import IMAGES, Curves, Line, Point
from situs.audit.text.recovered import Read
from situs.audit.text.result import TextAudit, finding_of
from situs.data.check import KINDS, DataCheck
from situs.errors import SitusError
from situs.gate import BLIND, Limit, parse_limit
from situs.locks.attacks import LockAudit
from situs.locks.attacks.recovery import KeyRecovery
from situs.locks.equivariance import Finding, Verification
from situs.locks.equivariance.findings import Law, Status
from situs.locks.veil import Veil
from situs.measure.knn import LayerAccuracy, LayerKnn
from situs.pages import PAGES, make_page, publish, write_numbers
from situs.results import Origin, Provenance, Result, show

ROOT = Path(__file__).resolve().parents[2]


def test_every_result_is_drawn_here_and_every_page_is_of_a_result() -> None:
    found = set()
    for path in (ROOT / "src" / "situs").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\b(Result|Probes|Leak|Report|TextAudit)\b", text) else ():
            if isinstance(node, ast.ClassDef) and any(
                re.match(r"(Result|Probes|Leak|Report|TextAudit)\b", ast.unparse(b)) for b in node.bases
            ):
                found.add(node.name)
    assert found - {"Probes", "Leak", "Report"} == set(RESULTS) >= set(PAGES)


def test_a_folder_holds_a_page_of_every_kind(tmp_path: Path) -> None:
    """No verb's page is named as another verb's; two forms of one measurement share a name."""
    names: dict[str, list[str]] = {}
    for kind, (build, _) in RESULTS.items():
        names.setdefault(build().file, []).append(kind)
    shared = {name: kinds for name, kinds in names.items() if len(kinds) > 1}
    assert shared == {
        "accuracy": ["ClassAccuracy", "LabelAccuracy"],
        "position": ["PositionCurve", "PositionGrid"],
        "split-audit": ["PromptAudit", "SplitAudit"],
    }
    assert "report" not in names  # the demo's page, whose folder others may be sent to
    for kind in ("LockAudit", "StudyResult"):
        assert publish(RESULTS[kind][0](), tmp_path).stem == RESULTS[kind][0]().file


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", RESULTS)
def test_a_page_says_what_its_result_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("situs.report.figures.RESOLUTION", 40)  # drawn all the same, in a third of the time
    build, pictures = RESULTS[name]
    result = replace(build(), provenance=provenance())
    page, said = make_page(result), result.summary()
    text = page.render()
    for paragraph in [] if name == "Audit" else said.sentence.replace("`", "").split("\n\n"):  # its facts say it
        assert paragraph in html.unescape(re.sub(r"<[^>]*>", "", text))
    cells = {html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", text)}
    cells |= {html.unescape(cell) for cell in re.findall(r"<d[td]>(.*?)</d[td]>", text)}
    for table in said.tables[-1:]:
        assert {show(cell) for row in table.rows for cell in row} <= cells
    assert {key for key in page.pictures if not key.startswith("umap")} == pictures
    assert all(picture.startswith(b"\x89PNG") for picture in page.pictures.values())
    if name not in ("LockAudit", "Runs", "Verification"):  # which say it in their own words
        assert "<dt>seed</dt><dd>3</dd>" in text
    assert NAME not in text
    assert "49" not in re.findall(r"<h1>.*?</h1>", text)[0]
    assert json.loads(json.dumps(result.to_json()))["of"] == ["0123"]


def read(**scores: float) -> SplitAudit:
    """A split audit whose one attacker came to these scores; a guess comes to 9 dB, and to 15 for its best image."""
    finding = SplitFinding("order", "", "done" if scores else "refused", figures=scores)
    blind = {"mean image": {"psnr": 9.0, "best psnr": 15.0, "patch psnr": 12.0}}
    return split_audit(setting(Veil(), Kept(0.9), finding), samples=8, public=4, blind=blind)


def sentences(*reads: Read, **fields: Any) -> TextAudit:
    return TextAudit([finding_of("none", 1, "done" if reads else "refused", reads)], "m", ["1"], 1, **fields)


def gradients(picture: Any, limit: str = "", **fields: Any) -> Audit:
    """An audit of one image by a closed form without a doubt, which found `picture`, or which does not apply."""
    model: Any = SimpleNamespace(backbone=SimpleNamespace(num_tokens=16))
    case, asked = Case("", model, NoDefence(), PatchEmbedding()), parse_limit(limit, METRICS) if limit else None
    found = case.refused("no table")
    if picture is not None:
        scores = measure_all(picture, IMAGE, 8)
        found = case.finding("done", [0], scores=scores, facts=[{"fits": True}], shown=picture).against({}, ["1"])
    return Audit([found], ["1"], IMAGE, "m", Step(), {}, about={"none": ""}, limit=asked, **fields)


def compared(picture: Any) -> Comparison:
    guesses = {("a", "mean image"): measure_all(IMAGE * 0.5, IMAGE, 8)}
    return Comparison(gradients(picture).findings, ["1"], IMAGE, IMAGE, guesses, 0.2, 1, 4, ())


def checked(kind: str = "", decoded: bool = True) -> DataCheck:
    counts = {each: int(each == kind) for each in KINDS}
    return DataCheck(images={"": 4}, counts=counts, issues={each: [] for each in KINDS}, sizes={}, classes={},
                     decoded=decoded)  # fmt: skip


def attacked(right: int | None = None, **scores: float) -> LockAudit:
    return LockAudit("m", (8,), 0, (KeyRecovery("labels", 8, right, residual_sizes=((8, right or 0),), **scores),))


UNATTACKED = "Not attacked, so not proved private"


@pytest.mark.parametrize(
    ("result", "tone", "mark"),
    [
        (gradients(None), "unsure", UNATTACKED),
        (gradients(None, "psnr=20"), "unsure", UNATTACKED),
        (gradients(1 - IMAGE), "unsure", "Not proved private"),
        (gradients(IMAGE.flip(0, 1, 2, 3) * 0.5, "blind"), "unsure", "Not proved private"),  # one image never passes
        (passing(limit=BLIND), "good", "The gate passed, against these attacks"),
        (passing(limit=Limit("psnr", 20)), "good", "The gate passed, against these attacks"),
        (passing(), "unsure", "Not proved private"),
        (passing(limit=BLIND, stopped="Ctrl-C"), "unsure", "Not proved private"),
        (gradients(IMAGE + 1e-3, "psnr=100"), "bad", "Not private"),  # a gate that lets an exact copy through
        (compared(None), "unsure", UNATTACKED),
        (compared(1 - IMAGE), "unsure", "Not proved private"),
        (compared(IMAGE), "bad", "Not private"),
        (sentences(), "unsure", UNATTACKED),
        (sentences(Read("1", (2, 6), (), (False, False))), "unsure", "Not proved private"),
        (sentences(Read("1", (2, 6), (), (True, False))), "bad", "Not private"),  # a word without its place
        (sentences(Read("1", (2, 6), (), (True, False)), limit=Limit("sentences", 0.5)), "bad", "Not private"),
        (read(), "unsure", UNATTACKED),
        (read(psnr=11.0, places=0.05, linked=0.125), "unsure", "Not proved private"),
        (read(psnr=13.0), "bad", "Not private"),
        (read(psnr=11.0, **{"best psnr": 26.0}), "bad", "Not private"),  # one sample of several
        (read(psnr=11.0, **{"patch psnr": 26.0}), "bad", "Not private"),  # every patch, and no order
        (read(psnr=11.0, places=0.4), "bad", "Not private"),
        (read(linked=1.0), "bad", "Not private"),
        (read(labels=1.0), "bad", "Not private"),
        (Curves("m", [Line("noise", "none", "", [Point("0", "", "", {})])], IMAGES, 1), "unsure", UNATTACKED),
        (attacked(8), "bad", "Opened by these attackers"),
        (
            attacked(before=0.1, after=0.9, owner=0.9),
            "bad",
            "Opened by these attackers",
        ),  # no key is known
        (attacked(1), "unsure", "Not opened by these attackers"),
        (attacked(), "unsure", "No strength can be given"),
        (checked(), "good", "No issues found"),
        (checked(decoded=False), "unsure", "No issues found, but images were not decoded"),
        (checked("leak"), "unsure", "Issues to inspect"),
        (checked("annotation"), "bad", "Issues to inspect"),
    ],
)
def test_a_verdict_is_no_kinder_than_what_was_tried(result: Result, tone: str, mark: str, undrawn: None) -> None:
    page = make_page(result)
    assert (page.tone, page.mark) == (tone, mark)
    assert isinstance(result, Curves) or result.tone == tone  # on a terminal the same


def test_a_lock_that_nobody_judged_is_not_said_to_hold() -> None:
    page = make_page(attacked())
    assert page.headline[0] == "No strength can be given, so the audit is inconclusive (not a pass)."
    assert (page.tone, page.mark) == ("unsure", "No strength can be given")
    none = make_page(replace(attacked(), attacks=()))
    assert none.headline[0] == "No attack was run, so no strength can be given." and none.tone == "unsure"


@pytest.mark.parametrize("laws", [(), ("row",), ("column",), ("row", "column")])
def test_both_laws_are_two(laws: tuple[Law, ...], undrawn: None) -> None:
    states: dict[Law, Status] = {"row": "holds", "column": "needs keyed weights"}  # the key is part of the column law
    found = tuple(Finding("blocks", law, states[law] if law in laws else "refused", "") for law in states)
    page = make_page(Verification("m", "float32", 1e-10, 1e-3, 3, None, found))
    assert (page.tone == "good") is (len(laws) == 2)
    missing = ", ".join(f"{law} law" for law in states if law not in laws)
    assert page.mark == (
        f"Not shown to hold for the blocks: {missing}" if missing else "The blocks obey the row law and the column law"
    )


@pytest.mark.parametrize(("name", "rows"), [("Segments", "masks.mask_rows"), ("Detections", "masks.object_rows")])
def test_a_page_opens_with_few_of_the_worst_images_and_shows_all_of_them_below(
    name: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening's picture is held to part of a screen: eight rows of images would be as small as stamps there."""
    drawn: list[int] = []
    monkeypatch.setattr(f"situs.report.{rows}", lambda some, _: drawn.append(len(some)) or Figure())
    found = replace(cast("Any", RESULTS[name][0]()), provenance=provenance())
    page = make_page(replace(found, worst=[*found.worst] * 8))
    assert drawn == [2, 8] and {"worst-first", "worst"} <= page.pictures.keys()
    assert "The worst images first" in page.opening.blocks[0]


def held(value: Any) -> Iterator[Any]:
    """A value and all that it holds, as far as dataclasses, tuples, lists and dicts go."""
    yield value
    inner = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else []
    inner += list(value) if isinstance(value, tuple | list) else []
    inner += list(value.values()) if isinstance(value, Mapping) else []
    for each in inner:
        yield from held(each)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_what_was_measured_and_cannot_be_changed(name: str) -> None:
    kinds = {type(value) for value in held(RESULTS[name][0]()) if is_dataclass(value)}
    open_kinds = {kind for kind in kinds if not kind.__dataclass_params__.frozen}  # type: ignore[attr-defined]
    assert open_kinds == set()


def knn(*of: Origin) -> LayerKnn:
    rows = (LayerAccuracy(1, "mean", 0.5, 0.5),)
    return LayerKnn(rows, 8, 4, None, 3, None, torch.eye(2), ("a", "b"), provenance=Provenance({"seed": 0}, of))


def test_a_published_result_has_numbers_pictures_and_page(tmp_path: Path) -> None:
    page = publish(knn(Origin("m", "1")), tmp_path / "new")
    assert page == tmp_path / "new" / "knn.html"
    assert "<title>m: nearest neighbours</title>" in page.read_text()
    numbers = json.loads((tmp_path / "new" / "knn.json").read_text())
    assert list(numbers)[:3] == ["of", "seed", "k"]
    assert sorted(path.name for path in page.parent.iterdir()) == ["knn-layers.png", "knn.html", "knn.json"]
    named = publish(knn(Origin("other", "2")), tmp_path / "new" / "mine.html")  # a page that is named is written there
    assert named == tmp_path / "new" / "mine.html"
    assert (tmp_path / "new" / "mine-layers.png").is_file() and (tmp_path / "new" / "mine.json").is_file()


def test_only_the_first_of_several_ranks_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = RESULTS["LayerKnn"][0]()
    monkeypatch.setattr("situs.pages.distributed.rank", lambda: 1)
    for out, page in ((tmp_path / "deep", tmp_path / "deep" / f"{result.file}.html"), (tmp_path / "my.html",) * 2):
        assert publish(result, out) == page
        assert write_numbers(result, out) == page.with_suffix(".json")
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_was_stopped_says_so_beside_what_it_found() -> None:
    found: Any = RESULTS["Remedies"][0]()
    assert found.with_setting and found.stopped is None
    whole, cut = (make_page(each).render() for each in (found, replace(found, stopped="Ctrl-C")))
    assert "The search was stopped by" not in whole
    assert cut.count("The search was stopped by Ctrl-C.") == 1
    assert cut.index("Settings within the limit</h2>") < cut.index("The search was stopped by Ctrl-C.")
    assert cut.index("The search was stopped by Ctrl-C.") < cut.index("All trials</h2>")


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON has no NaN, and strict readers refuse a file that holds one."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = replace(knn(), rows=(LayerAccuracy(1, "mean", math.nan, 0.5), LayerAccuracy(2, "mean", 0.5, 0.5)))
    numbers = json.loads(write_numbers(told, tmp_path).read_text(), parse_constant=refuse)
    assert [row["accuracy"] for row in numbers["rows"]] == [None, 0.5]


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SitusError, match=r"taken/knn.json: could not be written: "):
        publish(knn(), tmp_path / "taken")


def test_a_page_of_another_model_stays(tmp_path: Path) -> None:
    def write(*of: Origin) -> Path:
        return publish(knn(*of), tmp_path)

    one, two, three = Origin("mp3", "1"), Origin("mjp", "2"), Origin("mjp", "3")
    assert write(one) == tmp_path / "knn.html"
    assert write(one) == tmp_path / "knn.html"  # its own page is renewed
    assert write(two) == tmp_path / "mjp" / "knn.html"
    assert write(three) == tmp_path / "mjp-2" / "knn.html"  # another model of that name
    assert write(two) == tmp_path / "mjp" / "knn.html"
    assert write(one, two) == tmp_path / "mp3-mjp" / "knn.html"
    for place, of in {"": ["1"], "mjp": ["2"], "mjp-2": ["3"], "mp3-mjp": ["1", "2"]}.items():
        assert json.loads((tmp_path / place / "knn.json").read_text())["of"] == of
    (tmp_path / "knn.json").write_text("{torn")
    assert write(one) == tmp_path / "mp3" / "knn.html"  # nobody knows whose page that is
    assert write(Origin("a/../../b c", "9")).parent.parent == tmp_path


def test_a_result_that_nobody_registered_has_a_page() -> None:
    class Other(LayerKnn):
        """Of a third party."""

    page = make_page(Other(knn().rows, 8, 4, None, 3, None, torch.eye(2), ("a", "b")))
    assert page.headline[0].startswith("After the last block") and set(page.pictures) == {"layers"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself_in_a_notebook_and_its_repr_has_no_numbers(name: str) -> None:
    result = RESULTS[name][0]()
    assert repr(result) == f"<{name}: {result.title}>" and "tensor" not in repr(result)


@pytest.mark.usefixtures("undrawn")
def test_a_private_result_in_a_notebook_says_that_the_notebook_keeps_it() -> None:
    audit = gradients(IMAGE)
    frame = audit._repr_html_()
    opening = re.fullmatch(r'<iframe srcdoc="([^"]*)" title="[^"]*" style="[^"]*" onload="[^"]*"></iframe>', frame)
    assert opening is not None
    page = html.unescape(opening[1])
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert "data:image/" in page and "A saved notebook contains this output" in page
    without = audit.without_pictures()._repr_html_()
    assert "A saved notebook contains" not in without and "data:image/" not in without
    printed: list[str] = []
    audit._repr_pretty_(SimpleNamespace(text=printed.append), False)
    assert printed == [str(audit)]
