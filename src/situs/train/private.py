"""DP-SGD: Poisson sampling, each sample's gradient clipped, noise on their sum, and the guarantee (ε, δ).

The guarantee is that of the PRV accountant of Opacus (the extra `dp`). It assumes what the training does: a step takes
each sample with probability q by itself (Poisson), clips the gradient of each to norm C, and adds Gaussian noise of
deviation noise · C to their sum. Neighbours differ by one sample that is there or not.

The per-sample gradients come from torch.func over the method itself (Opacus' no-op mode): Opacus' hooks know layers,
and a transformer's tokens and tables are in none. What AdamW and the mean compute from the noisy sum is covered by the
same ε.

An attacker who knows the noise of a step subtracts it, and one who knows which samples a step took loses the
amplification by sampling. So both come from 32 bytes of the operating system, never from the run's seed, which is in
its config. They are in the run's folder, readable by its owner alone, until the run is complete, and are then deleted.
The library's other draws are fast hashes whose outputs reveal their seed, so they are not used here. Each step has its
own words, so that a run resumes at any step as if it had never stopped.
"""

from __future__ import annotations

import importlib
import math
import os
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.config import Checked
from situs.core.attention import attention_weights
from situs.core.when import When
from situs.data.augment.recipes import AugmentConfig
from situs.data.loader import Loader
from situs.errors import SitusError, counted, missing_extra
from situs.limits import Positive, Within
from situs.methods.base import Batch, Method
from situs.progress import note
from situs.train import distributed
from situs.train.checkpoint import RunFolder
from situs.train.contract import RunState
from situs.train.optim import OptimConfig
from situs.train.step import MicroBatch, Stepper, Update, autocast

EXTRA = "dp"
ROUGH = 0.1
"""Error of a first estimate of ε."""

STRIDE, MOST_NOISE = 1.5, 1e4
"""Factor between two noise levels that are tried for an ε, and the largest one."""

NOT_COVERED = (
    "ε covers the weights, their moving average (EMA) and everything computed from them. ε does not cover the "
    "training loss and accuracy in the log, the samples of the validation split, the choice of settings or of a "
    "checkpoint, or the data that the initial weights were trained on. Audio clips are normalised by a mean "
    "and a standard deviation measured on the training clips, and ε does not cover these values. Rounding errors are "
    "ignored"
)
"""What a reader must know of every ε."""


@dataclass(frozen=True)
class DpConfig(Checked):
    """Settings of DP-SGD, which needs the extra `dp`. It is on if epsilon or noise is set."""

    epsilon: Positive | None = None
    """ε of the (ε, δ) guarantee for the whole run. The noise is computed from ε."""

    noise: Positive | None = None
    """Noise multiplier: the standard deviation of the noise on the sum of gradients, in units of `clip`. Set either
    noise or epsilon."""

    clip: Positive = 1.0
    """Clip the gradient of each sample to this norm, over all trained weights."""

    delta: Annotated[float, Within("(0, 1)")] = 1e-5
    """δ of the (ε, δ) guarantee. It should be well below 1 / (number of samples)."""

    def check(self) -> None:
        if self.epsilon is not None and self.noise is not None:
            reason = f"epsilon={self.epsilon} and noise={self.noise}: give only one, because each determines the other"
            raise SitusError(reason, field=("epsilon", "noise"))
        for name in ("clip", "delta") if not self.on else ():  # else the user would take the run for a private one
            if (value := getattr(self, name)) != getattr(DpConfig, name):
                reason = f"{name}={value}: is a setting of DP-SGD, which is off; set epsilon or noise"
                raise SitusError(reason, field=(name, "epsilon", "noise"))

    @property
    def on(self) -> bool:
        return self.epsilon is not None or self.noise is not None


@dataclass(frozen=True)
class Spent:
    """What a run has spent so far: ε at δ after some steps, with the noise and the clipping behind it.

    epsilon: None where it is not known here.
    """

    epsilon: float | None
    delta: float
    noise: float
    clip: float
    steps: int

    def __str__(self) -> str:
        epsilon = "ε is not known here" if self.epsilon is None else f"ε = {self.epsilon:.3g}"
        steps = f"{counted(self.steps, 'steps')} of DP-SGD"
        noise = f"noise {self.noise:.3g} · C, C = {self.clip:g} (PRV accountant)"
        return f"{epsilon} at δ = {self.delta:g} after {steps}, {noise}. {NOT_COVERED}"


