"""The result of an attack on a lock, the attacks with a base and with the locked file alone.

A lock is obfuscation, not encryption: its key is a permutation of channels, and a channel is recognised by its weights.
The attackers: `public-base` has the model that was locked, `drifted-base` has a fine-tuned version of that model;
`no-base` has
the locked file and compares its clear parts with its locked ones; `images` (`attacks.images`) does so with unlabelled
samples, far better; `labels` (`attacks.adapter`) trains around the lock; `activations` (`attacks.columns`) runs the
locked blocks for the owner and sees the permuted stream. Keys of inner groups may be recovered on the way and never
count: permuting them leaves the function unchanged.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.layout import Group, Member
from situs.core.permutation import identity
from situs.errors import SitusError, counted
from situs.limits import check_value
from situs.locks.attacks.match import Keys, State, assign, channels, match_keys, normal_scores
from situs.locks.equivariance.sample import random_inputs
from situs.locks.groups import invert_keys, permute_state, residual_only
from situs.locks.withhold import block_tensors

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
        raise SitusError(f"right={right}: the number of channels in their true place must be in [0, {size}]")
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
        raise SitusError("no residual channels of this model are permuted, so there is no lock to attack")
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
    """The attack with the locked file: clear parts against locked ones, see `match_blind`.

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
            raise SitusError(f"{what}: {name} contains NaN or infinite numbers, so no attack can be run")


def exact_truth(locked: State, base: State, groups: Sequence[Group]) -> Keys | None:
    """The true keys if `base` is exactly the model that was locked, otherwise None."""
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


# --- no-base: the locked file alone -----------------------------------------------------------------------------------
# Embedding, positions, prefix tokens, final norm and head are clear and in the true order; the blocks are not. Both
# sides use the residual stream, so the attack looks for the order in which they agree:
#
# - single channels: the first norm centres its input, so its bias is minus its weight times the channel's mean. Norm
#   weights are expected to rank like norm weights, biases like biases, and the channels that the embedding writes (or
#   the head reads) strongly like those that the blocks write (or read) strongly;
# - pairs of channels: channels that vary together behind the embedding are read together by the blocks, and those that
#   the head reads together are written together. This is a quadratic assignment, relaxed to doubly stochastic matrices
#   and solved by Frank and Wolfe's algorithm.
#
# It is a statistical guess that gets few channels right; the audit prints how many.


STEPS = 30
PROBES = 32
"""Random inputs, where none are given."""

CENTRING = 100.0
"""Weight of the first norm's bias relative to ranks: it is nearly exact after long training."""

Kinds = dict[str, list[Tensor]]
"""norm.weight, bias, write, read -> a number for each channel, [D], from each tensor of that kind."""


def match_blind(backbone: Backbone, groups: Sequence[Group], inputs: Tensor | None = None) -> Keys:
    """A guess at the residual keys from the locked model alone. inputs: unlabelled samples; None: noise.

    Of a hierarchical model (Swin) only the first stage is attacked; later keys stay the identity.
    """
    state = {name: value.detach().float().cpu() for name, value in backbone.model.state_dict().items()}
    residual = residual_only(groups)
    keys = {group.name: identity(group.size) for group in groups}
    group = residual[0]
    # What the blocks hold and no key moves (the biases of queries) has the order of no channel of the stream.
    inside = {member.tensor for other in groups for member in other.members} | block_tensors(backbone)
    clear = {name: value for name, value in state.items() if name not in inside}
    if inputs is None:
        inputs = random_inputs(backbone, PROBES, 64, torch.Generator().manual_seed(0))
    stream = block_inputs(backbone, inputs).flatten(0, 1)
    before = {name.removeprefix("model.") for name, role in backbone.roles().items() if role.depth == 0}
    linear = _linear(_clear_kinds(clear, group.size, before), _locked_kinds(state, group), group.size)
    linear += _centring(state, group, stream)
    pairs = [(_written(state, group, reads=True), torch.cov(stream.T))]
    heads = [value for value in clear.values() if value.dim() == 2 and value.shape[1] == group.size]
    if len(residual) == 1 and heads:
        pairs.append((_written(state, group, reads=False), sum_grams(heads)))
    keys[group.name] = graph_match(linear, [(_scaled(a), _scaled(b)) for a, b in pairs])
    return keys


