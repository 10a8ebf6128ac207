"""The page of attention says whose attention it shows, and how the model was run."""

from __future__ import annotations

import pytest
import torch

from situs.measure.attention import Attention, AttentionMaps, Survey
from situs.pages import make_page as page

CLS, MEAN = "Attention of the CLS token to the patches, in layer 2", "Mean attention of all patches"
WITHOUT = "The model was trained without positions and runs without positions here."


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("cls", "positions"), [(True, True), (False, True), (True, False)])
def test_it_says_whose_attention_it_is_and_whether_positions_took_part(cls: bool, positions: bool) -> None:
    layers = torch.full((2, 2), 0.5, dtype=torch.float64)
    survey = Survey((2, 2), 3, 5, layers, torch.rand(2, 2, 3, 3), layers, layers)
    shown = AttentionMaps(torch.rand(2, 3, 8, 8), torch.full((2, 2, 2, 2), 0.25), 1, cls=cls, positions=positions)
    text = page(Attention(survey, shown)).render()
    assert (CLS in text, MEAN in text, WITHOUT in text) == (cls, not cls, not positions)


def drawn(entropy: torch.Tensor, distance: torch.Tensor, **shown: bool) -> Attention:
    """Two layers of three heads on a grid of 2 × 3 with two prefix tokens, over four images."""
    prefix = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.9]]).double()
    survey = Survey((2, 3), 4, 8, entropy, torch.rand(2, 3, 3, 5), distance, prefix)
    maps = torch.zeros(2, 3, 2, 3)
    maps[..., 1, 2], maps[..., 0, 0] = 0.75, 0.25
    return Attention(survey, AttentionMaps(torch.rand(2, 3, 8, 8), maps, 1, cls=True, **shown))


ENTROPY = torch.tensor([[1.0, 0.5, 1.5], [2.0, 0.25, 1.25]]).double()


@pytest.mark.parametrize(
    ("near", "said"),
    [(0, "No head is local"), (1, "One head is local"), (2, "2 heads are local"), (6, "6 heads are local")],
)
def test_a_head_is_local_below_half_the_distance_of_uniform_attention(near: int, said: str) -> None:
    # Two random places of 2 × 3 are (4 · 1 + 4 √2 ... ) apart on average: the mean over all 36 pairs.
    places = [(row, column) for row in range(2) for column in range(3)]
    mean = sum(((a - c) ** 2 + (b - d) ** 2) ** 0.5 for a, b in places for c, d in places) / 36
    distance = torch.where(torch.arange(6).view(2, 3) < near, 0.499 * mean, 0.501 * mean).double()
    result = drawn(ENTROPY, distance)
    sentence = result.summary().sentence
    assert (
        said in sentence and "Of 6 heads, head 2 of layer 2 (0.25 nats, like uniform attention to 1.3 of 8" in sentence
    )
    assert "head 1 of layer 2 (2.00 nats, like uniform attention to 7.4 of 8 tokens) has the widest" in sentence
    # A tenth of six places is 0.6 of the brightest one.
    assert sentence.startswith("In layer 2, 45 % of the attention from CLS to patches goes to one tenth of the patches")
    assert result.numbers()["uniform_distance"] == pytest.approx(mean)
    assert f"a distance of {mean:.1f} patches on this 2×3 grid" in result.figures()[1].caption


def test_the_rows_are_means_over_the_heads_of_a_layer() -> None:
    result = drawn(ENTROPY, torch.tensor([[1.0, 2.0, 4.0], [0.5, 3.0, 3.0]]).double())
    (table,) = result.summary().tables
    assert [list(row) for row in table.rows] == [
        ["1", "1.00", "0.50", "1.50", "2.3", "20.0 %"], ["2", "1.17", "0.25", "2.00", "2.2", "60.0 %"],
    ]  # fmt: skip
    assert [value for value, _ in result.summary().numbers] == ["0.25 of 2.08", "0.5", "45 %"]
    images, heads, relative = result.figures()
    assert torch.equal(heads.values[0]["Entropy of each head"][0], ENTROPY)
    assert torch.equal(heads.values[0]["Mean distance of each head"][0], result.survey.distance)
    assert [[*each] for each in heads.values[1:3]] == [[1, 2], [1, 2, 3]]
    assert "from −1 to 1, horizontal offsets from −2 to 2" in relative.caption
    assert (relative.values[0] == result.survey.relative.numpy()).all()
    assert (images.values[1] == result.shown.maps.numpy()).all()
    numbers = result.numbers()
    assert (numbers["maps"]["layer"], numbers["maps"]["images"], numbers["images"], numbers["tokens"]) == (2, 2, 4, 8)
    assert numbers["maps"]["on_brightest_tenth_by_head"] == pytest.approx([0.45] * 3)
