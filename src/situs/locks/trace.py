"""The groups of a model that no adapter was written for: read off its exported graph, then certified on it.

`torch.export` gives the operations; each is typed by what it does to axes (`axes`, `trace_ops`); axes that must be
permuted alike are united, those whose places an operation tells apart are frozen. An operation that is not known
freezes all it touches and is reported. The types are a guess about the model; the check that follows is not: with the
groups keyed, outputs and every gradient must agree in float64, or nothing is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from situs.backbones.base import Backbone, Stream
from situs.core.permutation import invert, permute_columns
from situs.errors import SitusError
from situs.locks.arms import PREFIX, embedded, evaluating, gap, named_gap, own_dtype, sample_of
from situs.locks.axes import Atom, Axis, axis, leaves
from situs.locks.groups import entrance_and_exit, invert_keys, permute_state, random_keys, residual_only
from situs.locks.members import Group, Kind, Member
from situs.locks.precise import KeepDouble
from situs.locks.trace_ops import apply, shape_of

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Traced:
    """Certified groups of a traced model, the residual ones first.

    error: the worst in the check. unknown: operations that no rule is known for; what they touched stays clear.
    dropped: inner groups that were found and did not pass the check.
    """

    groups: tuple[Group, ...]
    error: float
    unknown: tuple[str, ...]
    dropped: tuple[str, ...] = ()


def trace_module(module: nn.Module, z: Tensor) -> Traced:
    """The groups of a module that maps a stream z [B, S, D] to one, as `nn.TransformerEncoder` does.

    What leaves may be wider than what enters; keys of stages between the two are inner groups here, for permuting them
    changes nothing outside. The module is run in evaluation mode and left as it was. Raises where the stream's
    channels cannot be permuted, naming the operation, and where the check fails.
    """
    training = module.training
    module.eval()
    try:
        groups, unknown = _groups(module, z.detach())
        residual, inner = residual_only(groups), [g for g in groups if g.kind != "residual"]
        error = _check(module, residual, z)
        kept, dropped = [], []
        for group in inner:
            passes = _error(module, [*residual, group], z) <= TOLERANCE
            (kept if passes else dropped).append(group)
        if kept:  # each passes alone; all together they must too
            error = max(error, _error(module, [*residual, *kept], z))
            assert error <= TOLERANCE, "inner groups that do not commute"
        return Traced((*residual, *kept), error, unknown, tuple(group.name for group in dropped))
    finally:
        module.train(training)


def trace_backbone(backbone: Backbone, x: Tensor | None = None) -> Traced:
    """The groups of any backbone's blocks, by tracing; x: images or ids to run on (None: random ones)."""
    backbone.require("tokens")
    generator = torch.Generator().manual_seed(0)
    with evaluating(backbone), torch.no_grad():
        sample = sample_of(backbone, x, 32, generator)
        tokens = embedded(backbone, sample, own_dtype(backbone))
        places = backbone.positions()
        stream = backbone.assemble(tokens, places if sample.index is None else places.take(sample.index), sample.mask)
        traced = trace_module(_Blocks(backbone, stream), stream.z)
    return replace(traced, groups=tuple(_named(group) for group in traced.groups))


class _Blocks(nn.Module):
    """A backbone's blocks as a function of z alone."""

    def __init__(self, backbone: Backbone, stream: Stream) -> None:
        super().__init__()
        self.backbone = backbone
        self.stream = stream

    def forward(self, z: Tensor) -> Tensor:
        rotary = self.stream.rotary
        if rotary is not None:
            rotary = rotary.to(z.dtype)
        return self.backbone.blocks(replace(self.stream, z=z, rotary=rotary)).z


def _named(group: Group) -> Group:
    members = tuple(replace(m, tensor=m.tensor.removeprefix(PREFIX)) for m in group.members)
    return replace(group, name=group.name.replace(PREFIX, ""), members=members)


# --- from the graph to groups --------------------------------------------------------------------------------------


def _groups(module: nn.Module, z: Tensor) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    try:
        program = torch.export.export(module, (z,), strict=False)
    except Exception as error:  # export raises whatever the model's own code does not let it do
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise SitusError(f"{type(module).__name__} cannot be exported: {type(error).__name__}: {reason}") from error
    parameters, entrance, leave, unknown = _typed(program, set(module.state_dict()))
    enter_root, leave_root = _free(entrance, "in"), _free(leave, "out")
    members = _members(parameters)
    names = (
        {enter_root: "residual"} if enter_root is leave_root else {enter_root: "residual.0", leave_root: "residual.1"}
    )
    found = [Group(name, "residual", root.size, tuple(members.pop(root, ()))) for root, name in names.items()]
    hidden: Kind = "hidden"
    for root, each in members.items():
        if root.frozen is None and len(each) > 1:
            found.append(
                Group(f"inner.{each[0].tensor}.{each[0].axis}.{each[0].outer}", hidden, root.size, tuple(each))
            )
    return tuple(found), unknown


