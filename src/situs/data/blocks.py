"""An epoch's order for sets that are read in blocks, such as row groups of parquet files that do not fit into memory.

Blocks come in random order, some of them are open at a time, and the samples of the open ones are mixed. Each *lane*
gives the same rows of every batch, from blocks of its own. A process that takes some rows of every batch then reads the
blocks of these lanes alone, each of them once, and a batch is still mixed from all open blocks. The samples of a batch
depend on neither ranks nor workers, and nothing is computed in advance but the order of the blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from situs.core.random import bits
from situs.data.config import DataConfig
from situs.data.pipeline import Pipeline
from situs.data.sampler import Balanced, BatchPlan, LengthBuckets, epoch_order
from situs.data.sources.base import Blocks
from situs.data.sources.subset import check_one_class, class_labels
from situs.errors import SitusError

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


def with_order(
    plan: BatchPlan, pipeline: Pipeline, config: DataConfig, resident: Mapping[str, Tensor] | None = None
) -> tuple[BatchPlan, str]:
    """The plan with the order that the config asks for, and what a log says of it. resident: the values of all samples,
    where they are on the device."""
    source = pipeline.source
    if not plan.shuffle:
        return plan, ""
    if config.balanced:
        if plan.step_sampler is not None:
            reason = (
                "differential privacy draws samples independently of their class: leave out one of the two settings"
            )
            raise SitusError(f"balanced: {reason}", field="balanced")
        check_one_class(source, "balanced")
        labels = class_labels(source) if resident is None or "label" not in resident else resident["label"]
        return replace(plan, order=Balanced(labels, plan.repeated)), ", each class equally often"
    if plan.step_sampler is not None or resident is not None:
        return plan, ""
    if pipeline.in_memory:
        lengths = pipeline.lengths()
        if lengths is None:
            return plan, ""
        return replace(plan, order=LengthBuckets(lengths, plan.batch)), ", similar lengths together"
    blocks = source.blocks()
    if config.order == "blocks" and blocks is None:
        raise SitusError(field="order", value="blocks", allowed=f"exact for {source.name}, which is not read by blocks")
    if blocks is None or config.order == "exact" or (config.order == "auto" and not blocks.slow_random_access):
        slow = blocks is not None and blocks.slow_random_access
        cost = f"; each sample reads one of its {len(blocks.ends):,} {blocks.name}" if blocks and slow else ""
        return plan, f", shuffled exactly{cost}"
    order = block_order(blocks, config.window_gib * 2**30, plan.distinct, plan.n // plan.batch)
    gib = blocks.bytes / len(blocks.ends) * order.open / 2**30
    reason = " which do not fit into memory," if blocks.slow_random_access else ""
    shuffled = f"of {len(blocks.ends):,} {blocks.name},{reason} {order.open:,} at a time ({gib:.2g} GiB)"
    return replace(plan, order=order), f", shuffled in blocks: {shuffled}"
