"""Statistics of the channels on the two sides of a lock, for the attack with samples (SPEC §6).

The clear side is the embedding: samples through it give the stream that enters the first block, and so which channels
vary together. The locked side is the first blocks: which channels their projections read and write together. The two
differ by the permutation that the attack looks for; cover (permuted inner groups) does not change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.layout import Group, Member
from situs.errors import SitusError
from situs.locks.attacks.blind import block_inputs, first_norm
from situs.locks.attacks.graph import normal_scores
from situs.locks.attacks.match import channels
from situs.locks.groups import residual_only

BLOCKS = 2
"""Blocks that are used, from the first in the file: in later ones the stream has changed."""

RIDGE = 0.03
"""Added to the diagonal of a correlation matrix before it is inverted."""

SHIFTS = 4
"""Shifts of each image, the first being none; each is also mirrored."""

REACH = 2
"""The largest shift, in patches."""

BATCH = 16

ROLES = {"query": "qk", "value": "vo", "heads": "qkvo"}
"""kind of an inner group -> the projections of its members, in order."""


@dataclass(frozen=True)
class ClearSide:
    """grams: name -> [D, D]. For each channel as the first block reads it, [D]: mean, spread, and `first`, its mean at
    the first place (the CLS token)."""

    grams: dict[str, Tensor]
    mean: Tensor
    spread: Tensor
    first: Tensor

    def to(self, device: torch.device) -> ClearSide:
        """The same on another device."""
        single = (values.to(device) for values in (self.mean, self.spread, self.first))
        return ClearSide({name: gram.to(device) for name, gram in self.grams.items()}, *single)


@dataclass(frozen=True)
class LockedSide:
    """grams: for each block, role (q, k, v, o, up, down) -> [D, D]. Of the first block, for each channel, [D]:

    centre: what its norm subtracts; without a first norm, what the bias of its values does. lean: from the biases of
    its MLP's input and its attention's output. reach: how strongly its attention reads the channel, norm included.
    """

    grams: list[dict[str, Tensor]]
    centre: Tensor | None
    lean: Tensor | None
    reach: Tensor

    def to(self, device: torch.device) -> LockedSide:
        """The same on another device."""
        grams = [{role: gram.to(device) for role, gram in block.items()} for block in self.grams]
        centre, lean = (None if clue is None else clue.to(device) for clue in (self.centre, self.lean))
        return LockedSide(grams, centre, lean, self.reach.to(device))


def clear_side(backbone: Backbone, groups: Sequence[Group], inputs: Iterable[Tensor]) -> ClearSide:
    """Statistics of the channels behind the embedding. inputs: batches of images, or of token ids."""
    state = {name: value.detach().cpu() for name, value in backbone.model.state_dict().items()}
    moments = _moments(backbone, state, groups, inputs)
    whole, place = moments.covariances()
    if not bool(whole.any()):
        raise SitusError(f"{backbone.name}: its embedding is the same for all samples, so they reveal nothing")
    correlation = whole / torch.outer(*(whole.diagonal().clamp_min(1e-30).sqrt(),) * 2)
    grams = {"all": whole, "content": whole - place, "place": place}
    locked = {member.tensor for group in groups for member in group.members}
    embedding = _embedding(backbone, {name: value for name, value in state.items() if name not in locked})
    grams["filters"] = _filters(backbone, embedding)
    table = backbone.positions().table
    if table is not None:
        rows = _widened(backbone, embedding, table.detach().cpu().double())
        grams["table"] = rows.T @ rows
    grams["inverse"] = torch.linalg.inv(correlation + RIDGE * torch.eye(backbone.dim, dtype=torch.float64))
    grams = {name: gram.float() for name, gram in grams.items() if bool(gram.any())}
    first = moments.sums[0] / moments.counts[0]
    return ClearSide(grams, moments.mean().float(), whole.diagonal().clamp_min(0).sqrt().float(), first.float())


def at_places(backbone: Backbone, groups: Sequence[Group], inputs: Iterable[Tensor]) -> Tensor:
    """[D, D]: the mean covariance of the stream at one place."""
    whole, place = _moments(backbone, backbone.model.state_dict(), groups, inputs).covariances()
    return whole - place


def _moments(
    backbone: Backbone, state: Mapping[str, Tensor], groups: Sequence[Group], inputs: Iterable[Tensor]
) -> _Moments:
    moments = _Moments(backbone.dim)
    for batch in inputs:
        moments.add(_read(backbone, state, groups, batch))
    return moments


class _Moments:
    """Sums over all tokens and over the tokens of each place."""

    def __init__(self, dim: int) -> None:
        self.square = torch.zeros(dim, dim, dtype=torch.float64)
        self.sums = torch.zeros(0, dim, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.float64)

    def add(self, tokens: Tensor) -> None:
        """tokens: [B, N, D]; N may differ from call to call."""
        batch, length, dim = tokens.shape
        if (more := length - len(self.counts)) > 0:
            self.sums = torch.cat([self.sums, self.sums.new_zeros(more, dim)])
            self.counts = torch.cat([self.counts, self.counts.new_zeros(more)])
        flat = tokens.reshape(-1, dim)
        self.square += (flat.T @ flat).double()
        self.sums[:length] += tokens.double().sum(dim=0)
        self.counts[:length] += batch

    def mean(self) -> Tensor:
        return self.sums.sum(dim=0) / self.counts.sum()

    def covariances(self) -> tuple[Tensor, Tensor]:
        """Covariance of all tokens, and of the means of the places; their difference is the covariance at a place."""
        if not self.counts.numel():
            raise SitusError("the attacker `images` has no samples", field=("images", "texts"))
        mean, count = self.mean(), self.counts.sum()
        offsets = self.sums / self.counts[:, None] - mean
        return self.square / count - torch.outer(mean, mean), (offsets.T * self.counts) @ offsets / count


def _read(backbone: Backbone, state: Mapping[str, Tensor], groups: Sequence[Group], batch: Tensor) -> Tensor:
    """The stream as the first block's projections read it, without the norm's affine part, [B, N, D]."""
    z = block_inputs(backbone, batch)
    first, bias = first_norm(state, residual_only(groups)[0])
    if first is None:  # post-norm: the stream is already normalised
        return z
    return F.layer_norm(z, z.shape[-1:]) if bias is not None else F.rms_norm(z, z.shape[-1:])


def _embedding(backbone: Backbone, clear: Mapping[str, Tensor]) -> list[Tensor]:
    """The clear tensors of the embedding."""
    parts = {name.removeprefix("model."): role.part for name, role in backbone.roles().items()}
    return [value.detach().double() for name, value in clear.items() if parts.get(name) == "embedding"]


def _widened(backbone: Backbone, embedding: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows [n, E] of words or places in the channels of the stream, [n, D], by the last clear matrix before it."""
    if rows.shape[1] == backbone.dim:
        return rows
    [*_, wider] = (value for value in embedding if value.shape == (backbone.dim, backbone.token_dim))
    return rows @ wider.T


