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
