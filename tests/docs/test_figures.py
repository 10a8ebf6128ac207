"""A headline figure is written once: README and pages take it from docs/figures.toml, and nobody types it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"make_figures_{len(str(file))}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuples look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load(DOCS / "make_figures.py")


def test_no_figure_differs_or_is_typed_by_hand(figures: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = figures.main(["--check"])
    told = capsys.readouterr().out
    assert status == 0, told
    covered, places = map(int, re.findall(r"\d+", told.splitlines()[-1]))
    assert covered >= 65 and places >= 165


def test_a_marker_never_begins_a_line(figures: ModuleType) -> None:
    """There a comment is a block of HTML, and cuts the paragraph in two."""
    marked = "<!--f:cifar-mp3-->55.0<!--/f--> %"
    assert all(figures.BREAKS.search(f"It has\n{start}{marked}") for start in ("", "  ", "- ", "1. "))
    assert not figures.BREAKS.search(f"It has {marked}\n| {marked} |")


def test_every_run_names_command_machine_and_day_and_where_it_is_told(figures: ModuleType) -> None:
    for run in figures.load():
        assert run.command and run.machine and re.fullmatch(r"2026-\d\d-\d\d", run.day), run.title
        page, _, anchor = run.page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, run.page


def test_a_figure_that_changes_in_its_source_changes_on_every_page(tmp_path: Path) -> None:
    """In a copy: one number of figures.toml, and one of a study."""
    for name in ("README.md", "src/situs/studies/papers"):
        source, copy = DOCS.parent / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "_static"))
    changes = {
        "docs/figures.toml": ("59 of 64", "58 of 64"),
        "src/situs/studies/papers/cifar100.toml": ("[55.0, 83.9]", "[54.3, 83.9]"),
    }
    for name, (old, new) in changes.items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new), encoding="utf-8")
    copied = load(tmp_path / "docs" / "make_figures.py")
    assert copied.main(["--check"]) == 1
    source = [(tmp_path / "README.md").read_text(encoding="utf-8")]
    copied.add_figures(None, "README", source)  # what Sphinx does when it builds a page
    assert copied.main([]) == copied.main(["--check"]) == 0
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text(encoding="utf-8") for page in copied.pages()}
    assert source[0] == pages["README.md"]
    for name, old, new in (("cifar-mp3", "55.0", "54.3"), ("mjp-exact", "59 of 64", "58 of 64")):
        following = [page for page, text in pages.items() if f"<!--f:{name}-->{new}<!--/f-->" in text]
        assert "README.md" in following and len(following) >= 5, following
        assert not any(f"<!--f:{name}-->{old}<!--/f-->" in text for text in pages.values())


@pytest.mark.parametrize(
    ("text", "strict", "count"),
    [
        ("MP3 reaches 55.0 % here.", False, 1),
        ("55.0 instead of <!--f:cifar-none-->29.9<!--/f--> %", False, 1),
        ("MP3 reaches <!--f:cifar-mp3-->55.0<!--/f--> % here, and the server 55.0 dB.", False, 0),
        ("`55.0 %` in code, 155.0 % and 55.03 % are others.", False, 0),
        ("None but this has 12.3 %.", False, 0),
        ("None but this has 12.3 %, and 3 of 7.", True, 2),
        ("Its 2,000 images, batch 256.", True, 0),
    ],
)
def test_hand_typed_figures_are_found(figures: ModuleType, text: str, strict: bool, count: int) -> None:
    matches = [each for each in figures.typed(text, figures.load(), strict=strict) if "pets-droppos" not in each]
    assert len(matches) == count, matches


def test_the_tables_of_few_labels_are_the_means_of_its_draws() -> None:
    study = json.loads((DOCS / "results" / "few-labels.json").read_text(encoding="utf-8"))
    page = (DOCS / "results" / "few_labels.md").read_text(encoding="utf-8")
    draws = {(row["set"], row["labels"], row["start"]): row for row in study["rows"]}
    choices = [choice for choice in study["adapt"] if choice["starts"] == ["dinov2"]]

    def table(first: str) -> list[tuple[tuple[str, int], list[str]]]:
        """The rows below a header: set and labels, and the other cells."""
        lines = page[page.index(f"| {first}") :].split("\n\n")[0].splitlines()[2:]
        cells = [[cell.strip(" *") for cell in line.strip("|").split(" | ")] for line in lines]
        names = [re.findall(r"(pets|cifar)\S*, (\d+)", row[0].lower())[0] for row in cells]
        return [((name, int(count)), row[1:]) for (name, count), row in zip(names, cells, strict=True)]

    def same(cell: str, values: list[float]) -> bool:
        return abs(float(cell.partition(" ")[0]) - 100 * sum(values) / len(values)) <= 0.0501

    ways = ("kNN", "class means", "linear probe", "head", "LoRA", "all layers")
    rows = table("set, labels per class | kNN")
    assert len(rows) == 6
    for key, cells in rows:
        row, taken = draws[*key, "dinov2"], [each for each in choices if (each["set"], each["labels"]) == key]
        assert all(same(cell, row[way]) for cell, way in zip(cells, ways, strict=False)), key
        assert same(cells[6], [each["top1"] for each in taken]), key
        assert {each["taken"] for each in taken} == {re.sub("^probe", "linear probe", name) for name in
                                                     cells[7].removesuffix(", three times").split(", ")}  # fmt: skip
    rows = table("set, labels per class | not pretrained further")
    assert len(rows) == 3
    for key, cells in rows:
        for cell, start in zip(cells, ("dinov2", "mp3", "droppos", "mae", "part", "scratch"), strict=True):
            pair = zip(cell.split(", "), ("LoRA", "all layers"), strict=True)
            assert all(same(figure, draws[*key, start][way]) for figure, way in pair), (key, start)
    within = sum(choice["within"] for choice in choices)
    assert f"In {within} of {len(choices)} draws the chosen recipe is within" in page


def test_the_table_of_mjp_is_the_mean_of_its_seeds() -> None:
    """Its hand-typed cells too: mean ± standard deviation of the study's numbers."""
    study = tomllib.loads((DOCS.parent / "src/situs/studies/papers/cifar100-mjp.toml").read_text(encoding="utf-8"))
    page = re.sub(r"<!--.*?-->|\*\*", "", (DOCS / "results" / "mjp.md").read_text(encoding="utf-8"))
    rows = {row["name"][0]: row["ours"] for row in study["tables"][0]["rows"]}
    for letter, ours in rows.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {letter}: ") and "±" in line]
        shown = re.findall(r"([\d.]+) ± ([\d.]+)", line)
        expected = [ours[index] for index in (0, 1, 2, 4, 5)]  # without the Diff.Norm that is not squared
        assert [(f"{mean(seeds):.2f}", f"{stdev(seeds):.2f}".lstrip("0")) for seeds in expected] == shown, letter
