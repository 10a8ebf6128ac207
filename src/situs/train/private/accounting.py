"""The guarantee of a training with DP-SGD: ε at a δ, by the PRV accountant of Opacus (the extra `dp`).

The accountant assumes what the training does: a step takes each sample with probability q by itself (Poisson), clips
the gradient of each to norm C, and adds Gaussian noise of deviation noise · C to their sum. Neighbours differ by one
sample that is there or not.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any

from situs.config import Checked
from situs.errors import SitusError, counted, missing_extra
from situs.limits import Positive, Within

EXTRA = "dp"
ROUGH = 0.1
"""Error of a first estimate of ε."""

STRIDE, MOST_NOISE = 1.5, 1e4
"""Factor between two noise levels that are tried for an ε, and the largest one."""

NOT_COVERED = (
    "ε covers the weights, their mean (EMA) and all that is computed from them. It does not cover the training "
    "loss and accuracy in the log, the samples of the validation split, the choice of settings or of a "
    "checkpoint, the mean and deviation of clips if they were measured on the training clips, nor the data of "
    "the first weights. Rounding errors are ignored"
)
"""What a reader must know of every ε."""


@dataclass(frozen=True)
class DpConfig(Checked):
    """DP-SGD (the extra `dp`); on where epsilon or noise is set."""

    epsilon: Positive | None = None
    """ε of the whole run; the noise follows from it."""

    noise: Positive | None = None
    """Instead of epsilon: standard deviation of the noise on the sum of gradients, in units of `clip`."""

    clip: Positive = 1.0
    """Largest norm of a sample's gradient, over all trained weights."""

    delta: Annotated[float, Within("(0, 1)")] = 1e-5
    """δ at which ε holds; well below 1 / samples."""

    def check(self) -> None:
        if self.epsilon is not None and self.noise is not None:
            reason = f"epsilon={self.epsilon} and noise={self.noise}: one follows from the other; give one"
            raise SitusError(reason, field=("epsilon", "noise"))
        for name in ("clip", "delta") if not self.on else ():  # else the user would take the run for a private one
            if (value := getattr(self, name)) != getattr(DpConfig, name):
                reason = f"{name}={value}: is a setting of DP-SGD, which is off without epsilon or noise"
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
            raise SitusError(f"epsilon={epsilon}: no noise reaches it in {steps} steps", field="dp.epsilon")
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
