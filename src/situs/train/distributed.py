"""A run on several ranks: started by torchrun, parallel by DDP or FSDP2, written by rank 0 alone.

Without torchrun every function here is what one rank does. Nothing that is sent is pickled.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from situs.errors import SitusError, counted
from situs.methods.base import Method

Precision = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the number of ranks, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0


def find_device(device: Any = None) -> torch.device:
    """The device "cpu", "cuda", "cuda:1" or "mps" (Apple), where torch can compute; None takes a CUDA device where
    there is one."""
    try:
        kind = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise SitusError(field="device", value=device, allowed="cpu, cuda, cuda:N or mps") from None
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise SitusError(f"device={device}: this machine has no CUDA device", field="device")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise SitusError(
            f"device={device}: this machine has only {counted(torch.cuda.device_count(), 'CUDA devices')}, numbered "
            "from 0",
            field="device",
        )
    if kind.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=kind).tolist()
        except Exception as error:  # each kind of device has its own class of error
            raise SitusError(
                f"device={device}: torch cannot compute on this device; use cpu", field="device"
            ) from error
    return kind


def start(device: str | None = None) -> Ranks:
    """Joins the process group that torchrun's environment names (nccl or gloo); without torchrun, one rank.

    device: see `find_device`.
    """
    kind = find_device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, kind)
    if kind.type not in ("cpu", "cuda"):
        raise SitusError(f"device={device}: a run with several ranks works only on cpu or cuda", field="device")
    if kind.type == "cuda":
        kind = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(kind)
    if not dist.is_initialized():
        _join("nccl" if kind.type == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), kind)


def restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _join(backend: str) -> None:
    """Joins under a prefix that each restart of torchrun changes: its store still has the killed ranks' addresses."""
    store, rank, world = next(dist.rendezvous("env://"))  # pyright: ignore[reportPrivateImportUsage]
    store = dist.PrefixStore(f"start {restarts()}", store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def stop() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Waits for all ranks."""
    if world() > 1:
        dist.barrier()


def mean(value: Tensor) -> Tensor:
    """The mean over the ranks, on each of them."""
    if world() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total / world()


def most(value: Tensor) -> Tensor:
    """The elementwise maximum over the ranks, in place."""
    if world() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


def gather(value: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's rows [n, …], in the order of the ranks; n may differ."""
    if world() == 1:
        return [value]
    counts = [torch.zeros(1, dtype=torch.int64, device=value.device) for _ in range(world())]
    dist.all_gather(counts, torch.tensor([len(value)], device=value.device), group=group)
    padded = torch.cat([value, value.new_zeros(int(max(counts)) - len(value), *value.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(count)] for part, count in zip(parts, counts, strict=True)]


def gather_json(value: Any, device: torch.device | str = "cpu", group: Any = None) -> list[Any]:
    """Every rank's JSON value, in the order of the ranks."""
    if world() == 1:
        return [value]
    data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    return [json.loads(bytes(part.tolist())) for part in gather(data, group)]


def rows(value: Tensor, device: torch.device) -> Tensor:
    """Every rank's `value` (of one shape) as the rows of a CPU tensor, on each rank."""
    return torch.cat(gather(value[None].to(device))).cpu()


def from_main(value: Any, device: torch.device) -> Any:
    """A JSON value of rank 0 on every rank."""
    return gather_json(value if rank() == 0 else None, device)[0]


def full(tensor: Tensor) -> Tensor:
    """A tensor gathered where FSDP has sharded it; all ranks call it together."""
    if world() == 1:
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def place(target: Tensor, value: Tensor | None) -> None:
    """Copies rank 0's `value` into every rank's `target`; the other ranks may pass None."""
    if value is not None and rank() == 0:
        target.copy_(value)
    if world() > 1:
        dist.broadcast(target, 0)


class Box(NamedTuple):
    """A part of a tensor: the whole's shape, where the part begins in it, and the part's own shape."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def box_of(tensor: Tensor) -> Box | None:
    """Which part of a sharded tensor this rank has; None where the tensor is whole."""
    if world() == 1:
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor if box_of(tensor) is None else tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]


class SideChannel:
    """JSON messages between the ranks, apart from the training's own: a process group on the CPU for another thread.

    Made and used by all ranks together.
    """

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo") if world() > 1 else None

    def everyone(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in the order of the ranks."""
        return gather_json(value, group=self.group)


@dataclass(frozen=True)
class SpreadMethod:
    """A method ready to train: `forward` to call, and `local(last)`, the context of one micro-batch.

    Gradients are exchanged only at a step's last micro-batch.
    """

    forward: Callable[..., Any]
    local: Callable[[bool], AbstractContextManager[Any]]


def spread(method: Method, parallel: str, precision: str, compiled: bool) -> SpreadMethod:
    """The method on this run's ranks: as it is on one, in DDP, or sharded by FSDP2 (in place)."""
    whole = compiled and method.compiled_part == "forward"
    if compiled and not whole:
        compile_part(method)
    if world() == 1:
        return SpreadMethod(torch.compile(method) if whole else method, lambda _: nullcontext())
    if parallel == "ddp":
        wrapped = wrap_ddp(method)
        # Compiled outside DDP, so that the backward is cut where its buckets are sent.
        call = torch.compile(wrapped) if whole else wrapped
        return SpreadMethod(call, lambda last: nullcontext() if last else wrapped.no_sync())
    wrap_fsdp(method, precision, whole=compiled)
    if whole:  # inside FSDP's hooks, which gather the weights before this runs
        compile_part(method)
    sharded: Any = method

    def local(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return SpreadMethod(method, local)


def compile_part(method: Method) -> None:
    """Compiles the part that a method names, in place."""
    setattr(method, method.compiled_part, torch.compile(getattr(method, method.compiled_part)))


def wrap_ddp(method: nn.Module) -> nn.parallel.DistributedDataParallel:
    """DDP that allows unused parameters (MP3: the positions and the head)."""
    # One small gradient (that of a kernel with one input) is copied into DDP's layout: nothing a user could change.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return nn.parallel.DistributedDataParallel(method, find_unused_parameters=True, gradient_as_bucket_view=True)


def wrap_fsdp(method: Method, precision: str, *, whole: bool = False) -> None:
    """FSDP2 in place: optimiser state, gradients and weights are sharded, and a block is gathered when it is run.

    What is in no block (embedding, positions, heads) is gathered once a step; with `whole`, everything is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # A part's output may be a view; the backbones add it out of place, which is what FSDP asks for.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    device = next(method.parameters()).device
    mesh = init_device_mesh(device.type, (world(),))
    halved = {} if precision == "fp32" else {"param_dtype": DTYPES[precision], "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**halved, cast_forward_inputs=False)
    for tensor in (*method.parameters(), *method.buffers()):
        place(tensor.detach(), tensor.detach() if rank() == 0 else None)
    for part in () if whole else gathered_apart(method):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(method, mesh=mesh, mp_policy=policy)


def gathered_apart(method: Method) -> list[nn.Module]:
    """The modules that FSDP gathers one by one: the backbone's blocks, and those that a method adds."""
    blocks = [module for block in method.backbone.block_modules() for module in block]
    if blocks and "bias" in method.backbone.positions().kinds:
        # Relative positions are weights of the blocks that are read before the first of them is run.
        blocks = [part for block in blocks for name, part in block.named_modules() if name.split(".")[-1] == "mlp"]
    in_backbone = {id(part) for part in method.backbone.modules()}
    lists = [part for part in method.modules() if isinstance(part, nn.ModuleList) and id(part) not in in_backbone]
    apart = [*blocks, *(part for module_list in lists for part in module_list)]
    return [part for part in apart if any(True for _ in part.parameters())]
