"""A run's tensors as they are at one step, held apart, so that the next steps may change them while they are written.

On a GPU they are copied on the device, in the order of its work: nothing waits, not even for a step that is replayed
from a graph and moves the weights in place. Where the device has no memory left for that they are brought to the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from situs.train import distributed
from situs.train.checkpoint.tensors import identity

ALIGNED = 256
_torch: Any = torch  # its stubs do not export the foreach kernels


class Snapshot:
    """What this rank has to write: file by file tensors by name, and the boxes of those that are parts.

    tensors: file by file; sharded ones are taken in this rank's part, others by the first rank alone. A file of parts
    bears its rank in its name. gpu: where the copies lie, if they lie on one. spare: bytes that the device needs for a
    step beside what it holds between steps.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], spare: int = 0) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}
        self.boxes: dict[str, dict[str, distributed.Box]] = {}
        rank = distributed.rank()
        for file, held in tensors.items():
            boxes = {name: box for name, tensor in held.items() if (box := distributed.box_of(tensor)) is not None}
            own = {
                name: distributed.local(tensor).detach()
                for name, tensor in held.items()
                if (math.prod(boxes[name].size) if name in boxes else rank == 0)
            }
            title = f"{file}.rank{rank}" if boxes else file
            if boxes or rank == 0:
                self.files[title] = own
            if boxes:
                self.boxes[title] = boxes
        self.sharded = bool(self.boxes)
        self.gpu: torch.device | None = None
        self._events: list[Any] = []
        self._hold(spare)

    def _hold(self, spare: int) -> None:
        """Puts copies in the place of the tensors; two names of one tensor are two names of one copy."""
        found = {identity(tensor): tensor for held in self.files.values() for tensor in held.values()}
        copies: dict[tuple[object, ...], Tensor] = {}
        for device in {tensor.device for tensor in found.values()}:
            copies |= self._copied({key: tensor for key, tensor in found.items() if tensor.device == device}, spare)
        self.files = {
            file: {name: copies[identity(tensor)] for name, tensor in held.items()} for file, held in self.files.items()
        }

    def _copied(self, sources: Mapping[tuple[object, ...], Tensor], spare: int) -> dict[tuple[object, ...], Tensor]:
        """Copies of one device's tensors, in one piece of memory: nothing to allocate tensor by tensor."""
        starts, end = [], 0
        for source in sources.values():
            starts.append(end)
            end += -(-source.numel() * source.element_size() // ALIGNED) * ALIGNED
        memory = _memory(end, next(iter(sources.values())).device, spare)
        copies = [
            memory[start : start + s.numel() * s.element_size()].view(s.dtype).view(s.shape)
            for start, s in zip(starts, sources.values(), strict=True)
        ]
        with torch.no_grad():
            for dtype in {copy.dtype for copy in copies}:  # one kernel for many tensors, where they are of a kind
                pairs = [(c, s) for c, s in zip(copies, sources.values(), strict=True) if c.dtype == dtype]
                _torch._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs])
        if memory.device.type == "cuda":
            self.gpu = memory.device
            self._events.append(torch.cuda.current_stream(memory.device).record_event())
        return dict(zip(sources, copies, strict=True))

    def wait(self) -> None:
        """Returns when the copies are made; called by who writes them."""
        for event in self._events:
            event.synchronize()


def spare_of(device: torch.device) -> int:
    """Bytes that a step has needed so far on a GPU beside what is held between steps; ask before the first snapshot."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _memory(size: int, device: torch.device, spare: int) -> Tensor:
    """So many bytes on the device, where it then still has `spare`; else on the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size + spare <= 0.95 * idle:
            try:
                return torch.empty(size, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:  # what is idle may be kept for a graph, or in pieces
                pass
    return torch.empty(size, dtype=torch.uint8)
