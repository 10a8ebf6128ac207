"""The solver for the tokens of a first block, by its gradients: of images, words and hidden patches alike.

    m = z + A o + b          the stream between attention and MLP; o: input of the attention's last layer
    h2 = norm2(m)            input of the MLP's first layer or layers
    a = late(m)              input of its last layer

Each must lie in the row space of its layer's gradient. The first two equations are linear and leave a flat (`Flat`); in
it the third tells the tokens of the batch from all others (`Descent`). The attention's output for a token then shows
which others are in the same image or sentence (`pulls`).

`Descent` is Levenberg-Marquardt for many tokens at once, on the residual of a outside the last layer's span: the
unknowns φ are the directions that linear equations leave open. Most of the time goes into the normal matrices. So they
are made of few products, in float32 where possible, and from those units alone that are least curved over what a token
can be: strongly curved ones block the path to a root with local minima. The accuracy of a token does not depend on
that: a near fit is polished in float64 with every unit.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vmap

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.equations import svd

# ---------------------------------------------------------------------------------------------------------------------
# Row spaces of gradients: the input of a linear layer lies in the row space of its weight's gradient.
#
# ∂W = Σ_t δ_t h_t^T, so with fewer tokens than channels every h_t passes a test that anything else fails: its residual
# outside the row space is 0. How large a residual rounding and noise explain follows from the gradient itself, so a
# guess is judged without the truth. The span of a layer behind a norm is one of norm(z): `Norm` has the form of z that
# lies in it and is linear in z.


FORWARD = 3e-6
"""Relative error of the victim's own forward pass in float32: its h is not exactly ours."""

SOLVED = 3.0
"""An input fits if its residual is at most this many times what noise explains. At the truth the ratio is about 1; a
wrong solution has thousands, and at least 4 where its gradients are weak."""

TELLING = 1e-2
"""Largest residual that still tells right from wrong, whatever noise explains: wrong solutions have little more, and
where rounding alone explains as much (fp16, tokens of weak gradients) nobody can tell them from the right one."""

BULK = 1.5
"""A direction is no noise if it is this many times the largest that noise of the remaining size alone would have."""

SPARE = 4
"""Directions that are left to noise at least where a rank is estimated."""


def whole_rows(gradient: Tensor) -> Tensor:
    """The rows [·, in] of a gradient without overflow, in float64: they span the same space."""
    rows = known_numbers(gradient)
    return rows[rows.isfinite().all(dim=1)]


def rank_of(values: Tensor, rows: int, columns: int) -> int:
    """How many singular values [·], in descending order, of a matrix [rows, columns] exceed uniform noise.

    The others are the noise: r directions leave noise of a known size, whose largest singular value is known too
    (√rows + √columns times its deviation); the result is the largest r whose last direction exceeds that. From fewer
    than `SPARE` directions the size of noise cannot be estimated.
    """
    count = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    left = (values.square().flip(0).cumsum(0).flip(0) - values.square()).clamp(min=0)
    high, wide = (rows - count).clamp(min=0), (columns - count).clamp(min=0)
    noise = (left / (high * wide).clamp(min=1)).sqrt()
    edge = BULK * noise * (high.sqrt() + wide.sqrt())
    rounding = max(rows, columns) * torch.finfo(values.dtype).eps * values[:1]
    above = (values > torch.maximum(edge, rounding))[: max(len(values) - SPARE, 0)].nonzero()
    return int(above[-1]) + 1 if len(above) else 0


