from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.data.batch import Batch


@given(st.integers(1, 12), st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_parts_hold_every_sample_with_all_that_is_its_own(count: int, cuts: list[int], padded: bool) -> None:
    ids = torch.arange(count)
    targets = {"label": ids * 3, "boxes": ids[:, None, None].expand(-1, 2, 4) + 0.5}
    batch = Batch(ids[:, None] * 10.0, ids, targets, ids[:, None] > torch.arange(5) if padded else None)
    seen: list[int] = []
    for start, stop in pairwise(sorted({0, count, *(cut for cut in cuts if cut < count)})):
        part = batch.part(slice(start, stop))
        for row, name in enumerate(part.ids.tolist()):
            seen.append(name)
            assert part.inputs[row].tolist() == [name * 10.0]
            assert int(part.targets["label"][row]) == name * 3
            assert part.targets["boxes"][row].eq(name + 0.5).all()
            assert part.mask is None if not padded else part.mask[row].tolist() == [name > n for n in range(5)]
    assert seen == list(range(count))
