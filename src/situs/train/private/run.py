"""A run with DP-SGD: what it refuses, how its samples are drawn, its noise, and ε in its log."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from situs.data.augment.recipes import AugmentConfig
from situs.data.loader import Loader
from situs.errors import SitusError, counted
from situs.methods.base import Method
from situs.progress import note
from situs.train.checkpoint import RunFolder
from situs.train.contract import RunState
from situs.train.private.accounting import NOT_COVERED, DpConfig, epsilon_of, noise_for
from situs.train.private.secret import SIZE, Secret, forget, secret_of
from situs.train.private.step import Mechanism, PrivateStepper

LEAST = 32
"""Least samples per step on average: an empty step, which no loader can give, then has a probability below 2e-14."""


@dataclass
class Draws:
    """Poisson sampling for a loader; the secret is in the run's folder."""

    secret: Secret | None = None

    def __call__(self, step: int, count: int, batch: int) -> Tensor:
        """The samples of a step of the run."""
        assert self.secret is not None, "called before the run has a folder"
        return self.secret.sample(step, count, batch / count)


@dataclass
class Private:
    """The parts of a run with DP-SGD."""

    config: DpConfig
    draws: Draws = field(default_factory=Draws)

    def check(self, method: str, augment: AugmentConfig) -> None:
        """Refuses what lets one sample act on another's gradient, or act twice."""
        if method != "supervised":
            raise SitusError(field=("method", "dp"), value=method, allowed="supervised with dp")
        for name in ("mixup", "cutmix"):
            if getattr(augment, name):
                allowed = "0 with dp: mixed samples have no gradient of their own"
                raise SitusError(field=(f"augment.{name}", "dp"), value=getattr(augment, name), allowed=allowed)
        if augment.repeated > 1:
            allowed = "1 with dp: a repeated sample is clipped twice"
            raise SitusError(field=("augment.repeated", "dp"), value=augment.repeated, allowed=allowed)

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
            f"DP-SGD: each of {count:,} samples with probability {rate:.3g} a step, gradients clipped to {dp.clip:g}, "
            f"noise {noise:.4g} · {dp.clip:g}; ε = {spent:.3g} at δ = {dp.delta:g} after {counted(total, 'steps')}. "
            f"{NOT_COVERED}"
        )
        return noise, rate, sentence

    def rehearse(self, method: Method, loader: Loader, total: int) -> str:
        """The sentence of `plan`, for a dry run, whose one batch is drawn by a secret of its own."""
        self.draws.secret = Secret(secrets.token_bytes(SIZE))
        return self.plan(method, loader, total)[-1]

    def open(
        self, run: RunFolder, method: Method, loader: Loader, total: int
    ) -> tuple[Callable[..., PrivateStepper], Ledger]:
        """The stepper that makes the updates, and the hook that writes ε to the log."""
        dp = self.config
        if dp.epsilon is not None and run.resumed and run.start is not None:
            before = run.start.state["total_steps"]
            if before != total:
                reason = f"the noise was set for {counted(before, 'steps')}, so the run cannot be extended to {total}"
                raise SitusError(f"dp.epsilon={dp.epsilon:g}: {reason}", field=("train.epochs", "train.max_steps"))
        noise, rate, sentence = self.plan(method, loader, total)
        self.draws.secret, existed = secret_of(run.path)
        if run.resumed and not existed:
            note("the secret of the noise is gone: the run continues with a new one")
        note(sentence)
        mechanism = Mechanism(self.draws.secret, noise, dp.clip, loader.global_batch)
        return partial(PrivateStepper, mechanism=mechanism), Ledger(noise, rate, dp.delta)

    def close(self, run: RunFolder) -> None:
        """Deletes the secret of a complete run."""
        forget(run.path)


def private_of(config: DpConfig, method: str, augment: AugmentConfig) -> Private | None:
    """The parts of DP-SGD, if the config asks for it; refuses a recipe that does not allow it."""
    if not config.on:
        return None
    private = Private(config)
    private.check(method, augment)
    return private


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