class Span:
    """The row space of one weight's gradient [out, in] of rank `rank`; None for as many directions as exceed its
    rounding and noise.

    Rows are divided by their size (which leaves the row space as it is) and columns by theirs: rounding errs in
    proportion to each number, so that only then the noise is uniform and even the weakest tokens exceed it. even: noise
    of one deviation was added to all numbers, and nothing is divided. forward: relative error of the layer's inputs in
    the victim's forward pass, None for that of float32. drifts: what is left beside the rank may lie in few directions,
    as the changes of inputs over a client's local steps do: its largest value bounds it, not its mean. `inside`
    [rank, in] is an orthonormal basis for inputs scaled by `column`.
    """

    def __init__(
        self,
        gradient: Tensor,
        rank: int | None = None,
        even: bool = False,
        forward: float | None = None,
        drifts: bool = False,
    ) -> None:
        self.forward = FORWARD if forward is None else forward
        g = whole_rows(gradient)
        size = g.square().mean(dim=1, keepdim=True).sqrt()
        g = (g / (1.0 if even else size))[size[:, 0] > 0]
        column = g.square().mean(dim=0).sqrt()
        # A unit that is nearly dead carries no information, and dividing by its size would give it the most weight.
        column = column.clamp(min=1e-2 * float(column.square().mean().sqrt()))
        self.column = torch.ones_like(column) if even else 1 / column
        g = g * self.column
        # The triangle of a tall matrix has the same directions.
        _, values, vectors = svd(torch.linalg.qr(g, mode="r")[1] if g.shape[0] > g.shape[1] else g)
        self.rank = rank_of(values, *g.shape) if rank is None else rank
        free = (g.shape[0] - self.rank) * (g.shape[1] - self.rank)
        noise = (values[self.rank :].square().sum() / max(free, 1)).sqrt()
        if drifts and self.rank < len(values):
            noise = torch.maximum(noise, values[self.rank] / max(g.shape[1] - self.rank, 1) ** 0.5)
        self.values, self.inside, self.noise = values[: self.rank], vectors[: self.rank].contiguous(), noise

    @staticmethod
    def exists(gradient: Tensor, rank: int) -> bool:
        """Whether the gradient has directions outside of a row space of this rank."""
        rows = whole_rows(gradient)
        return min(rows.shape) > rank and bool(rows.any())

    def outside(self, scaled: Tensor) -> Tensor:
        """The part of scaled inputs [..., in] outside the span, as vectors of the same length."""
        return scaled - (scaled @ self.inside.T) @ self.inside

    def residual(self, inputs: Tensor) -> Tensor:
        """The share of inputs [..., in] that lies outside the span, [...]."""
        scaled = inputs * self.column
        return self.outside(scaled).norm(dim=-1) / scaled.norm(dim=-1)

    def expected(self, inputs: Tensor) -> Tensor:
        """The residual that noise alone explains, [...].

        h = Σ_k c_k v_k with ∂W known up to noise η errs outside by η ‖c / σ‖: tokens with weak gradients err most.
        """
        outside = self.column.shape[0] - len(self.inside)
        size = (inputs * self.column).square().sum(dim=-1)
        return (self.deviation(inputs).square() * outside / size + self.forward**2).sqrt()

    def deviation(self, inputs: Tensor) -> Tensor:
        """The deviation of each scaled number outside the span by noise alone, [...]: η ‖c / σ‖."""
        return self.noise * (inputs * self.column @ self.inside.T / self.values).norm(dim=-1)

    def gain(self, matrix: Tensor, into: Tensor) -> Tensor:
        """By how much a matrix [out, in] with outputs weighed by `into` [out] multiplies one unit of `deviation`."""
        outside = (self.column.shape[0] - len(self.inside)) / self.column.shape[0]
        return (matrix / self.column * into.unsqueeze(-1)).norm() * outside**0.5

    def holds(self, inputs: Tensor) -> Tensor:
        """Whether inputs [..., in] lie in the span as far as noise lets one tell, [...] bool."""
        residual = self.residual(inputs)
        return (residual <= SOLVED * self.expected(inputs)) & (residual <= TELLING)


