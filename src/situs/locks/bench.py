"""One model in one dtype, run clear and permuted: how far each kind of move is from the law."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Stream
from situs.backbones.layout import Group
from situs.core.permutation import invert, permute_columns
from situs.core.tokens import take
from situs.locks.arms import (
    PREFIX,
    Arm,
    Back,
    Move,
    Sample,
    Stack,
    embedded,
    gap,
    keyed,
    named_gap,
    run_arm,
    tensors_of,
    train_arm,
)
from situs.locks.groups import entrance_and_exit, invert_keys, permute_state, residual_only
from situs.locks.rows import moved_order

Errors = dict[str, float]
"""check (forward, backward, steps) -> relative error."""

Keying = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def stay(x: Stream) -> Stream:
    """No move of the stream."""
    return x


def still(z: Tensor) -> Tensor:
    """No move of the output."""
    return z


class Bench:
    """What all arms of one dtype share: parameters, tokens, the loss and the clear arm."""

    def __init__(self, backbone: Backbone, sample: Sample, dtype: torch.dtype, steps: int) -> None:
        self.backbone = backbone
        self.sample = sample
        self.dtype = dtype
        # Nobody trains weights of half precision; AdamW's own numbers would not survive there.
        self.steps = steps if dtype in (torch.float64, torch.float32) else 0
        self.stack = Stack(backbone)
        self.tensors = tensors_of(self.stack, dtype)
        self.tokens = embedded(backbone, sample, dtype)
        with torch.no_grad():
            output = self.output(stay, still)
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if sample.mask is not None and not backbone.num_prefix:
            noise *= sample.mask.cpu()[..., None]  # what stands at padding is no one's answer
        self.cotangent = (noise / noise.numel() ** 0.5).to(output)
        self.clear = self.arm(stay, still)

    def output(self, move: Move, back: Back, key: Keying | None = None) -> Tensor:
        """Forward alone, in clear order."""
        return run_arm(self.stack, self._keyed(key), self.tokens, self.sample, move, back)

    def arm(self, move: Move, back: Back, key: Keying | None = None) -> Arm:
        """Forward, backward and steps."""
        tensors = self._keyed(key)
        return train_arm(self.stack, tensors, self.tokens, self.sample, move, back, self.cotangent, self.steps)

    def _keyed(self, key: Keying | None) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        parameters, buffers = self.tensors
        return (parameters if key is None else keyed(parameters, key)), buffers

    def errors(self, arm: Arm, unkey: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> Errors:
        """How far an arm is from the clear one, its weights un-permuted.

        Trained weights are compared in float64 only: below it, AdamW makes whole steps out of gradients that are
        nothing but rounding (the keys' bias), which the output does not feel.
        """
        a, b = self.clear, arm
        backward = max(gap(a.input_gradient, b.input_gradient), named_gap(a.gradients, unkey(b.gradients)))
        found = {"forward": self._gap(a.output, b.output), "backward": backward}
        if a.trained_output is not None and b.trained_output is not None:
            found["steps"] = self._gap(a.trained_output, b.trained_output)
            if self.dtype == torch.float64:
                found["steps"] = max(found["steps"], named_gap(a.trained, unkey(b.trained)))
        return found

    def _gap(self, a: Tensor, b: Tensor) -> float:
        """Between outputs, where tokens are no padding."""
        if self.sample.mask is None or self.backbone.num_prefix:
            return gap(a, b)
        return gap(a[self.sample.mask], b[self.sample.mask])

    # --- the moves ---------------------------------------------------------------------------------------------

    def row_moves(self) -> tuple[Move, Back]:
        """A different order of the patch tokens for each sample, and back."""
        batch, count = self.tokens.shape[:2]
        order = moved_order(batch, count, torch.Generator().manual_seed(1)).to(self.tokens.device)
        p, undo = self.backbone.num_prefix, invert(order)
        return lambda s: s.take(order), lambda z: torch.cat([z[:, :p], take(z[:, p:], undo)], dim=1)

    def column_moves(self, residual: Sequence[Group], keys: Mapping[str, Tensor]) -> tuple[Move, Back]:
        """The stream's channels by the key of its first stage, and back from that of its last."""
        enter, leave = entrance_and_exit(residual)
        p, undo = keys[enter].to(self.tokens.device), invert(keys[leave]).to(self.tokens.device)
        return lambda s: replace(s, z=permute_columns(s.z, p)), lambda z: permute_columns(z, undo)

    def row(self) -> Errors:
        """The row law: the same weights, their gradients equal."""
        return self.errors(self.arm(*self.row_moves()), dict)

    def row_forward(self) -> Errors:
        """The row law forward only, to show how far a refused model is from it."""
        with torch.no_grad():
            return {"forward": self._gap(self.clear.output, self.output(*self.row_moves()))}

    def column(self, residual: Sequence[Group], keys: Mapping[str, Tensor]) -> Errors:
        """The column law: keyed weights, their gradients permuted."""
        undo = invert_keys(keys)
        arm = self.arm(*self.column_moves(residual, keys), lambda t: permute_state(t, residual, keys))
        return self.errors(arm, lambda t: permute_state(t, residual, undo))

    def column_forward(
        self, residual: Sequence[Group], keys: Mapping[str, Tensor], weights: Sequence[Group] = ()
    ) -> float:
        """The column law forward with only `weights` of the groups keyed."""
        key = (lambda t: permute_state(t, weights, keys)) if weights else None
        with torch.no_grad():
            return self._gap(self.clear.output, self.output(*self.column_moves(residual, keys), key))

    def inner(self, inner: Sequence[Group], keys: Mapping[str, Tensor]) -> Errors:
        """Inner groups: keyed weights alone, the function as it was."""
        undo = invert_keys(keys)
        arm = self.arm(stay, still, lambda t: permute_state(t, inner, keys))
        return self.errors(arm, lambda t: permute_state(t, inner, undo))

    def control(self, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> float | None:
        """The forward error of a key that misses one axis of one matrix: a check that passes it checks nothing."""
        residual = residual_only(groups)
        for group in residual[:1]:
            for member in group.members:
                if self.tensors[0][PREFIX + member.tensor].dim() > 1:
                    kept = replace(group, members=tuple(m for m in group.members if m != member))
                    return self.column_forward(residual, keys, (kept, *residual[1:]))
        return None
