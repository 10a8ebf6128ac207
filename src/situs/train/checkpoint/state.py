"""The state of a training as tensors by name: weights, moments, mean (EMA), generators, running sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from situs.errors import SitusError
from situs.train import distributed
from situs.train.checkpoint.folder import Checkpoint
from situs.train.step import Ema

Files = dict[str, dict[str, Tensor]]


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None, device: torch.device) -> Files:
    """The tensors of a checkpoint, file by file, not copied, sharded where they are. All ranks call it."""
    files: Files = {"model": model.state_dict(), "optimizer": moments(optimizer)}
    if ema is not None:
        files["ema"] = ema.mean
    files["generators"] = {kind: distributed.rows(state, device) for kind, state in generators(device).items()}
    return files


def restore(
    checkpoint: Checkpoint | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    device: torch.device,
) -> bool:
    """Restores a checkpoint. False where the generators did not fit.

    checkpoint: each rank reads its own part of sharded tensors; rank 0 reads and sends all others, so that where
    nothing is sharded the other ranks may pass None.
    """
    fill("model", model.state_dict(), checkpoint)
    # A parameter that never had a gradient has no moments; rank 0's file knows which ones have.
    names = None if checkpoint is None else sorted(checkpoint.parts("optimizer").shapes)
    for name in distributed.from_main(names, device):
        _make_moment(optimizer, name)
    fill("optimizer", moments(optimizer), checkpoint)
    if ema is not None:
        fill("ema", ema.mean, checkpoint)
    return _restore_generators(checkpoint, device)


@torch.no_grad()
def fill(file: str, targets: Mapping[str, Tensor], checkpoint: Checkpoint | None) -> None:
    """Copies a checkpoint's tensors of one kind into `targets`, by name; a mismatch is an error."""
    parts = None if checkpoint is None else checkpoint.parts(file)
    if checkpoint is not None and parts is not None:
        check_fit(f"{checkpoint.path.name}/{file}.safetensors", targets, parts.shapes)
    for name, target in targets.items():
        box = distributed.box_of(target)
        if box is None:
            value = None if parts is None or distributed.rank() else parts.read(name)
            distributed.place(target.detach(), value)
        else:
            assert parts is not None, "a sharded tensor is read by every rank"
            distributed.local(target).copy_(parts.read(name, box))


def check_fit(where: str, targets: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuses names or shapes that differ from the targets'."""
    for name in sorted(targets.keys() ^ shapes.keys()):
        problem = "is not in the file" if name in targets else "is in the file but not in the model"
        raise SitusError(f"{where} does not fit the run: {name} {problem}")
    for name, target in targets.items():
        if tuple(target.shape) != tuple(shapes[name]):
            raise SitusError(
                f"{where} does not fit the run: {name} has the shape {list(shapes[name])} instead of "
                f"{list(target.shape)}"
            )


def _named(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state as {"parameter/exp_avg": tensor, …}."""
    return {
        f"{name}/{kind}": tensor
        for name, parameter in _named(optimizer).items()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def _make_moment(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Adds a zero moment, shaped (and sharded) like its parameter."""
    owner, kind = name.rsplit("/", 1)
    parameter = _named(optimizer).get(owner)
    if parameter is None:
        raise SitusError(
            f"optimizer.safetensors does not fit the run: {owner} is in the file, but the run does not train it"
        )
    like = torch.zeros((), dtype=torch.float32, device=parameter.device) if kind == "step" else None
    optimizer.state[parameter][kind] = torch.zeros_like(parameter) if like is None else like


def seed_generators(seed: int, step: int = 0) -> None:
    """Seeds torch's own generators (drop path, dropout), differently on each rank."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + distributed.rank()) % 2**63)


def generators(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators that a step on `device` may use: kind -> bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type != "cpu":
        module: Any = torch.get_device_module(device)
        states[device.type] = module.get_rng_state()
    return states


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores the states that `generators` gave."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    elif device.type in states and device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.set_rng_state(states[device.type].cpu())


def _restore_generators(checkpoint: Checkpoint | None, device: torch.device) -> bool:
    """Restores each rank's generators; False (and nothing done) where other ranks or devices saved them."""
    current = generators(device)
    saved = {} if checkpoint is None or distributed.rank() else checkpoint.tensors("generators")
    shapes = {kind: (distributed.world(), state.numel()) for kind, state in current.items()}
    fits = distributed.from_main({kind: tuple(rows.shape) for kind, rows in saved.items()} == shapes, device)
    if not fits:
        return False
    states = {}
    for kind, shape in shapes.items():
        rows = torch.empty(shape, dtype=torch.uint8, device=device)
        distributed.place(rows, saved.get(kind))
        # A copy: torch 2.14 crashes on a state that is a view into a larger tensor.
        states[kind] = rows[distributed.rank()].cpu().clone()
    set_generators(states, device)
    return True
