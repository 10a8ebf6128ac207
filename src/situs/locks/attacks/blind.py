"""The attacker with the locked file alone: it compares clear parts with locked ones.

Embedding, positions, prefix tokens, final norm and head are clear and in the true order; the blocks are not. Both sides
use the residual stream, so the attack looks for the order in which they agree:

- single channels: the first norm centres its input, so its bias is minus its weight times the channel's mean. Norm
  weights are expected to rank like norm weights, biases like biases, and the channels that the embedding writes (or the
  head reads) strongly like those that the blocks write (or read) strongly;
- pairs of channels: channels that vary together behind the embedding are read together by the blocks, and those that
  the head reads together are written together. This is a quadratic assignment, relaxed to doubly stochastic matrices
  and solved by Frank and Wolfe's algorithm.

It is a statistical guess that gets few channels right; the audit prints how many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.layout import Group, Member
from situs.core.permutation import identity
from situs.locks.attacks.graph import normal_scores
from situs.locks.attacks.match import Keys, assign, channels
from situs.locks.equivariance.sample import random_inputs
from situs.locks.groups import residual_only

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
    locked_names = {member.tensor for other in groups for member in other.members}
    clear = {name: value for name, value in state.items() if name not in locked_names}
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
