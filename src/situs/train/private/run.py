"""A run with DP-SGD put together: what it refuses, how its samples are drawn, its noise, and ε in its log."""

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
"""Samples a step on average: a step that draws none, which no loader can give, has a chance of less than 2e-14."""


@dataclass
class Draws:
    """Poisson sampling as a loader asks for it; the secret comes with the run's folder."""

    secret: Secret | None = None

    def __call__(self, step: int, count: int, batch: int) -> Tensor:
        """The samples of a step of the run."""
        assert self.secret is not None, "asked before the run has a folder"
        return self.secret.sample(step, count, batch / count)


@dataclass
class Private:
    """What makes a run one of DP-SGD."""

    config: DpConfig
    draws: Draws = field(default_factory=Draws)

    def check(self, method: str, augment: AugmentConfig) -> None:
        """Refuses what would let one sample act on the gradient of another, or twice."""
        if method != "supervised":
            raise SitusError(field=("method", "dp"), value=method, allowed="supervised with dp")
        for name in ("mixup", "cutmix"):
            if getattr(augment, name):
                said = "0 with dp: what is mixed has no gradient of its own"
                raise SitusError(field=(f"augment.{name}", "dp"), value=getattr(augment, name), allowed=said)
        if augment.repeated > 1:
            said = "1 with dp: a sample that comes twice is clipped twice"
            raise SitusError(field=("augment.repeated", "dp"), value=augment.repeated, allowed=said)

    def plan(self, method: Method, loader: Loader, total: int) -> tuple[float, float, str]:
        """The noise, the chance of a sample to be taken, and the sentence that says what is spent and covered."""
        count, batch, dp = loader.plan.n, loader.global_batch, self.config
        if batch < LEAST:
            raise SitusError(field=("data.batch", "dp"), value=batch, allowed=f"at least {LEAST} with dp")
        mixing = [name for name, part in method.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        if mixing:
            raise SitusError(f"dp: {mixing[0]} is a BatchNorm, by which samples act on one another", field="dp")
        rate = batch / count
        noise = dp.noise if dp.epsilon is None else noise_for(dp.epsilon, rate, total, dp.delta)
        assert noise is not None
        spent = epsilon_of(noise, rate, total, dp.delta)
        said = (
            f"DP-SGD: each of {count:,} samples with chance {rate:.3g} a step, gradients clipped to {dp.clip:g}, noise "
            f"{noise:.4g} · {dp.clip:g}; ε = {spent:.3g} at δ = {dp.delta:g} after {counted(total, 'steps')}. "
            f"{NOT_COVERED}"
        )
        return noise, rate, said

    def rehearse(self, method: Method, loader: Loader, total: int) -> str:
        """What a run would say, and chance of no run's own for the batch that a dry run looks at."""
        self.draws.secret = Secret(secrets.token_bytes(SIZE))
        return self.plan(method, loader, total)[-1]

    def open(
        self, run: RunFolder, method: Method, loader: Loader, total: int
    ) -> tuple[Callable[..., PrivateStepper], Ledger]:
        """What makes the updates, and the hook that writes ε to the log."""
        dp = self.config
        if dp.epsilon is not None and run.resumed and run.start is not None:
            before = run.start.state["total_steps"]
            if before != total:
                said = f"set the noise for {counted(before, 'steps')}, and the run cannot have {total}"
                raise SitusError(f"dp.epsilon={dp.epsilon:g}: {said}", field=("train.epochs", "train.max_steps"))
        noise, rate, said = self.plan(method, loader, total)
        self.draws.secret, known = secret_of(run.path)
        if run.resumed and not known:
            note("the secret of the noise is gone: what is drawn from here on is drawn anew")
        note(said)
        mechanism = Mechanism(self.draws.secret, noise, dp.clip, loader.global_batch)
        return partial(PrivateStepper, mechanism=mechanism), Ledger(noise, rate, dp.delta)

    def close(self, run: RunFolder) -> None:
        """The run is complete: nobody needs its chance again."""
        forget(run.path)


def private_of(config: DpConfig, method: str, augment: AugmentConfig) -> Private | None:
    """What makes it a run of DP-SGD, where the config asks for one; refuses a recipe that cannot be one."""
    if not config.on:
        return None
    private = Private(config)
    private.check(method, augment)
    return private


@dataclass(frozen=True)
class Ledger:
    """Writes what has been spent to the log, after the first step, each epoch and the last step."""

    noise: float
    rate: float
    delta: float

    def after_step(self, state: RunState) -> None:
        if state.step in (1, state.total):
            self._tell(state)

    def after_epoch(self, state: RunState) -> None:
        if 1 < state.step < state.total:
            self._tell(state)

    def _tell(self, state: RunState) -> None:
        spent = epsilon_of(self.noise, self.rate, state.step, self.delta)
        state.log({"epsilon": spent, "noise_multiplier": self.noise, "sampling_rate": self.rate})