@cache
def epsilon_of(noise: float, rate: float, steps: int, delta: float) -> float:
    """ε after so many steps, an upper bound; the first call for a noise takes a second.

    rate: the probability that a step takes a given sample.
    """
    if steps == 0:
        return 0.0
    accountant = _accountants().PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():  # about the range of orders that bounds its grid, which the result does not need
        warnings.simplefilter("ignore")
        # Its grid grows with ε over the error, to minutes: for a large ε an error of a hundredth must do.
        rough = float(accountant.get_epsilon(delta, eps_error=ROUGH))
        return rough if rough > 100 * ROUGH else float(accountant.get_epsilon(delta))


def _accountants() -> Any:
    """Opacus' accountants, with a cache: most of their time goes to orders that are the same after any number of
    steps."""
    orders = opacus("accountants.analysis.rdp")
    slow = getattr(orders, "_compute_rdp", None)  # not public: where it is gone, nothing is cached
    if slow is not None and not hasattr(slow, "cache_info"):
        orders._compute_rdp = lru_cache(4096)(slow)
    return opacus("accountants")


def noise_for(epsilon: float, rate: float, steps: int, delta: float) -> float:
    """The least noise, to a hundredth of ε, under which so many steps spend no more than ε.

    From 1 up or down: Opacus' own search begins at noise so small that its accountant takes minutes.
    """
    high = 1.0
    while epsilon_of(high, rate, steps, delta) > epsilon:
        high *= STRIDE
        if high > MOST_NOISE:
            raise SitusError(
                f"epsilon={epsilon}: even with a noise multiplier of {high / STRIDE:,.0f}, ε is above this limit "
                f"after {counted(steps, 'steps')}; give a larger epsilon, or train fewer steps",
                field="dp.epsilon",
            )
    low = high / STRIDE
    while (spent := epsilon_of(low, rate, steps, delta)) <= epsilon:
        if spent > 0.99 * epsilon:
            return low
        high, low = low, low / STRIDE
    while True:
        middle = (low + high) / 2
        spent = epsilon_of(middle, rate, steps, delta)
        if 0.99 * epsilon < spent <= epsilon or high - low < 1e-4 * high:
            return middle if spent <= epsilon else high
        low, high = (low, middle) if spent <= epsilon else (middle, high)


def opacus(module: str) -> Any:
    """A module of the package; a clear sentence where it is not installed."""
    try:
        return importlib.import_module(f"opacus.{module}")
    except ImportError:
        raise missing_extra("opacus", EXTRA, "training with differential privacy") from None


KEY_FILE = "dp.secret"
KEY_SIZE = 32


