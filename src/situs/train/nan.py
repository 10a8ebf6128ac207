"""A loss or gradient that is not finite: detected without a sync, the run stopped, the step saved for a replay.

The flag of a step is copied to the host while the next step is being queued, and read one step late. The
update of the bad step and every later one was already skipped on the device, so the weights that are saved are
those the step started from: with its batch, draws and generators it can be run again to the same end.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.methods.base import Batch, Method
from situs.train import distributed
from situs.train.checkpoint import RunFolder
from situs.train.checkpoint.files import read_folder, read_tensors, write_folder, write_tensors
from situs.train.checkpoint.state import check_fit, gathered, set_generators
from situs.train.step import MicroBatch, Update, autocast


class NotFiniteError(SitusError):
    """The run stopped: a loss or gradient was not finite. folder: what was saved, for `replay`."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class FiniteCheck:
    """Reads each step's flags one step late: was it finite, and was some rank asked to stop."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: tuple[Update, Tensor, Any] | None = None

    def look_back(self, step: Update) -> tuple[Update | None, bool]:
        """Takes a step that is queued; gives (the one before it if it was bad, whether to stop)."""
        flags, event = step.flags, None
        if self.device.type == "cuda":
            flags = flags.to("cpu", non_blocking=True)  # pinned by the allocator
            event = torch.cuda.Event()
            event.record()
        last, self.pending = self.pending, (step, flags, event)
        return self._read(last)

    def wait(self) -> tuple[Update | None, bool]:
        """Reads the newest step's flags now: before a checkpoint, a log line and the end."""
        last, self.pending = self.pending, None
        return self._read(last)

    @staticmethod
    def _read(last: tuple[Update, Tensor, Any] | None) -> tuple[Update | None, bool]:
        if last is None:
            return None, False
        step, flags, event = last
        if event is not None:
            event.synchronize()
        bad, stop = flags.tolist()
        return (step if bad else None), bool(stop)


def save_bad_step(
    run: RunFolder, method: Method, step: Update, precision: str, names: tuple[str, ...]
) -> NotFiniteError:
    """Saves the step under nan/ and gives the error that ends the run. All ranks call it."""
    folder, draft = run.path / "nan", run.path / ".writing-nan"
    model = gathered(method.state_dict())
    values = dict(zip(names, step.values.tolist(), strict=True)) | {"gradient norm": float(step.norm)}
    listed = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    number = step.when.step + 1
    text = f"step {number} was not finite ({listed}); the weights are still those before it"
    rank = distributed.rank()
    try:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, exist_ok=True)
        distributed.barrier()
        write_tensors(draft / f"rank{rank}.safetensors", _pack(step))
        distributed.barrier()
        if rank == 0:
            facts = {"step": number, "epoch": step.when.epoch, "precision": precision}
            facts |= {"shares": [part.share for part in step.parts], "values": {k: repr(v) for k, v in values.items()}}
            write_folder(draft, {"model": model}, facts)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        return NotFiniteError(f"{text}; it could not be saved: {error.strerror or error}", folder)
    return NotFiniteError(f"{text}; saved in {folder}, run it again with situs.train.nan.replay", folder)


def _pack(step: Update) -> dict[str, Tensor]:
    """A step as tensors by name: "0/inputs", "0/targets/label", "0/draws/context", "generator/cpu"."""
    packed = {f"generator/{kind}": state for kind, state in step.generators.items()}
    for number, (batch, draws, _) in enumerate(step.parts):
        packed |= {f"{number}/inputs": batch.inputs, f"{number}/ids": batch.ids}
        packed |= {} if batch.mask is None else {f"{number}/mask": batch.mask}
        packed |= {f"{number}/targets/{k}": v for k, v in batch.targets.items()}
        packed |= {f"{number}/draws/{k}": v for k, v in draws.items()}
    return packed


def _unpack(packed: dict[str, Tensor], shares: list[float], device: torch.device) -> list[MicroBatch]:
    parts = []
    for number, share in enumerate(shares):
        tensors = _below(f"{number}/", packed, device)
        targets, draws = (_below(f"{kind}/", tensors, device) for kind in ("targets", "draws"))
        if "images" in tensors:  # a step of an old version
            tensors["inputs"] = tensors["images"]
            targets |= {"label": tensors["labels"]} if "labels" in tensors else {}
        batch = Batch(tensors["inputs"], tensors["ids"], targets, tensors.get("mask"))
        parts.append(MicroBatch(batch, draws, share))
    return parts


def _below(prefix: str, packed: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v.to(device) for name, v in packed.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Replay:
    """What the saved step gives when it is run again; gradients: those that are not finite, by name."""

    step: int
    loss: float
    metrics: dict[str, float]
    gradients: list[str]


def replay(folder: Path, method: Method, rank: int = 0) -> Replay:
    """Runs a saved step again, forward and backward, uncompiled and without an update.

    folder: the `nan` folder of a run, or the run's own. method: built as for the run; its weights are replaced.
    rank: whose part of the batch.
    """
    folder = folder if folder.name == "nan" else folder / "nan"
    state = read_folder(folder)
    if isinstance(state, str):
        raise SitusError(f"{folder}: has no saved step: {state}")
    if f"rank{rank}.safetensors" not in state["files"]:
        raise SitusError(f"{folder}: has no part of rank {rank}")
    weights = read_tensors(folder / "model.safetensors")
    shapes = {name: value.shape for name, value in weights.items()}
    check_fit(f"{folder}/model.safetensors", method.state_dict(), shapes)
    method.load_state_dict(weights)
    device = next(method.parameters()).device
    packed = read_tensors(folder / f"rank{rank}.safetensors")
    set_generators({k.removeprefix("generator/"): v for k, v in packed.items() if k.startswith("generator/")}, device)
    method.train()
    method.zero_grad(set_to_none=True)
    loss, metrics = 0.0, dict[str, float]()
    for batch, draws, share in _unpack(packed, state["shares"], device):
        with autocast(device, state["precision"]):
            output = method(batch, draws)
        (output.loss * share).backward()
        loss += float(output.loss.detach()) * share
        metrics = {k: metrics.get(k, 0.0) + float(v) * share for k, v in output.metrics.items()}
    bad = [name for name, p in method.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return Replay(state["step"], loss, metrics, bad)
