"""The result of an attack on a lock, the attacks with a base and with the locked file alone.

A lock is obfuscation, not encryption: its key is a permutation of channels, and a channel is recognised by its weights.
The attackers: `public-base` has the model that was locked, `drifted-base` a fine-tuned relative of it; `no-base` has
the locked file and compares its clear parts with its locked ones; `images` (`attacks.images`) does so with unlabelled
samples, far better; `labels` (`attacks.adapter`) trains around the lock; `activations` (`attacks.columns`) runs the
locked blocks for the owner and sees the permuted stream. Keys of inner groups may be recovered on the way and never
count: permuting them leaves the function unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.errors import SitusError, counted
from situs.limits import check_value
from situs.locks.attacks.blind import match_blind
from situs.locks.attacks.match import Keys, State, match_keys
from situs.locks.groups import invert_keys, permute_state, residual_only

BROKEN = 0.99
"""Share of the accuracy gap between locked and open model that an attack must close to make the key unnecessary."""

Score = Callable[[State], float]
"""The accuracy in [0, 1] of the model with these weights."""


@dataclass(frozen=True)
class KeyRecovery:
    """The result of one attack.

    right, size: correctly assigned residual channels, of all; right is None if the true key is unknown. before, after,
    owner: accuracy of the locked model, after the attack, and with the key; None without data. tested: samples that it
    was measured on. control: the attack's accuracy with random blocks instead of the locked ones, which contribute
    after - control. agreement, failed: J of the attacker `images`, and the largest from random hints. doubt: why a
    failure of this attack says nothing about the lock; empty if it does. bits: see `bits_left`.
    """

    attacker: str
    size: int
    right: int | None = None
    seconds: float = 0.0
    cost: str = ""
    before: float | None = None
    after: float | None = None
    owner: float | None = None
    control: float | None = None
    tested: int | None = None
    agreement: float | None = None
    failed: float | None = None
    doubt: str = ""
    residual_sizes: tuple[tuple[int, int], ...] = ()
    keys: Keys = field(default_factory=dict, repr=False, compare=False)

    @property
    def share(self) -> float | None:
        """The share of the residual key that was recovered."""
        return None if self.right is None else self.right / self.size

    @property
    def separable(self) -> bool:
        """Whether the accuracies with and without the key differ by more than two standard errors of the test."""
        if self.owner is None or self.before is None:
            return False
        spread = sum(share * (1 - share) for share in (self.owner, self.before)) / (self.tested or math.inf)
        return self.owner - self.before > 2 * spread**0.5

    @property
    def broken(self) -> bool:
        """Whether the attack restored the accuracy, with or without the key; never where the test set is too small."""
        if self.after is None or self.owner is None or self.before is None or not self.separable:
            return False
        return self.after - self.before >= BROKEN * (self.owner - self.before)

    @property
    def successful(self) -> bool:
        """Whether most channels are right, or the accuracy is restored; then it counts in spite of any doubt."""
        return self.broken or (self.right is not None and 2 * self.right > self.size)

    @property
    def bits(self) -> float | None:
        """log2 of the keys that remain to be tried; 0 if the accuracy is restored. None: the true key is unknown, or
        the attack failed with too little data (`doubt`)."""
        if self.broken:
            return 0.0
        if self.right is None or (self.doubt and not self.successful):
            return None
        return sum(bits_left(size, right) for size, right in self.residual_sizes)


def bits_left(size: int, right: int) -> float:
    """log2 of the keys that remain if `right` of `size` channels are right and the attacker knows which.

    The r others have r! orders. If most channels are right it is far less: each further right one improves the model,
    so exchanges can be tried one by one, r (r - 1) / 2 of them for each of at most r - 1 channels.
    """
    if not 0 <= right <= size:
        raise SitusError(f"right={right}: must be in [0, {size}]")
    wrong = size - right
    orders = math.lgamma(wrong + 1) / math.log(2)
    if 2 * right <= size or wrong < 2:
        return orders
    return min(orders, math.log2(wrong * (wrong - 1) ** 2 / 2))


def judged(
    attacker: str, groups: Sequence[Group], keys: Keys, truth: Mapping[str, Tensor] | None, **more: Any
) -> KeyRecovery:
    """The result of an attack: its residual keys compared with the true ones if known; inner keys never count.

    more: fields of `KeyRecovery`.
    """
    residual = residual_only(groups)
    if not residual:
        raise SitusError("these groups have no residual key: there is no lock to attack")
    recovery = KeyRecovery(attacker, sum(group.size for group in residual), keys=keys, **more)
    if truth is None:
        return recovery
    pairs = tuple((group.size, int((keys[group.name] == truth[group.name]).sum())) for group in residual)
    return replace(recovery, right=sum(right for _, right in pairs), residual_sizes=pairs)


def recover_with_base(
    locked: State,
    base: State,
    groups: Sequence[Group],
    *,
    truth: Mapping[str, Tensor] | None = None,
    attacker: str = "public-base",
) -> KeyRecovery:
    """Linear assignment of the base's channels to the locked ones, over every residual-side weight and norm.

    truth: the keys, if the auditor has them. Without them, keys that turn the base into the locked weights bit for bit
    are right. Equal channels may be in any order: a key that gives the same open weights is right.
    """
    began = time.perf_counter()
    match = match_keys(locked, base, groups)
    seconds = time.perf_counter() - began
    residual = residual_only(groups)
    if truth is None:
        truth = match.keys if match.error == 0 else None
    elif all(map(torch.equal, *(opened(locked, residual, keys).values() for keys in (match.keys, truth)))):
        truth = match.keys
    weights = sum(base[name].numel() for name in {m.tensor for group in groups for m in group.members})
    turns = f", {match.rounds} rounds over {len(groups)} groups" if len(groups) > 1 else ""
    cost = f"one base model, no data; {weights / 1e6:.1f} M weights compared{turns}"
    return judged(attacker, groups, match.keys, truth, seconds=seconds, cost=cost)


def recover_blind(
    backbone: Backbone,
    groups: Sequence[Group],
    *,
    truth: Mapping[str, Tensor] | None = None,
    inputs: Tensor | None = None,
    of: int | None = None,
) -> KeyRecovery:
    """The attack with the locked file: clear parts against locked ones, see `attacks.blind`.

    inputs: unlabelled samples, if this attacker has them. of: the number of all samples, if only those of one length
    are in `inputs`.
    """
    began = time.perf_counter()
    keys = match_blind(backbone, groups, inputs)
    cost = "the locked file alone"
    if inputs is not None:
        chosen = f"the {len(inputs)} of {counted(of, 'samples')} that have the same length" if of else None
        cost = f"the locked file and {chosen or counted(len(inputs), 'samples')}, without labels"
    return judged("no-base", groups, keys, truth, seconds=time.perf_counter() - began, cost=cost)


def check_finite(state: State, what: str) -> None:
    """Refuses weights that are not finite."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SitusError(f"{what}: {name} holds NaN or infinite numbers, so no attack can be run")