class Norm(NamedTuple):
    """A layer norm, or an RMS norm (not centred): norm(z) = weight · (z - mean z) / s + bias, s the deviation of z.

    Times s that is linear in z and in s: `form(z) + s · bias` lies in the span of the layer behind the norm, with one
    unknown a token where there is a bias and none where there is not.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = True

    @property
    def biased(self) -> bool:
        """Whether it adds anything."""
        return self.bias is not None and bool(self.bias.any())

    def form(self, z: Tensor) -> Tensor:
        """weight · (z - mean z) of tokens z [..., D]."""
        away = z - z.mean(dim=-1, keepdim=True) if self.centred else z
        return away if self.weight is None else away * self.weight

    def size(self, z: Tensor) -> Tensor:
        """s of tokens z [..., D]: [..., 1]."""
        away = z - z.mean(dim=-1, keepdim=True) if self.centred else z
        return (away.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def apply(self, z: Tensor) -> Tensor:
        """norm(z)."""
        normed = self.form(z) / self.size(z)
        return normed if self.bias is None else normed + self.bias


ABREAST = (2**22, 2**28)
"""Numbers of a Jacobian in memory at a time, on one core and on a device."""

OUTSIDE = 1e-3
"""The weight of pixels beyond the range of bytes, beside the residual of a token."""

DEFLATED = 2e-4
"""The residual that the equations of deflated tokens may add, all together: each is weighed accordingly."""

CLOSE = 4.0
"""Times that residual up to which a path that deflated equations have led is continued without them."""

RELEASED = 6
"""Steps of that continuation at most."""

STUCK = 4
"""Steps without progress after which a token's search ends."""

PROGRESS = 1e-2
"""The share by which a step must lower the cost."""

NEAR = 1e-9
"""The cost below which float32 leads no nearer to a token."""


class BlockTail(ABC):
    """The part of a first block after its attention. into [·, D] and shift [D]: A and b."""

    norm2: Norm
    into: Tensor
    shift: Tensor

    @abstractmethod
    def entry(self) -> tuple[Tensor, Tensor]:
        """Weight [H', D] and bias [H'] of the MLP's first layers, one below the other."""

    @abstractmethod
    def tail(self, entered: Tensor) -> Tensor:
        """The input [..., H] of the MLP's last layer for outputs of its first layers [..., H']."""

    def late(self, m: Tensor) -> Tensor:
        """The input [..., H] of the MLP's last layer for streams m [..., D]."""
        weight, bias = self.entry()
        return self.tail(self.norm2.apply(m) @ weight.T + bias)


class Tokens(NamedTuple):
    """Patches x [Q, K], inputs o [Q, ·] of the attention's last layer, and streams z and m [Q, D]."""

    x: Tensor
    o: Tensor
    z: Tensor
    m: Tensor

    def at(self, index: Tensor | int) -> Tokens:
        return Tokens(*(part[index] for part in self))


class Group:
    """The equations of one norm and the span behind it: the weighed residual of the norm's form."""

    def __init__(self, norm: Norm, span: Span | None, weight: float = 1.0) -> None:
        self.norm, self.span, self.weight = norm, span, weight

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.added(self.norm.form(tokens))

    def added(self, formed: Tensor) -> Tensor:
        """The residual of vectors [..., D] that the norm has weighed already (its bias)."""
        if self.span is None:
            return formed[..., :0]
        return self.weight * self.span.outside(formed * self.span.column)

    def rows(self, moves: Tensor) -> Tensor:
        """A row for each unknown along moves [U, D] of a stream, and one for the norm's deviation if it has a bias."""
        rows = self(moves)
        if self.norm.bias is None or not self.norm.biased:
            return rows
        return torch.cat([rows, self.added(self.norm.bias)[None]])


class Flat:
    """The solutions c [U] of linear equations c matrix + constant = 0: all c = least(constant) + φ free.

    matrix [U, E]: a row for each unknown. rank: of the matrix, or a function of its singular values in descending
    order; weaker directions are left open. free: [f, U], orthonormal.
    """

    def __init__(self, matrix: Tensor, rank: int | Callable[[Tensor], int]) -> None:
        left, self.values, right = svd(matrix)
        if len(matrix) > len(self.values):  # unknowns in no equation are open as well
            left = svd(matrix, full=True)[0]
        rank = rank if isinstance(rank, int) else rank(self.values)
        self.free = left[:, rank:].T
        self._left, self._right, self._strong = left[:, :rank], right[:rank], self.values[:rank]

    def least(self, constant: Tensor) -> Tensor:
        """The shortest c [Q, U] for constants [Q, E]."""
        return -(constant @ self._right.T / self._strong) @ self._left.T


