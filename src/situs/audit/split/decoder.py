"""The paper's own attacker: a decoder from what arrives to pixels, learned on public images under the same defence.

It never restores the order of rows, so that against permuted rows its failure does not show what the rows reveal: the
attacks that do restore the order stand beside it, and one of them decodes what it has restored.

A regression of each patch on its own row comes first, in closed form; a small transformer then learns what the other
rows add to it. It starts from nothing added, and learning stops when public images that were held out gain no more:
most of what a decoder finds without this start costs it thousands of steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH, HEADS, LAYERS = 96, 4, 2
STEPS, BATCH, RATE = 400, 16, 1e-3
CHECK, PATIENCE = 20, 3
"""Steps between looks at the images held out, and looks without a gain after which learning ends."""

GAIN = 0.002
"""A smaller part of the error that is left is no gain."""

_RIDGE = 1e-10

Send = Callable[[Tensor, int], Tensor]
"""(streams, step) -> what a client with the defence would send of them, with other noise at every step."""


class Context(nn.Module):
    """Rows [B, N, F] to what they add to patches [B, N, P]: a small transformer with places, as MAE's decoder has."""

    def __init__(self, rows: int, features: int, pixels: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(rows, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, pixels)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.leave(self.norm(self.blocks(self.enter(rows) + self.places)))


@dataclass(frozen=True)
class Linear:
    """patches ≈ pixels + (rows - centre) @ weights, place by place. spread: [D] of the rows, error: what it leaves."""

    centre: Tensor
    pixels: Tensor
    weights: Tensor
    spread: Tensor
    error: float

    @classmethod
    def of(cls, rows: Tensor, patches: Tensor) -> Linear:
        """Fitted on rows [m, N, D] and patches [m, N, P]."""
        centre, pixels = rows.mean(dim=0), patches.mean(dim=0)
        x, y = (rows - centre).flatten(0, 1), (patches - pixels).flatten(0, 1)
        ridge = _RIDGE * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        weights = torch.linalg.solve(x.T @ x / len(x) + ridge, x.T @ y / len(x))
        spread = x.std(dim=0).clamp(min=1e-12)
        return cls(centre, pixels, weights, spread, float((y - x @ weights).square().mean().sqrt().clamp(min=1e-9)))

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(patches [n, N, P], what the transformer is given in float32: the rows and what each says of its patch)."""
        moved = rows - self.centre
        alone = moved @ self.weights
        features = torch.cat([moved / self.spread, alone / self.pixels.std().clamp(min=1e-3)], dim=-1)
        return self.pixels + alone, features.float()


@dataclass(frozen=True)
class Learned:
    """A decoder. steps: that it learned for. gain: the share of the regression's squared error that it removed."""

    linear: Linear
    context: Context
    steps: int
    gain: float

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """Patches [n, N, P] float64 from patch rows [n, N, D]."""
        parts = map(self.linear, rows.to(self.linear.centre).split(BATCH))
        return torch.cat([alone + self.linear.error * self.context(features) for alone, features in parts]).cpu()


def learn(
    send: Send, streams: Tensor, patches: Tensor, *, prefix: int, seed: int, changes: bool = True,
    device: torch.device | str = "cpu", most: int | None = None,
) -> Learned:  # fmt: skip
    """A decoder learned on public streams [m, R, D] and their patches [m, N, P]; it takes patch rows to patches.

    changes: whether a second sending differs from the first. most: steps at most; None: `STEPS`.
    """
    patches, held_out = patches.double().to(device), max(1, len(streams) // 6)
    linear = Linear.of(send(streams[held_out:], 0)[:, prefix:].to(patches), patches[held_out:])

    def sent(part: slice, number: int) -> tuple[Tensor, Tensor]:
        """What the transformer is given of a sending, and what it should add, in units of the error so far."""
        alone, features = linear(send(streams[part], number)[:, prefix:].to(patches))
        return features, ((patches[part] - alone) / linear.error).float()

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        context = Context(patches.shape[1], linear.weights.shape[0] + patches.shape[2], patches.shape[2]).to(device)
        chance = torch.Generator().manual_seed(seed)
    check, rows = sent(slice(held_out), 1), sent(slice(held_out, None), 1)

    @torch.no_grad()
    def judged() -> float:
        parts = zip(*(part.split(BATCH) for part in check), strict=True)
        return (
            sum(float((context(features) - wanted).square().mean()) * len(features) for features, wanted in parts)
            / held_out
        )

    optimizer = torch.optim.AdamW(context.parameters(), RATE, weight_decay=0.01)
    first = least = judged()
    best, reached, step, waiting = copy.deepcopy(context), 0, 0, list[Tensor]()
    while step < (most or STEPS) and step - reached < CHECK * PATIENCE:
        if not waiting:
            waiting = list(torch.randperm(len(rows[0]), generator=chance).split(BATCH))
            rows = sent(slice(held_out, None), 2 + step) if changes and step else rows
        features, wanted = (part[waiting[-1]] for part in rows)
        waiting.pop()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / CHECK)
        optimizer.zero_grad()
        (context(features) - wanted).square().mean().backward()
        optimizer.step()
        step += 1
        if step % CHECK == 0 and (now := judged()) < least * (1 - GAIN):
            best, least, reached = copy.deepcopy(context), now, step
    return Learned(linear, best.eval(), reached, 1 - least / first)
