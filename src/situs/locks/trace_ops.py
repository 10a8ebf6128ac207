"""What each operation of an exported graph does to the types of its axes. An operation that is not here freezes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from situs.locks.axes import Axis, axis, freeze, partition, unify

Value = list[Axis]
"""One axis list for each dimension of a tensor."""

Rule = Callable[[Node, Callable[[Any], Any]], Any]
"""(node, values of its arguments) -> Value, or a list of them."""


def shape_of(node: Node) -> tuple[int, ...]:
    """The sizes of what a node gives."""
    return tuple(int(n) for n in node.meta["val"].shape)


def tensors_in(node: Node) -> list[Node]:
    """All tensors that a node reads, lists flattened."""
    return [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]


def _name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _pointwise(node: Node, value: Callable[[Any], Any]) -> Value:
    """Element by element, with broadcasting: axes that meet are permuted alike."""
    shape = shape_of(node)
    out: Value = [[] for _ in shape]
    for source in tensors_in(node):
        given: Value = value(source)
        for at in range(1, len(given) + 1):
            if given[-at]:
                if out[-at]:
                    unify(out[-at], given[-at], _name(node))
                else:
                    out[-at] = given[-at]
    return out


def _same(node: Node, value: Callable[[Any], Any]) -> Value:
    """The first argument's axes: element-wise, or as softmax is, indifferent to any axis' order."""
    return value(node.args[0])


def _linear(node: Node, value: Callable[[Any], Any]) -> Value:
    x, weight = value(node.args[0]), value(node.args[1])
    unify(x[-1], weight[1], "linear")
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if bias is not None:
        unify(value(bias)[0], weight[0], "linear")
    return [*x[:-1], weight[0]]


def _addmm(node: Node, value: Callable[[Any], Any]) -> Value:
    bias, x, weight = (value(arg) for arg in node.args[:3])
    unify(x[1], weight[0], "addmm")
    if bias[-1]:
        unify(bias[-1], weight[1], "addmm")
    if len(bias) > 1 and bias[0]:
        unify(bias[0], x[0], "addmm")
    return [x[0], weight[1]]


def _matmul(node: Node, value: Callable[[Any], Any]) -> Value:
    a, b = value(node.args[0]), value(node.args[1])
    if len(a) < 2 or len(b) < 2:
        return unknown(node, value)
    unify(a[-1], b[-2], _name(node))
    return [*_meet(a[:-2], b[:-2], _name(node)), a[-2], b[-1]]


def _meet(a: Sequence[Axis], b: Sequence[Axis], reason: str) -> Value:
    """Batch axes that are broadcast against each other."""
    longer, shorter = (list(a), list(b)) if len(a) >= len(b) else (list(b), list(a))
    for at in range(1, len(shorter) + 1):
        if longer[-at] and shorter[-at]:
            unify(longer[-at], shorter[-at], reason)
        longer[-at] = longer[-at] or shorter[-at]
    return longer


def _norm(node: Node, value: Callable[[Any], Any]) -> Value:
    """layer_norm and rms_norm: statistics that see no order, then a weight and a bias over the same axes."""
    x = value(node.args[0])
    for extra in node.args[2:4]:
        if isinstance(extra, Node):
            weight = value(extra)
            for at in range(1, len(weight) + 1):
                unify(x[-at], weight[-at], _name(node))
    return x


def _attention(node: Node, value: Callable[[Any], Any]) -> Value:
    q, k, v = (value(arg) for arg in node.args[:3])
    if node.kwargs.get("enable_gqa"):
        return unknown(node, value)
    batch = _meet(_meet(q[:-2], k[:-2], "attention"), v[:-2], "attention")
    unify(q[-1], k[-1], "attention")
    unify(k[-2], v[-2], "attention")
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if isinstance(mask, Node):
        _meet([*batch, q[-2], k[-2]], value(mask), "attention")
    return [*batch, q[-2], v[-1]]


def _moved(node: Node, value: Callable[[Any], Any]) -> Value:
    arguments: Any = node.args
    x = list(value(arguments[0]))
    name = _name(node)
    if name == "permute":
        return [x[at] for at in arguments[1]]
    one, two = (0, 1) if name == "t" else arguments[1:3]
    if len(x) > 1:
        x[one], x[two] = x[two], x[one]
    return x


def _view(node: Node, value: Callable[[Any], Any]) -> Value:
    flat = [atom for each in value(node.args[0]) for atom in each]
    return partition(flat, shape_of(node), _name(node))


def _expand(node: Node, value: Callable[[Any], Any]) -> Value:
    """Copies along an axis are all alike: any permutation of them changes nothing, so that the new axis is free."""
    shape, x = shape_of(node), value(node.args[0])
    x = [[] for _ in range(len(shape) - len(x))] + list(x)
    return [given or axis(size) for given, size in zip(x, shape, strict=True)]


def _repeat_interleave(node: Node, value: Callable[[Any], Any]) -> Value:
    arguments: Any = node.args
    dim: Any = arguments[2] if len(arguments) > 2 else node.kwargs.get("dim")
    if not isinstance(arguments[1], int) or not isinstance(dim, int):
        return unknown(node, value)
    x = list(value(arguments[0]))
    x[dim] = [*x[dim], *axis(arguments[1])]
    return x


def _parts(node: Node, value: Callable[[Any], Any]) -> list[Value]:
    """chunk and split: equal parts leave the places within them free, and tell the parts themselves apart."""
    arguments: Any = node.args
    dim: Any = arguments[2] if len(arguments) > 2 else node.kwargs.get("dim", 0)
    x, given = value(arguments[0]), node.meta["val"]
    sizes = [int(part.shape[dim]) for part in given]
    if len(set(sizes)) == 1:
        which, within = partition(x[dim], (len(sizes), sizes[0]), _name(node))
        freeze(which, _name(node))
        cuts = [within] * len(sizes)
    else:
        freeze(x[dim], _name(node))
        cuts = [axis(size, _name(node)) for size in sizes]
    at = dim % len(x)
    return [[*x[:at], cut, *x[at + 1 :]] for cut in cuts]


def _pick(node: Node, value: Callable[[Any], Any]) -> Any:
    """select and unbind: places of an axis told apart, and the axis gone."""
    x = value(node.args[0])
    at = (int(node.args[1]) if len(node.args) > 1 else 0) % len(x)  # type: ignore[arg-type]
    freeze(x[at], _name(node))
    rest = [*x[:at], *x[at + 1 :]]
    return rest if _name(node) == "select" else [rest] * len(node.meta["val"])


def _cut(node: Node, value: Callable[[Any], Any]) -> Value:
    """slice and pad: an axis whose length changes is told apart; the others pass."""
    x, shape = value(node.args[0]), shape_of(node)
    before = shape_of(node.args[0])  # type: ignore[arg-type]
    out = []
    for given, old, new in zip(x, before, shape, strict=True):
        if old != new:
            freeze(given, _name(node))
        out.append(given if old == new else axis(new, _name(node)))
    return out


def _roll(node: Node, value: Callable[[Any], Any]) -> Value:
    x = value(node.args[0])
    for dim in node.args[2] if len(node.args) > 2 else range(len(x)):  # type: ignore[union-attr]
        freeze(x[dim], "roll")
    return x


def _join(node: Node, value: Callable[[Any], Any]) -> Value:
    """cat and stack: the joined axis is told apart, the others meet."""
    parts = [value(each) for each in node.args[0]]  # type: ignore[union-attr]
    shape = shape_of(node)
    at = (int(node.args[1]) if len(node.args) > 1 else 0) % len(shape)  # type: ignore[arg-type]
    if _name(node) == "stack":
        parts = [[*part[:at], [], *part[at:]] for part in parts]
    for part in parts:
        freeze(part[at], _name(node))
    out = parts[0]
    for part in parts[1:]:
        for n, (a, b) in enumerate(zip(out, part, strict=True)):
            if n != at and a and b:
                unify(a, b, _name(node))
    return [axis(shape[at], _name(node)) if n == at else each for n, each in enumerate(out)]


def _reduce(node: Node, value: Callable[[Any], Any]) -> Value:
    """mean, sum, amax, var: indifferent to the order of what they reduce."""
    x = value(node.args[0])
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None:
        return []
    dims = {int(d) % len(x) for d in (dims if isinstance(dims, list | tuple) else [dims])}  # type: ignore[arg-type]
    keep = len(shape_of(node)) == len(x)
    return [[] if n in dims else each for n, each in enumerate(x) if keep or n not in dims]


def _index(node: Node, value: Callable[[Any], Any]) -> Value:
    """A table looked up by its first axis."""
    x, indices = value(node.args[0]), node.args[1]
    if not isinstance(indices, list | tuple) or len(indices) != 1:
        return unknown(node, value)
    freeze(x[0], "index")
    shape = shape_of(node)
    return [*(axis(n, "index") for n in shape[: len(shape) - len(x) + 1]), *x[1:]]


def unknown(node: Node, value: Callable[[Any], Any]) -> Any:
    """Whatever it does, it does to frozen axes."""
    reason = f"unknown operation {_name(node)}"
    for source in tensors_in(node):
        given = value(source)
        for each in given if given is not None else ():
            freeze(each, reason)
    return constant(node, reason)


def constant(node: Node, reason: str) -> Any:
    """New axes, all told apart."""
    given = node.meta.get("val")
    if isinstance(given, Tensor):
        return [axis(size, reason) for size in shape_of(node)]
    if isinstance(given, list | tuple):
        return [[axis(int(n), reason) for n in each.shape] for each in given]
    return None


def _item(node: Node, value: Callable[[Any], Any]) -> Any:
    return value(node.args[0])[node.args[1]]


def _table() -> dict[str, Rule]:
    unary = """gelu silu relu relu6 tanh sigmoid exp log erf sin cos neg abs sqrt rsqrt reciprocal square elu leaky_relu
        mish hardswish hardsigmoid hardtanh softplus dropout native_dropout feature_dropout alpha_dropout to _to_copy
        type_as alias clone detach contiguous lift_fresh softmax _softmax log_softmax clamp float double dropout_"""
    binary = """add sub mul div pow maximum minimum where masked_fill add_ mul_ rsub eq ne lt le gt ge logical_and
        logical_or logical_not __and__ __or__ bitwise_and bitwise_or bitwise_not addcmul lerp"""
    views = "view reshape _unsafe_view flatten unflatten unsqueeze squeeze"
    rules: dict[str, Rule] = {
        **dict.fromkeys(unary.split(), _same),
        **dict.fromkeys(binary.split(), _pointwise),
        **dict.fromkeys(views.split(), _view),
        **dict.fromkeys(("transpose", "t", "permute"), _moved),
        **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
        **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
        **dict.fromkeys(("chunk", "split", "split_with_sizes"), _parts),
        **dict.fromkeys(("select", "unbind"), _pick),
        **dict.fromkeys(("slice", "pad", "constant_pad_nd"), _cut),
        **dict.fromkeys(("cat", "stack"), _join),
        **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std"), _reduce),
    }
    return rules | {
        "linear": _linear,
        "addmm": _addmm,
        "scaled_dot_product_attention": _attention,
        "expand": _expand,
        "repeat_interleave": _repeat_interleave,
        "roll": _roll,
        "index": _index,
    }


RULES = _table()
FACTORIES = ("arange", "new_ones", "ones", "zeros", "full", "new_zeros", "scalar_tensor", "ones_like", "zeros_like")
SILENT = ("_assert_tensor_metadata", "_assert_async", "sym_size", "_assert_scalar")


def apply(node: Node, value: Callable[[Any], Any], unknowns: dict[str, None]) -> Any:
    """The types of what one node gives."""
    if node.target is operator.getitem:
        return _item(node, value)
    name = _name(node)
    if name in SILENT:
        return None
    if name in FACTORIES or not tensors_in(node):
        return constant(node, f"constant ({name})")
    if name not in RULES:
        unknowns[name] = None
        return unknown(node, value)
    return RULES[name](node, value)
