"""The attention's output of a token that is known: what the first block of an encoder adds to a word at its place.

    y = z + W o + b        z: the word at its place, known; o: the attention's output, in the span of ∂W
    u = norm(y)            in the span of the MLP's first gradient
    a = act(fc1(u))        in the span of its second

The second line leaves a family of o: with n tokens of which only r1 vectors z are independent, n - r1 directions. The
third has a root in it for a word that is there, and none for one that only lies in the closure of the words and places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.spans import TELLING, Norm
from situs.audit.defences import Gradients
from situs.audit.text.layers import span_of
from situs.backbones.hf.encoders import TextEncoder

ROUNDS, SKETCH = 30, 2
"""Steps of a search, and how many equations it has for each unknown; what it finds is judged by all of them."""

ARRIVED, PATIENCE = 1e-12, 5
"""Sum of squares at which a search ends, and after how many steps that hardly help."""

FLAT = 3e-3
"""A direction in which the linear equations change by less than this, of the most they change, is left to the search:
rounding would blur what they say of it."""


class Roots(NamedTuple):
    """found: [m] bool; loosely, for what is made of a root is held against the second block. outputs: o [m, D]. left:
    share of the activation that sticks out, [m]."""

    found: Tensor
    outputs: Tensor
    left: Tensor


class FirstBlock:
    """The first block of an encoder with the spans of an upload; all in float64."""

    def __init__(self, backbone: TextEncoder, upload: Gradients, even: bool = False) -> None:
        roles = backbone.roles()
        own = [name for name, p in backbone.named_parameters() if p.dim() == 2 and roles[name].depth == 1]
        self.names = out, fc1, fc2 = [name for name in own if roles[name].part == "block"]
        self.out, self.fc1, self.fc2 = (span_of(backbone, upload, [name], even) for name in (out, fc1, fc2))
        layer: Any = backbone.parts()[0]
        parts = (
            tensor.detach().double()
            for part in (layer.norm1, layer.attention.out, layer.mlp.up[0])
            for tensor in (part.weight, part.bias)
        )
        weight, bias, self.w_out, self.b_out, self.w_in, self.b_in = parts
        self.norm, self.act = Norm(weight, bias, layer.norm1.eps), layer.mlp.act
        self.basis = self.out.inside / self.out.column
        """Of the attention's outputs, [n, D]."""
        self.moves = self.basis @ self.w_out.T
        shift = self.norm.bias if self.norm.bias is not None else torch.zeros_like(self.b_out)
        ways = torch.cat([self.norm.form(self.moves), shift.unsqueeze(0)]) * self.fc1.column
        left, values, right = torch.linalg.svd(self.fc1.outside(ways), full_matrices=False)
        kept = values > FLAT * values[0]
        self.solve = right[kept].T / values[kept] @ left[:, kept].T
        self.free = left[:, ~kept].T.contiguous()
        """The family's directions in the coordinates of `basis` and one scale, [f, n + 1]."""
        self.ways = self.free[:, :-1] @ self.moves
        self.flows = (self.norm.form(self.ways) @ self.w_in.T).float()
        self.stray = float(self.fc1.outside(shift * self.fc1.column).norm())

    def start(self, z: Tensor) -> Tensor:
        """The least o that solves the linear equations, in the coordinates of `basis`, and the scale, [m, n + 1]."""
        goal = self.fc1.outside(self.norm.form(z + self.b_out) * self.fc1.column)
        return -goal @ self.solve

    def middle(self, z: Tensor, x: Tensor) -> Tensor:
        """y of tokens z [m, D] with coordinates x [m, n + 1]."""
        return z + self.b_out + x[:, :-1] @ self.moves

    def search(self, z: Tensor, x: Tensor, rounds: int = ROUNDS) -> Roots:
        """Levenberg–Marquardt in the family of each token z [m, D] from coordinates x [m, n + 1]."""
        f, width = len(self.free), len(self.fc2.column)
        if f:
            equations = min(SKETCH * f + 64, width - self.fc2.rank)
            chance = torch.Generator().manual_seed(0)
            drawn = torch.randn(equations, width, generator=chance, dtype=torch.float64).to(z.device)
            sketch = self.fc2.outside(drawn).T.contiguous() * self.fc2.column.unsqueeze(1) / width**0.5
            x = self._descend(z, x, sketch, rounds)
        y = self.middle(z, x)
        u = (self.norm.form(y) / self.norm.size(y)) + (0 if self.norm.bias is None else self.norm.bias)
        a = self.act(u @ self.w_in.T + self.b_in)
        left = self.fc2.residual(a)
        return Roots((left <= TELLING) & (self.fc1.residual(u) <= TELLING), x[:, :-1] @ self.basis, left)

    def _descend(self, z: Tensor, x: Tensor, sketch: Tensor, rounds: int) -> Tensor:
        """Tokens that have arrived, or come no nearer, are left as they are."""
        x, going = x.clone(), torch.arange(len(z), device=z.device)
        damp, stalled = torch.full((len(z),), 1e-2, dtype=z.dtype, device=z.device), torch.zeros_like(going)
        rest, slope = self._equations(z, x, sketch)
        for _ in range(rounds):
            tried = x[going] + self._step(rest, slope, damp) @ self.free
            new_rest, new_slope = self._equations(z[going], tried, sketch)
            cost, new_cost = (each.square().sum(dim=1) for each in (rest, new_rest))
            better = new_cost < cost
            x[going] = torch.where(better.unsqueeze(1), tried, x[going])
            rest = torch.where(better.unsqueeze(1), new_rest, rest)
            slope[better] = new_slope[better]
            damp = torch.where(better, damp / 5, damp * 4).clamp(1e-9, 1e9)
            stalled = torch.where(new_cost < 0.9 * cost, 0, stalled + 1)
            left = (rest.square().sum(dim=1) > ARRIVED) & (stalled < PATIENCE)
            going, rest, slope, damp, stalled = (each[left] for each in (going, rest, slope, damp, stalled))
            if not len(going):
                break
        return x

    def _step(self, rest: Tensor, slope: Tensor, damp: Tensor) -> Tensor:
        """Levenberg–Marquardt's step along the family, [m, f]."""
        normal = (slope @ slope.mT).double()
        scale = normal.diagonal(dim1=1, dim2=2)
        extra = damp.unsqueeze(1) * scale + 1e-7 * scale.amax(dim=1, keepdim=True)
        goal = slope.double() @ rest.unsqueeze(2)
        # Where nothing hangs on the step (coarse gradients that are 0), it is no number, and lowers no cost.
        return -torch.linalg.solve_ex(normal + torch.diag_embed(extra), goal).result[:, :, 0]

    def _equations(self, z: Tensor, x: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor]:
        """What must be 0, [m, E], and its derivative along the family, [m, f, E]."""
        y = self.middle(z, x)
        size, form = self.norm.size(y), self.norm.form(y)
        bias = 0 if self.norm.bias is None else self.norm.bias
        with torch.enable_grad():
            pre = ((form / size + bias) @ self.w_in.T + self.b_in).requires_grad_()
            a = self.act(pre)
            [rate] = torch.autograd.grad(a.sum(), pre)
        a = a.detach()
        away = y - y.mean(dim=1, keepdim=True) if self.norm.centred else y
        turn = away @ self.ways.T / (size * y.shape[1])  # how the size changes, [m, f]
        whole = (a * self.fc2.column).norm(dim=1, keepdim=True)
        rest = a @ sketch / whole
        # The derivative alone may be coarse, and it is what takes the time.
        along = (form @ self.w_in.T / size).float().unsqueeze(1)
        flow = (self.flows - turn.float().unsqueeze(2) * along).mul_((rate / size / whole).float().unsqueeze(1))
        slope = flow @ sketch.float()
        # The scale of the linear equations must be that of y itself; one equation, where the norm's bias sticks out.
        gap = self.stray * (size[:, 0] - x[:, -1]) / size[:, 0]
        dgap = self.stray * (turn * x[:, -1:] / size.square() - self.free[:, -1] / size)
        return torch.cat([rest, gap.unsqueeze(1)], dim=1), torch.cat([slope, dgap.float().unsqueeze(2)], dim=2)