class Family(NamedTuple):
    """The solutions of the linear equations at place i: fixed[i] + φ along for φ [f], of every part of `Tokens`.

    values: singular values of the equations, in descending order, without the last f. scale: [N, 1] and [f, 1], where a
    norm stands before the first block: the family of its deviation, by which o, z and m are multiplied.
    """

    fixed: Tokens
    along: Tokens
    values: Tensor
    scale: tuple[Tensor, Tensor] | None = None

    def tokens(self, places: Tensor, phi: Tensor) -> Tokens:
        """The tokens for φ [Q, f] at places [Q]."""
        parts = zip(self.fixed, self.along, strict=True)
        tokens = Tokens(*(fixed[places] + phi @ along for fixed, along in parts))
        if self.scale is None:
            return tokens
        size = self.scale[0][places] + phi @ self.scale[1]
        return Tokens(tokens.x, tokens.o / size, tokens.z / size, tokens.m / size)

    def phi(self, places: Tensor, x: Tensor) -> Tensor:
        """The φ whose patches are nearest to x [Q, K]; among those with the same patches, the shortest."""
        return (x - self.fixed.x[places]) @ torch.linalg.pinv(self.along.x, rtol=1e-9)


class Range(NamedTuple):
    """The range of a pixel, [K] each."""

    low: Tensor
    high: Tensor

    @property
    def width(self) -> float:
        """The mean of high - low."""
        return float((self.high - self.low).mean())


class Minimum(NamedTuple):
    """Where the search of tokens ended: φ [Q, f], the squared residual [Q], and the normal matrices [Q, f, f]."""

    phi: Tensor
    cost: Tensor
    normal: Tensor


