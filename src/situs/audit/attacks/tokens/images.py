"""From tokens to images: which tokens are of the same image, and the place of each.

The attention's output for a token, o, is a mean over the tokens of its own image. Where attention is a plain one, that
shows which they are (`same_image`); with rotary or relative positions the o of one image are assumed to be alike. Every
place gives each image one token (`_assign`). Places with equal position vectors are put in order by their borders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from situs.audit.attacks.ordering import order_hidden
from situs.audit.attacks.solver import SOLVED, Heads, Span, Tokens, pulls
from situs.audit.attacks.tokens.block import LOOSE, Block
from situs.audit.attacks.tokens.search import Roots, shared_places
from situs.audit.defences import Gradients
from situs.audit.stem import to_images
from situs.core.tokens import patchify
from situs.methods.mp3 import MP3

# ---------------------------------------------------------------------------------------------------------------------
# Which tokens are of the same image, from the attention of the first block alone (`solver.pulls`): least squares near
# y = 1 / batch for every token, also where some tokens were not recovered.


MISSED = 0.1
"""Share of o that may come from tokens that were not recovered: it sets the weight of the equations."""


def read_heads(block: Block) -> Heads | None:
    """The plain attention with the same outputs as the block's own, by trying; None where it is of another kind."""
    weight, bias = block.joined(block.layers.qkv)
    patches = torch.randn(1, block.places, block.weight.shape[1], generator=torch.Generator().manual_seed(0))
    inputs, outputs = block.attended(patches.to(block.weight))
    width = outputs.shape[-1]
    if len(bias) != 3 * width:
        return None
    for count in (number for number in range(1, width + 1) if width % number == 0):
        heads = Heads(weight, bias, count)
        plain = scaled_dot_product_attention(*heads.split(inputs[0])).transpose(0, 1).flatten(1)
        if float((plain - outputs[0]).norm()) <= LOOSE * float(outputs.norm()):
            return heads
    return None


def same_image(block: Block, roots: Roots, batch: int) -> Tensor | None:
    """Whether tokens are of the same image [T, T], near 1 or 0; None where the attention is not a plain one.

    Two tokens of one place are of different images, unless places share their equations.
    """
    heads = read_heads(block)
    if heads is None:
        return None
    tokens, first, count = roots.tokens, len(block.prefix), len(roots.place)
    q, k, v = heads.split(block.norm1.apply(torch.cat([block.prefix, tokens.z])))
    paid = heads.paid(q[:, first:], k)
    o = tokens.o.unflatten(-1, (heads.count, -1)).transpose(0, 1)
    links = torch.eye(count).to(o)
    alone = roots.wanted[roots.place] <= batch
    for number in range(count):
        pull = pulls(paid[:, number], v, o[:, number])
        apart = (roots.place == roots.place[number]) & alone
        apart[number] = True
        others = (~apart).nonzero()[:, 0]
        scale = MISSED * float(paid[:, number].sum(dim=-1).mean()) / batch * float(o[:, number].std())
        columns = pull[first + others].T / scale
        left = -(pull[:first].sum(dim=0) + pull[first + number]) / scale - columns.sum(dim=1) / batch
        normal = columns.T @ columns + torch.eye(len(others)).to(columns)
        links[number, others] = 1 / batch + torch.linalg.solve(normal, columns.T @ left)
    return (links + links.T) / 2


# ---------------------------------------------------------------------------------------------------------------------
# The order of tokens whose places show in attention alone: rotary and relative positions.
#
# The attention's output o of each token is known beside the token itself. The block's own attention over the tokens in
# some order gives outputs too: in the right order the same ones. Borders give a first order, which is often right up to
# a shift of the whole and a few patches; those are tried. Where every order gives the same outputs, attention has no
# positions.


RIVALS = 3.0
"""The order is proved if the error of attention is this many times smaller than in every other order tried."""

WORST = 16
"""Tokens whose places are exchanged with each other in a round: those with the largest error of attention."""

ROUNDS = 60

ROUNDED = 100
"""Errors up to this many units in the last digit are rounding, and prove no order."""

ABREAST = 2**14
"""Tokens in one forward pass."""


class Order(NamedTuple):
    """at: [N], the token at each place. proved: whether attention tells this order from every other tried."""

    at: Tensor
    proved: bool


