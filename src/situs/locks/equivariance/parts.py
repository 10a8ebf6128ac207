"""The laws module by module: the outputs of every leaf module of the blocks, clear and permuted.

A leaf whose output moves with the key, or does not change, obeys the column law; the first that does neither breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from situs.backbones.layout import Group
from situs.core.permutation import permute_columns
from situs.locks.equivariance.experiment import UNMOVED, Back, Experiment, Keying, Move, relative_error
from situs.locks.equivariance.sample import row_refusal
from situs.locks.groups import permute_state


@dataclass(frozen=True)
class Part:
    """One leaf module, or the worst of its kind at all depths (depths written as *).

    operation: its type, for the reason of a refusal. keyed: whether the residual key moves its weights. row, column:
    error in float64, None if the law was not run or the leaf is not called itself. moves: whether its output moves with
    the key. turn: its place in the order of the calls.
    """

    name: str
    operation: str
    keyed: bool
    row: float | None
    column: float | None
    moves: bool
    turn: int


def parts_of(experiment: Experiment, residual: Sequence[Group], keys: Mapping[str, Tensor]) -> list[Part]:
    """Every leaf in the blocks, in the model's order; each law is run if the model supports it."""
    rows = row_refusal(experiment.backbone) is None
    moved, shuffled = {}, {}
    with torch.no_grad():
        clear = _outputs(experiment, *UNMOVED)
        if residual:
            moves = experiment.column_moves(residual, keys)
            moved = _outputs(experiment, *moves, lambda t: permute_state(t, residual, keys))
        if rows:
            move, back = experiment.row_moves()
            shuffled = _outputs(experiment, move, back)
    touched = {member.tensor.rpartition(".")[0] for group in residual for member in group.members}
    turns = {name: turn for turn, name in enumerate(clear)}
    parts = []
    for name, module in experiment.backbone.model.named_modules():
        if name in clear or name in touched:
            row = None
            if rows and name in clear:  # an output by head is [B, H, S, d]
                a, b = (out[name].transpose(1, 2) if out[name].dim() == 4 else out[name] for out in (clear, shuffled))
                row = relative_error(a, back(b))
            column, moves_along = (
                _column_error(clear[name], moved[name], keys, residual) if name in moved else (None, False)
            )
            turn = turns.get(name, len(turns))
            parts.append(Part(name, _operation(module), name in touched, row, column, moves_along, turn))
    return parts


def _operation(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"convolution ({kind})"
    buffers = [name for name, b in module.named_buffers() if b.is_floating_point()]
    return f"buffer ({kind}.{buffers[0]})" if buffers else kind


def merged(parts: Sequence[Part]) -> list[Part]:
    """One part for each kind of leaf, depths written as *."""
    by_name: dict[str, Part] = {}
    for part in parts:
        part = replace(part, name=re.sub(r"\.\d+(?=\.|$)", ".*", part.name))
        previous = by_name.get(part.name)
        if previous is not None:
            row, column = (
                max((error for error in errors if error is not None), default=None)
                for errors in ((previous.row, part.row), (previous.column, part.column))
            )
            keyed, moves = part.keyed or previous.keyed, part.moves or previous.moves
            part = replace(part, keyed=keyed, row=row, column=column, moves=moves)
        by_name[part.name] = part
    return list(by_name.values())


def _column_error(a: Tensor, b: Tensor, keys: Mapping[str, Tensor], residual: Sequence[Group]) -> tuple[float, bool]:
    """(error of the column law, whether the output moves with the key)."""
    moved = min(relative_error(_permuted(a, keys[group.name], group.size), b) for group in residual)
    unmoved = relative_error(a, b)
    return min(moved, unmoved), moved < unmoved


def _permuted(a: Tensor, p: Tensor, size: int) -> Tensor:
    """The last axis permuted by the key, 4 times if a merge has joined 4 tokens; NaN for another width."""
    if a.shape[-1] not in (size, 4 * size):
        return a.new_full((), float("nan"))
    return permute_columns(a.unflatten(-1, (-1, size)), p.to(a.device)).flatten(-2)


def _outputs(experiment: Experiment, move: Move, back: Back, key: Keying | None = None) -> dict[str, Tensor]:
    """The last output of every leaf in the blocks."""
    outputs: dict[str, Tensor] = {}

    def listen(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            passed = bool(inputs) and output is inputs[0]  # identities, such as dropout in evaluation
            if experiment.stack.inside and isinstance(output, Tensor) and not passed:
                outputs[name] = output.detach()

        return hook

    leaves = [(name, m) for name, m in experiment.backbone.model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(listen(name)) for name, module in leaves]
    try:
        experiment.output(move, back, key)
    finally:
        for handle in handles:
            handle.remove()
    return outputs