def _typed(program: Any, state: set[str]) -> tuple[dict[str, list[Axis]], Axis, Axis, tuple[str, ...]]:
    """Types of all parameters; of the stream's channels as they enter and leave; operations that were not known."""
    signature = program.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    values: dict[Any, Any] = {}
    parameters: dict[str, list[Axis]] = {}
    unknown: dict[str, None] = {}
    entrance: Axis = []
    leave: Axis = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            shape = shape_of(node) if isinstance(node.meta.get("val"), Tensor) else ()
            if node.name in named:
                name = named[node.name]
                frost = None if name in state else f"buffer {name}, which no state dict holds"
                values[node] = parameters[name] = [axis(n, frost) for n in shape]
            elif node.name in signature.user_inputs:
                values[node] = [axis(n) for n in shape]
                entrance = values[node][-1]
            else:
                values[node] = [axis(n, "constant of the graph") for n in shape]
        elif node.op == "output":
            leave = values[node.args[0][0]][-1]
        elif node.op == "call_function":
            values[node] = apply(node, values.__getitem__, unknown)
        else:
            values[node] = None
    return parameters, entrance, leave, tuple(unknown)


def _free(channels: Axis, where: str) -> Atom:
    """The one class of the stream's channels, or the reason why they cannot be permuted."""
    roots = leaves(channels)
    frost = next((root.frozen for root in roots if root.frozen is not None), None)
    if frost is not None:
        raise SitusError(f"the channels of the stream going {where} cannot be permuted: {frost}")
    if len(roots) != 1:
        sizes = " x ".join(str(root.size) for root in roots)
        raise SitusError(f"the channels of the stream going {where} are cut in {sizes}: no one key fits them")
    return roots[0]


def _members(parameters: Mapping[str, list[Axis]]) -> dict[Atom, list[Member]]:
    found: dict[Atom, list[Member]] = {}
    for name, axes in parameters.items():
        for at, each in enumerate(axes):
            roots = leaves(each)
            outer, inner = 1, 1
            for root in roots:
                inner *= root.size
            for root in roots:
                inner //= root.size
                found.setdefault(root, []).append(Member(name, at, outer, inner))
                outer *= root.size
    return found


# --- the check -----------------------------------------------------------------------------------------------------


def _check(module: nn.Module, residual: Sequence[Group], z: Tensor) -> float:
    """Certifies the residual groups; a key with one axis left out must not pass."""
    if not any(group.members for group in residual):
        raise SitusError("no weight reads or writes the stream's channels, so that there is nothing to key")
    error = _error(module, residual, z)
    if not error <= TOLERANCE:
        raise SitusError(f"the traced groups fail the check with an error of {error:.1e} (at most {TOLERANCE:.0e})")
    first = max(residual, key=lambda group: len(group.members))
    short = replace(first, members=first.members[:-1])
    control = _error(module, [short if group is first else group for group in residual], z)
    if not control > TOLERANCE:
        raise SitusError("a key with one axis left out passes the check too, so that it shows nothing")
    return error


def _error(module: nn.Module, groups: Sequence[Group], z: Tensor) -> float:
    """How far the keyed module is from the clear one in float64: outputs, input gradients, weight gradients."""
    keys = random_keys(groups, torch.Generator().manual_seed(1))
    state = {name: _double(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
    enter, leave = entrance_and_exit(groups)
    out, start, gradients = _run(module, state, _double(z), keys[enter][:0], keys[leave][:0])
    keyed = permute_state(state, groups, keys)
    theirs = _run(module, keyed, _double(z), keys[enter], invert(keys[leave]))
    back = permute_state(theirs[2], groups, invert_keys(keys))
    return max(gap(out, theirs[0]), gap(start, theirs[1]), named_gap(gradients, back))


def _double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()


def _run(
    module: nn.Module, state: Mapping[str, Tensor], z: Tensor, enter: Tensor, leave: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    with torch.enable_grad(), KeepDouble():
        z = z.clone().requires_grad_()
        own = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in state.items()}
        out = functional_call(module, own, (permute_columns(z, enter.to(z.device)) if len(enter) else z,))
        out = permute_columns(out, leave.to(z.device)) if len(leave) else out
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        leaves_ = {name: t for name, t in own.items() if t.requires_grad}
        found = torch.autograd.grad((out * noise.to(out)).sum(), [z, *leaves_.values()], allow_unused=True)
    gradients = {name: g for name, g in zip(leaves_, found[1:], strict=True) if g is not None}
    return out.detach(), found[0], gradients
