"""One update of DP-SGD: per-sample gradients clipped by Opacus, noise on their sum, then AdamW as usual.

The per-sample gradients come from torch.func over the method itself (Opacus' no-op mode): Opacus' hooks know layers,
and a transformer's tokens and tables are in none. What AdamW and the mean compute from the noisy sum is covered by the
same ε.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.core.attention import attention_weights
from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Method
from situs.train import distributed
from situs.train.optim import OptimConfig
from situs.train.private.accounting import opacus
from situs.train.private.secret import Secret
from situs.train.step import MicroBatch, Stepper, Update, autocast

MAX_BYTES = 2**31
"""Bytes of per-sample gradients in memory at a time."""


@dataclass(frozen=True)
class Mechanism:
    """noise: of the sum, in units of clip. batch: samples per step on average, by which the sum is divided."""

    secret: Secret
    noise: float
    clip: float
    batch: int


class WrittenOut(TorchFunctionMode):
    """Attention as products and a softmax in float32, and norms in float32.

    Fused attention does not support per-sample gradients: torch would loop over the samples. Its own unfused form, and
    on a CPU its norms, fail there in bf16, since a gradient has another dtype than its tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = {F.scaled_dot_product_attention: _attend, F.layer_norm: _normalise}.get(func, func)
        return call(*args, **(kwargs or {}))


def _normalise(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.layer_norm(x.to(torch.promote_types(x.dtype, torch.float32)), *args, **kwargs)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    assert not is_causal, "causal attention is not supported here"
    with torch.autocast(q.device.type, enabled=False):
        weights = F.dropout(attention_weights(q, k, attn_mask, scale), dropout_p)
        return weights.to(v.dtype) @ v


class PrivateStepper(Stepper):
    """`Stepper` with the clipped and noisy gradient of a mechanism; without graphs and compilation."""

    def __init__(self, method: Method, optim: OptimConfig, *, mechanism: Mechanism, **options: Any) -> None:
        if options["precision"] == "fp16":
            raise SitusError(field=("train.precision", "dp"), value="fp16", allowed="bf16 or fp32 with dp")
        if distributed.world() > 1:
            raise SitusError("dp: trains on one rank only", field="dp")
        super().__init__(method, optim, **{**options, "compiled": False, "graph": False})
        self.mechanism, self.when = mechanism, When()
        names = {id(p): name for name, p in method.named_parameters()}
        self.trained = {names[id(p)]: p for p in self.parameters}
        self.private = opacus("optimizers").DPOptimizer(
            self.optimizer,
            noise_multiplier=mechanism.noise,
            max_grad_norm=mechanism.clip,
            expected_batch_size=mechanism.batch,
        )
        numbers = sum(p.numel() for p in self.parameters)
        self.at_once = max(1, MAX_BYTES // (4 * numbers))

    def update(self, batch: Batch, when: When, rate: float, ragged: bool) -> Update:
        self.when = when
        return super().update(batch, when, rate, ragged)

    def _compute(self, parts: list[MicroBatch]) -> Tensor:
        self.private.zero_grad(set_to_none=True)
        total, count = None, 0
        for part in parts:
            if part.draws:
                raise SitusError("dp: methods with random draws are not supported", field="dp")
            for at in range(0, len(part.batch.ids), self.at_once):
                sums = self._accumulate(part.batch.part(slice(at, at + self.at_once)))
                total = sums if total is None else total + sums
            count += len(part.batch.ids)
        assert total is not None, "a step without samples"
        self._add_noise()
        values = total / count
        norm = self._move(values[0])
        return torch.cat([values, norm.float()[None]])

    def _accumulate(self, batch: Batch) -> Tensor:
        """Adds the clipped gradients of some samples to their sum; gives the sums of loss and metrics."""
        weights = {name: p.detach() for name, p in self.trained.items()}

        def loss(weights: dict[str, Tensor], *sample: Any) -> tuple[Tensor, Tensor]:
            inputs, ids, targets, mask = sample
            target = {name: value[None] for name, value in targets.items()}
            single = Batch(inputs[None], ids[None], target, None if mask is None else mask[None])
            output = functional_call(self.method, weights, (single, {}))
            return output.loss, self._values(output)

        with WrittenOut(), autocast(self.device, self.precision):
            axes = (None, 0, 0, 0, None if batch.mask is None else 0)
            per_sample = vmap(grad_and_value(loss, has_aux=True), in_dims=axes, randomness="different")
            gradients, (_, values) = per_sample(weights, batch.inputs, batch.ids, dict(batch.targets), batch.mask)
        for name, parameter in self.trained.items():
            parameter.grad_sample = gradients[name]  # pyright: ignore[reportAttributeAccessIssue]
        self.private.clip_and_accumulate()
        for parameter in self.parameters:
            parameter.grad_sample = None  # pyright: ignore[reportAttributeAccessIssue]
        return values.sum(dim=0)

    @torch.no_grad()
    def _add_noise(self) -> None:
        """Sets the gradients: the sum plus secret noise, divided by the average number of samples per step."""
        mechanism = self.mechanism
        for name, parameter in self.trained.items():
            summed: Any = getattr(parameter, "summed_grad")  # noqa: B009  (Opacus hangs it there)
            noise = mechanism.secret.normal(self.when.step, name, parameter) * (mechanism.noise * mechanism.clip)
            parameter.grad = ((summed.double() + noise) / mechanism.batch).to(parameter.dtype)