def exact_truth(locked: State, base: State, groups: Sequence[Group]) -> Keys | None:
    """The true keys if `base` is exactly the model that was locked, else None."""
    match = match_keys(locked, base, groups)
    return match.keys if match.error == 0 else None


def drift(base: State, amount: float, seed: int = 0) -> dict[str, Tensor]:
    """A relative of `base`: noise of `amount` standard deviations of each tensor on all its weights."""
    check_value("drift", amount, "[0, inf)")
    generator, moved = torch.Generator().manual_seed(seed), dict(base)
    for name, value in base.items():
        if value.is_floating_point() and value.numel() > 1:
            exact = value.double().cpu()
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            moved[name] = (exact + amount * exact.std() * noise).to(value)
    return moved


def opened(locked: State, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The locked weights with the permutations `keys` undone."""
    return permute_state(locked, groups, invert_keys({group.name: keys[group.name] for group in groups}))


def scored(
    recovery: KeyRecovery, locked: State, groups: Sequence[Group], score: Score, owner: float | None, tested: int
) -> KeyRecovery:
    """The recovery with the accuracies before and after the attack, and of the owner. tested: samples of `score`."""
    after = score(opened(locked, groups, recovery.keys))
    return replace(recovery, before=score(locked), after=after, owner=owner, tested=tested)
