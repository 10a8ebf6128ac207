"""From tokens to images: which tokens are of one image, and where each stands.

What a token's attention gave it, o, is a mean over the tokens of its own image. Where attention is a plain one that
tells which they are (`members`); with rotary or relative positions the o of one image are taken to be alike. Every
place gives each image one token (`_part`). Places that no vector tells apart are put in order by their borders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from situs.audit.attacks.adaptive.ordering import order_hidden
from situs.audit.attacks.solver import Heads, Tokens, pulls
from situs.audit.attacks.spans import SOLVED, Span
from situs.audit.attacks.tokens.block import LOOSE, Block
from situs.audit.attacks.tokens.search import Roots, shared_places
from situs.audit.defences import Gradients
from situs.audit.stem import to_images
from situs.core.tokens import patchify
from situs.methods.mp3 import MP3

# ---------------------------------------------------------------------------------------------------------------------
# Which tokens are of one image, from the attention of the first block alone (`solver.pulls`). Least squares near
# y = 1 / batch give who stands with every token, also where some tokens were not found.


MISSED = 0.1
"""Share of o that may be of tokens that were not found: what the equations are weighed by."""


def read_heads(block: Block) -> Heads | None:
    """The plain attention that gives what the block's own gives, found by trying; None where it is of another kind."""
    own = dict(block.backbone.named_parameters())
    weights: list[Tensor] = [own[name] for name in block.layers.qkv]
    biases = [own.get(f"{name.removesuffix('weight')}bias") for name in block.layers.qkv]
    pairs = zip(weights, biases, strict=True)
    bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
    patches = torch.randn(1, block.places, block.weight.shape[1], generator=torch.Generator().manual_seed(0))
    entered, given = block.attended(patches.to(block.weight))
    width = given.shape[-1]
    if len(bias) != 3 * width:
        return None
    for count in (number for number in range(1, width + 1) if width % number == 0):
        heads = Heads(torch.cat(weights), bias, count)
        made = scaled_dot_product_attention(*heads.split(entered[0])).transpose(0, 1).flatten(1)
        if float((made - given[0]).norm()) <= LOOSE * float(given.norm()):
            return heads
    return None


def same_image(block: Block, roots: Roots, batch: int) -> Tensor | None:
    """How far tokens are of one image [T, T], near 1 or 0; None where the attention is not a plain one.

    Two of one place are of different images, unless places share their equations.
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
# The order of tokens that nothing but attention tells apart: rotary and relative positions.
#
# What a token's attention gave it, o, is known beside the token itself. The block's own attention over the tokens in
# some order gives each of them an o: in the right order the same. Borders give a first order, which is often right but
# for a shift of the whole and a few patches; those are tried. Where every order gives the same, no position is in
# attention.


RIVALS = 3.0
"""The order is proved if attention is off by this many times less than in every other that was tried."""

WORST = 16
"""Tokens whose places are exchanged with each other in a round: those whose attention is furthest off."""

ROUNDS = 60

ABREAST = 2**14
"""Tokens that are run at a time."""


class Order(NamedTuple):
    """at: [N], which of the tokens stands at each place. proved: whether attention tells it from every other tried."""

    at: Tensor
    proved: bool


def order_by_attention(block: Block, patches: Tensor, o: Tensor, stop: Callable[[], bool] = lambda: False) -> Order:
    """The order of patches [N, K] whose attention gave o [N, ·], from the order they are in."""
    count = len(patches)
    here = torch.arange(count, device=patches.device)
    every = _off(block, patches, o, torch.cat([here[None], _shifts(block, here)]))
    best = int(every.sum(dim=1).argmin())
    at = torch.cat([here[None], _shifts(block, here)])[best]
    off, reached = every[best], float(every.sum(dim=1).max())
    if reached <= (1 + 1e-6) * float(off.sum()):
        return Order(here, False)  # attention knows no places
    nearest = torch.inf
    for _ in range(ROUNDS):
        if stop():
            return Order(at, False)
        worst = off.argsort(descending=True)[:WORST]
        tries = _exchanged(at, torch.combinations(worst))
        found = _off(block, patches, o, tries)
        nearest = float(found.sum(dim=1).min())
        if nearest >= float(off.sum()):
            break
        at, off = tries[found.sum(dim=1).argmin()], found[found.sum(dim=1).argmin()]
    # No exchange of the worst helps: what of all neighbours, and of others by chance?
    grid = here.view(block.grid)
    pairs = [
        torch.stack([a.flatten(), b.flatten()], dim=1) for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]))
    ]
    pairs.append(torch.stack([here, here.roll(count // 2 + 1)], dim=1))
    found = _off(block, patches, o, _exchanged(at, torch.cat(pairs)), stop).sum(dim=1)
    alike = torch.cdist(patches, patches) <= 1e-6 * patches.norm(dim=1).max()
    told = ~alike[at[torch.cat(pairs)[:, 0]], at[torch.cat(pairs)[:, 1]]]  # two that are equal may stand either way
    nearest = min(nearest, float(found[told].min()) if bool(told.any()) else torch.inf)
    return Order(at, not stop() and RIVALS**2 * float(off.sum()) <= nearest)


def _off(block: Block, patches: Tensor, o: Tensor, orders: Tensor, stop: Callable[[], bool] = lambda: False) -> Tensor:
    """How far attention is off in each order [T, N], squared, at each place: [T, N]."""
    first, found = len(block.prefix), []
    for part in orders.split(max(1, ABREAST // patches.shape[0])):
        if stop():
            found.append(torch.full(part.shape, torch.inf).to(patches))
            continue
        given = block.middle(patches[part])[1][:, first:]
        found.append(((given - o[part]) @ block.into).square().sum(dim=-1))
    return torch.cat(found)


def _shifts(block: Block, here: Tensor) -> Tensor:
    """The order shifted as a whole, every way but none, [N - 1, N]."""
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
"""Tokens are of one image if its attention gives them their streams up to this share."""

NEARER = 3.0

FALL = 100.0
"""Singular values of different images' tokens follow each other more closely than this."""

