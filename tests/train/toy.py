"""A tiny method, backbone and loader that have everything a run must bring back: drop path, draws, ties, spares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, Stream, Taps
from situs.backbones.layout import Names, Role, roles_of
from situs.core.position import Positions
from situs.core.random import normal, uniform
from situs.core.when import When
from situs.methods.base import Batch, Draws, Method, Output
from situs.train import distributed


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device) >= self.rate
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = DropPath(drop_path)

    def forward(self, z: Tensor) -> Tensor:
        # The mean makes tokens speak to one another without the cost of attention.
        return z + self.drop(self.mlp(self.norm(z + z.mean(1, keepdim=True))))


class Inner(nn.Module):
    def __init__(self, dim: int, depth: int, classes: int, drop_path: float) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 4, dim))
        self.patch_embed = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, drop_path) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)


class ToyBackbone(Backbone):
    def __init__(self, dim: int = 8, depth: int = 2, classes: int = 3, drop_path: float = 0.0) -> None:
        super().__init__(Inner(dim, depth, classes, drop_path), "toy", (2, 2), dim, 0, depth)

    def embed(self, x: Tensor) -> Tensor:
        return self.model.patch_embed(x.reshape(x.shape[0], 4, 4))

    def positions(self, grid: tuple[int, ...] | None = None) -> Positions:
        return Positions(table=self.model.pos_embed[0])

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        return Stream(tokens if positions is None else tokens + positions.table, 0)

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        z = stream.z
        for block in self.model.blocks:
            z = block(z)
        return z

    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        return [(block,) for block in self.model.blocks]

    def roles(self) -> dict[str, Role]:
        names = Names(embedding=("patch_embed",), table=("pos_embed",), head=("head",))
        return roles_of(self, self.block_modules(), names)

    def finish(self, stream: Stream) -> Features:
        z = self.model.norm(stream.z)
        return Features(z[:, :0], z)

    def head(self, features: Features) -> Tensor:
        return self.model.head(features.patches.mean(1))


class ToyMethod(Method):
    """Classifies images whose tokens are dimmed by its draws. `spare` is never used, `tied` is the head's weight."""

    def __init__(self, backbone: Backbone, poison: int | None = None) -> None:
        super().__init__(backbone)
        self.poison = poison
        self.progress: list[float] = []
        self.epochs: set[int | None] = set()
        self.spare = nn.Parameter(torch.ones(3, 3))
        self.tied = backbone.model.head.weight

    def draw(self, batch: Batch, when: When) -> Draws:
        self.progress.append(when.progress)
        self.epochs.add(when.epochs)
        dim = 1 - 0.5 * uniform(when.seed, when.epoch, batch.ids, "toy.dim", (4, 1))
        return {"dim": dim, "ids": batch.ids, "progress": torch.tensor(when.progress)}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        tokens = self.backbone.embed(batch.inputs) * draws["dim"].to(batch.inputs.dtype)
        logits = self.backbone.head(self.backbone.encode(tokens, self.backbone.positions()))
        loss = F.cross_entropy(logits, batch.targets["label"])
        if self.poison is not None:  # a sample whose loss is not finite, with the drop path's noise in it
            loss = loss + torch.where(draws["ids"] == self.poison, torch.inf, 0.0).sum() * tokens.mean()
        accuracy = (logits.argmax(-1) == batch.targets["label"]).float().mean()
        return Output(loss, {"accuracy": accuracy, "size": logits.detach().square().mean()}, {})


class ToyLoader:
    """`count` samples of four tokens; each epoch in an order of its own; each rank has its slice of every batch."""

    def __init__(
        self, count: int = 40, batch: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.global_batch, self.count, self.seed = batch, count, seed
        self.steps_per_epoch = -(-count // batch)
        self.data_wait, self.mark = 0.0, f"{count} samples"
        ids = torch.arange(count, device=device)
        self.images = normal(seed, 0, ids, "toy.images", (4, 2, 2)).to(dtype)
        self.labels = (self.images[:, 0].sum((1, 2)) > 0).long() + (self.images[:, 1].sum((1, 2)) > 0).long()

    def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
        order = uniform(self.seed, epoch, torch.arange(self.count, device=self.images.device), "toy.order", (1,))[
            :, 0
        ].argsort()
        rank, world = distributed.rank(), distributed.world()
        for ids in order.split(self.global_batch)[start_step:]:
            ids = ids.tensor_split(world)[rank]
            yield Batch(self.images[ids], ids, {"label": self.labels[ids]})


def toy(seed: int = 0, poison: int | None = None, dtype: torch.dtype = torch.float32, **shape: float) -> ToyMethod:
    torch.manual_seed(seed)
    return ToyMethod(ToyBackbone(**shape), poison).to(dtype)