def _filters(backbone: Backbone, embedding: Sequence[Tensor]) -> Tensor:
    """The Gram matrix of the patch convolution, or of the word embeddings."""
    flat = [value.flatten(1) for value in embedding if value.dim() == 4 and value.shape[0] == backbone.dim]
    tables = [value for value in embedding if value.dim() == 2 and value.shape[1] == backbone.token_dim]
    if backbone.input.shape is None and tables:  # the largest; others embed token types
        words = max(tables, key=len)
        flat.append(_widened(backbone, embedding, words - words.mean(dim=0)).T)
    return sum((matrix @ matrix.T for matrix in flat), torch.zeros(backbone.dim, backbone.dim, dtype=torch.float64))


def shifted(images: Tensor, patch: tuple[int, int], seed: int = 0) -> Iterator[Tensor]:
    """Images [B, C, H, W] in batches: as they are and shifted by up to `REACH` patches, each also mirrored.

    Shifted images are padded by reflection.
    """
    height, width = images.shape[-2:]
    reach = [min(REACH * side, whole - 1) for side, whole in zip(patch, (height, width), strict=True)]
    generator = torch.Generator().manual_seed(seed)
    for batch in images.split(BATCH):
        padded = F.pad(batch, (reach[1], reach[1], reach[0], reach[0]), mode="reflect")
        for number in range(SHIFTS):
            top, left = reach
            if number:
                top, left = (int(torch.randint(0, 2 * r + 1, (), generator=generator)) for r in reach)
            cut = padded[..., top : top + height, left : left + width]
            yield cut
            yield cut.flip(-1)


