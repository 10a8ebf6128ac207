"""The same computation run twice, clear and permuted, and the difference between the two.

A run is tokens -> assemble -> move -> blocks -> move back -> loss, on a copy of the parameters in a chosen dtype, which
it may train. The wrapped model is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from situs.backbones.base import Backbone, Stream
from situs.backbones.layout import Group
from situs.core.permutation import invert, permute_columns
from situs.core.tokens import take
from situs.locks.equivariance.sample import Sample, embedded, moved_order, row_refusal
from situs.locks.groups import entrance_and_exit, invert_keys, permute_state, residual_only

Move = Callable[[Stream], Stream]
Back = Callable[[Tensor], Tensor]
Keying = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Errors = dict[str, float]
"""check (forward, backward, steps) -> relative error."""

PREFIX = "backbone.model."

UNMOVED: tuple[Move, Back] = (lambda stream: stream, lambda z: z)
"""Moves neither the stream nor the output."""


@dataclass(frozen=True)
class Computed:
    """The results of one run in clear order, under the wrapped model's names."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    trained: dict[str, Tensor] = field(default_factory=dict)
    trained_output: Tensor | None = None


class KeepDouble(TorchFunctionMode):
    """Casts to float64 where a model casts float64 or integers to float32.

    RMSNorm, rotary embeddings and some softmaxes compute in float32 whatever the model's dtype. With these casts a law
    that holds to 1e-14 would appear to hold only to 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if double and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        if double and func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


class Stack(nn.Module):
    """assemble, move and blocks as one module, so `functional_call` can replace its parameters."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.inside = False
        """Whether the blocks are running; hooks ignore what is outside them."""

    def forward(self, tokens: Tensor, sample: Sample, move: Move) -> Tensor:
        places = self.backbone.positions()
        if sample.index is not None:
            places = places.take(sample.index)
        stream = move(self.backbone.assemble(tokens, places, sample.mask))
        self.inside = True
        try:
            return self.backbone.blocks(stream).z
        finally:
            self.inside = False


