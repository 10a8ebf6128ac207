"""The learned decoder: it learns, the same every time, and is blind to an order that it did not see."""

from __future__ import annotations

import torch
from sent import classifier, pictures, sent

from situs.audit.split.decoder import learn
from situs.audit.split.view import streams
from situs.core.tokens import patchify


def test_it_learns_and_does_not_put_rows_in_order() -> None:
    backbone, public, private = classifier(), pictures(64, seed=1), pictures(8, seed=2)
    z, seen, patches = streams(backbone, [public]), streams(backbone, [private]), patchify(private, 4)
    given = {"prefix": 1, "steps": 60, "seed": 0, "batch": 16}
    before = torch.random.get_rng_state()
    decode = learn(lambda tokens, _: tokens, z, patchify(public, 4), **given)
    assert torch.equal(before, torch.random.get_rng_state())

    def error(found: torch.Tensor) -> float:
        return float((found - patches).square().mean())

    blind = error(patchify(public, 4).mean(dim=0).expand_as(patches))
    assert error(decode(seen)) < 0.6 * blind
    assert error(decode(sent(seen, "none", "rows").seen)) > max(1.5 * error(decode(seen)), blind)

    one, again = (learn(lambda tokens, _: tokens, z, patchify(public, 4), **{**given, "steps": 3}) for _ in range(2))
    torch.testing.assert_close(one(seen), again(seen))