def locked_side(backbone: Backbone, groups: Sequence[Group]) -> LockedSide:
    """Statistics of the channels in the first locked blocks. groups: those whose tensors the file holds."""
    state = {name: value.detach().float().cpu() for name, value in backbone.model.state_dict().items()}
    [group, *_] = residual_only(groups)
    present = set(group.members)
    blocks: dict[str, dict[str, tuple[Tensor, Tensor | None]]] = {}
    for block, role, member, rows in _projections(backbone.groups()):
        if member in present:
            matrix = state[member.tensor]
            cut = matrix if rows is None else matrix.index_select(1 - member.axis, rows)
            values, bias = channels(cut, member, group.size), state.get(f"{member.tensor.removesuffix('weight')}bias")
            if bias is not None and rows is not None and role not in ("o", "down"):
                bias = bias[rows]
            projections = blocks.setdefault(block, {})
            projections[f"{role} again" if role in projections else role] = values, bias  # a gated MLP has two "up"
    if not blocks:
        raise SitusError("the locked file has no block with known projections, so there is nothing to attack")
    chosen = list(blocks.values())[:BLOCKS]
    grams = [{role: values @ values.T for role, (values, _) in block.items()} for block in chosen]
    return LockedSide(grams, *_clues(chosen[0], *first_norm(state, residual_only(groups)[0])))


def _clues(
    block: Mapping[str, tuple[Tensor, Tensor | None]], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """centre, lean and reach of a block's projections (role -> values [D, n], bias) behind its norm."""

    def against(role: str) -> Tensor | None:
        values, role_bias = block.get(role, (None, None))
        return None if values is None or role_bias is None else values @ role_bias

    centre = None
    if weight is not None and bias is not None:
        centre = -bias / torch.where(weight == 0, 1e-30, weight)
    elif weight is None and (values_bias := against("v")) is not None:
        centre = -values_bias
    leans = [part for part in (against("up"), block["o"][1] if "o" in block else None) if part is not None]
    lean = torch.stack([normal_scores(part).float() for part in leans]).sum(dim=0) if leans else None
    scale = 1.0 if weight is None else weight.abs()
    reach = [normal_scores(block[role][0].norm(dim=1) * scale).float() for role in "qkv" if role in block]
    return centre, lean, torch.stack(reach).sum(dim=0)


def _projections(groups: Sequence[Group]) -> Iterator[tuple[str, str, Member, Tensor | None]]:
    """(block, role, member of the residual group, indices on the other axis or None for all) of every projection of the
    first stream.

    The inner groups determine the roles: a projection has the residual channels on one axis and an inner group on the
    other.
    """
    [first, *_] = residual_only(groups)
    sides = {(member.tensor, member.axis): member for member in first.members}
    seen = set()
    for group in groups:
        block, _, kind = group.name.rpartition(".")
        members = [m for m in group.members if (m.tensor, 1 - m.axis) in sides]
        places = [None if m.length is None else torch.arange(m.start, m.start + m.length) for m in members]
        if kind == "heads" and len(members) == 2:  # queries, keys and values of each head in one matrix (GPT-NeoX)
            [fused, out], width = members, members[1].inner
            thirds = torch.arange(3 * group.size * width).view(group.size, 3, width).unbind(dim=1)
            members, places = [fused, fused, fused, out], [*(third.flatten() for third in thirds), None]
        roles = [*ROLES.get(kind, "")] if kind != "mlp" else ["up"] * (len(members) - 1) + ["down"]
        if not block or len(roles) != len(members):  # another kind, or a gate among them
            continue
        for role, member, rows in zip(roles, members, places, strict=True):
            if (block, role, member.tensor) not in seen:
                seen.add((block, role, member.tensor))
                yield block, role, sides[member.tensor, 1 - member.axis], rows
