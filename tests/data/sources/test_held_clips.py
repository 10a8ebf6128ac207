"""Held clips against the source they were decoded from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from situs.core.random import uniform
from situs.data.sources.base import Source
from situs.data.sources.held_clips import HeldClips
from situs.data.sources.images import BrokenImageError


class Clips(Source):
    """Even ones are whole numbers of 16 bits, odd ones go beyond full scale; some are broken."""

    def __init__(self, broken: tuple[int, ...], *, labels: bool = True) -> None:
        super().__init__("clips", ("a", "b") if labels else None, None, strict=False)
        self.broken, self.labels, self.times = broken, labels, 0

    def __len__(self) -> int:
        return 20

    def key(self, index: int) -> str:
        return f"clip-{index}"

    def read(self, index: int) -> dict[str, Any]:
        self.times += 1
        if index in self.broken:
            raise BrokenImageError(f"clip {index}: is torn")
        wave = 2.4 * uniform(0, 0, torch.tensor([index]), "clips", (50,))[0] - 1.2
        wave = (wave * 20_000).round() / 32_768 if index % 2 == 0 else wave
        return {"wave": wave, "label": index % 2} if self.labels else {"wave": wave}


@pytest.mark.parametrize("broken", [(), (0, 7), tuple(range(20))])
def test_the_same_clips_read_once(broken: tuple[int, ...]) -> None:
    source, plain = Clips(broken), Clips(broken)
    held = HeldClips(source)
    assert source.times == len(held) == 20
    for _ in range(2):
        for index in range(20):
            if index in broken:
                with pytest.raises(BrokenImageError, match=f"clip {index}: is torn"):
                    held.read(index)
                continue
            found, wanted = held.read(index), plain.read(index)
            assert found["label"] == wanted["label"] and held.key(index) == f"clip-{index}"
            if index % 2 == 0:
                assert torch.equal(found["wave"], wanted["wave"])
            else:
                torch.testing.assert_close(
                    found["wave"], wanted["wave"].clamp(-1, 32_767 / 32_768), rtol=0, atol=1.6e-5
                )
    assert source.times == 20
    assert held.origin(3) == (source, 3)


def test_a_set_without_labels() -> None:
    held = HeldClips(Clips((), labels=False))
    assert held.classes is None and held.read(1).keys() == {"wave"}
