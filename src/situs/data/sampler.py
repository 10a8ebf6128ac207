"""Which sample stands in which row of which batch: pure functions of (seed, epoch), the same on every rank.

The global batch of step t is fixed first and then cut into one contiguous slice a rank, so that two ranks
see exactly what one rank would, and a run that resumes at step t only starts counting there.

Sets that are read in blocks, such as row groups of parquet files that do not fit into memory, have an order of their
own (`BlockOrder`): blocks come in random order, some of them are open at a time, and the samples of the open ones are
mixed. Each *lane* gives the same rows of every batch, from blocks of its own. A process that takes some rows of every
batch then reads the blocks of these lanes alone, each of them once, and a batch is still mixed from all open blocks.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from situs.core.random import bits
from situs.data.sources.base import Blocks
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
    """An `Order` in which each class comes equally often: n rows per epoch, n / classes of each.

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


_MOST_LANES = 128  # as many processes can share the blocks without reading one twice
_BLOCKS_A_LANE = 8  # a lane begins and ends in the middle of a block, which is then read twice
_MOST_OPEN = 1 << 22  # samples: their numbers lie in memory


@dataclass(frozen=True)
class BlockOrder:
    """An `Order`. Build it with `block_order`.

    ends: [m] int64, where each block of the set ends. open: blocks that are mixed at a time. rows, steps: samples of a
    batch without their copies, and whole batches of an epoch. The rest, less than a batch, comes last, from blocks of
    its own.
    """

    ends: np.ndarray
    open: int
    rows: int
    steps: int

    @property
    def lanes(self) -> int:
        """How many lanes: if possible a divisor of the batch, so that lanes end where ranks and workers do."""
        most = max(1, min(_MOST_LANES, self.rows, self.open, len(self.ends) // _BLOCKS_A_LANE))
        even = next(count for count in range(most, 0, -1) if self.rows % count == 0)
        return even if 2 * even > most else most

    @property
    def mark(self) -> str:
        """Equal for equal orders."""
        sizes = f"{self.open} {self.rows} {self.steps}"
        digest = hashlib.blake2b(sizes.encode() + np.ascontiguousarray(self.ends).tobytes(), digest_size=6)
        return f" in blocks ({digest.hexdigest()})"

    def __call__(self, seed: int, epoch: int, n: int, device: torch.device | str = "cpu") -> BlockEpoch:  # noqa: ARG002
        assert n == self.ends[-1], "the blocks belong to another set"
        return BlockEpoch(self, seed, epoch)


def block_order(blocks: Blocks, window_bytes: float, rows: int, steps: int) -> BlockOrder:
    """The order in which about `window_bytes` of blocks are open at a time, over all processes."""
    count = len(blocks.ends)
    fitting = int(window_bytes * count / max(1, blocks.bytes))
    most = _MOST_OPEN * count // int(blocks.ends[-1])
    return BlockOrder(blocks.ends, max(1, min(fitting, most, count)), rows, steps)


class BlockEpoch:
    """One epoch of a `BlockOrder`, computed on demand.

    The blocks in their random order make a *line* of n places. Lane l takes the places from `edges[l]` on, in windows
    of `depth` blocks (the first window has another length in each lane, so that they do not all end at once), and gives
    the samples of each window in random order.
    """

    def __init__(self, order: BlockOrder, seed: int, epoch: int) -> None:
        self.seed, self.epoch, self.rows, self.steps = seed, epoch, order.rows, order.steps
        lanes = order.lanes
        self.depth = max(1, order.open // lanes)
        self.cuts = np.arange(lanes + 1) * order.rows // lanes  # of a batch's rows
        self.edges = np.append(self.cuts * order.steps, order.ends[-1])  # of the line; the last lane is the rest
        self._blocks = epoch_order(seed, epoch, len(order.ends), stream="sampler.blocks").numpy()
        first = np.append(0, order.ends[:-1])
        self._first = first[self._blocks]  # sample
        self._ends = np.cumsum((order.ends - first)[self._blocks])
        self._lane_block = np.searchsorted(self._ends, self.edges[:-1], "right")
        self._lane_first = 1 + self.depth * np.arange(lanes + 1) // (lanes + 1)  # blocks of its first window
        # The window that each lane has open: its first block, its first place, its samples in their order.
        self._open, self._begin = np.full(lanes + 1, -1), np.zeros(lanes + 1, np.int64)
        self._samples = np.zeros((lanes + 1, 0), np.int64)

    def __getitem__(self, places: Tensor) -> Tensor:
        lane, line = self._line(places.cpu().numpy())
        window = self._window(lane, np.searchsorted(self._ends, line, "right"))
        samples, missing = np.empty(len(line), np.int64), np.arange(len(line))
        while len(missing):
            lanes = lane[missing]
            is_open = self._open[lanes] == window[missing]
            ready = missing[is_open]
            samples[ready] = self._samples[lanes[is_open], line[ready] - self._begin[lane[ready]]]
            missing = missing[~is_open]
            for number in np.unique(lane[missing], return_index=True)[1].tolist():  # of each lane the first in demand
                self._open_window(int(lane[missing[number]]), int(window[missing[number]]))
        return torch.from_numpy(samples).to(places.device)

    def ended(self, step: int) -> list[tuple[int, int]]:
        """The blocks whose window ends with this batch, so that they are not read again in this epoch.

        Of each: how many rows of the batch are read by then, and a sample of the block.
        """
        if step >= self.steps:
            return []
        lanes, width = np.arange(len(self.cuts) - 1), np.diff(self.cuts)
        begun = self.edges[:-2] + step * width
        before, after = (self._first_needed(lanes, place) for place in (begun, begun + width))
        ended = []
        for lane in np.flatnonzero(after > before).tolist():
            blocks = np.arange(before[lane], after[lane])
            for block, window in zip(blocks.tolist(), self._window(np.full_like(blocks, lane), blocks), strict=True):
                _, _, stop = self._span(lane, int(window))
                ended.append((int(self.cuts[lane] + stop - begun[lane]), int(self._first[block])))
        return ended

    def _first_needed(self, lane: np.ndarray, line: np.ndarray) -> np.ndarray:
        """The first block that a lane still needs once it has given all places before `line`."""
        over = line >= self.edges[lane + 1]
        block = np.searchsorted(self._ends, np.where(over, line - 1, line), "right")
        return np.where(over, block + 1, self._window(lane, block))

    def _line(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lane and place in the line of each place of the epoch."""
        step, row = np.divmod(places, self.rows)
        lane = np.searchsorted(self.cuts, row, "right") - 1
        line = self.edges[lane] + step * (self.cuts[lane + 1] - self.cuts[lane]) + row - self.cuts[lane]
        rest = step >= self.steps
        return np.where(rest, len(self.cuts) - 1, lane), np.where(rest, places, line)

    def _window(self, lane: np.ndarray, block: np.ndarray) -> np.ndarray:
        """The first block of the window that a block of a lane lies in; blocks are numbered along the line."""
        second = self._lane_block[lane] + self._lane_first[lane]
        later = second + (block - second) // self.depth * self.depth
        return np.where(block < second, self._lane_block[lane], later)

    def _span(self, lane: int, block: int) -> tuple[int, int, int]:
        """Of the window that opens with a block: its first place, the block after its last, the place after it."""
        start = max(int(self._ends[block - 1]) if block else 0, int(self.edges[lane]))
        blocks = int(self._lane_first[lane]) if block == self._lane_block[lane] else self.depth
        after = min(block + blocks, len(self._ends))
        return start, after, min(int(self._ends[after - 1]), int(self.edges[lane + 1]))

    def _open_window(self, lane: int, block: int) -> None:
        start, after, stop = self._span(lane, block)
        words = bits(self.seed, self.epoch, torch.arange(start, stop), "sampler.window", ())
        line = start + torch.argsort(words, stable=True).numpy()
        at = np.searchsorted(self._ends[block:after], line, "right") + block
        if stop - start > self._samples.shape[1]:
            self._samples = np.pad(self._samples, ((0, 0), (0, stop - start - self._samples.shape[1])))
        self._samples[lane, : stop - start] = self._first[at] + line - np.where(at > 0, self._ends[at - 1], 0)
        self._open[lane], self._begin[lane] = block, start
