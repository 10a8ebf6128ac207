"""Which sample stands in which row of which batch: pure functions of (seed, epoch), the same on every rank.

The global batch of step t is fixed first and then cut into one contiguous slice a rank, so that two ranks
see exactly what one rank would, and a run that resumes at step t only starts counting there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from situs.core.random import bits
from situs.errors import SitusError, counted

# Copy c of sample i, under repeated augmentation, draws its randomness as number i + c·2^40.
_COPY_SHIFT = 40
_SAMPLE_MASK = (1 << _COPY_SHIFT) - 1

AnyIds = TypeVar("AnyIds", Tensor, int)


def draw_ids(samples: Tensor, copies: Tensor) -> Tensor:
    """The number by which copy `copies` of a sample draws its randomness; for copy 0 the sample's own."""
    return samples + (copies << _COPY_SHIFT)


def sample_of(ids: AnyIds) -> AnyIds:
    """The sample of each draw number, of a tensor or one int: the row in the data set."""
    return ids & _SAMPLE_MASK


class Permutation(Protocol):
    """The order of an epoch: which sample stands at each of some places [b], [b] int64. A tensor [n] is one."""

    def __getitem__(self, places: Tensor, /) -> Tensor: ...


Order = Callable[[int, int, int, "torch.device | str"], Permutation]
"""(seed, epoch, n, device) -> a permutation of range(n)."""

StepSampler = Callable[[int, int, int], Tensor]
"""(step of the run, n, batch) -> the samples of that step, [b] int64, `batch` of them on average."""


def epoch_order(
    seed: int, epoch: int, n: int, device: torch.device | str = "cpu", stream: str = "sampler.order"
) -> Tensor:
    """A uniform random permutation of range(n), [n] int64, a pure function of (seed, epoch)."""
    words = bits(seed, epoch, torch.arange(n, device=device), stream, ())
    # Stable, so that even two equal 64-bit words would leave every device with the same order.
    return torch.argsort(words, stable=True)


@dataclass(frozen=True)
class LengthBuckets:
    """An `Order` in which the samples of a batch have similar lengths, so that little of it is padding.

    lengths: [n], of each sample. batch: of the plan. In each epoch, pools of `pool` batches are drawn at random, each
    is sorted by length and cut into batches, and the batches come in random order; a last, smaller one stays last.
    """

    lengths: Tensor
    batch: int
    pool: int = 16

    @property
    def mark(self) -> str:
        """Equal for equal orders."""
        return f" by their lengths ({int(self.lengths.sum())} in all)"

    def __call__(self, seed: int, epoch: int, n: int, device: torch.device | str = "cpu") -> Tensor:
        order, lengths = epoch_order(seed, epoch, n, device), self.lengths.to(device)
        whole = n // self.batch * self.batch
        pools = order[:whole].split(self.pool * self.batch)
        rows = [part[lengths[part].argsort(stable=True)].view(-1, self.batch) for part in pools]
        if not rows:
            return order
        shuffled = epoch_order(seed, epoch, whole // self.batch, device, "sampler.buckets")
        return torch.cat([torch.cat(rows)[shuffled].flatten(), order[whole:]])


@dataclass(frozen=True)
class Balanced:
    """An `Order` in which each class comes equally often: n rows an epoch, n / classes of each.

    labels: [n] class of each sample, negative for one that is left out. repeated: of the plan. The samples of a class
    come in random order; a class with fewer samples than rows starts again, with copies that are augmented anew.
    """

    labels: Tensor
    repeated: int = 1

    @property
    def mark(self) -> str:
        """Equal for equal orders."""
        return f", each class equally often ({zlib.crc32(self.labels.cpu().numpy().tobytes()):08x})"

    def __call__(self, seed: int, epoch: int, n: int, device: torch.device | str = "cpu") -> Tensor:
        labels = self.labels.to(device)
        shuffled = epoch_order(seed, epoch, n, device, "sampler.balanced")
        shuffled = shuffled[labels[shuffled] >= 0]
        members = shuffled[labels[shuffled].argsort(stable=True)]  # class by class
        sizes = labels[members].bincount()
        sizes = sizes[sizes > 0]
        rows = epoch_order(seed, epoch, n, device)  # row i holds turn number rows[i]
        which, turn = rows % len(sizes), rows // len(sizes)
        size = sizes[which]
        return draw_ids(members[(sizes.cumsum(0) - sizes)[which] + turn % size], turn // size * self.repeated)


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of an epoch fall into batches, and which of them one rank takes."""

    n: int
    """Images in the set."""

    batch: int
    """Rows of the global batch, over all ranks."""

    seed: int = 0
    """Seed of the order."""

    rank: int = 0
    """This process."""

    world: int = 1
    """Processes that share the batch."""

    repeated: int = 1
    """Augmented copies of a sample in one batch."""

    shuffle: bool = True
    """Whether each epoch has its own random order."""

    drop_last: bool = True
    """Whether a last, smaller batch is left out."""

    order: Order = epoch_order
    """The order of each epoch, where it is shuffled: a pure function, the same on every rank."""

    step_sampler: StepSampler | None = None
    """Instead of an order: which samples each step takes, on one rank."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.batch % self.world:
            raise SitusError(field="batch", value=self.batch, allowed=f"a multiple of the {self.world} ranks")
        if self.drop_last and self.n < self.batch:
            raise SitusError(field="batch", value=self.batch, allowed=f"at most the set's {counted(self.n, 'samples')}")
        if self.repeated < 1:
            raise SitusError(field="augment.repeated", value=self.repeated, allowed="at least 1")

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return self.n // self.batch if self.drop_last else -(-self.n // self.batch)

    @property
    def distinct(self) -> int:
        """Samples of a batch, without their copies."""
        return -(-self.batch // self.repeated)

    def order_of(self, epoch: int, device: torch.device | str = "cpu") -> Permutation:
        """The epoch's order."""
        return self.order(self.seed, epoch, self.n, device) if self.shuffle else torch.arange(self.n, device=device)


def batches_for(
    plan: BatchPlan,
    epoch: int,
    start_step: int = 0,
    device: torch.device | str = "cpu",
    order: Permutation | None = None,
) -> Iterator[Tensor]:
    """This rank's draw numbers [b] of every global batch of the epoch from `start_step` on.

    An epoch always has n rows: with repeated augmentation it visits n / repeated samples, as DeiT does. The copies of a
    sample are batch / repeated rows apart: on different ranks where there are enough, and never side by side, where
    MixUp would mix an image with itself. A last, smaller batch is divided as evenly as possible; a rank without a row
    in it still gets its empty share. order: the epoch's, where the caller has it already.
    """
    n, batch = plan.n, plan.batch
    if plan.step_sampler is not None:
        for step in range(start_step, plan.steps):
            yield plan.step_sampler(epoch * plan.steps + step, n, batch).to(device)
        return
    order = plan.order_of(epoch, device) if order is None else order
    for step in range(start_step, plan.steps):
        size = min(batch, n - step * batch)
        across = -(-size // plan.repeated)
        rows = torch.arange(size, device=device)
        ids = draw_ids(order[step * plan.distinct + rows % across], rows // across)
        yield ids.tensor_split(plan.world)[plan.rank]