def graph_match(linear: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The permutation q that (locally) maximises Σ linear[i, q[i]] + Σ A[i, k] B[q[i], q[k]] over the pairs (A, B).

    All are [D, D]. Frank and Wolfe on doubly stochastic matrices from the uniform one, with an exact line search.
    """
    size = linear.shape[0]
    place = torch.full((size, size), 1 / size, dtype=torch.float64)

    def gradient(p: Tensor) -> Tensor:
        return linear + sum((a @ p @ b.T + a.T @ p @ b for a, b in pairs), torch.zeros_like(linear))

    def value(p: Tensor) -> float:
        return float((linear * p).sum() + sum((a @ p @ b.T * p).sum() for a, b in pairs))

    for _ in range(STEPS):
        corner = torch.zeros_like(place)
        corner[identity(size), assign(gradient(place))] = 1.0
        ahead = corner - place
        slope = float((gradient(place) * ahead).sum())
        if slope <= 1e-9 * max(1.0, abs(value(place))):
            break
        curve = value(corner) - value(place) - slope
        place = place + (1.0 if curve >= 0 else min(1.0, -slope / (2 * curve))) * ahead
    return assign(place)


def sum_grams(matrices: Iterable[Tensor]) -> Tensor:
    """Σ WᵀW over matrices [*, D] -> [D, D]."""
    grams = [matrix.T @ matrix for matrix in matrices]
    return torch.stack(grams).sum(dim=0)


def _scaled(gram: Tensor) -> Tensor:
    """A Gram matrix in double precision, scaled to a fixed norm."""
    gram = gram.double()
    return gram / gram.square().sum().sqrt().clamp_min(1e-30) * gram.shape[0] ** 0.5


def _linear(clear: Kinds, locked: Kinds, size: int) -> Tensor:
    """[D, D]: similarity of the ranks of locked channel i and clear channel j, over the kinds that both sides have."""
    shared = sorted(clear.keys() & locked.keys())
    total = torch.zeros(size, size, dtype=torch.float64)
    for kind in shared:
        ours, theirs = (
            normal_scores(torch.stack([*map(normal_scores, side[kind])]).mean(dim=0)) for side in (locked, clear)
        )
        total += torch.outer(ours, theirs)
    return total / max(len(shared), 1)


def _clear_kinds(clear: dict[str, Tensor], size: int, before: set[str]) -> Kinds:
    """Statistics of the clear tensors. before: names before the blocks; these write to the stream, a head reads."""
    kinds: Kinds = defaultdict(list)
    for name, value in clear.items():
        if value.dim() == 1 and value.shape[0] == size and value.std() > 0:
            kinds["bias" if name.endswith("bias") else "norm.weight"].append(value)
        elif value.dim() == 2 and value.shape[1] == size and name not in before:
            kinds["read"].append(value.norm(dim=0))
        elif value.dim() >= 2 and size in (value.shape[0], value.shape[-1]):
            axis = value.dim() - 1 if value.shape[-1] == size else 0
            kinds["write"].append(value.movedim(axis, 0).flatten(1).norm(dim=1))
    return kinds


def _locked_kinds(state: dict[str, Tensor], group: Group) -> Kinds:
    """The same statistics of the locked tensors."""
    kinds: Kinds = defaultdict(list)
    for member in group.members:
        value = state[member.tensor]
        if value.shape == (group.size,) and value.std() > 0:
            kinds["bias" if member.tensor.endswith("bias") else "norm.weight"].append(value)
        elif value.dim() == 2:
            kinds["read" if _reads(state, member) else "write"].append(channels(value, member, group.size).norm(dim=1))
    return kinds


def _reads(state: dict[str, Tensor], member: Member) -> bool:
    """Whether this axis is a projection's input; a bias has the length of the output axis."""
    bias = state.get(f"{member.tensor.removesuffix('weight')}bias")
    shape = state[member.tensor].shape
    if bias is not None and shape[0] != shape[1]:
        return bias.shape[0] != shape[member.axis]
    return member.axis == 1


def _written(state: dict[str, Tensor], group: Group, *, reads: bool) -> Tensor:
    """The Gram matrix of all projections that read from the stream, or write to it, [D, D] in the locked order."""
    projections = [
        channels(state[member.tensor], member, group.size).T
        for member in group.members
        if state[member.tensor].dim() == 2 and _reads(state, member) == reads
    ]
    return sum_grams(projections)


def _centring(state: dict[str, Tensor], group: Group, stream: Tensor) -> Tensor:
    """[D, D]: how well locked channel i of the first norm centres clear channel j; 0 without a first norm."""
    weight, bias = first_norm(state, group)
    if weight is None or bias is None:
        return torch.zeros(group.size, group.size, dtype=torch.float64)
    means = nn.functional.layer_norm(stream, stream.shape[-1:]).mean(dim=0)
    residual = (bias[:, None] + weight[:, None] * means[None, :]).double().square()
    return -residual / bias.double().var().clamp_min(1e-12) * CENTRING


def first_norm(state: Mapping[str, Tensor], group: Group) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of the norm before the first block's attention, in the locked order; None if absent."""
    name = group.members[0].tensor
    if state[name].dim() != 1:
        return None, None
    return state[name], state.get(f"{name.removesuffix('weight')}bias")


@torch.no_grad()
def block_inputs(backbone: Backbone, inputs: Tensor) -> Tensor:
    """The stream that enters the blocks, [B, N, D] in the clear order, float32 on the CPU."""
    weight = next(backbone.model.parameters())
    inputs = inputs.to(weight.device)
    tokens = backbone.embed(inputs.to(weight.dtype) if inputs.is_floating_point() else inputs)
    places = backbone.positions()
    if tokens.shape[1] < backbone.num_tokens:  # a text shorter than the model's longest
        places = places.take(identity(tokens.shape[1], tokens.device))
    return backbone.assemble(tokens, places).z.float().cpu()