def order_by_attention(block: Block, patches: Tensor, o: Tensor, stop: Callable[[], bool] = lambda: False) -> Order:
    """The order of patches [N, K] with attention outputs o [N, ·], from the order they are in."""
    count = len(patches)
    here = torch.arange(count, device=patches.device)
    orders = torch.cat([here[None], _shifts(block, here)])
    errors = _errors(block, patches, o, orders)
    best = int(errors.sum(dim=1).argmin())
    at, error, largest = orders[best], errors[best], float(errors.sum(dim=1).max())
    rounding = float((o @ block.into).square().sum()) * (ROUNDED * torch.finfo(o.dtype).eps) ** 2
    if largest <= (1 + 1e-6) * float(error.sum()) + rounding:
        return Order(here, False)  # attention has no positions
    nearest = torch.inf
    for _ in range(ROUNDS):
        if stop():
            return Order(at, False)
        worst = error.argsort(descending=True)[:WORST]
        orders = _exchanged(at, torch.combinations(worst))
        errors = _errors(block, patches, o, orders)
        totals = errors.sum(dim=1)
        nearest = float(totals.min())
        if nearest >= float(error.sum()):
            break
        at, error = orders[totals.argmin()], errors[totals.argmin()]
    # No exchange of the worst helps: try all neighbours, and some distant pairs.
    grid = here.view(block.grid)
    pairs = [
        torch.stack([a.flatten(), b.flatten()], dim=1) for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]))
    ]
    pairs = torch.cat([*pairs, torch.stack([here, here.roll(count // 2 + 1)], dim=1)])
    errors = _errors(block, patches, o, _exchanged(at, pairs), stop).sum(dim=1)
    alike = torch.cdist(patches, patches) <= 1e-6 * patches.norm(dim=1).max()
    different = ~alike[at[pairs[:, 0]], at[pairs[:, 1]]]  # two equal patches may stand either way
    nearest = min(nearest, float(errors[different].min()) if bool(different.any()) else torch.inf)
    return Order(at, not stop() and RIVALS**2 * float(error.sum()) + rounding <= nearest)


def _errors(
    block: Block, patches: Tensor, o: Tensor, orders: Tensor, stop: Callable[[], bool] = lambda: False
) -> Tensor:
    """Squared errors of the attention's outputs in each order [T, N], at each place: [T, N]."""
    first, errors = len(block.prefix), []
    for part in orders.split(max(1, ABREAST // patches.shape[0])):
        if stop():
            errors.append(torch.full(part.shape, torch.inf).to(patches))
            continue
        outputs = block.middle(patches[part])[1][:, first:]
        errors.append(((outputs - o[part]) @ block.into).square().sum(dim=-1))
    return torch.cat(errors)


def _shifts(block: Block, here: Tensor) -> Tensor:
    """All shifts of the whole order but the identity, [N - 1, N]."""
    grid = here.view(block.grid)
    down, across = block.grid[0], block.grid[1]
    moved = [grid.roll((i, j), dims=(0, 1)).flatten() for i in range(down) for j in range(across) if i or j]
    return torch.stack(moved)


def _exchanged(at: Tensor, pairs: Tensor) -> Tensor:
    """The order with the tokens at two places exchanged, once for each of pairs [T, 2]: [T, N]."""
    orders = at.repeat(len(pairs), 1)
    rows = torch.arange(len(pairs), device=at.device)
    orders[rows, pairs[:, 0]], orders[rows, pairs[:, 1]] = at[pairs[:, 1]], at[pairs[:, 0]]
    return orders


# --- from tokens to images -------------------------------------------------------------------------------------------


TOGETHER = 1e-2
"""Tokens are of one image if its attention gives them their streams up to this relative error."""

NEARER = 3.0
"""And if the attention of any other image has an error this many times larger."""

FALL = 100.0
"""Successive singular values of different images' tokens differ by less than this factor."""

PASSES = 10
"""Rounds of assigning the tokens of every place to images, at most."""

SEEDS = 8
"""Places whose tokens are tried as the first of each image."""


def make_images(
    block: Block, roots: Roots, batch: int, predictor: MP3 | None = None, stop: Callable[[], bool] = lambda: False
) -> tuple[Tensor, Tensor]:
    """Patches [B, N, K] and whether each is proved [B, N]; missing ones are grey, 0. predictor: helps to order them."""
    first, tokens = shared_places(block.base), roots.tokens
    owner = _assign(block, roots, batch)
    patches = tokens.x.new_zeros(batch, block.places, tokens.x.shape[1])
    proved = torch.zeros(batch, block.places, dtype=torch.bool, device=first.device)
    for image in range(batch):
        free = torch.ones_like(first, dtype=torch.bool)
        for number in (owner == image).nonzero()[:, 0].tolist():
            here = ((first == roots.place[number]) & free).nonzero()[:, 0]
            if not len(here):
                continue
            free[here[0]] = False
            patches[image, here[0]], proved[image, here[0]] = tokens.x[number], bool(roots.fit[number] <= SOLVED)
        loose = torch.bincount(first, minlength=len(first))[first] > 1
        if bool(loose.any()):
            patches[image] = _in_order(block, patches[image], loose, predictor, stop)
            proved[image] &= bool(proved[image].all())  # the order of missing patches is not known
    return _copied(patches, proved, batch)


def _in_order(block: Block, patches: Tensor, loose: Tensor, predictor: MP3 | None, stop: Callable[[], bool]) -> Tensor:
    """Patches [N, K] with those of unknown place (`loose`) put where their borders fit best."""
    cells, size = patches, block.stem.patch_size
    if block.stem.layout != "patches":
        image = to_images(patches.unsqueeze(0), block.backbone, block.stem)
        size = (image.shape[-2] // block.grid[0], image.shape[-1] // block.grid[1])
        cells = patchify(image, size)[0]
    ordered = order_hidden(cells, loose, block.grid, size, predictor=predictor, stop=stop)
    return patches[torch.cdist(ordered, cells).argmin(dim=1)]


def distinct_images(block: Block, upload: Gradients, batch: int, even: bool) -> int:
    """How many different images a batch has: equal ones have the same tokens, which count once in every rank.

    Fewer than the batch only where the singular values of the MLP's last gradient fall by `FALL` behind a whole number
    of images.
    """
    tokens, late = block.places + len(block.prefix), block.layers.fc2
    if batch == 1 or late not in upload:
        return batch
    values = Span(upload[late], min(batch * tokens, *upload[late].shape), even).values
    for count in range(1, batch):
        pair = values[count * tokens - 1 : count * tokens + 1].tolist()
        if len(pair) == 2 and pair[1] * FALL <= pair[0]:
            return count
    return batch


def agree(block: Block, patches: Tensor, tokens: Tokens) -> bool:
    """Whether the block's own attention gives the tokens of images [B, N, K] their streams, and nearer by `NEARER` than
    the attention of any other image would."""
    batch, first = len(patches), len(block.prefix)
    streams, outputs = (part[:, first:] for part in block.middle(patches))
    recovered = tokens.at(torch.cdist(patches.flatten(0, 1), tokens.x).argmin(dim=1))
    error = (streams.flatten(0, 1) - recovered.m).norm(dim=1)
    right = error <= TOGETHER * recovered.m.norm(dim=1)
    for step in range(1, batch):
        other = (outputs.roll(step, dims=0).flatten(0, 1) - recovered.o) @ block.into
        right &= NEARER * error <= other.norm(dim=1)
    return bool(right.all())


def _copied(patches: Tensor, proved: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Images that are alike at a place have one root there: its copy is the best guess, and not proved."""
    if batch > 1:
        for place in range(patches.shape[1]):
            known = proved[:, place]
            if bool(known.any()) and not bool(known.all()):
                patches[~known, place] = patches[known, place][0]
    return patches, proved


def _assign(block: Block, roots: Roots, batch: int) -> Tensor:
    """The image of each token, [T]: every image has one token of each place."""
    if batch == 1:
        return torch.zeros_like(roots.place)
    best, least = torch.zeros_like(roots.place), torch.inf
    sure = roots.fit <= SOLVED
    counts = torch.bincount(roots.place[sure], minlength=len(roots.wanted))
    whole = (counts == roots.wanted).nonzero()[:, 0]
    whole = whole[roots.wanted[whole] > 0] if len(whole) else counts.argmax().view(1)
    points = _points(block, roots, batch, sure)
    for seed in whole[torch.linspace(0, len(whole) - 1, min(SEEDS, len(whole))).long()].tolist():
        owner, cost = _cluster(points, roots, batch, roots.at(seed)[:batch])
        if cost < least:
            best, least = owner, cost
    return best


def _points(block: Block, roots: Roots, batch: int, sure: Tensor) -> Tensor:
    """[T, ·], near each other for tokens of one image; by the sure tokens alone."""
    o, index = roots.tokens.o, sure.nonzero()[:, 0]
    known = Roots(roots.place[index], roots.tokens.at(index), roots.fit[index], roots.wanted)
    links = same_image(block, known, batch) if len(index) else None
    if links is None:
        away = o - o[sure].mean(dim=0)
        # The strongest directions alone: what a token's own query adds is noise here.
        _, _, axes = torch.linalg.svd(away[sure], full_matrices=False)
        return away @ axes[: 2 * (batch - 1)].T
    values, axes = torch.linalg.eigh(links)
    points = o.new_zeros(len(o), min(batch, len(index)))
    points[index] = (axes * values.clamp(min=0).sqrt())[:, -batch:]
    return points


def _cluster(points: Tensor, roots: Roots, batch: int, seeds: Tensor) -> tuple[Tensor, float]:
    from scipy.optimize import linear_sum_assignment

    centres = points[seeds]
    if len(centres) < batch:
        centres = torch.cat([centres, points[: batch - len(centres)]])
    owner, cost = torch.zeros_like(roots.place), torch.inf
    for _ in range(PASSES):
        new, cost = torch.full_like(owner, -1), 0.0
        for place in roots.place.unique().tolist():
            here = roots.at(place)
            away = torch.cdist(points[here], centres)
            slots = max(1, int(roots.wanted[place]) // batch)
            wide = away.repeat_interleave(slots, dim=1).square()
            rows, columns = linear_sum_assignment(wide.cpu().numpy())
            new[here[torch.from_numpy(rows)]] = torch.from_numpy(columns).to(new) // slots
            cost += float(wide[torch.from_numpy(rows), torch.from_numpy(columns)].sum())
        if torch.equal(new, owner):
            break
        owner = new
        clusters = [points[owner == image] for image in range(len(centres))]
        pairs = zip(clusters, centres, strict=True)  # the centre of an image without tokens stays where it is
        centres = torch.stack([cluster.mean(dim=0) if len(cluster) else centre for cluster, centre in pairs])
    return owner, cost