class Experiment:
    """What all runs of a model in one dtype share: parameters, tokens, loss and the clear run. steps: of AdamW."""

    def __init__(self, backbone: Backbone, sample: Sample, dtype: torch.dtype, steps: int) -> None:
        self.backbone = backbone
        self.sample = sample
        self.dtype = dtype
        # AdamW's moments do not survive half precision, in which nobody trains weights.
        self.steps = steps if dtype in (torch.float64, torch.float32) else 0
        self.stack = Stack(backbone)
        self.parameters = {name: _copy(p, dtype) for name, p in self.stack.named_parameters()}
        self.buffers = {name: _copy(b, dtype) for name, b in self.stack.named_buffers()}
        self.tokens = embedded(backbone, sample, dtype)
        with torch.no_grad():
            output = self.output(*UNMOVED)
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if sample.mask is not None and not backbone.num_prefix:
            noise *= sample.mask.cpu()[..., None]  # outputs at padding do not count
        self.cotangent = (noise / noise.numel() ** 0.5).to(output)
        self.clear = self.run(*UNMOVED)

    def output(self, move: Move, back: Back, key: Keying | None = None) -> Tensor:
        """The blocks' output in clear order, forward only."""
        return self._forward(self._keyed(key), self.tokens, move, back)

    @torch.enable_grad()
    def run(self, move: Move, back: Back, key: Keying | None = None) -> Computed:
        """Forward, backward and steps. loss = <cotangent, output in clear order>."""
        parameters = {n: p.clone().requires_grad_(p.is_floating_point()) for n, p in self._keyed(key).items()}
        leaves = {name: p for name, p in parameters.items() if p.requires_grad}
        start = self.tokens.clone().requires_grad_()
        first = self._forward(parameters, start, move, back)
        loss = (first * self.cotangent).sum()
        input_gradient, *grads = torch.autograd.grad(loss, [start, *leaves.values()], allow_unused=True)
        gradients = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
        if not self.steps:
            return Computed(first.detach(), input_gradient, _model_names(gradients))
        used = [parameters[name] for name in gradients]
        # A large epsilon: otherwise rounding in gradients that are 0 (the keys' bias) grows beyond the tolerance.
        optimizer = torch.optim.AdamW(used, lr=1e-3, weight_decay=0.05, eps=1e-4)
        for step in range(self.steps):
            output = None if step == 0 else self._forward(parameters, self.tokens, move, back)
            grads = gradients.values() if output is None else torch.autograd.grad((output * self.cotangent).sum(), used)
            for p, g in zip(used, grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
        with torch.no_grad():
            last = self._forward(parameters, self.tokens, move, back)
        trained = {name: parameters[name].detach() for name in gradients}
        return Computed(first.detach(), input_gradient, _model_names(gradients), _model_names(trained), last)

    def _forward(self, parameters: Mapping[str, Tensor], tokens: Tensor, move: Move, back: Back) -> Tensor:
        with KeepDouble() if tokens.dtype == torch.float64 else nullcontext():
            return back(functional_call(self.stack, {**parameters, **self.buffers}, (tokens, self.sample, move)))

    def _keyed(self, key: Keying | None) -> Mapping[str, Tensor]:
        """The parameters with `key` applied to those of the wrapped model."""
        if key is None:
            return self.parameters
        state = _model_names({name: p for name, p in self.parameters.items() if name.startswith(PREFIX)})
        return {**self.parameters, **{PREFIX + name: p for name, p in key(state).items()}}

    def errors(self, other: Computed, unkey: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> Errors:
        """The errors of a run against the clear one, after its weights are permuted back.

        Trained weights are compared in float64 only: in lower precision AdamW makes full steps from gradients that are
        pure rounding (the keys' bias), which do not change the output.
        """
        a, b = self.clear, other
        inputs = relative_error(a.input_gradient, b.input_gradient)
        backward = max(inputs, worst_relative_error(a.gradients, unkey(b.gradients)))
        errors = {"forward": self._error(a.output, b.output), "backward": backward}
        if a.trained_output is not None and b.trained_output is not None:
            errors["steps"] = self._error(a.trained_output, b.trained_output)
            if self.dtype == torch.float64:
                errors["steps"] = max(errors["steps"], worst_relative_error(a.trained, unkey(b.trained)))
        return errors

    def _error(self, a: Tensor, b: Tensor) -> float:
        """The relative error of outputs, without padding."""
        if self.sample.mask is None or self.backbone.num_prefix:
            return relative_error(a, b)
        return relative_error(a[self.sample.mask], b[self.sample.mask])

    def row_moves(self) -> tuple[Move, Back]:
        """Moves the patch tokens of each sample to a different order, and back."""
        batch, count = self.tokens.shape[:2]
        order = moved_order(batch, count, torch.Generator().manual_seed(1)).to(self.tokens.device)
        p, undo = self.backbone.num_prefix, invert(order)
        return lambda s: s.take(order), lambda z: torch.cat([z[:, :p], take(z[:, p:], undo)], dim=1)

    def column_moves(self, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> tuple[Move, Back]:
        """Permutes the stream's channels by the key of the first stage, and the output back by that of the last."""
        enter, leave = entrance_and_exit(groups)
        p, undo = keys[enter].to(self.tokens.device), invert(keys[leave]).to(self.tokens.device)
        return lambda s: replace(s, z=permute_columns(s.z, p)), lambda z: permute_columns(z, undo)

    def row(self) -> Errors:
        """Errors of the row law: same weights, equal gradients."""
        return self.errors(self.run(*self.row_moves()), dict)

    def row_forward(self) -> Errors:
        """Errors of the row law, forward only: how far a refused model is from it."""
        with torch.no_grad():
            return {"forward": self._error(self.clear.output, self.output(*self.row_moves()))}

    def column(self, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> Errors:
        """Errors of the column law: keyed weights, permuted gradients. Inner groups alone do not move the stream."""
        moves = self.column_moves(groups, keys) if residual_only(groups) else UNMOVED
        undo = invert_keys(keys)
        run = self.run(*moves, lambda t: permute_state(t, groups, keys))
        return self.errors(run, lambda t: permute_state(t, groups, undo))

    def column_forward(
        self, residual: Sequence[Group], keys: Mapping[str, Tensor], weights: Sequence[Group] = ()
    ) -> float:
        """The forward error of the column law if only the groups `weights` are keyed."""
        key = (lambda t: permute_state(t, weights, keys)) if weights else None
        with torch.no_grad():
            return self._error(self.clear.output, self.output(*self.column_moves(residual, keys), key))

    def control(self, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> float | None:
        """The forward error of a key that misses one axis of one matrix: a check that accepts it is worthless."""
        residual = residual_only(groups)
        for group in residual[:1]:
            for member in group.members:
                if self.parameters[PREFIX + member.tensor].dim() > 1:
                    incomplete = replace(group, members=tuple(m for m in group.members if m != member))
                    return self.column_forward(residual, keys, (incomplete, *residual[1:]))
        return None


def _copy(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.detach().to(dtype, copy=True) if t.is_floating_point() else t.detach().clone()


def _model_names(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the wrapped model's names; those of the backbone itself (Swin's table) keep theirs."""
    return {name.removeprefix(PREFIX): t for name, t in named.items()}


def relative_error(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest entry of `a`; infinite if either is not finite."""
    if a.shape != b.shape:
        return float("inf")
    scale, difference = a.abs().max(), (a - b).abs().max()
    if not (torch.isfinite(scale) and torch.isfinite(difference)):
        return float("inf")
    return float(difference / scale.clamp(min=torch.finfo(a.dtype).tiny))


def worst_relative_error(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest relative error of all tensors, each relative to its largest entry.

    At least a thousandth of the largest entry of all is used as scale, for gradients that are 0 up to rounding (the
    keys' bias under a softmax).
    """
    if a.keys() != b.keys():
        return float("inf")
    least = max((float(t.abs().max()) for t in a.values()), default=0.0) * 1e-3
    worst = 0.0
    for name, t in a.items():
        difference = float((t - b[name]).abs().max())
        worst = max(worst, difference / max(float(t.abs().max()), least, torch.finfo(t.dtype).tiny))
        if not difference < float("inf"):
            return float("inf")
    return worst


# --- module by module: the outputs of every leaf of the blocks --------------------------------------------------------
# A leaf whose output moves with the key, or does not change, obeys the column law; the first that does neither breaks
# it.


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
