"""What a step of split training computes, sends and holds, with permutations and without: the fourth paper's Fig. 8.

Client and server stand in one process, so that both sides are counted; each case runs in a process of its own, which
has held nothing before. A permutation is a gather here, where the paper multiplies by matrices.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from situs.backbones.config import BackboneConfig
from situs.config import Checked
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.errors import counted
from situs.limits import Count
from situs.locks.features import Defence
from situs.locks.key import SEED_BYTES, Key
from situs.methods.base import Method
from situs.methods.supervised import SupervisedConfig
from situs.progress import tracked
from situs.results import Provenance, Result, Summary, Table
from situs.split.client import Client
from situs.split.parts import cut, layout, own_names, trained_order
from situs.split.remote import SplitStepper, attach
from situs.split.server import agreed
from situs.split.serving import make_server
from situs.split.view import make_view
from situs.train.assemble import RunConfig, make_method
from situs.train.config import TrainConfig
from situs.train.optim import OptimConfig
from situs.train.step import Stepper

MIB = 2**20
CASES: Mapping[str, tuple[str, ...] | None] = {
    "local": None,
    "split": (),
    "split, rows": ("rows",),
    "split, columns": ("columns",),
    "split, rows + columns": ("rows", "columns"),
}
"""What is measured -> what is permuted; None: without a server."""


@dataclass(frozen=True)
class CostConfig(Checked):
    """Whose step it is; images and labels are random."""

    model: str = "vit_base_patch16_224"
    """A timm name."""

    img_size: Count = 224
    """Side of the images."""

    patch_size: Count | None = None
    """Side of a patch; by default the model's own."""

    depth: Count | None = None
    """Blocks; by default the model's own."""

    batch: Count = 8
    """Images a step."""

    classes: Count = 10
    """Of the classifier."""

    def run(self) -> RunConfig:
        """As the config of a run."""
        shape = {} if self.depth is None else {"depth": self.depth}
        made = {"patch_size": self.patch_size, "num_classes": self.classes, "model_args": shape}
        return RunConfig(
            method=SupervisedConfig(),
            backbone=BackboneConfig(self.model, drop_path=0.1, **made),
            data=DataConfig(path="samples", img_size=self.img_size, batch=self.batch),
            optim=OptimConfig(lr=1e-4, clip=1.0),
            train=TrainConfig(epochs=1),
        )


class StepCost(NamedTuple):
    """Of one step of both sides. kept: for its backward pass. held: the most ever, by the device or the process."""

    gflop: float
    mib_sent: float
    mib_kept: float
    mib_held: float


@dataclass(frozen=True)
class SplitCost(Result):
    """The steps side by side."""

    file: ClassVar[str] = "split-cost"

    rows: Mapping[str, StepCost]
    config: CostConfig
    device: str

    def summary(self) -> Summary:
        """What permutations add to a step of split training."""
        plain, moved = self.rows["split"], self.rows["split, rows + columns"]
        said = [f"{100 * (b / a - 1):+.2f} % {name}" for name, a, b in _beside(plain, moved)]
        header = ("a step", "GFLOP", "MiB sent", "MiB kept for backward", "MiB held at most")
        rows = [[name, *(f"{value:,.2f}" for value in row)] for name, row in self.rows.items()]
        asked = self.config
        title = f"{asked.model} at {asked.img_size} px, {counted(asked.batch, 'images')} a step, {self.device}"
        return Summary(f"Permuted rows and columns add {', '.join(said)} to a step.", (Table(title, header, rows),))

    def numbers(self) -> dict[str, Any]:
        """Every row, by its name."""
        rows = {name: row._asdict() for name, row in self.rows.items()}
        return {**asdict(self.config), "device": self.device, "rows": rows}


def _beside(plain: StepCost, moved: StepCost) -> list[tuple[str, float, float]]:
    names = ("operations", "bytes on the wire", "kept for backward", "held at most")
    return list(zip(names, plain, moved, strict=True))


def split_cost(config: CostConfig | None = None, *, device: str | None = None) -> SplitCost:
    """Measures three steps of every case of `CASES`, each in a process of its own; nothing is timed."""
    asked, where = config or CostConfig(), device or ("cuda" if torch.cuda.is_available() else "cpu")
    context, rows = multiprocessing.get_context("spawn"), {}
    for name, permute in tracked([*CASES.items()], "cases"):
        with ProcessPoolExecutor(1, context) as fresh:
            rows[name] = fresh.submit(measure, asked, permute, where).result()
    return SplitCost(rows, asked, where, provenance=Provenance({"torch": torch.__version__}))


def measure(asked: CostConfig, permute: tuple[str, ...] | None, device: str) -> StepCost:
    """Three steps in this process: what the second keeps and the most held so far, then operations and bytes."""
    config, batch = asked.run(), random_batch(asked, device)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with tempfile.TemporaryDirectory() as out:
        client = None
        if permute is None:
            stepper = stepper_of(Stepper, new_method(config, device), config, device)
        else:
            stepper, client = both_sides(config, permute, Path(out), device)
        stepper.update(batch, When(), 1e-4, False)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stepper.update(batch, When(step=1), 1e-4, False)
        for weight in (each for each in gc.get_objects() if type(each) is torch.nn.Parameter):
            kept.pop(weight.untyped_storage().data_ptr(), None)  # is there without a step
        here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        held = torch.cuda.max_memory_allocated() if device.startswith("cuda") else here
        before = 0 if client is None else client.sent
        # The counter does not know every fused attention; as plain products it knows it everywhere.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            stepper.update(batch, When(step=2), 1e-4, False)
        sent = 0 if client is None else client.sent - before
    return StepCost(counted.get_total_flops() / 1e9, sent / MIB, sum(kept.values()) / MIB, held / MIB)


def new_method(config: RunConfig, device: str) -> Method:
    """The client's whole method, for as many classes as the config says."""
    return make_method(config, (*map(str, range(config.backbone.num_classes or 0)),)).to(device).train()


def stepper_of(kind: Any, method: Method, config: RunConfig, device: str) -> Stepper:
    """What makes the updates, neither compiled nor recorded."""
    precision, accumulate = config.train.precision_on(torch.device(device)), config.train.accumulate
    fixed: dict[str, Any] = {"parallel": "ddp", "compiled": False, "graph": False}
    return kind(method, config.optim, seed=0, precision=precision, accumulate=accumulate, **fixed)


def both_sides(config: RunConfig, permute: tuple[str, ...], out: Path, device: str) -> tuple[Stepper, Client]:
    """A client that trains with its server in one process."""
    server, method = make_server(config, out, device=device), new_method(config, device)
    order, served = trained_order(method, config.optim), own_names(method, "server")
    client = Client(lambda message, _: server.answer("me", message), "0" * 32)
    view = make_view(method.backbone, permute, Defence(), key=Key(bytes(SEED_BYTES)), run=client.session)
    client.hello(layout(method.backbone), agreed(config.optim, server.precision), [])
    cut(method, "client")
    attach(method.backbone, client, view, sum(name in served for name in order))
    return stepper_of(partial(SplitStepper, client=client, order=order), method, config, device), client


def random_batch(asked: CostConfig, device: str) -> Batch:
    """Images and labels from one seed."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randn(asked.batch, 3, asked.img_size, asked.img_size, generator=chance).to(device)
    labels = torch.randint(asked.classes, (asked.batch,), generator=chance).to(device)
    return Batch(images, torch.arange(asked.batch, device=device), {"label": labels})
