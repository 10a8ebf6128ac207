from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import ToyLoader, toy

from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Output
from situs.progress import notes_to
from situs.train.optim import OptimConfig
from situs.train.step import Stepper, split

OPTIM = OptimConfig(lr=1e-2, warmup_epochs=0, weight_decay=0.1)


@given(st.integers(1, 40), st.integers(1, 12))
def test_split_keeps_every_sample_once(total: int, count: int) -> None:
    batch = Batch(torch.arange(total)[:, None], torch.arange(total), {"label": torch.arange(total) * 2})
    parts = split(batch, count)
    assert torch.equal(torch.cat([part.ids for part, _ in parts]), batch.ids)
    assert torch.equal(torch.cat([part.inputs for part, _ in parts]), batch.inputs)
    assert torch.equal(torch.cat([part.targets["label"] for part, _ in parts]), batch.targets["label"])
    sizes = [len(part.ids) for part, _ in parts]
    assert len(parts) == min(total, count)
    assert max(sizes) - min(sizes) <= 1
    assert [share for _, share in parts] == [size / total for size in sizes]


def stepped(accumulate: int, count: int, steps: int = 3, *, compiled: bool = False):
    """(weights, values) after some steps of batches of `count` samples in float64."""
    method = toy(dtype=torch.float64)
    stepper = Stepper(method, OPTIM, seed=0, precision="fp32", accumulate=accumulate, parallel="ddp", compiled=compiled)
    loader = ToyLoader(count=count * steps, batch=count, dtype=torch.float64)
    done = [stepper.update(batch, When(step=i), 1e-2, ragged=False) for i, batch in enumerate(loader.iterate(0, 0))]
    gradients = {n: p.grad for n, p in method.named_parameters() if p.grad is not None}
    return method, gradients, torch.stack([step.values for step in done])


@pytest.mark.parametrize(
    ("accumulate", "count"), [(4, 32), (3, 32), (5, 7), (9, 7)], ids=["even", "ragged", "7/5", "7/9"]
)
def test_accumulation_is_the_large_batch(accumulate: int, count: int) -> None:
    # AdamW hides a wrong scale of the gradient (it divides by its size), so the gradients themselves are compared.
    whole, expected, values = stepped(1, count)
    parts, gradients, partial = stepped(accumulate, count)
    assert gradients.keys() == expected.keys()
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(values, partial, rtol=1e-5, atol=1e-6)  # float32, for the log


def test_metrics_that_change_their_names_are_one_sentence() -> None:
    method, loader = toy(), ToyLoader()
    stepper = Stepper(method, OPTIM, seed=0, precision="fp32", accumulate=1, parallel="ddp", compiled=False)
    first, second, *_ = loader.iterate(0, 0)
    stepper.update(first, When(), 1e-2, ragged=False)
    real = type(method).forward

    class Other(type(method)):
        def forward(self, batch: Batch, draws: Any) -> Output:
            return real(self, batch, draws)._replace(metrics={"size": torch.tensor(1.0)})

    method.__class__ = Other
    said = r"Other: every step must give .* were \('loss', 'accuracy', 'size'\) and are now \('loss', 'size'\)$"
    with pytest.raises(SitusError, match=said):
        stepper.update(second, When(step=1), 1e-2, ragged=False)


