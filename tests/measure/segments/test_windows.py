"""Windows beside the whole: equal where both see the same, averaged where windows overlap."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import small_method, small_vit
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from situs.measure.segments.windows import Inference, segment, starts


@given(st.integers(1, 200), st.integers(1, 60), st.floats(0, 0.9))
def test_windows_cover_a_side_and_overlap_enough(spare: int, window: int, overlap: float) -> None:
    found = starts(window + spare, window, overlap)
    assert found[0] == 0 and found[-1] == spare and found == sorted(set(found))
    step = max(1, int(window * (1 - overlap)))
    assert all(b - a <= step + 0.5 for a, b in itertools.pairwise(found))
    assert starts(window, window, overlap) == [0]


def local(inputs: Tensor) -> Tensor:
    """A model that looks at each point alone: what it says of one does not depend on what else it sees."""
    return torch.stack([inputs[:, 0] * 2, inputs[:, 1] - inputs[:, 2]], dim=1)


@pytest.mark.parametrize("overlap", [0.0, 1 / 3, 0.8])
def test_a_model_of_single_points_sees_the_same_in_windows_and_in_the_whole(overlap: float) -> None:
    picture = torch.randn(3, 28, 36, generator=torch.Generator().manual_seed(0))
    whole = segment(local, picture, (12, 16), (4, 4), Inference("whole"))
    slid = segment(local, picture, (12, 16), (4, 4), Inference("slide", overlap, at_once=3))
    torch.testing.assert_close(slid, whole, rtol=0, atol=1e-5)


def test_a_window_that_sees_the_whole_picture_is_the_whole() -> None:
    torch.manual_seed(0)
    method = small_method("segmentation", small_vit((16, 24)), 3, width=16, auxiliary_width=16).eval()
    picture = torch.randn(3, 16, 24)
    with torch.no_grad():
        slid, whole = (
            segment(method.logits, picture, (16, 24), (4, 4), Inference(mode)) for mode in ("slide", "whole")
        )
        assert torch.equal(slid, whole)
        # In a larger picture a window's own part is what the model says of that part alone.
        large = torch.randn(3, 16, 40)
        slid = segment(method.logits, large, (16, 24), (4, 4), Inference("slide", 1 / 3))
        left, right = (method.logits(large[None, :, :, at : at + 24])[0] for at in (0, 16))
        torch.testing.assert_close(slid[..., :16], left[..., :16], rtol=0, atol=1e-5)
        torch.testing.assert_close(slid[..., 24:], right[..., 8:], rtol=0, atol=1e-5)
        torch.testing.assert_close(slid[..., 16:24], (left[..., 16:] + right[..., :8]) / 2, rtol=0, atol=1e-5)


def test_the_whole_is_brought_to_whole_patches() -> None:
    seen = []

    def look(inputs: Tensor) -> Tensor:
        seen.append(tuple(inputs.shape[2:]))
        return local(inputs)

    picture = torch.ones(3, 17, 22)
    assert segment(look, picture, (16, 16), (4, 4), Inference("whole")).shape == (2, 17, 22)
    assert seen == [(16, 24)]
