"""An update as one CUDA graph, so that no step waits for Python to launch its kernels.

The first updates run eagerly, on a stream of their own: kernels are compiled and workspaces allocated. Then the update
is recorded over fixed buffers, and every later one copies its tensors there and replays it: the same kernels, so the
same bits. What cannot be recorded, such as a forward that reads a value on the host, runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten  # the structures torch.compile itself walks

from situs.progress import note

WARMUP = 4
"""Eager updates of one shape before it is recorded: the compiler may recompile in the first ones."""


class Graphed:
    """Calls `update` with any structure of tensors; records it once its shapes have stayed the same.

    update: works on the device alone and gives one tensor. Where it cannot be recorded, a note says so once.
    """

    def __init__(self, update: Callable[[Any], Tensor], device: torch.device) -> None:
        self.update, self.device = update, device
        self.stream = torch.cuda.Stream(device)
        self.shapes: Any = None
        self.eager = 0
        self.buffers: list[Any] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)
        self.failed = False

    def __call__(self, inputs: Any) -> Tensor:
        """One update; the result is a copy that the caller may keep."""
        leaves, form = tree_flatten(inputs)
        shapes = form, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if self.graph is not None and shapes != self.shapes:  # a last batch of another size, say
            return self._run_eagerly(inputs)
        if shapes != self.shapes:
            self.shapes, self.eager = shapes, 0
            # All on the device: of a tensor on the host the recording would keep today's value.
            self.buffers = [torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                            if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # fmt: skip
        for buffer, leaf in zip(self.buffers, leaves, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(leaf, non_blocking=True)
        # Over the buffers from the first, so that what is compiled for them need not be compiled again.
        inputs = tree_unflatten(self.buffers, form)
        self.eager += 1
        if self.graph is None and self.eager > WARMUP and not self.failed:
            self._record(inputs)
        if self.graph is None:
            return self._run_eagerly(inputs)
        self.graph.replay()
        return self.output.clone()

    def _run_eagerly(self, inputs: Any) -> Tensor:
        """One update without the graph, on the stream that is recorded later."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            output = self.update(inputs)
        here.wait_stream(self.stream)
        return output

    def _record(self, inputs: Any) -> None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.get_state()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the threads that load data may go on with theirs.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.output = self.update(inputs)
        except RuntimeError as error:
            self.failed = True
            # A failed recording leaves the generator in capture mode: give it a fresh state.
            fresh = torch.Generator(self.device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            torch.cuda.synchronize(self.device)
            reason = str(error).strip().partition("\n")[0]
            note(f"the step cannot be recorded as a CUDA graph and runs without one: {reason}")
        else:
            self.graph = graph
