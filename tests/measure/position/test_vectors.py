"""A look at a table, its words and its page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import timm
import torch
from builders import small_vit

from situs.core.position import sincos
from situs.errors import SitusError
from situs.measure.position import vectors
from situs.measure.position.vectors import (
    PositionTable,
    PositionTables,
    TableAnalysis,
    analyze_positions,
    grasp,
    in_words,
    look_at,
    look_at_references,
    tables_of,
    to_json,
)
from situs.models import Model
from situs.pages import make_page as page


def table(name: str = "sincos", grid: tuple[int, int] = (4, 5), dim: int = 16) -> PositionTable:
    noise = torch.randn(grid[0] * grid[1], dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return PositionTable("learned table", sincos(grid, dim).double() if name == "sincos" else noise, grid)


@pytest.fixture(scope="module")
def looks() -> list[TableAnalysis]:
    return [look_at("knows", table()), look_at("knows nothing", table("noise"), note="Its note.")]


def test_words_follow_the_numbers(looks: list[TableAnalysis]) -> None:
    knows, nothing = looks
    assert grasp(knows) == "encodes the grid"
    assert grasp(nothing) == "does not encode the grid"
    said = in_words(nothing)
    assert said.startswith("`knows nothing`, learned table of 4 × 5 positions, 16 channels:")
    assert f"{nothing.decoded.two.mean:.2f} patches" in said
    assert said.endswith("does not encode the grid. Its note.")


def test_words_grow_worse_with_what_covers_the_grid() -> None:
    chance = torch.Generator().manual_seed(0)
    taught = table(grid=(8, 8), dim=32)
    noise = torch.randn(taught.rows.shape, generator=chance, dtype=torch.float64)
    covered = [taught._replace(rows=taught.rows + amount * noise) for amount in (0.0, 0.1, 0.3, 1.0, 10.0)]
    looks = [look_at("noisy", each) for each in covered]
    assert [look.decoded.left for look in looks] == sorted(look.decoded.left for look in looks)
    said = list(dict.fromkeys(map(grasp, looks)))
    assert said == ["encodes the grid", "roughly encodes the grid", "does not encode the grid"]


def test_numbers_are_all_there(looks: list[TableAnalysis]) -> None:
    numbers = json.loads(json.dumps(to_json(looks[1])))
    assert (numbers["grid"], numbers["channels"], numbers["note"]) == ([4, 5], 16, "Its note.")
    assert sum(numbers["explained_variance"]) == pytest.approx(1)
    assert list(numbers["explained_variance_of"]) == ["3", "4", "5", "6", "7"]  # as in MJP's Table 6
    assert numbers["explained_variance_of"]["3"] == pytest.approx(sum(numbers["explained_variance"][:3]))
    assert numbers["accumulated_singular_energy"][-1] == pytest.approx(1)
    assert numbers["regression"]["mae_2d"]["mean"] == looks[1].decoded.two.mean


def test_without_a_seed_it_is_0() -> None:
    plain = look_at("noise", table("noise")).decoded.two.mean
    assert plain == look_at("noise", table("noise"), seed=0).decoded.two.mean
    assert plain != look_at("noise", table("noise"), seed=1).decoded.two.mean
    references = [
        [look.decoded.two.mean for look in look_at_references(table(), **seed)]
        for seed in ({}, {"seed": 0}, {"seed": 1})
    ]
    assert references[0] == references[1] != references[2]


def test_tables_of_several_models_say_how_they_were_made_and_which_took_no_part() -> None:
    models = [Model("one", small_vit(), identity="1"), Model("two", small_vit(), identity="2", positions=False)]
    found = analyze_positions(models, folds=4, seed=5)
    assert [(look.name, bool(look.note)) for look in found.looks] == [("one", False), ("two", True)]
    assert all(
        torch.equal(look.table.rows, tables_of(model.backbone)[0].rows)
        for look, model in zip(found.looks, models, strict=True)
    )
    assert "did not use its position vectors" in found.looks[1].note
    made = found.provenance
    assert (made.facts["folds"], made.facts["seed"], [origin.name for origin in made.of]) == (4, 5, ["one", "two"])
    assert made.facts["torch"] == torch.__version__.partition("+")[0] and made.facts["timm"] == timm.__version__
    assert {"situs", "scikit-learn"} <= set(made.facts)
    with pytest.raises(SitusError, match="name at least one model"):
        analyze_positions([])


def test_references_are_known(looks: list[TableAnalysis]) -> None:
    sincos, random = look_at_references(looks[0].table)
    assert sincos.decoded.left < 0.1 < 0.9 < random.decoded.left
    _, header, rows, _ = PositionTables(looks, [sincos, random]).summary().tables[0]
    assert [row[0] for row in rows] == [
        "knows, learned table",
        "knows nothing, learned table",
        "sin-cos (reference)",
        "random (reference)",
    ]
    assert all(len(row) == len(header) for row in rows)


def test_page_shows_each_model_and_says_how_to_get_umap(
    looks: list[TableAnalysis], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "has_umap", lambda: False)
    drawn = page(PositionTables(looks, look_at_references(looks[0].table)))
    text, pictures = drawn.render(), drawn.pictures
    each = {"pca-2d", "pca-3d", "cosine", "guesses"}
    assert set(pictures) == each | {f"{name}-2" for name in each} | {"energy"}
    assert text.count("<figure>") == len(pictures)
    assert "pip install 'situs[umap]'" in text
    assert f"in {looks[0].decoded.folds} folds." in text  # how the errors were made
    assert text.index("encodes the grid.") < text.index("<table")
    assert "`" not in text.split("</style>")[1]


@pytest.mark.usefixtures("undrawn")
def test_page_draws_umap_where_it_is_installed(looks: list[TableAnalysis], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "has_umap", lambda: True)
    monkeypatch.setattr(vectors, "umap_points", lambda rows, seed: rows[:, :2].numpy())
    drawn = page(PositionTables(looks[:1], []))
    assert "umap" in drawn.pictures
    text = drawn.render()
    assert "UMAP with 15 neighbours" in text
    assert "pip install" not in text


@pytest.mark.parametrize(("dim", "said"), [(16, "smallest norm"), (12, "too few positions"), (4, "")])
def test_few_places_are_owned_up_to(dim: int, said: str) -> None:
    note = look_at("few", table("noise", dim=dim)).few_places
    assert all(part in note for part in ("`few`", "16 positions", f"{dim} channels")) if said else note == ""
    assert said in note


def test_a_single_row_of_places_has_a_page() -> None:
    drawn = page(PositionTables([look_at("small", table("noise", grid=(1, 6), dim=8))], []))
    assert "cosine" in drawn.pictures
    assert "<title>Positions of small</title>" in drawn.render()


def test_what_the_figures_draw(looks: list[TableAnalysis], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "has_umap", lambda: False)
    drawn = {figure.name: figure for figure in PositionTables(looks, []).figures()}
    for number, look in enumerate(looks):
        end = "-2" * number
        for dims in (2, 3):
            panels, grid = drawn[f"pca-{dims}d{end}"].values
            assert [panel[3] for panel in panels] == ["row", "column"] and grid == (4, 5)
            assert all((panel[1] == look.components.points[:, :dims]).all() for panel in panels)
            assert len(panels[0][2]) == dims and panels[0][2][0].startswith("1st component (")
        panels, _ = drawn[f"guesses{end}"].values
        assert (panels[0][1] == look.decoded.guesses[:, [1, 0]]).all() and panels[0][4] is True
        maps, rows, columns, _ = drawn[f"cosine{end}"].values
        assert (rows, columns) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
        centred = look.table.rows - look.table.rows.mean(dim=0)
        for r, c in ((0, 0), (2, 3)):
            slow = [torch.cosine_similarity(centred[5 * r + c], other, dim=0) for other in centred]
            torch.testing.assert_close(maps[look.title][r, c].flatten(), torch.stack(slow))
        assert drawn[f"cosine{end}"].options["limits"] == (-1, 1)
        assert "evenly spaced" not in drawn[f"cosine{end}"].caption
    shown = max(look.spectrum.components_for(0.99) for look in looks) + 1
    for look in looks:
        x, y = drawn["energy"].values[0][look.title]
        assert x.tolist() == [*range(1, min(shown, 16) + 1)]
        assert y.tolist() == pytest.approx([100 * share for share in look.spectrum.energy[:shown]])
    large = PositionTables([look_at("large", table(grid=(6, 5)))], []).figures()
    assert "maps for 25 evenly spaced positions" in large[2].caption


def test_the_rows_of_the_tables_and_the_first_screen(looks: list[TableAnalysis]) -> None:
    found = PositionTables(looks * 2, [])
    (table_,) = found.summary().tables
    for row, look in zip(table_.rows, looks, strict=False):
        decoded, spectrum = look.decoded, look.spectrum
        assert list(row) == [
            look.title,
            "4×5 × 16",
            f"{100 * sum(spectrum.explained[:3]):.1f} %",
            spectrum.components_for(0.9),
            f"{decoded.two.mean:.3f}",
            f"{decoded.chance_two:.2f}",
        ]
    assert len(found.summary().numbers) == 3  # of the first three
    assert found.summary().numbers[0][0] == f"{looks[0].decoded.two.mean:.2f} patches"
    shares, errors = found.details()
    assert list(shares.rows[1]) == [
        looks[1].title,
        *(f"{100 * sum(looks[1].spectrum.explained[:k]):.2f}" for k in range(3, 8)),
    ]
    decoded = looks[1].decoded
    assert list(errors.rows[1])[1:] == [
        f"{decoded.one.mean:.3f}\u202f±\u202f{decoded.one.std:.3f}",
        f"{decoded.two.mean:.3f}\u202f±\u202f{decoded.two.std:.3f}",
        f"{decoded.rows:.3f}",
        f"{decoded.columns:.3f}",
        f"{decoded.chance_one:.2f}",
        f"{decoded.chance_two:.2f}",
        f"{100 * decoded.exact:.0f} %",
    ]
    assert all(len(row) == len(errors.header) for row in errors.rows)


@pytest.mark.parametrize(
    ("count", "channels", "said"), [(16, 16, "smallest norm"), (17, 16, "too few"), (31, 16, "too few"), (32, 16, "")]
)
def test_few_places_at_the_bounds(count: int, channels: int, said: str, looks: list[TableAnalysis]) -> None:
    look = replace(looks[0], decoded=replace(looks[0].decoded, fitted=count))
    assert look.table.rows.shape[1] == channels
    assert said in look.few_places and bool(look.few_places) == bool(said)


@pytest.mark.parametrize(
    ("left", "said"),
    [(0.149, "encodes the grid"), (0.15, "roughly encodes the grid"), (0.59, "roughly encodes the grid"),
     (0.6, "does not encode the grid")],
)  # fmt: skip
def test_how_well_a_table_encodes_the_grid_at_the_bounds(left: float, said: str, looks: list[TableAnalysis]) -> None:
    decoded = replace(looks[0].decoded, two=looks[0].decoded.two._replace(mean=left), chance_two=1.0)
    assert grasp(replace(looks[0], decoded=decoded)) == said
