"""A step of DP-SGD against one written by hand: sample after sample, clipped, summed, with the secret's noise."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from situs.backbones import create_backbone
from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Method
from situs.methods.supervised import Supervised, SupervisedConfig
from situs.train import private
from situs.train.optim import OptimConfig
from situs.train.private import KEY_SIZE, Mechanism, PrivateStepper, Secret
from situs.train.tuning import TuningConfig, attach, freeze

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(
    find_spec("opacus") is None, reason="opacus is not installed"
)  # it imports for a second

CLIP, NOISE, EXPECTED = 0.7, 0.5, 4
PLAIN = {"seed": 0, "accumulate": 1, "parallel": "ddp", "compiled": False}


def made(parts: str = "all") -> Method:
    torch.manual_seed(0)
    args = {"depth": 2, "embed_dim": 16, "num_heads": 2, "init_values": 0.1}
    backbone = create_backbone("vit_tiny_patch16_224", img_size=28, patch_size=14, num_classes=5, model_args=args)
    method = Supervised(backbone, SupervisedConfig(label_smoothing=0.1))
    tuning = TuningConfig(parts, rank=2)  # pyright: ignore[reportArgumentType]
    freeze(attach(method, tuning), tuning, new_positions=False)
    return method.train()


def batch(count: int = 5) -> Batch:
    chance = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 28, 28, generator=chance)
    return Batch(images, torch.arange(count), {"label": torch.arange(count) % 5})


def by_hand(method: Method, given: Batch, secret: Secret, step: int) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient, and the norm that it clips to: the median of the samples', so that some are clipped."""
    trained = {name: p for name, p in method.named_parameters() if p.requires_grad}
    each = []
    for i in range(len(given.ids)):
        method.zero_grad()
        method(given.part(slice(i, i + 1)), {}).loss.backward()
        each.append({name: p.grad.double() for name, p in trained.items()})
    method.zero_grad(set_to_none=True)
    norms = [float(torch.cat([g.flatten() for g in one.values()]).norm()) for one in each]
    clip = sorted(norms)[len(norms) // 2]
    found = {}
    for name in trained:
        total = sum(one[name] * min(1.0, clip / norm) for one, norm in zip(each, norms, strict=True))
        found[name] = (total + NOISE * clip * secret.normal(step, name, total)) / EXPECTED
    return found, clip


@pytest.mark.parametrize("parts", ["all", "lora", "head"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradient_is_the_noisy_sum_of_clipped_ones(
    parts: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accumulate > 1:
        monkeypatch.setattr(private, "MAX_BYTES", 1)  # one sample's gradient at a time
    method, secret, seen = made(parts), Secret(bytes(KEY_SIZE)), {}
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    expected, clip = by_hand(method, batch(), secret, 3)
    asked = {**PLAIN, "accumulate": accumulate, "precision": "fp32"}
    stepper = PrivateStepper(method, OptimConfig(), mechanism=Mechanism(secret, NOISE, clip, EXPECTED), **asked)
    move = stepper._move

    def look(loss: torch.Tensor) -> torch.Tensor:
        seen.update({name: p.grad.clone() for name, p in stepper.trained.items()})
        return move(loss)

    monkeypatch.setattr(stepper, "_move", look)
    done = stepper.update(batch(), When(step=3), 1e-2, ragged=False)
    for name, value in expected.items():
        torch.testing.assert_close(seen[name].double(), value, rtol=1e-4, atol=1e-6)
    whole = method.eval()(batch(), {})
    method.load_state_dict({**method.state_dict(), **before})
    torch.testing.assert_close(done.values[0], method(batch(), {}).loss, rtol=1e-4, atol=1e-5)  # the mean over samples
    assert whole.loss != done.values[0] and "accuracy" in stepper.names
    assert all(torch.equal(p, before[name]) for name, p in method.named_parameters() if name not in expected)


@pytest.mark.parametrize("parts", ["all", "head"])
def test_the_gradients_of_samples_that_are_in_memory_at_a_time_take_two_gibibytes(parts: str) -> None:
    method, mechanism = made(parts), Mechanism(Secret(bytes(KEY_SIZE)), NOISE, CLIP, EXPECTED)
    stepper = PrivateStepper(method, OptimConfig(), mechanism=mechanism, **PLAIN, precision="fp32")
    one = sum(4 * p.numel() for p in method.parameters() if p.requires_grad)
    assert stepper.at_once * one <= 2 * 1024**3 < (stepper.at_once + 1) * one


def test_the_same_step_again_has_the_same_noise_and_the_next_another() -> None:
    asked = {**PLAIN, "precision": "fp32"}
    mechanism, found = Mechanism(Secret(b"x" * KEY_SIZE), NOISE, CLIP, EXPECTED), []
    for step in (1, 1, 2):
        method = made("head")
        PrivateStepper(method, OptimConfig(), mechanism=mechanism, **asked).update(
            batch(), When(step=step), 1e-2, ragged=False
        )
        found.append(method.backbone.model.head.weight.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("bias", ["none", "added", "hidden"])
def test_attention_that_is_written_out_is_torchs_own(bias: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64).unbind()
    mask = {"none": None, "added": torch.randn(5, 5).double(), "hidden": torch.rand(5, 5) < 0.7}[bias]
    if bias == "hidden":
        mask |= torch.eye(5, dtype=torch.bool)
    with private.WrittenOut():
        found = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Softmaxes(TorchDispatchMode):
    """The types that softmax is computed in, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[torch.dtype, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._softmax.default, torch.ops.aten._softmax_backward_data.default):
            given = [each.dtype if isinstance(each, torch.Tensor) else each for each in args]
            self.types.append(tuple(each for each in given if isinstance(each, torch.dtype)))
        return func(*args, **(kwargs or {}))


def step_of(precision: str, device: str) -> tuple[dict[str, torch.Tensor], list[tuple[torch.dtype, ...]]]:
    method, mechanism = made().to(device), Mechanism(Secret(bytes(KEY_SIZE)), 0.0, 1e3, EXPECTED)
    stepper = PrivateStepper(method, OptimConfig(), mechanism=mechanism, **PLAIN, precision=precision)
    given, seen = batch(), Softmaxes()
    moved = Batch(given.inputs.to(device), given.ids.to(device), {n: t.to(device) for n, t in given.targets.items()})
    with seen:
        stepper.update(moved, When(step=1), 0.0, ragged=False)
    return {name: p.grad.cpu() for name, p in stepper.trained.items()}, seen.types


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_bf16_a_softmax_is_of_float32_and_goes_back_as_it_came(device: str) -> None:
    found, types = step_of("bf16", device)
    assert len(types) == 4 and {each for one in types for each in one} == {torch.float32}  # two blocks, there and back
    expected, _ = step_of("fp32", device)
    flat = [torch.cat([grads[name].flatten() for name in expected]) for grads in (found, expected)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.999


def test_fp16_is_refused_and_nothing_is_left_of_single_gradients() -> None:
    method = made("head")
    mechanism = Mechanism(Secret(bytes(KEY_SIZE)), NOISE, CLIP, EXPECTED)
    with pytest.raises(SitusError, match="bf16 or fp32"):
        PrivateStepper(method, OptimConfig(), mechanism=mechanism, **PLAIN, precision="fp16")
    stepper = PrivateStepper(method, OptimConfig(), mechanism=mechanism, **PLAIN, precision="fp32")
    stepper.update(batch(), When(), 1e-2, ragged=False)
    assert all(p.grad_sample is None for p in method.parameters() if isinstance(p, nn.Parameter) and p.requires_grad)
