"""The paper's own attacker: a decoder from what arrives to pixels, learned on public images under the same defence.

It never puts rows in order, so that against permuted rows it measures its own blindness and not what the rows give
away: the attacks that do put them in order stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS, LAYERS = 128, 4, 2


class Decoder(nn.Module):
    """Rows [B, R, D] to patches [B, N, P]: a small transformer with places of its own, as MAE's decoder has."""

    def __init__(self, rows: int, width: int, prefix: int, pixels: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.enter = nn.Linear(width, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(rows, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.leave = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, pixels))

    def forward(self, rows: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(rows) + self.places))[:, self.prefix :]


def learn(
    send: Callable[[Tensor, int], Tensor], streams: Tensor, patches: Tensor, *, prefix: int, steps: int, seed: int,
    batch: int = 32, rate: float = 1e-3,
) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """A decoder learned on public streams [m, R, D] and their patches [m, N, P]; it takes what was sent to patches.

    send(streams, step): what a client with the defence would send, other permutations and noise at every step.
    """
    pixels, spread = patches.mean(dim=(0, 1)), patches.std()
    sent = send(streams, 0)
    mean, scale = sent.mean(dim=(0, 1)), sent.std(dim=(0, 1)).clamp(min=1e-12)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        decoder = Decoder(streams.shape[1], streams.shape[2], prefix, patches.shape[2])
        optimizer = torch.optim.AdamW(decoder.parameters(), rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        for step in range(steps):
            chosen = torch.randint(len(streams), (min(batch, len(streams)),))
            wanted = (patches[chosen] - pixels) / spread
            found = decoder(((send(streams[chosen], step) - mean) / scale).float())
            loss = (found - wanted.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def decode(seen: Tensor) -> Tensor:
        return decoder.eval()(((seen - mean) / scale).float()).double() * spread + pixels

    return decode