PASSES = 10
"""Times that every place is given to the images anew, at most."""

SEEDS = 8
"""Places whose tokens are tried as the first of each image."""


def make_images(
    block: Block, roots: Roots, batch: int, predictor: MP3 | None = None, stop: Callable[[], bool] = lambda: False
) -> tuple[Tensor, Tensor]:
    """Patches [B, N, K] and whether each is proved [B, N]; what is missing is grey, 0. predictor: asked for places."""
    first, tokens = shared_places(block.base), roots.tokens
    owner = _part(block, roots, batch)
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
            proved[image] &= bool(proved[image].all())  # the order of those that are missing is not known
    return _copied(patches, proved, batch)


def _in_order(block: Block, patches: Tensor, loose: Tensor, predictor: MP3 | None, stop: Callable[[], bool]) -> Tensor:
    """Patches [N, K] with the loose ones brought to the places where their borders fit best."""
    cells, size = patches, block.stem.patch_size
    if block.stem.layout != "patches":
        image = to_images(patches.unsqueeze(0), block.backbone, block.stem)
        size = (image.shape[-2] // block.grid[0], image.shape[-1] // block.grid[1])
        cells = patchify(image, size)[0]
    ordered = order_hidden(cells, loose, block.grid, size, predictor=predictor, stop=stop)
    return patches[torch.cdist(ordered, cells).argmin(dim=1)]


def distinct_images(block: Block, upload: Gradients, batch: int, even: bool) -> int:
    """How many different images a batch has: equal ones have the same tokens, which count once in every rank.

    Believed only where the singular values of the MLP's last gradient fall by `FALL` behind a whole number of images.
    """
    each, late = block.places + len(block.prefix), block.layers.fc2
    if batch == 1 or late not in upload:
        return batch
    values = Span(upload[late], min(batch * each, *upload[late].shape), even).values
    for count in range(1, batch):
        pair = values[count * each - 1 : count * each + 1].tolist()
        if len(pair) == 2 and pair[1] * FALL <= pair[0]:
            return count
    return batch


def repeated(distinct: int, batch: int) -> str:
    """What is said of a batch with equal images."""
    return f"{distinct} different images are in a batch of {batch}, and the gradients do not tell which are there twice"


def agree(block: Block, patches: Tensor, tokens: Tokens) -> bool:
    """Whether the block's own attention gives the tokens of images [B, N, K] their streams, and nearer by `NEARER` than
    the attention of any other image would."""
    batch, first = len(patches), len(block.prefix)
    streams, given = (part[:, first:] for part in block.middle(patches))
    held = tokens.at(torch.cdist(patches.flatten(0, 1), tokens.x).argmin(dim=1))
    off = (streams.flatten(0, 1) - held.m).norm(dim=1)
    right = off <= TOGETHER * held.m.norm(dim=1)
    for step in range(1, batch):
        other = (given.roll(step, dims=0).flatten(0, 1) - held.o) @ block.into
        right &= NEARER * off <= other.norm(dim=1)
    return bool(right.all())


def _copied(patches: Tensor, proved: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Images that are alike at a place have one root there: the copy is the best guess, and unproved."""
    if batch > 1:
        for place in range(patches.shape[1]):
            there = proved[:, place]
            if bool(there.any()) and not bool(there.all()):
                patches[~there, place] = patches[there, place][0]
    return patches, proved


def _part(block: Block, roots: Roots, batch: int) -> Tensor:
    """The image of each token, [T]: one of each place for every image, so that those of an image belong together."""
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
    """[T, ·], near each other for tokens of one image; those that are not sure tell nothing of others."""
    o, found = roots.tokens.o, sure.nonzero()[:, 0]
    known = Roots(roots.place[found], roots.tokens.at(found), roots.fit[found], roots.wanted)
    links = same_image(block, known, batch) if len(found) else None
    if links is None:
        away = o - o[sure].mean(dim=0)
        # The strongest directions alone: what a token's own query adds is noise here.
        _, _, axes = torch.linalg.svd(away[sure], full_matrices=False)
        return away @ axes[: max(batch - 1, 1) * 2].T
    values, axes = torch.linalg.eigh(links)
    points = o.new_zeros(len(o), min(batch, len(found)))
    points[found] = (axes * values.clamp(min=0).sqrt())[:, -batch:]
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
        owned = [points[owner == image] for image in range(len(centres))]
        pairs = zip(owned, centres, strict=True)  # an image that no token is given stays where it is
        centres = torch.stack([own.mean(dim=0) if len(own) else centre for own, centre in pairs])
    return owner, cost
