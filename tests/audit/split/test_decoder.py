"""The learned decoder: its regression is exact, its context removes noise, and it is blind to another order."""

from __future__ import annotations

import pytest
import torch
from sent import classifier, pictures, sent
from sklearn.linear_model import LinearRegression

from situs.audit.split import decoder
from situs.audit.split.decoder import Linear, learn
from situs.audit.split.stage import streams
from situs.core.tokens import patchify

BACKBONE, PUBLIC, PRIVATE = classifier(), pictures(64, seed=1), pictures(8, seed=2)
Z, SEEN, PATCHES = streams(BACKBONE, [PUBLIC]), streams(BACKBONE, [PRIVATE]), patchify(PRIVATE, 4)


def plain(z: torch.Tensor, _: int) -> torch.Tensor:
    return z


def noisy(z: torch.Tensor, step: int) -> torch.Tensor:
    return z + 0.3 * torch.randn(z.shape, generator=torch.Generator().manual_seed(step), dtype=z.dtype)


def error(found: torch.Tensor) -> float:
    return float((found - PATCHES).square().mean())


def test_the_start_is_a_regression_of_each_patch_on_its_own_row() -> None:
    rows, patches = noisy(Z, 0)[:, 1:], patchify(PUBLIC, 4)
    x, y = (each - each.mean(dim=0) for each in (rows, patches))
    reference = LinearRegression(fit_intercept=False).fit(x.flatten(0, 1).numpy(), y.flatten(0, 1).numpy())
    wanted = patches.mean(dim=0) + torch.from_numpy(reference.predict(x.flatten(0, 1).numpy())).view_as(patches)
    torch.testing.assert_close(Linear.of(rows, patches)(rows)[0], wanted, rtol=0, atol=1e-6)


@pytest.mark.slow  # that it sees pictures, and none behind permuted rows: test_attackers
def test_it_learns_what_other_rows_say_and_does_not_put_rows_in_order() -> None:
    before = torch.random.get_rng_state()
    decode = learn(noisy, Z, patchify(PUBLIC, 4), prefix=1, seed=0, most=60)
    assert torch.equal(before, torch.random.get_rng_state())
    assert decode.steps and decode.gain > 0.05
    seen = noisy(SEEN, 999)
    assert error(decode(seen[:, 1:])) < 0.95 * error(decode.linear(seen[:, 1:])[0])
    blind = error(patchify(PUBLIC, 4).mean(dim=0).expand_as(PATCHES))
    assert error(decode(sent(seen, "none", "rows").seen[:, 1:])) > max(1.5 * error(decode(seen[:, 1:])), blind)


def test_it_stops_where_nothing_is_gained_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read without error has next to nothing to learn: it ends after three looks without a gain."""
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *given: steps.append(given) or step(*given))
    monkeypatch.setattr(decoder, "CHECK", 5)
    clear = learn(plain, Z, patchify(PUBLIC, 4), prefix=1, seed=0, changes=False)
    assert clear.steps < 60 and len(steps) == clear.steps + 3 * 5
    assert error(clear(SEEN[:, 1:])) <= 1.5 * error(clear.linear(SEEN[:, 1:])[0])


def test_the_same_seed_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "CHECK", 3)
    one, again = (learn(noisy, Z, patchify(PUBLIC, 4), prefix=1, seed=0, most=6) for _ in range(2))
    assert one.steps
    torch.testing.assert_close(one(SEEN[:, 1:]), again(SEEN[:, 1:]), rtol=0, atol=0)
