"""The whole image at once: the likeliest order of its rows, the pixels behind it, and which patches belong together.

Under noise a token alone no longer tells its place, but what a picture shows goes on across the borders of patches.
Public images give a Gaussian of all tokens of an image, noise among them: place by place, a token is regressed on those
to the left, above, and between. Along the few directions that neighbours share most, an order of the rows then has an
energy: a cost a token and place, and one a pair of neighbours. Mean field finds how likely each token stands at each
place: by turns what the neighbours let expect, and beliefs that add up to one a place and a token (Sinkhorn). The pairs
come in slowly and never whole, for beliefs that are not yet sure count too much. Pixels are the posterior mean.

What of it is used, and how much the pairs count, is decided on public images that were held out and are attacked in the
same way: where that gains nothing, each token stays alone.

`Borders` is for tokens that a batch exchanged: the last lines of a patch predict the first lines of the next by a
regression on public images, and the tokens of one place are given to the samples by how well they fit the neighbours
that are given already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from situs.backbones.base import Backbone
from situs.locks.veil import Veil, low_pass, token_scale

# ---------------------------------------------------------------------------------------------------------------------
# The attacker that knows the embedding: which place each token came from, and the pixels behind it.
#
# Natural patches have almost no energy in many directions of the token space, and there the position vectors stand
# alone. Mahalanobis distance shows these directions: a token's cost at a place is its distance from the mean token
# there, in the covariance of public tokens. The order of all tokens is the assignment of least cost. The pixels are
# then the regression of patches on tokens, fitted on public images under the same defence.


LEAST_RIDGE, _PIXEL_RIDGE = 1e-9, 1e-10


@dataclass(frozen=True)
class PublicSide:
    """What public images and the known embedding say under a defence.

    prefix: [p, D]. places: [N, D], the mean token at each place. covariance: [D, D] of tokens about these means,
    without noise. noise: σ², on each entry. cross: [P, D], of pixels and tokens. pixels: [P], the mean patch. scale:
    what σ is a multiple of. tokens: [m, R, D], the public streams themselves, undefended.
    """

    prefix: Tensor
    places: Tensor
    covariance: Tensor
    noise: float
    cross: Tensor
    pixels: Tensor
    scale: float
    tokens: Tensor

    def whitener(self, least: float = LEAST_RIDGE) -> Tensor:
        """(S + σ²I)⁻¹, [D, D]."""
        return torch.linalg.inv(self.covariance + max(self.noise, least) * torch.eye(len(self.covariance)).double())


def public_side(backbone: Backbone, z: Tensor, patches: Tensor, defence: Veil) -> PublicSide:
    """Fits on public images: their streams z [m, R, D], undefended, and their pixels `patches` [m, N, P].

    The defence is simulated: a filter is linear, so that places and contents pass it apart; noise adds its variance.
    """
    count = patches.shape[1]
    prefix = z[0, : z.shape[1] - count]
    tokens = z[:, len(prefix) :]
    places = _places(backbone, z.shape[2], count)
    content = tokens - places
    if defence.kind == "lowpass":
        content, places = (low_pass(part, backbone.grid, defence.strength) for part in (content, places[None]))
        places = places[0]
    mean = content.flatten(0, 1).mean(dim=0)
    centred = content.flatten(0, 1) - mean
    pixels = patches.double().flatten(0, 1)
    scale = token_scale(tokens)
    return PublicSide(
        prefix=prefix,
        places=places + mean,
        covariance=centred.T @ centred / len(centred),
        noise=(defence.strength * scale) ** 2 if defence.kind == "noise" else 0.0,
        cross=(pixels - pixels.mean(dim=0)).T @ centred / len(centred),
        pixels=pixels.mean(dim=0),
        scale=scale,
        tokens=z,
    )


@torch.no_grad()
def _places(backbone: Backbone, width: int, count: int) -> Tensor:
    """What each place adds to its token, [N, D]: the stream of tokens that are nought."""
    device = next(backbone.parameters()).device
    none = torch.zeros(1, count, width, device=device, dtype=next(backbone.parameters()).dtype)
    return backbone.assemble(none, backbone.positions()).z[0, -count:].double().cpu()


def assign_places(tokens: Tensor, side: PublicSide, copies: int = 1) -> Tensor:
    """The place of each token, [M], for tokens [M, D] with M = copies · N: each place is taken `copies` times."""
    _, chosen = linear_sum_assignment(place_costs(tokens, side).T.repeat(1, copies).numpy())
    return torch.from_numpy(chosen) % len(side.places)


def place_costs(tokens: Tensor, side: PublicSide) -> Tensor:
    """[..., N, M]: the squared Mahalanobis distance of each place to each of the tokens [..., M, D]."""
    inner = side.whitener()
    means = side.places @ inner
    norms = (tokens @ inner * tokens).sum(dim=-1)
    return norms[..., None, :] - 2 * means @ tokens.mT + (means * side.places).sum(dim=1)[:, None]


def set_apart(rows: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """(which rows [p] of one sample [R, D] are the fixed prefix tokens, the others in their order [R - p])."""
    if not len(fixed):
        return torch.empty(0, dtype=torch.long), torch.arange(len(rows))
    _, chosen = linear_sum_assignment(torch.cdist(fixed, rows).numpy())
    others = torch.ones(len(rows), dtype=torch.bool)
    others[torch.from_numpy(chosen)] = False
    return torch.from_numpy(chosen), others.nonzero()[:, 0]


def order_rows(seen: Tensor, side: PublicSide) -> Tensor:
    """The row of the stream that each row sent is, [n, R], for samples [n, R, D] whose rows may be in any order.

    Each token on its own; `joint` also uses neighbours.
    """
    stream_rows = torch.empty(seen.shape[:2], dtype=torch.long)
    for sample, rows in zip(seen, stream_rows, strict=True):
        fixed, others = set_apart(sample, side.prefix)
        rows[fixed] = torch.arange(len(fixed))
        rows[others] = len(fixed) + assign_places(sample[others], side)
    return stream_rows


def read_pixels(tokens: Tensor, places: Tensor, side: PublicSide) -> Tensor:
    """Patches [M, P] behind tokens [M, D] that stand at `places` [M]."""
    return side.pixels + (tokens - side.places[places]) @ (side.cross @ side.whitener(_PIXEL_RIDGE)).T


WIDTHS = (4, 8, 16, 32, 48, 64)
"""Shared directions; how many are used is decided by the likelihood of public images held out."""

WEIGHTS = (0.3, 0.5, 0.7)
"""Shares of the pairs' energy that beliefs end with; one is chosen by an attack on public images held out."""

