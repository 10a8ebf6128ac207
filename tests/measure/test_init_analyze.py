"""The analyses as functions: any model, a set of images, a result that can be published."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import small_method, small_vit

from situs import measure
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.models import open_model


def source() -> TensorSource:
    pixels = torch.randint(256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return TensorSource(pixels, None, None, "six")


def test_each_looks_at_as_many_images_as_it_is_told() -> None:
    torch.manual_seed(0)
    backbone = small_vit(8, depth=2).eval()
    attention = measure.analyze_attention(backbone, source(), layer=1, show=2, count=5)
    assert (attention.survey.images, len(attention.shown.images), attention.shown.layer) == (5, 2, 0)
    correlation = measure.analyze_correlation(backbone, source(), depth="1", count=4)
    assert correlation.to_json()["images"] == 4 and correlation.depth == "1"
    run = replace(open_model(backbone), method=small_method("mp3", backbone).eval())
    puzzles = measure.analyze_reconstruct(run, source(), ratios=(0.5,), show=3, pairs=1, count=4)
    assert [each["images"] for each in puzzles.to_json()["settings"]] == [4]
    assert (len(puzzles.images), len(puzzles.mixes)) == (3, 1)
    tables = measure.analyze_positions([backbone, small_vit(8, depth=1)], folds=2)
    assert [look.name for look in tables.looks] == [backbone.name, f"{backbone.name} (2)"]
    for found in (attention, correlation, puzzles):
        assert found.provenance.facts["data"].startswith("six")


def test_what_cannot_be_is_named_by_its_argument() -> None:
    backbone = small_vit(8, depth=1)
    for call, field in (
        (lambda: measure.analyze_attention(backbone, source(), layer=3), "layer"),
        (lambda: measure.analyze_attention(backbone, source(), show=0), "show"),
        (lambda: measure.analyze_correlation(backbone, source(), depth="9"), "depth"),
        (lambda: measure.analyze_positions([]), "model"),
        (lambda: measure.analyze_runs([]), "runs"),
    ):
        with pytest.raises(SitusError) as error:
            call()
        assert error.value.field == field
