"""Attacks on a lock, and what is left of it after them.

A lock is obfuscation, not encryption: its key is a permutation of channels, and a channel is known by its weights.
Who has the model that was locked reads the key off (`public-base`); who has a fine-tuned relative nearly so
(`drifted-base`); who has only the locked file can compare its clear parts with its locked ones (`no-base`), with
unlabelled samples far better (`images`, in `attacks.images`), or train around it with labelled ones (`labels`, in
`attacks.adapter`). Who runs the locked blocks for the owner sees what the key does to the stream (`activations`, in
`attacks.columns`). Keys of inner groups are found on the way where they are needed, and never count: permuting them
leaves the function as it was.
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
"""An attack that gives back this share of what the key is worth has made the key unnecessary."""

Score = Callable[[State], float]
"""The accuracy in [0, 1] of the model with these weights."""


@dataclass(frozen=True)
class KeyRecovery:
    """What one attack got.

    right, size: residual channels put where they belong, of all; right is None where nobody knows the true key.
    before, after, owner: accuracy of the locked model as it is, after the attack, and with the key; None without data.
    tested: the samples that it was measured on.
    control: the same attack's accuracy where the locked blocks are replaced by random ones, so that they helped by
    after - control. agreement, failed: J of the attacker `images`, and the largest from random hints. doubt: why it
    says nothing of the lock that this attack failed; empty where it does. bits: what is left, see `bits_left`.
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
    def told(self) -> bool:
        """Whether accuracy tells the model with its key from the locked one, by two standard errors of the test."""
        if self.owner is None or self.before is None:
            return False
        spread = sum(share * (1 - share) for share in (self.owner, self.before)) / (self.tested or math.inf)
        return self.owner - self.before > 2 * spread**0.5

    @property
    def broken(self) -> bool:
        """Whether the model works again although the key may not be known; chance is no sign of it."""
        if self.after is None or self.owner is None or self.before is None or not self.told:
            return False
        return self.after - self.before >= BROKEN * (self.owner - self.before)

    @property
    def got_far(self) -> bool:
        """Whether the attack speaks for itself, whatever it had: most channels are right, or the model works again."""
        return self.broken or (self.right is not None and 2 * self.right > self.size)

    @property
    def bits(self) -> float | None:
        """log2 of the keys that are left to try; 0 where the model works again. None: nobody knows the true key, or the
        attack failed and had too little for that to say anything (`doubt`)."""
        if self.broken:
            return 0.0
        if self.right is None or (self.doubt and not self.got_far):
            return None
        return sum(bits_left(size, right) for size, right in self.residual_sizes)


def bits_left(size: int, right: int) -> float:
    """log2 of what is left to try where `right` of `size` channels are, the attacker being taken to know which.

    The r others have r! orders. Where most are right it is far less: each that is put right makes the model better, so
    that exchanges are tried one by one, r (r - 1) / 2 of them for each of at most r - 1 channels.
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
    """What an attack got: its residual keys compared with the true ones where they are known; inner ones never count.

    more: fields of `KeyRecovery`.
    """
    residual = residual_only(groups)
    if not residual:
        raise SitusError("these groups hold no residual key: there is no lock to attack")
    found = KeyRecovery(attacker, sum(group.size for group in residual), keys=keys, **more)
    if truth is None:
        return found
    pairs = tuple((group.size, int((keys[group.name] == truth[group.name]).sum())) for group in residual)
    return replace(found, right=sum(right for _, right in pairs), residual_sizes=pairs)


def recover_with_base(
    locked: State,
    base: State,
    groups: Sequence[Group],
    *,
    truth: Mapping[str, Tensor] | None = None,
    attacker: str = "public-base",
) -> KeyRecovery:
    """Linear assignment of the base's channels to the locked ones, over every residual-side weight and norm.

    truth: the keys, where the auditor has them. Without them, a base that turns into the locked weights bit by bit
    proves its own key. Channels that are equal may stand in any order: a key that opens the very weights is right.
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
    """What the locked file gives away: its clear parts against its locked ones, see `attacks.blind`.

    inputs: samples that this attacker has as well, without labels; None: the locked file alone. of: how many samples
    there were, where those of one length were taken.
    """
    began = time.perf_counter()
    keys = match_blind(backbone, groups, inputs)
    had = "alone"
    if inputs is not None:
        some = f"the {len(inputs)} of {counted(of, 'samples')} that have one length" if of else None
        had = f"and {some or counted(len(inputs), 'samples')}, labels unread"
    cost = f"the locked file {had}"
    return judged("no-base", groups, keys, truth, seconds=time.perf_counter() - began, cost=cost)


def check_finite(state: State, what: str) -> None:
    """Refuses weights that nothing can be matched by."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SitusError(f"{what}: {name} holds NaN or infinite numbers, so no attack can be run and none was")


def exact_truth(locked: State, base: State, groups: Sequence[Group]) -> Keys | None:
    """The true keys where `base` is the very model that was locked, else None."""
    match = match_keys(locked, base, groups)
    return match.keys if match.error == 0 else None


def drift(base: State, amount: float, seed: int = 0) -> dict[str, Tensor]:
    """A relative of `base`: noise of `amount` times each tensor's own standard deviation on all its weights."""
    check_value("drift", amount, "[0, inf)")
    generator, moved = torch.Generator().manual_seed(seed), dict(base)
    for name, value in base.items():
        if value.is_floating_point() and value.numel() > 1:
            exact = value.double().cpu()
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            moved[name] = (exact + amount * exact.std() * noise).to(value)
    return moved


def opened(locked: State, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The locked weights with `keys` undone, right or wrong."""
    return permute_state(locked, groups, invert_keys({group.name: keys[group.name] for group in groups}))


def scored(
    recovery: KeyRecovery, locked: State, groups: Sequence[Group], score: Score, owner: float | None, tested: int
) -> KeyRecovery:
    """The recovery with the accuracy of the locked model before the attack, after it, and of its owner.

    tested: the samples that `score` looks at.
    """
    after = score(opened(locked, groups, recovery.keys))
    return replace(recovery, before=score(locked), after=after, owner=owner, tested=tested)