@dataclass(frozen=True)
class Secret:
    """The key of all private draws of a run."""

    value: bytes = field(repr=False)

    def words(self, step: int, purpose: str, count: int) -> Tensor:
        """Independent uniform 64-bit words, [count] int64; for another step or purpose, others."""
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
        except ImportError:
            raise missing_extra("cryptography", "dp", "training with differential privacy") from None
        subkey = HKDFExpand(SHA256(), KEY_SIZE, f"situs dp {purpose} {step}".encode()).derive(self.value)
        stream = Cipher(ChaCha20(subkey, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
        return torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)

    def normal(self, step: int, purpose: str, like: Tensor) -> Tensor:
        """Standard normal numbers in float64, shaped as `like` and on its device (Box and Muller)."""
        half = -(-like.numel() // 2)
        words = self.words(step, purpose, 2 * half).to(like.device)
        radius, angle = uniform(words).view(2, half)
        radius = torch.sqrt(-2.0 * torch.log1p(-radius))
        turned = torch.stack([radius * torch.cos(2 * math.pi * angle), radius * torch.sin(2 * math.pi * angle)])
        return turned.flatten()[: like.numel()].view(like.shape)

    def sample(self, step: int, count: int, rate: float) -> Tensor:
        """The samples of a step: each of `count` independently with probability `rate`, [b] int64."""
        return (uniform(self.words(step, "samples", count)) < rate).nonzero().squeeze(1)


def uniform(words: Tensor) -> Tensor:
    """Words as numbers in [0, 1), float64."""
    return ((words >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def secret_of(run: Path) -> tuple[Secret, bool]:
    """A run's secret, and whether it was there before; else a new one, which is written."""
    path = run / KEY_FILE
    try:
        if path.exists():
            value = path.read_bytes()
            if len(value) != KEY_SIZE:
                raise SitusError(
                    f"{path}: the file with the secret seed of the noise must have {KEY_SIZE} bytes; delete it to "
                    "continue with a new seed"
                )
            return Secret(value), True
        value = secrets.token_bytes(KEY_SIZE)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SitusError(
            f"{path}: the file with the secret seed of the noise cannot be read or written: {error.strerror or error}"
        ) from error
    return Secret(value), False


def forget_secret(run: Path) -> None:
    """Deletes a complete run's secret."""
    (run / KEY_FILE).unlink(missing_ok=True)


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
            raise SitusError("dp: training with differential privacy supports only one rank", field="dp")
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
                raise SitusError(
                    "dp: methods that draw something in each step, such as masks or orders of the patches, are not "
                    "supported",
                    field="dp",
                )
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


LEAST = 32
"""Least samples per step on average: an empty step, which no loader can give, then has a probability below 2e-14."""


@dataclass
class Private:
    """The parts of a run with DP-SGD. secret: None until the run has a folder."""

    config: DpConfig
    secret: Secret | None = None

    def draw(self, step: int, count: int, batch: int) -> Tensor:
        """The samples of a step of the run, for the loader."""
        assert self.secret is not None, "called before the run has a folder"
        return self.secret.sample(step, count, batch / count)

    def plan(self, method: Method, loader: Loader, total: int) -> tuple[float, float, str]:
        """The noise, the probability of a sample to be drawn, and the sentence on what is spent and covered."""
        count, batch, dp = loader.plan.n, loader.global_batch, self.config
        if batch < LEAST:
            raise SitusError(field=("data.batch", "dp"), value=batch, allowed=f"at least {LEAST} with dp")
        mixing = [name for name, part in method.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        if mixing:
            raise SitusError(f"dp: {mixing[0]} is a BatchNorm, which mixes the samples of a batch", field="dp")
        rate = batch / count
        noise = dp.noise if dp.epsilon is None else noise_for(dp.epsilon, rate, total, dp.delta)
        assert noise is not None
        spent = epsilon_of(noise, rate, total, dp.delta)
        sentence = (
            f"DP-SGD: a step draws each of {count:,} samples with probability {rate:.3g}, clips gradients to "
            f"{dp.clip:g} and adds noise of standard deviation {noise:.4g} · {dp.clip:g}; ε = {spent:.3g} at "
            f"δ = {dp.delta:g} after {counted(total, 'steps')}. {NOT_COVERED}"
        )
        return noise, rate, sentence

    def rehearse(self, method: Method, loader: Loader, total: int) -> str:
        """The sentence of `plan`, for a dry run, whose one batch is drawn by a secret of its own."""
        self.secret = Secret(secrets.token_bytes(KEY_SIZE))
        return self.plan(method, loader, total)[-1]

    def open(
        self, run: RunFolder, method: Method, loader: Loader, total: int
    ) -> tuple[Callable[..., PrivateStepper], Ledger]:
        """The stepper that makes the updates, and the hook that writes ε to the log."""
        dp = self.config
        if dp.epsilon is not None and run.resumed and run.start is not None:
            before = run.start.state["total_steps"]
            if before != total:
                reason = f"the noise was set for {counted(before, 'steps')}"
                reason += f", so the run cannot have {counted(total, 'steps')}"
                raise SitusError(f"dp.epsilon={dp.epsilon:g}: {reason}", field=("train.epochs", "train.max_steps"))
        noise, rate, sentence = self.plan(method, loader, total)
        self.secret, existed = secret_of(run.path)
        if run.resumed and not existed:
            note(
                "the file with the secret seed of the noise (dp.secret) is missing, so the run continues with a new "
                "seed"
            )
        note(sentence)
        mechanism = Mechanism(self.secret, noise, dp.clip, loader.global_batch)
        return partial(PrivateStepper, mechanism=mechanism), Ledger(noise, rate, dp.delta)


def private_of(config: DpConfig, method: str, augment: AugmentConfig) -> Private | None:
    """The parts of DP-SGD, if the config asks for it; refuses what lets one sample act on another's gradient, or act
    twice."""
    if not config.on:
        return None
    if method != "supervised":
        raise SitusError(field=("method", "dp"), value=method, allowed="supervised with dp")
    for name in ("mixup", "cutmix"):
        if getattr(augment, name):
            allowed = "0 with dp, because the gradient of a mixed sample depends on two samples"
            raise SitusError(field=(f"augment.{name}", "dp"), value=getattr(augment, name), allowed=allowed)
    if augment.repeated > 1:
        allowed = "1 with dp, because the copies of a repeated sample would be clipped separately"
        raise SitusError(field=("augment.repeated", "dp"), value=augment.repeated, allowed=allowed)
    return Private(config)


@dataclass(frozen=True)
class Ledger:
    """Writes ε spent so far to the log, after the first step, each epoch and the last step."""

    noise: float
    rate: float
    delta: float

    def after_step(self, state: RunState) -> None:
        if state.step in (1, state.total):
            self._log(state)

    def after_epoch(self, state: RunState) -> None:
        if 1 < state.step < state.total:
            self._log(state)

    def _log(self, state: RunState) -> None:
        spent = epsilon_of(self.noise, self.rate, state.step, self.delta)
        state.log({"epsilon": spent, "noise_multiplier": self.noise, "sampling_rate": self.rate})
