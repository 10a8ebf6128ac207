"""The audit's verdict follows from its numbers, for models that know, half know and do not know their places."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.backbones import create_backbone
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.measure.position.knowledge import OWN, REMOVED, SHUFFLED, PositionAudit, measure_positions, verdict
from situs.pages import make_page


def make(name: str = "vit_tiny_patch16_224", **more: Any) -> Any:
    torch.manual_seed(0)
    found = small_vit(name=name, **{"img_size": (12, 16), "width": 24, "heads": 3, **more}).eval()
    if name.startswith("vit_tiny"):
        with torch.no_grad():
            found.model.pos_embed.normal_(std=2.0)
    return found


def batches(count: int = 40, size: tuple[int, int] = (12, 16)) -> list[Batch]:
    images = torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))
    return [Batch(images, torch.arange(count))]


@pytest.fixture(scope="module")
def audit() -> PositionAudit:
    law = {"status": "holds", "reason": "", "errors": {"forward": 1e-15}}
    return replace(measure_positions("tiny", make(), batches()), rows=law)


def test_verdict_of_a_model_with_positions(audit: PositionAudit) -> None:
    assert audit.kinds == ("table",)
    said = verdict(audit)
    assert said.startswith("`tiny` encodes its 3 × 4 positions by a vector added to each token.")
    assert "Its learned table does not encode the grid" in said  # its vectors are random
    assert "Its features reveal the position of a patch" in said
    last = audit.probed.readings[OWN][-1]
    assert f"{100 * last.right:.0f} % after the final norm (chance: 8.3 %)" in said
    assert "only from the position embeddings" in said
    assert "If 50 % of the patches are shuffled, the CLS token changes by" in said  # 15 % of 12 is one, which cannot be
    assert "answers" not in said  # its head was never trained
    assert "The model's blocks are permutation equivariant" in said


def test_windows_are_said_to_encode_positions_where_nothing_is_added(audit: PositionAudit) -> None:
    windows = "`tiny` adds no positions to its 3 × 4 tokens, but its windows partly encode positions."
    for kinds, trained in (((), True), (("table",), False), ((), False)):
        assert verdict(replace(audit, kinds=kinds, trained=trained, hierarchical=True)).startswith(windows)
    none = replace(audit, kinds=(), hierarchical=False)
    assert verdict(none).startswith("`tiny` uses no positions: it has none.")
    untrained = replace(audit, trained=False, hierarchical=False)
    assert verdict(untrained).startswith("`tiny` uses no positions: it was trained without them.")


def test_shuffles_with_the_mask_known_and_hidden(audit: PositionAudit) -> None:
    assert [(row.ratio, row.mask_known) for row in audit.shuffled] == [
        (0.15, True), (0.15, False), (0.5, True), (0.5, False), (0.9, True), (0.9, False),
    ]  # fmt: skip
    assert [row.masked for row in audit.shuffled[::2]] == [1, 6, 10]
    assert all(row.diff_norm > 0 for row in audit.shuffled if row.mask_known or row.masked > 1)


def test_model_without_positions_does_not_mind_shuffles() -> None:
    found = measure_positions("mp3", make().double(), [b._replace(inputs=b.inputs.double()) for b in batches()],
                            positions=False)  # fmt: skip
    said = verdict(found)
    assert said.startswith("`mp3` uses no positions: it was trained without them.")
    assert "Its features reveal no position to a linear probe" in said
    assert "does not change the CLS token" in said
    assert all(row.diff_norm < 1e-9 for row in found.shuffled)
    assert found.no_vectors.startswith("it was trained without positions")
    assert (found.rows, found.looks) == (None, ())
    text = make_page(found).render()
    assert "<td>not measured</td>" in text
    assert "<td>it was trained without positions" in text


def test_relative_bias_breaks_the_law_and_has_no_vector() -> None:
    found = measure_positions("relpos", make("vit_relpos_small_patch16_224", img_size=(32, 48), patch_size=16),
                            batches(6, (32, 48)))  # fmt: skip
    assert "biases between pairs of tokens" in found.no_vectors
    assert not found.no_vectors.startswith("vit_relpos")
    law = {"status": "refused", "reason": "its relative bias follows places", "errors": {}}
    said = verdict(replace(found, rows=law))
    assert "`relpos` encodes its 2 × 3 positions by biases between pairs of tokens." in said
    assert "The model's blocks are not permutation equivariant: its relative bias" in said


def test_words_at_the_borders(audit: PositionAudit) -> None:
    def with_last(condition: str, of: PositionAudit = audit, **changed: float) -> PositionAudit:
        readings = {c: list(each) for c, each in of.probed.readings.items()}
        readings[condition][-1] = replace(readings[condition][-1], **changed)
        return replace(of, probed=replace(of.probed, readings=readings))

    blind = audit.probed.readings[OWN][-1].blind_error
    assert "features reveal the position of a patch" in verdict(with_last(OWN, error=0.1 * blind, right=0.1))
    assert "features reveal roughly where a patch is" in verdict(with_last(OWN, error=0.5 * blind, right=0.1))
    assert "features reveal no position to a linear probe" in verdict(with_last(OWN, error=0.95 * blind, right=0.1))
    both = verdict(with_last(SHUFFLED, with_last(REMOVED, error=0.5 * blind), error=0.3 * blind))
    assert re.search(rf"content alone.*{0.5 * blind:.2f}.*positions alone.*{0.3 * blind:.2f}", both)
    rotary = replace(audit, rows={"status": "holds", "reason": "RoPE: it leaks", "errors": {"forward": 1e-15}})
    assert "1e-15 in float64 (RoPE: it leaks)" in verdict(rotary)


def test_page_opens_with_the_verdict_and_shows_every_depth(audit: PositionAudit) -> None:
    page = make_page(audit)
    text = page.render()
    assert set(page.pictures) == {"error", "named", "vectors", "spectrum"}
    first, figure = text.index("encodes its 3 × 4 positions"), text.index("<figure>")
    assert first < figure < text.index("read from its features</h2>")
    assert all(f"{condition}: error" in text for condition in ("own", "removed", "shuffled"))
    for depth in ("embedding", "1", "2", "norm"):
        assert f"<td>{depth}</td>" in text or f'<td class="number">{depth}</td>' in text
    assert "This probe predicts the exact position of" in text
    assert "situs audit gradients" in text  # a learned table has a gradient


def test_numbers_are_plain_json(audit: PositionAudit) -> None:
    numbers = json.loads(json.dumps(audit.to_json()))
    assert numbers["verdict"] == verdict(audit)
    assert [each["depth"] for each in numbers["readings"][OWN]] == ["embedding", "1", "2", "norm"]
    assert (numbers["images_fitted_on"], numbers["images_read"]) == (20, 20)
    assert numbers["row_law"]["status"] == "holds"
    assert numbers["vectors"][0]["kind"] == "learned table"


def test_a_convolution_is_refused() -> None:
    with pytest.raises(SitusError, match="has no tokens"):
        measure_positions("net", create_backbone("test_resnet").eval(), batches(2))


def test_what_the_figures_draw(audit: PositionAudit) -> None:
    named, error, vectors, spectrum = audit.figures()
    for figure, scale, name, blind in ((named, 100, "right", "blind_right"), (error, 1, "error", "blind_error")):
        for (label, (x, y)), readings in zip(figure.values[0].items(), audit.probed.readings.values(), strict=True):
            assert [*x] == [0, 1, 2, 3] and y == pytest.approx([scale * getattr(each, name) for each in readings])
            assert label
        assert figure.options["x_names"] == ["embed", "1", "2", "norm"]
        assert figure.options["level"] == ("blind", scale * getattr(audit.probed.readings[OWN][-1], blind))
    (look,) = audit.looks
    (components, read), grid = vectors.values
    assert (components[1] == look.components.points[:, :2]).all() and components[2] == look.axes[:2]
    assert (read[1] == look.decoded.guesses[:, [1, 0]]).all()  # columns lie to the right, rows downwards
    assert read[2:] == (("predicted column", "predicted row"), "row", True) and grid == (3, 4)
    ((x, y),) = spectrum.values[0].values()
    assert [*x] == [*range(1, 13)] and y == pytest.approx([100 * share for share in look.spectrum.explained])
    assert "gradient of a learned table" in vectors.caption
    fixed = replace(look, table=look.table._replace(kind="sin-cos table"))
    two = replace(audit, looks=(look, fixed)).figures()
    assert [figure.name for figure in two[2:]] == ["vectors", "spectrum", "vectors-2", "spectrum-2"]
    assert "gradient of a learned table" not in two[4].caption


def test_of_many_components_twenty_are_drawn(audit: PositionAudit) -> None:
    look = audit.looks[0]
    wide = replace(look, spectrum=replace(look.spectrum, explained=tuple([0.04] * 25)))
    ((x, y),) = replace(audit, looks=(wide,)).figures()[-1].values[0].values()
    assert [*x] == [*range(1, 21)] and len(y) == 20


def test_the_numbers_of_the_first_screen_and_the_rows_of_each_depth(audit: PositionAudit) -> None:
    first, last = audit.probed.readings[OWN][0], audit.probed.readings[OWN][-1]
    said = audit.summary()
    assert [value for value, _ in said.numbers] == [f"{100 * first.right:.0f} %", f"{100 * last.right:.0f} %"]
    assert "(chance: 8.3 %)" in said.numbers[1][1]
    (table,) = said.tables
    assert list(table.header) == ["after", "own: error", "R²", "exact position", "removed: error", "exact position",
                                  "shuffled: error", "exact position"]  # fmt: skip
    for row, own, removed in zip(table.rows, *(audit.probed.readings[each] for each in (OWN, REMOVED)), strict=True):
        assert list(row)[:6] == [own.depth, f"{own.error:.2f}", f"{own.r2:.3f}", f"{100 * own.right:.1f} %",
                                 f"{removed.error:.2f}", f"{100 * removed.right:.1f} %"]  # fmt: skip
    assert "coarser" not in table.caption and "coarser" in replace(audit, hierarchical=True).summary().tables[0].caption


LEAKY = {"status": "holds", "reason": "", "errors": {"forward": 2e-15, "backward": 1e-15}}


@pytest.mark.parametrize(
    ("law", "right", "leaks"),
    [(LEAKY, 10.01, True), (LEAKY, 10.0, False), ({**LEAKY, "status": "refused"}, 10.01, False), (None, 10.01, False)],
)
def test_tokens_that_tell_their_place_ten_times_better_than_chance_are_no_secret(
    law: Any, right: float, leaks: bool, audit: PositionAudit
) -> None:
    readings = {c: list(each) for c, each in audit.probed.readings.items()}
    first = replace(readings[OWN][0], blind_right=0.0625, right=0.0625 * right)
    readings[OWN][0] = first
    found = replace(audit, rows=law, probed=replace(audit.probed, readings=readings))
    assert ("In split learning" in found.details()[-1].caption) == leaks
    assert not leaks or f"position of {100 * first.right:.0f} % of the tokens" in found.details()[-1].caption


def test_the_largest_error_of_the_law_is_the_one_that_is_said(audit: PositionAudit) -> None:
    assert "up to an error of 2e-15 in float64." in verdict(replace(audit, rows=LEAKY))
    (*_, law) = replace(audit, rows={**LEAKY, "reason": "RoPE"}).details()
    assert [list(row) for row in law.rows] == [
        ["verdict", "holds"], ["error in float64, forward", "2.0e-15"], ["error in float64, backward", "1.0e-15"],
        ["but", "RoPE"],
    ]  # fmt: skip
    assert replace(audit, rows={**LEAKY, "status": "refused", "reason": "x"}).details()[-1].rows[-1] == ["reason", "x"]


def test_the_rows_of_shuffled_patches(audit: PositionAudit) -> None:
    one = replace(
        audit.shuffled[0], ratio=0.5, masked=6, mask_known=True, diff_norm=1.0, clean_norm=4.0, consistency=None
    )
    rows = (one, replace(one, mask_known=False, diff_norm=0.5, clean_norm=0.0, consistency=0.75))
    table = replace(audit, shuffled=rows).details()[0]
    assert [list(row) for row in table.rows] == [
        ["0.5", "known", 6, "1", "25.0 %", None], ["0.5", "hidden", 6, "0.5", None, "75.0 %"],
    ]  # fmt: skip
    bare = replace(audit, shuffled=rows[:1]).details()[0]
    assert [list(row) for row in bare.rows] == [
        ["0.5", "known", 6, "1", "25.0 %"]
    ] and "no trained classifier" in bare.caption


@pytest.mark.parametrize(
    ("moved", "said"),
    [(0.99e-5, "does not change the CLS token"), (1.01e-5, "by 0 % of its norm."), (0.5, "by 50 %")],
)
def test_what_moves_by_rounding_alone_does_not_move(moved: float, said: str, audit: PositionAudit) -> None:
    one = replace(audit.shuffled[0], ratio=0.5, masked=6, mask_known=False, clean_norm=2.0, consistency=None)
    still, far = replace(one, ratio=0.25, diff_norm=0.0), replace(one, diff_norm=2 * moved)
    assert said in verdict(replace(audit, shuffled=(far, still)))
    assert ("does not change" in verdict(replace(audit, shuffled=(still, far)))) == (moved < 1e-5)
    answers = verdict(replace(audit, shuffled=(replace(far, consistency=0.75),)))
    assert moved < 1e-5 or "75 % of the model's answers stay the same." in answers
    known = (replace(far, mask_known=True), replace(far, masked=1), replace(far, clean_norm=0.0))
    assert "shuffled, the" not in verdict(replace(audit, shuffled=known))  # nothing that a sentence could be about


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [(0.19, 0.0, "reveal the position"), (0.2, 0.5, "reveal roughly"), (0.2, 0.51, "reveal the position"),
     (0.89, 0.0, "reveal roughly"), (0.9, 0.0, "reveal no position")],
)  # fmt: skip
def test_what_the_features_reveal_at_its_bounds(left: float, right: float, said: str, audit: PositionAudit) -> None:
    readings = {OWN: list(audit.probed.readings[OWN])}
    readings[OWN][-1] = replace(readings[OWN][-1], error=left, blind_error=1.0, right=right)
    words = verdict(replace(audit, probed=replace(audit.probed, readings=readings)))
    assert f"Its features {said}" in words
    assert ("know positions only from the content" in words) == (left < 0.9)


@pytest.mark.parametrize(("left", "none"), [(0.89, False), (0.9, True)])
def test_what_the_content_alone_reveals_at_its_bound(left: float, none: bool, audit: PositionAudit) -> None:
    readings = {c: list(each) for c, each in audit.probed.readings.items()}
    readings[REMOVED][-1] = replace(readings[REMOVED][-1], error=left, blind_error=1.0)
    words = verdict(replace(audit, probed=replace(audit.probed, readings=readings)))
    assert ("finds no position in the content" in words) == none and f" {left:.2f} patches" in words