TRIED = 16
"""Public images at most that are held out and attacked."""

ROUNDS, KEPT, SCALINGS = 38, 0.5, 40
"""Rounds of mean field, the share of the last beliefs that a round keeps, and Sinkhorn's rounds within each."""

BEFORE = ((0, -1), (-1, 0), (-1, -1))
"""The places that one is regressed on: left, above, and between."""

AROUND = tuple((y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0))
"""The places that the regressions tie to one."""

PIECE = 16
"""Images that are put in order at a time."""

_RIDGE = 1e-10

Window = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Moments:
    """Second moments of windows of content [W·k, W·k] by the places of `BEFORE` that there are, summed over `count`."""

    sums: dict[Window, Tensor]
    counts: dict[Window, int]

    @classmethod
    def of(cls, content: Tensor, grid: tuple[int, int]) -> Moments:
        """Of content [m, N, k] on a grid."""
        placed, (height, width) = content.unflatten(1, grid), grid
        sums, counts = {}, {}
        for window in {window_at(place, grid) for place in range(height * width)}:
            down, right = (max(-offset[axis] for offset in ((0, 0), *window)) for axis in (0, 1))
            parts = [placed[:, down + y : height + y, right + x : width + x] for y, x in ((0, 0), *window)]
            rows = torch.cat(parts, dim=-1).flatten(0, 2)
            sums[window], counts[window] = rows.T @ rows, len(rows)
        return cls(sums, counts)

    def covariance(self, window: Window, noise: Tensor, width: int) -> Tensor:
        """Of the first `width` directions, [(w + 1)·k, (w + 1)·k], with noise [K, K] on each place."""
        total, places = self.sums[window], len(window) + 1
        first = (torch.arange(places)[:, None] * (len(total) // places) + torch.arange(width)).flatten()
        return total[first][:, first] / self.counts[window] + torch.block_diag(*[noise[:width, :width]] * places)


def window_at(place: int, grid: tuple[int, int]) -> Window:
    """The offsets of `BEFORE` that stay on the grid."""
    row, column = divmod(place, grid[1])
    return tuple((y, x) for y, x in BEFORE if row + y >= 0 and column + x >= 0)


@dataclass(frozen=True)
class Regressed:
    """For each window: white = (own - before @ weights) @ whiten. weights: [w·k, k], whiten: [k, k]."""

    weights: dict[Window, Tensor]
    whiten: dict[Window, Tensor]
    width: int

    @classmethod
    def of(cls, moments: Moments, noise: Tensor, width: int) -> Regressed:
        """By least squares, of the first `width` directions with noise [k, k] on them."""
        weights, whiten = {}, {}
        for window in moments.sums:
            cov = moments.covariance(window, noise, width)
            weights[window] = torch.linalg.solve(cov[width:, width:], cov[width:, :width])
            left = cov[:width, :width] - cov[:width, width:] @ weights[window]
            whiten[window] = torch.linalg.inv(torch.linalg.cholesky((left + left.T) / 2)).T
        return cls(weights, whiten, width)

    def precision(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """([N, k, k], [N, 8, k, k]): the inverse of the covariance of an image, a place with itself and `AROUND`."""
        count, k = grid[0] * grid[1], self.width
        inner = torch.zeros(count, k, k, dtype=torch.float64)
        outer = torch.zeros(count, len(AROUND), k, k, dtype=torch.float64)
        for place in range(count):
            window = ((0, 0), *window_at(place, grid))
            white = self.whitening(window[1:]).view(len(window), k, k)
            for (y, x), mine in zip(window, white, strict=True):
                at = place + y * grid[1] + x
                for (v, u), other in zip(window, white, strict=True):
                    into = inner[at] if (v, u) == (y, x) else outer[at, AROUND.index((v - y, u - x))]
                    into += mine @ other.T
        return inner, outer

    def whitening(self, window: Window) -> Tensor:
        """[(w + 1)·k, k]: takes content at a place and its window to what is white."""
        return torch.cat([self.whiten[window], -self.weights[window] @ self.whiten[window]])

    def gain(self, moments: Moments, noise: Tensor, grid: tuple[int, int]) -> float:
        """Log likelihood per place of images with these moments, above that of independent places."""
        alone, total = self._likelihood(moments, noise, ()), 0.0
        windows = [window_at(place, grid) for place in range(grid[0] * grid[1])]
        for window in set(windows):
            total += windows.count(window) * (self._likelihood(moments, noise, window) - alone)
        return total / len(windows)

    def _likelihood(self, moments: Moments, noise: Tensor, window: Window) -> float:
        white = self.whitening(window)
        spread = (white.T @ moments.covariance(window, noise, self.width) @ white).trace()
        return float(torch.linalg.slogdet(self.whiten[window]).logabsdet - spread / 2)


@dataclass(frozen=True)
class Whole:
    """The Gaussian of an image's tokens under noise. axes: [D, k], along which a token alone is white.

    inner, outer: its precision along them. weight: how much pairs count in beliefs. side: what a token is alone, and
    in the other directions.
    """

    axes: Tensor
    inner: Tensor
    outer: Tensor
    weight: float
    side: PublicSide
    grid: tuple[int, int]

    def alone(self, tokens: Tensor) -> Tensor:
        """[n, N, N]: what each of the tokens [n, N, D] costs at each place without pairs, place by token."""
        along, middle = tokens @ self.axes, self.side.places @ self.axes
        more = [
            ((along - at) @ (matrix - torch.eye(len(matrix))) * (along - at)).sum(dim=-1)
            for at, matrix in zip(middle, self.inner, strict=True)
        ]
        return place_costs(tokens, self.side) + torch.stack(more, dim=1)

    def outside(self, along: Tensor) -> Tensor:
        """[n, N, k]: the precision times `along` [n, N, k], a place with others."""
        padded = torch.cat([along, along.new_zeros(len(along), 1, along.shape[2])], dim=1)
        near = padded[:, beside(self.grid)].flatten(2).transpose(0, 1)  # [N, n, 8·k]
        return torch.bmm(near, self.outer.mT.flatten(1, 2)).transpose(0, 1)

    def _multiplied(self, along: Tensor) -> Tensor:
        return self.outside(along) + torch.einsum("pkl,npl->npk", self.inner, along)

    def beliefs(self, tokens: Tensor) -> Tensor:
        """[n, N, N]: how likely each place has each of the tokens [n, N, D], which come in any order."""
        return torch.cat([self._beliefs(part) for part in tokens.split(PIECE)])

    def _beliefs(self, tokens: Tensor) -> Tensor:
        alone, single = self.alone(tokens), place_costs(tokens, self.side)
        along, middle = tokens @ self.axes, self.side.places @ self.axes
        belief = balanced(single / 2)
        for number in range(ROUNDS):
            share = self.weight * (number + ROUNDS / 5) / (ROUNDS * 6 / 5 - 1)
            together = alone + 2 * self.outside(belief @ along - middle) @ along.mT
            belief = KEPT * belief + (1 - KEPT) * balanced((single + share * (together - single)) / 2)
        return belief

    def read(self, tokens: Tensor) -> Tensor:
        """Patches [n, N, P], the posterior mean, behind tokens [n, N, D] at their places."""
        side = self.side
        along = (tokens - side.places) @ self.axes
        clear = torch.linalg.solve(side.covariance + _RIDGE * torch.eye(len(side.covariance)).double(), self.axes)
        return _alone(tokens, side) - side.noise * (self._multiplied(along) - along) @ (side.cross @ clear).T


def beside(grid: tuple[int, int]) -> Tensor:
    """[N, 8]: the places `AROUND` each, N where there is none."""
    row, column = (
        (torch.arange(grid[0] * grid[1]) // grid[1])[:, None],
        (torch.arange(grid[0] * grid[1]) % grid[1])[:, None],
    )
    y, x = torch.tensor(AROUND).T
    there = (row + y >= 0) & (row + y < grid[0]) & (column + x >= 0) & (column + x < grid[1])
    return torch.where(there, (row + y) * grid[1] + column + x, grid[0] * grid[1])


def balanced(costs: Tensor) -> Tensor:
    """exp(-costs) [n, N, N] scaled so that columns, then rows add up to one."""
    costs = costs - costs.amin(dim=2, keepdim=True)
    kernel = (-(costs - costs.amin(dim=1, keepdim=True)).clamp(max=60)).exp()
    columns = torch.ones_like(kernel[:, :, :1])
    for _ in range(SCALINGS):
        columns = 1 / (kernel.mT @ (1 / (kernel @ columns)))
    belief = kernel * columns.mT
    return belief / belief.sum(dim=2, keepdim=True)


def chosen(belief: Tensor) -> Tensor:
    """[n, N]: the token at each place with which most are expected to be right, each token once."""
    return torch.stack([torch.from_numpy(linear_sum_assignment(-matrix.numpy())[1]) for matrix in belief])


@dataclass(frozen=True)
class Joint:
    """What neighbours add to single tokens. orders: for rows in any order; reads: for pixels; None: nothing.

    missing: why this could not be tried.
    """

    orders: Whole | None = None
    reads: Whole | None = None
    missing: str = ""

    def read(self, tokens: Tensor, side: PublicSide) -> Tensor:
        """Patches [n, N, P] behind tokens [n, N, D] at their places."""
        return _alone(tokens, side) if self.reads is None else self.reads.read(tokens)


def _alone(tokens: Tensor, side: PublicSide) -> Tensor:
    places = torch.arange(tokens.shape[1]).repeat(len(tokens))
    return read_pixels(tokens.flatten(0, 1), places, side).unflatten(0, tokens.shape[:2])


@dataclass(frozen=True)
class Fitted:
    """Directions by how much neighbours share along them, [D, K], with the moments and the noise [K, K] there."""

    axes: Tensor
    moments: Moments
    noise: Tensor
    side: PublicSide
    grid: tuple[int, int]

    @classmethod
    def of(cls, side: PublicSide, grid: tuple[int, int]) -> Fitted:
        """Of a side's own images."""
        values, vectors = torch.linalg.eigh(side.covariance)
        white = vectors * (values.clamp(min=0) + side.noise).rsqrt()
        placed = _content(side, white).unflatten(1, grid)
        shared = torch.zeros_like(white)
        for axis in (1, 2):
            size = placed.shape[axis] - 1
            if size:
                last, first = (placed.narrow(axis, start, size).flatten(0, 2) for start in (0, 1))
                pair = last.T @ first / len(last)
                shared += pair @ pair.T + pair.T @ pair
        axes = white @ torch.linalg.eigh(shared).eigenvectors.flip(1)[:, : max(WIDTHS)]
        return cls(axes, Moments.of(_content(side, axes), grid), side.noise * axes.T @ axes, side, grid)

    def whole(self, width: int, weight: float) -> Whole:
        """The Gaussian with so many directions."""
        inner, outer = Regressed.of(self.moments, self.noise, width).precision(self.grid)
        return Whole(self.axes[:, :width], inner, outer, weight, self.side, self.grid)

    def width(self, tokens: Tensor) -> int:
        """How many directions make other images' tokens [t, N, D] likeliest; 0: none more than places alone."""
        unseen = Moments.of((tokens - self.side.places) @ self.axes, self.grid)
        widths = [width for width in WIDTHS if width <= self.axes.shape[1]]
        gains = {k: Regressed.of(self.moments, self.noise, k).gain(unseen, self.noise, self.grid) for k in widths}
        best = max(gains, key=gains.__getitem__, default=0)
        return best if best and gains[best] > 0 else 0


def _content(side: PublicSide, axes: Tensor) -> Tensor:
    """[m, N, K]: a side's own tokens, without their places, along axes [D, K]."""
    return (side.tokens[:, len(side.prefix) :] - side.places) @ axes


def joint(side: PublicSide, part: PublicSide, unseen: Tensor, patches: Tensor, grid: tuple[int, int]) -> Joint:
    """What neighbours add under the noise of `side`, decided on public images.

    part: the same without the images whose clear tokens are `unseen` [t, N, D] and whose pixels are `patches`
    [t, N, P]; these are attacked by it.
    """
    if not side.noise:
        return Joint()
    trial = Fitted.of(part, grid)
    if not (width := trial.width(unseen)):
        return Joint()
    chance = torch.Generator().manual_seed(0)
    tokens = unseen + side.noise**0.5 * torch.randn(unseen.shape, generator=chance, dtype=unseen.dtype)
    pixels = patches.double()

    def error(predicted: Tensor) -> float:
        return float((predicted.clamp(0, 1) - pixels).square().mean())

    fitted = Fitted.of(side, grid)
    reads = error(trial.whole(width, 0.0).read(tokens)) < error(_alone(tokens, part))
    whole = fitted.whole(width, 0.0) if reads else None
    identity = torch.arange(tokens.shape[1])
    alone = torch.stack([assign_places(sample, part).argsort() for sample in tokens])  # the token at each place
    best, share = None, float((alone == identity).double().mean())
    least = error(_alone(tokens.gather(1, alone[..., None].expand_as(tokens)), part))
    for weight in WEIGHTS if share < 1 else ():
        tried = trial.whole(width, weight)
        belief = tried.beliefs(tokens)
        right_share = float((chosen(belief) == identity).double().mean())
        if right_share > share and error(Joint(reads=tried if reads else None).read(belief @ tokens, part)) <= least:
            best, share = weight, right_share
    return Joint(None if best is None else fitted.whole(width, best), whole)


LINES = 2
_BORDER_RIDGE = 1e-4


@dataclass(frozen=True)
class Fit:
    """first ≈ centre + last @ weights, with what is left distributed as `inverse`⁻¹; for one direction."""

    weights: Tensor
    centre: Tensor
    inverse: Tensor

    def cost(self, last: Tensor, first: Tensor) -> Tensor:
        """[A, B]: how badly each of `first` [B, F] goes on from each of `last` [A, F]."""
        left = first[None] - (self.centre + last @ self.weights)[:, None]
        return torch.einsum("abf,fg,abg->ab", left, self.inverse, left)


@dataclass(frozen=True)
class Borders:
    """Patches [.., P] as [height, width, channels], and the fits down (0) and to the right (1)."""

    shape: tuple[int, int, int]
    grid: tuple[int, int]
    fits: tuple[Fit, Fit]

    @classmethod
    def of(cls, patches: Tensor, shape: tuple[int, int, int], grid: tuple[int, int]) -> Borders:
        """Fitted on public images, as patches [m, N, P]."""
        placed = patches.double().unflatten(1, grid)
        down = _fit(_edge(placed[:, :-1], shape, 0, False), _edge(placed[:, 1:], shape, 0, True))
        right = _fit(_edge(placed[:, :, :-1], shape, 1, False), _edge(placed[:, :, 1:], shape, 1, True))
        return cls(shape, grid, (down, right))

    def group(self, patches: Tensor, places: Tensor, count: int) -> Tensor:
        """[M]: the sample, 0 to count - 1 and without its name, of M = count · N patches [M, P] at `places` [M]."""
        at = [(places == place).nonzero()[:, 0] for place in range(self.grid[0] * self.grid[1])]
        edges = {(axis, first): _edge(patches, self.shape, axis, first) for axis in (0, 1) for first in (True, False)}
        group = torch.full((len(patches),), -1, dtype=torch.long)
        start = (self.grid[0] // 2) * self.grid[1] + self.grid[1] // 2
        group[at[start]] = torch.arange(len(at[start]))
        done, waiting = {start}, set(self._beside(start))
        while waiting:
            # The place with the most neighbours that are given already, so that as much as can be decides.
            place = max(sorted(waiting), key=lambda candidate: sum(n in done for n in self._beside(candidate)))
            cost = torch.zeros(len(at[place]), count, dtype=torch.float64)
            for other, (axis, after) in self._beside(place).items():
                if other not in done:
                    continue
                mine, theirs = edges[axis, not after][at[place]], edges[axis, after][at[other]]
                pair = self.fits[axis].cost(mine, theirs) if after else self.fits[axis].cost(theirs, mine).T
                cost[:, group[at[other]]] += pair
            rows, chosen = linear_sum_assignment(cost.numpy())
            group[at[place][torch.from_numpy(rows)]] = torch.from_numpy(chosen)
            done.add(place)
            waiting = (waiting | set(self._beside(place))) - done
        return group

    def _beside(self, place: int) -> dict[int, tuple[int, bool]]:
        """The places beside one: (axis, whether it comes after)."""
        height, width = self.grid
        row, column = divmod(place, width)
        beside = {}
        for axis, by in ((0, 1), (0, -1), (1, 1), (1, -1)):
            r, c = (row + by, column) if axis == 0 else (row, column + by)
            if 0 <= r < height and 0 <= c < width:
                beside[r * width + c] = (axis, by > 0)
        return beside


def _edge(patches: Tensor, shape: tuple[int, int, int], axis: int, first: bool) -> Tensor:
    """The first or last lines of patches [..., P] along an axis, flat, [..., F]."""
    placed = patches.double().unflatten(-1, shape)
    side = placed.shape[-3 + axis]
    return placed.narrow(-3 + axis, 0 if first else side - LINES, LINES).flatten(-3)


def _fit(last: Tensor, first: Tensor) -> Fit:
    x, y = last.flatten(0, -2), first.flatten(0, -2)
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    mx, my = x.mean(dim=0), y.mean(dim=0)
    weights = torch.linalg.solve((x - mx).T @ (x - mx) / len(x) + _BORDER_RIDGE * eye, (x - mx).T @ (y - my) / len(x))
    left = y - my - (x - mx) @ weights
    return Fit(weights, my - mx @ weights, torch.linalg.inv(left.T @ left / len(left) + _BORDER_RIDGE * eye))