class Activation:
    """The MLP between its first and last layers, and its derivative. plain: whether unit j of a depends on the j-th of
    each of the first layers' outputs alone."""

    def __init__(self, block: BlockTail) -> None:
        self.block, self.hidden = block, block.late(block.shift).shape[-1]
        count = block.entry()[0].shape[0]
        generator = torch.Generator().manual_seed(0)
        u, along = (torch.randn(3, count, generator=generator, dtype=torch.float64).to(block.shift) for _ in range(2))
        self.plain = False
        if count % self.hidden == 0:
            derivative = self._along(u, along)[1]
            by_units = (self.slopes(u)[1] * along.unflatten(1, (-1, self.hidden))).sum(dim=1)
            self.plain = bool((by_units - derivative).norm() <= 1e-9 * derivative.norm())

    def _along(self, u: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """a for outputs u of the first layers, and its derivative along a direction."""
        with warnings.catch_warnings():
            # torch scripts some of its forward derivatives, and warns of its own scripts.
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            value, derivative, *_ = jvp(self.block.tail, (u,), (direction,))
        return value, derivative

    def slopes(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """a [Q, H] and its derivative by the outputs [Q, ·, H] of each first layer, where it is plain."""
        parts = u.shape[1] // self.hidden
        ones = torch.eye(parts).to(u).repeat_interleave(self.hidden, dim=1)
        pairs = [self._along(u, one.expand_as(u)) for one in ones]
        return pairs[0][0], torch.stack([slope for _, slope in pairs], dim=1)

    def derivatives(self, u: Tensor, directions: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """a [Q, H] at `units`, and its derivatives along directions [Q, f, H'], [Q, f, ·]."""
        if not self.plain:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
                moved = vmap(lambda d: jvp(self.block.tail, (u,), (d,))[1], in_dims=1, out_dims=1)(directions)
            return self.block.tail(u)[:, units], moved[..., units]
        a, slope = self.slopes(u)
        slope = slope[..., units]
        moved = directions[..., : len(units)] * slope[:, :1]
        for number in range(1, slope.shape[1]):
            moved = moved + directions[..., number * len(units) : (number + 1) * len(units)] * slope[:, number, None]
        return a[:, units], moved


class Descent:
    """One system: the family of each place, the span that a must lie in, and the units of a that are used.

    known [k, k]: of the last k directions of the span, as in `Deflation.left`: a has none of these, which is one more
    weighed equation. functionals [k, rank]: on coordinates in the span; the residual is divided by their size at the
    token, so that no search ends where they vanish. Without them it is divided by the token's own size.
    """

    def __init__(
        self,
        activation: Activation,
        family: Family,
        span: Span,
        pixels: Range,
        units: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        known: Tensor | None = None,
        functionals: Tensor | None = None,
    ) -> None:
        self.activation, self.family, self.pixels, self.dtype = activation, family, pixels, dtype
        block, every = activation.block, torch.arange(activation.hidden, device=span.column.device)
        self.units = every if units is None else units
        # φ in units of streams: rounding and damping treat directions alike.
        metric = torch.cat([family.along.z, family.along.m - family.along.z, 1e-3 * family.along.x], dim=1)
        self._axes, upper = torch.linalg.qr(metric.T)
        self._turn = upper.T.contiguous()
        along = Tokens(*(torch.linalg.solve_triangular(self._turn, part, upper=False) for part in family.along))
        norm, (weight, bias) = block.norm2, block.entry()
        layers = torch.arange(len(weight) // activation.hidden, device=every.device).unsqueeze(1)
        chosen = (self.units + activation.hidden * layers).flatten()
        self._rows = chosen if activation.plain else torch.arange(len(weight), device=every.device)
        low = [part.to(dtype) for part in (family.fixed.m, along.m)]
        self._centre = [m - m.mean(dim=-1, keepdim=True) if norm.centred else m for m in low]
        self._still, self._moved = ((norm.form(m) @ weight.T).to(dtype) for m in (family.fixed.m, along.m))
        self._added = (bias if norm.bias is None else bias + norm.bias @ weight.T).to(dtype)
        axes, upper = torch.linalg.qr(span.inside[:, self.units].T)  # the same span, of these units
        count = 0 if known is None else len(known)
        self._inside, self._worth = axes.T.to(dtype).contiguous(), axes.new_zeros(len(upper), dtype=dtype)
        if known is not None and count:
            off = (upper[-count:, -count:] @ known).norm(dim=1) * count**0.5
            self._worth[-count:] = (DEFLATED / off.clamp(min=DEFLATED)).to(dtype)
        self._functionals = None if functionals is None else (functionals @ upper.T).to(dtype)
        self._column = span.column[self.units].to(dtype)
        self._x, self._dx = family.fixed.x.to(dtype), along.x.to(dtype)
        self._ends = [end.to(dtype) for end in pixels]

    def start(self, places: Tensor, tokens: Tokens) -> Tensor:
        """φ of the family's tokens that are nearest to given tokens [Q], by their streams."""
        fixed = self.family.fixed.at(places)
        mixed = tokens.m - tokens.z - fixed.m + fixed.z
        away = torch.cat([tokens.z - fixed.z, mixed, 1e-3 * (tokens.x - fixed.x)], dim=1)
        return torch.linalg.solve_triangular(self._turn, away @ self._axes, upper=False, left=False)

    def normal(self, places: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cost [Q], slope [Q, f] and normal matrix [Q, f, f], with a penalty on pixels out of range; φ in units of
        streams.

        With J the derivative of a, P the projection outside the span and c the part inside, the residual is
        r = P a / |c|, and its products need neither P J nor r's derivative: J P J^T = J J^T - (J V^T)(J V^T)^T, V the
        span.
        """
        still, moved = self._centre
        centred = still[places] + phi @ moved
        size = (centred.square().mean(dim=1, keepdim=True) + self.activation.block.norm2.eps).sqrt()
        bare = (self._still[places] + phi @ self._moved) / size
        turn = centred @ moved.T / (centred.shape[1] * size)
        rows = self._rows
        directions = self._moved[:, rows] - bare[:, rows].unsqueeze(1) * turn.unsqueeze(-1)
        a, jacobian = self.activation.derivatives(bare + self._added, directions, self.units)
        a, jacobian = a * self._column, jacobian * (self._column / size).unsqueeze(1)
        inside = a @ self._inside.T
        across = jacobian @ self._inside.T
        counted, carried = inside, across
        if self._functionals is not None:
            counted, carried = inside @ self._functionals.T, across @ self._functionals.T
        scale = counted.norm(dim=1, keepdim=True).clamp(min=1e-30)
        r, e = (a - inside @ self._inside) / scale, inside * self._worth / scale
        along = (jacobian @ r.unsqueeze(-1) + (across * self._worth) @ e.unsqueeze(-1)).squeeze(-1)
        grown = (carried @ (counted / scale).unsqueeze(-1)).squeeze(-1)
        left = r.square().sum(dim=1, keepdim=True) + e.square().sum(dim=1, keepdim=True)
        inner = across * (1 - self._worth.square()).sqrt()
        whole = torch.baddbmm(jacobian @ jacobian.mT, inner, inner.mT, alpha=-1)
        mixed = grown.unsqueeze(2) * (along - left * grown / 2).unsqueeze(1)
        slope, whole = (along - grown * left) / scale, (whole - mixed - mixed.mT) / scale.square().unsqueeze(2)
        x = self._x[places] + phi @ self._dx
        over = (x - self._ends[1]).clamp(min=0) + (x - self._ends[0]).clamp(max=0)
        weight = OUTSIDE**2 / max(x.shape[1], 1)  # words have no pixels
        bound = (self._dx * (over != 0).unsqueeze(1)) @ self._dx.T
        cost = left[:, 0] + weight * over.square().sum(dim=1)
        return cost, slope + weight * over @ self._dx.T, whole + weight * bound

    def run(self, places: Tensor, phi: Tensor, steps: int, stop: Callable[[], bool] = lambda: False) -> Minimum:
        """The minima for tokens at places [Q], from φ [Q, f] on."""
        numbers = phi.shape[1] * len(self._rows)
        size = max(1, ABREAST[phi.device.type != "cpu"] // max(numbers, 1))
        scaled = (phi @ self._turn).to(self.dtype)
        parts = [self._run(p, f, steps, stop) for p, f in zip(places.split(size), scaled.split(size), strict=True)]
        ends, cost, normal = (torch.cat(part).double() for part in zip(*parts, strict=True))
        turned = self._turn @ normal @ self._turn.T
        return Minimum(torch.linalg.solve_triangular(self._turn, ends, upper=False, left=False), cost, turned)

    def _run(self, places: Tensor, phi: Tensor, steps: int, stop: Callable[[], bool]) -> tuple[Tensor, Tensor, Tensor]:
        near = NEAR if self.dtype == torch.float32 else 0.0
        ends = descend(lambda rows, phi: self.normal(places[rows], phi), phi, steps, stop, near)
        close = (ends[1] <= (CLOSE * DEFLATED) ** 2).nonzero()[:, 0]
        if not (len(close) and bool(self._worth.any())):
            return ends
        # The deflated equations are only nearly true: the last steps are by the span itself.
        free = copy(self)
        free._worth = torch.zeros_like(self._worth)
        for part, better in zip(ends, free._run(places[close], ends[0][close], RELEASED, stop), strict=True):
            part[close] = better
        return ends


def descend(
    normal: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    phi: Tensor,
    steps: int,
    stop: Callable[[], bool],
    near: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Levenberg-Marquardt from φ [Q, f], each row by itself: φ, cost [Q] and normal matrices [Q, f, f] at the end.

    normal: cost, slope and normal matrices of some rows, by their numbers and their φ. near: a cost that is enough.
    """
    damping = torch.full_like(phi[:, 0], 1e-2)
    active = torch.arange(len(phi), device=phi.device)
    cost, slope, matrix = normal(active, phi)
    phi, stuck = phi.clone(), torch.zeros_like(active)
    least = 8 * torch.finfo(phi.dtype).eps
    for _ in range(steps):
        if stop() or not len(active):
            break
        part = matrix[active]
        diagonal = part.diagonal(dim1=1, dim2=2)
        bend = damping[active].unsqueeze(-1) * (diagonal + 1e-3 * diagonal.mean(dim=1, keepdim=True))
        bend = bend + least * diagonal.amax(dim=1, keepdim=True) + 1e-30
        factor, failed = torch.linalg.cholesky_ex(part + torch.diag_embed(bend))
        step = torch.cholesky_solve(slope[active].unsqueeze(-1), factor).squeeze(-1)
        step = torch.where((failed == 0).unsqueeze(1), step, 0.0).nan_to_num(0.0, 0.0, 0.0)
        moved = phi[active] - step
        after = normal(active, moved)
        better = after[0] < cost[active]
        improved = active[better]
        gain = 1 - after[0][better] / cost[improved].clamp(min=1e-30)
        phi[improved], cost[improved] = moved[better], after[0][better]
        slope[improved], matrix[improved] = after[1][better], after[2][better]
        damping[active] = torch.where(better, damping[active] * 0.2, damping[active] * 5).clamp(1e-12, 1e6)
        stuck[active] += 1
        stuck[improved] = torch.where(gain > PROGRESS, 0, stuck[improved])
        active = active[(stuck[active] < STUCK) & (cost[active] > near)]
    return phi, cost, matrix


def blur(normal: Tensor, along: Tensor, span: Span) -> Tensor:
    """How far noise moves a solution along [f, ·] for one unit of residual, [Q]: the deviation of least squares, over
    all numbers together."""
    values, vectors = torch.linalg.eigh(normal.nan_to_num())
    values = values.clamp(min=1e-14 * values.amax(dim=1, keepdim=True)).clamp(min=1e-300)
    spread = (vectors.mT @ along).square().sum(dim=-1) / values
    return (spread.sum(dim=-1) / (span.column.shape[0] - span.rank)).sqrt()


# --- which tokens are in the same image or sentence ------------------------------------------------------------------
#
# The attention's output for token i is a mean over the tokens of its own image or sentence, head by head:
#
#     o_i = Σ_j y_ij a_ij v_j / Σ_j y_ij a_ij    with a_ij = exp(q_i · k_j / √d) and y_ij = 1 for these, else 0
#
# Queries, keys and values follow from the tokens, so that Σ_j y_ij a_ij (v_j - o_i) = 0 is linear in y_i: as many
# equations as channels for as many unknowns as tokens, of which attention needs fewer.


class Heads(NamedTuple):
    """Weight [3 D, D] and bias [3 D] of queries, keys and values, one below the other, the number of heads, and the
    factor on the logits, None for 1/√d."""

    weight: Tensor
    bias: Tensor
    count: int
    scale: float | None = None

    def split(self, entered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [heads, T, d] for inputs of their layers [T, D]."""
        parts = (entered @ self.weight.T + self.bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.count, -1)).transpose(0, 1) for part in parts)
        return q, k, v

    def paid(self, q: Tensor, k: Tensor) -> Tensor:
        """Attention of queries [heads, Q, d] to keys [heads, T, d], up to a factor of each query: [heads, Q, T]."""
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        return (scores - scores.amax(dim=-1, keepdim=True)).exp()


def pulls(paid: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """[T, heads · d]: a_ij (v_j - o_i) of each token j with values v [heads, T, d], for a token i with attention `paid`
    [heads, T] and output o [heads, d]; over all tokens of its image or sentence they sum to 0."""
    return (paid.unsqueeze(-1) * (v - o.unsqueeze(1))).transpose(0, 1).flatten(1)
