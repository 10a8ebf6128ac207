"""The learned decoder: its regression is exact, its context removes noise, and it is blind to another order."""

from __future__ import annotations

import pytest
import torch
from sent import classifier, pictures, sent
from sklearn.linear_model import LinearRegression

from situs.audit.split import decoder
from situs.audit.split.decoder import Context, Linear, learn
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
    found = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)  # what was drawn before does not matter
        found.append(learn(noisy, Z, patchify(PUBLIC, 4), prefix=1, seed=seed, most=6))
    assert found[0].steps
    one, again, other = (each(SEEN[:, 1:]) for each in found)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_a_regression_says_what_it_leaves_and_gives_rows_of_unit_size() -> None:
    rows, patches = noisy(Z, 0)[:, 1:], patchify(PUBLIC, 4)
    linear = Linear.of(rows, patches)
    found, features = linear(rows)
    assert linear.error == pytest.approx(float((found - patches).square().sum() / patches.numel()) ** 0.5)
    scaled, says = features.split((rows.shape[2], patches.shape[2]), dim=2)
    centred = (rows - rows.mean(dim=0)).flatten(0, 1)
    torch.testing.assert_close(scaled.flatten(0, 1), (centred / centred.std(dim=0)).float())
    mean = patches.mean(dim=0)
    torch.testing.assert_close(says, ((found - mean) / mean.std()).float())


def test_what_the_context_adds_is_nothing_at_first() -> None:
    assert bool((Context(4, 7, 5)(torch.randn(3, 4, 7)) == 0).all())


def test_each_step_has_the_gradient_of_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last layer's bias: the mean of what is left, twice; one batch has all images."""
    made, apart, step, new = [], [], torch.optim.AdamW.step, Context.__init__
    chance = torch.Generator().manual_seed(0)
    streams, patches = (torch.randn(n, generator=chance, dtype=torch.float64) for n in ((18, 4, 6), (18, 3, 5)))
    linear = Linear.of(streams[3:, 1:].tanh(), patches[3:])
    alone, features = linear(streams[3:, 1:].tanh())

    def stepped(optimizer: torch.optim.AdamW, *given: object) -> object:
        with torch.no_grad():
            left = made[0](features) - ((patches[3:] - alone) / linear.error).float()
        apart.append(made[0].leave.bias.grad - 2 * left.mean(dim=(0, 1)) / 5)
        return step(optimizer, *given)

    monkeypatch.setattr(Context, "__init__", lambda self, *given: (made.append(self), new(self, *given))[1])
    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    learn(lambda z, _: z.tanh(), streams, patches, prefix=1, seed=0, changes=False, most=4)
    torch.testing.assert_close(torch.stack(apart), torch.zeros(4, 5), rtol=0, atol=1e-5)


def test_gains_are_of_images_held_out_and_every_round_is_sent_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixth is held out; the rate rises to its full height until the first look; every round sees all rows once."""
    calls, rates, step = [], [], torch.optim.AdamW.step
    chance = torch.Generator().manual_seed(0)
    streams, patches = (torch.randn(n, generator=chance, dtype=torch.float64) for n in ((115, 4, 6), (115, 3, 5)))

    def send(z: torch.Tensor, number: int) -> torch.Tensor:
        calls.append((len(z), number))
        return z.tanh() + 0.1 * number

    def stepped(optimizer: torch.optim.AdamW, *given: object) -> object:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    monkeypatch.setattr(decoder, "CHECK", 8)
    patches[:, :, 0] = streams[:, [2, 3, 1], 0] * 3  # what other rows say
    decode = learn(send, streams, patches, prefix=1, seed=0, most=16)
    fitted, held = 96, 19
    assert calls == [(fitted, 0), (held, 1), (fitted, 1), (fitted, 2 + 6), (fitted, 2 + 12)]
    assert rates == pytest.approx([decoder.RATE * min(1, n / 8) for n in range(1, 17)])
    rows = send(streams[:held], 1)[:, 1:]
    left = [(found - patches[:held]).square().mean() for found in (decode(rows), decode.linear(rows)[0])]
    assert decode.steps == 16 and decode.gain == pytest.approx(1 - float(left[0] / left[1]), rel=1e-4)
    assert decode.gain > 0.01
    torch.testing.assert_close(decode(rows), torch.cat([decode(row[None]) for row in rows]), rtol=0, atol=1e-5)