def test_an_update_is_adamw_by_hand() -> None:
    method, peer = toy(dtype=torch.float64), toy(dtype=torch.float64)
    stepper = Stepper(method, OPTIM, seed=0, precision="fp32", accumulate=1, parallel="ddp", compiled=False)
    bare = [p for n, p in peer.named_parameters() if p.ndim <= 1 or n.endswith("pos_embed")]
    decayed = [p for n, p in peer.named_parameters() if not (p.ndim <= 1 or n.endswith("pos_embed"))]
    groups = [{"params": bare, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False, fused=False)
    for i, batch in enumerate(ToyLoader(dtype=torch.float64).iterate(0, 0)):
        stepper.update(batch, When(step=i), 1e-2, ragged=False)
        optimizer.zero_grad()
        peer(batch, peer.draw(batch, When(seed=0, epoch=0))).loss.backward()
        optimizer.step()
    for p, q in zip(method.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_step_does_not_use_is_neither_moved_nor_decayed(accumulate: int) -> None:
    """Nor by the moments of the steps that have used it."""
    method, used = toy(), [True]
    forward = method.forward

    def sometimes(batch, draws):
        output = forward(batch, draws)
        return output._replace(loss=output.loss + method.spare.square().sum()) if used[0] else output

    method.forward = sometimes  # type: ignore[method-assign]
    stepper = Stepper(method, OPTIM, seed=0, precision="fp32", accumulate=accumulate, parallel="ddp", compiled=False)
    kept = []
    for step, batch in enumerate(ToyLoader(count=32).iterate(0, 0)):
        used[0] = step in (0, 2)
        stepper.update(batch, When(step=step), 1e-2, ragged=False)
        kept.append(method.spare.detach().clone())
    assert [torch.equal(now, before) for before, now in pairwise(kept)] == [True, False, True]


def test_in_fp16_the_scale_follows_the_overflows() -> None:
    """Every update either moves the weights and doubles the scale, or overflows, moves nothing and halves it."""
    method = toy()
    stepper = Stepper(method, OPTIM, seed=0, precision="fp16", accumulate=1, parallel="ddp", compiled=False)
    assert stepper.scaler is not None
    stepper.scaler.set_growth_interval(1)
    seen = []
    for number, batch in enumerate(ToyLoader().iterate(0, 0)):
        if number == 2:
            stepper.scaler.update(2.0**60)
        before, scale = method.backbone.model.head.weight.detach().clone(), stepper.scaler.get_scale()
        stepper.update(batch, When(step=number), 1e-2, ragged=False)
        moved = not torch.equal(before, method.backbone.model.head.weight)
        assert stepper.scaler.get_scale() == scale * (2.0 if moved else 0.5)
        seen.append(moved)
    assert seen[0]
    assert not seen[2]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_in_fp16_gradients_are_clipped_without_their_scale(accumulate: int) -> None:
    """AdamW hides a scale that was left in, or a share that was taken twice: the norm that is clipped does not."""
    clipped, norms = OptimConfig(lr=1e-2, clip=0.1), {}
    for precision in ("fp32", "fp16"):
        method, batch = toy(), next(ToyLoader(batch=32).iterate(0, 0))
        asked = {"precision": precision, "accumulate": accumulate, "parallel": "ddp", "compiled": False}
        norms[precision] = float(Stepper(method, clipped, seed=0, **asked).update(batch, When(), 1e-2, False).norm)
        gradients = torch.stack([p.grad.norm() for p in method.parameters() if p.grad is not None])
        assert float(gradients.norm()) == pytest.approx(0.1, rel=1e-3)
    assert norms["fp32"] > 0.2  # else nothing was clipped
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=1e-2)


@pytest.mark.slow
def test_a_compiled_step_is_an_eager_step() -> None:
    whole, expected, values = stepped(2, 8)
    torch._dynamo.utils.counters.clear()
    compiled, gradients, others = stepped(2, 8, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10)
    for p, q in zip(whole.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(values, others)


def test_of_a_method_that_decides_on_the_host_its_part_alone_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    given, said, method = [], [], toy()
    monkeypatch.setattr(torch, "compile", lambda part: given.append(part) or part)
    monkeypatch.setattr(type(method), "compiled_part", "encode")
    asked = {"seed": 0, "precision": "fp32", "accumulate": 1, "parallel": "ddp", "compiled": True}
    with notes_to(said.append):
        stepper = Stepper(method, OPTIM, **asked)
    assert given == [method.encode] and stepper.spread.forward is method
    stepper.update(next(ToyLoader(count=4, batch=4).iterate(0, 0)), When(), 1e-2, ragged=False)
    wanted = "makes decisions on the CPU, so encode alone is compiled, and no CUDA graph is recorded"
    assert said == [f"{type(method).__name__} {wanted}"]


@pytest.mark.parametrize("loss", [0.0, -1.5, 3.4e38, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("norm", [1e-30, 3.4e38, float("inf"), float("nan")])
def test_flags_say_what_is_not_finite_and_stay(loss: float, norm: float) -> None:
    stepper = Stepper(toy(), OPTIM, seed=0, precision="fp32", accumulate=1, parallel="ddp", compiled=False)
    place = stepper.flags.data_ptr()
    stepper._raise_flags(torch.tensor(loss), torch.tensor(norm))
    fine = math.isfinite(loss) and math.isfinite(norm)
    assert stepper.flags.tolist() == [float(not fine), 0.0]
    stepper.stop.fill_(1.0)
    stepper._raise_flags(torch.tensor(0.5), torch.tensor(0.5))
    assert stepper.flags.tolist() == [float(not fine), 1.0] and stepper.flags.data_ptr() == place
