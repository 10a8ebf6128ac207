"""Uploads that were captured: gradients, differences of weights, or weights, from a file or from memory.

A file holds tensors by name (safetensors; .pt, opened without running code; .npz), or arrays in the order of the
model's state dict, as Flower sends them. Names may have a prefix that the model's lack, or lack one that they have.

What an upload is shows in its numbers where that is certain. Weights lie near the model's own. A difference d of two
weights lands on a number of their type again: w - d has no more digits than w. A gradient does neither. So does the
type of the weights, whose rounding is an error of the difference: of half precision, a large one.
"""

from __future__ import annotations

import errno
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.audit.client import no_gradient
from situs.audit.defences import Defence, FedAvg, Gradients, Together
from situs.backbones.base import Backbone
from situs.errors import SitusError, counted, verb
from situs.methods.base import Method

Sent = Literal["gradient", "difference", "weights"]
"""gradient: of the loss, up to a factor. difference: weights before - after the step. weights: those after the step."""

NEAR = 0.5
"""Numbers that differ from the model's weights by less than this share of their size are weights."""

LANDED, SMALLER, LEAST = 0.99, 16, 256
"""A difference of weights is one where this share of its numbers lands on their type, of those that are so many times
smaller than their weights, and there are so many of them. One number in 16 does so by chance."""

COARSE = (torch.bfloat16, torch.float16)
"""The types of weights in half precision; bfloat16 first, since float16 has nearly all of its numbers."""

DROWNED = 0.1
"""Rounding below this share of the stated noise does not matter."""

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch's wrappers add anywhere."""

LARGEST, SLACK = 64, 2**26
"""Bytes that a file may hold for each number of the model, for an optimiser's state may lie beside it, and beyond."""

CONTAINERS = ("gradients", "grads", "update", "delta", "state_dict", "model")
"""Keys under which a torch file may keep its tensors."""


@dataclass(frozen=True)
class Captured:
    """One upload. gradients: by the names of `Backbone.named_parameters()`; of differences and weights, the weights
    before - after the step. rounding: deviation of the rounding of weights on each number; rounded_to: their type.
    mismatch: why it is not the gradient of its images."""

    name: str
    gradients: Gradients
    sent: Sent
    rounding: float = 0.0
    rounded_to: str = ""
    mismatch: str = ""

    def under(self, defence: Defence) -> tuple[Gradients, float]:
        """The gradients and their rounding in units of the gradient, where the defence states the rate."""
        rate = rate_of(defence) if self.sent != "gradient" else None
        if rate is None:
            return self.gradients, self.rounding
        return {name: g / rate for name, g in self.gradients.items()}, self.rounding / rate

    def caveat(self, defence: Defence, batch: int) -> str:
        """Why what an attack does not recover of it proves nothing; "" where it may."""
        _, rounding = self.under(defence)
        rounded = f"the upload comes from weights rounded to {self.rounded_to}, and rounding is not random noise"
        drowned = rounding <= DROWNED * defence.noise_level(batch)
        return "; ".join(filter(None, (self.mismatch, "" if drowned else rounded)))


@dataclass(frozen=True)
class WeightRounding(Defence):
    """The rounding of weights on their difference: an error that the attacker knows, and no defence."""

    sigma: float = 0.0

    name: ClassVar[str] = "rounded weights"

    def noise_level(self, batch: int) -> float:  # noqa: ARG002
        return self.sigma


def rate_of(defence: Defence) -> float | None:
    """Steps · rate of a defence that states local steps, else None."""
    parts = defence.parts if isinstance(defence, Together) else (defence,)
    return next((part.steps * part.lr for part in parts if isinstance(part, FedAvg)), None)


def open_uploads(
    uploads: Any, model: Backbone | Method, defences: Iterable[Defence] = (), sent: Sent | None = None
) -> list[Captured]:
    """Uploads of a model: a file, tensors by name or a list of arrays, or several of these.

    defences: as stated; a tensor may be missing where one of them withholds it. sent: None to work it out. A tensor of
    zeros counts as not sent: its equations would be solved by an image of zeros, whatever was trained on.
    """
    layout, captured = _layout(model), list[Captured]()
    most = sum(t.numel() for t in [*layout.parameters.values(), *layout.buffers.values()]) * LARGEST + SLACK
    withheld = set[str]().union(*(defence.withheld(layout.backbone) for defence in defences))
    for number, source in enumerate(_several(uploads)):
        name = Path(source).name if isinstance(source, str | Path) else f"upload {number + 1}"
        tensors = read_upload(Path(source), most) if isinstance(source, str | Path) else _tensors(name, source)
        opened = _opened(name, tensors, layout, withheld, sent)
        captured.append(replace(opened, gradients={key: g for key, g in opened.gradients.items() if bool(g.any())}))
        if captured[-1].gradients.keys() != captured[0].gradients.keys():
            raise _error(name, f"has other tensors than {captured[0].name}: audit each upload separately")
    return captured


def _several(uploads: Any) -> list[Any]:
    """The uploads one by one; a list of arrays is one upload."""
    if isinstance(uploads, str | Path | Mapping):
        return [uploads]
    parts = list(uploads) if isinstance(uploads, Sequence) else []
    if not parts:
        allowed = "files, tensors by name, or lists of arrays in the model's order"
        raise SitusError(f"upload: must be {allowed}, not {type(uploads).__name__}", field="upload")
    return parts if isinstance(parts[0], str | Path | Mapping | list | tuple) else [parts]


def _error(name: str | Path, reason: str) -> SitusError:
    return SitusError(f"upload={name}: {reason}", field="upload")


# --- files ----------------------------------------------------------------------------------------------------------

Tensors = dict[str, Tensor] | list[Tensor]
"""By name, or in the model's order."""


def read_upload(path: Path, most: int) -> Tensors:
    """The tensors of a file. Nothing in it is run, and nothing is read if it would need more bytes than `most`."""
    suffix = path.suffix.lower()
    try:
        if not path.is_file():
            raise _error(path, "is not a regular file" if path.exists() else "no such file")
        if suffix not in READERS:
            raise _error(path, f"must be one of {', '.join(READERS)}")
        if (size := _unpacked(path)) > most:
            raise _error(path, f"holds {size:,} bytes, but an upload of this model needs at most {most:,}")
        with warnings.catch_warnings(action="ignore"):  # torch's, of unusual tensors
            content = READERS[suffix](path)
    except SitusError:
        raise
    except Exception as error:  # each library raises classes of its own for each kind of damage
        text = str(error)
        if isinstance(error, OSError) and error.errno != errno.EINVAL and error.strerror:  # torch's, of a damaged file
            raise _error(path, f"cannot be read: {error.strerror.lower()}") from error
        if "pickle" in text or "GLOBAL" in text or "Unsupported" in text:
            raise _error(path, "contains Python objects, which are never loaded: save a dict of tensors") from error
        raise _error(path, "cannot be read: it is damaged, truncated or of another format") from error
    return _tensors(path, content)


def _unpacked(path: Path) -> int:
    """The bytes of a file, or of what a zip file holds."""
    with path.open("rb") as stream:
        if stream.read(2) == b"PK":
            with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as file:
                return sum(part.file_size for part in file.infolist())
    return path.stat().st_size


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _read_torch(path: Path) -> Any:
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping | list | tuple):
            return content[key]
    return content


def _read_npz(path: Path) -> Any:
    with zipfile.ZipFile(path):  # NumPy takes any other file for a pickle
        pass
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".npz": _read_npz,
}


def _tensors(name: str | Path, content: Any) -> Tensors:
    """Tensors by name, or in order where the names are numbers."""
    if isinstance(content, list | tuple):
        tensors: Tensors = [_tensor(name, f"array {at}", value) for at, value in enumerate(content)]
    elif isinstance(content, Mapping):
        tensors = {str(key): _tensor(name, str(key), value) for key, value in content.items()}
    else:
        raise _error(name, f"contains a {type(content).__name__}, but must contain tensors by name or in order")
    if not tensors:
        raise _error(name, "holds no tensors")
    numbered = {key: re.fullmatch(r"(?:arr_)?(\d+)", key) for key in tensors} if isinstance(tensors, dict) else {}
    if isinstance(tensors, dict) and all(numbered.values()):
        by_number = {int(match[1]): tensors[key] for key, match in numbered.items() if match}
        lacking = [at for at in range(len(by_number)) if at not in by_number]
        if lacking:
            raise _error(name, f"its arrays are numbered, and number {lacking[0]} is missing")
        return [by_number[at] for at in range(len(by_number))]
    return tensors


def _tensor(name: str | Path, key: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_meta or value.is_nested:
            raise _error(name, f"{key} is a {'meta' if value.is_meta else 'nested'} tensor: save its numbers")
        return value.detach()
    try:
        array = np.asarray(value)
        return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    except (TypeError, ValueError) as error:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        saved = ": save bfloat16 as float32, because NumPy has no bfloat16" if kind.endswith("|V2") else ""
        raise _error(name, f"{key} is {kind}, not an array of numbers{saved}") from error


# --- names ----------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """A model's tensors. parameters: by the names of an upload. trained: those with a gradient. order: names of the
    state dict. buffers: those of it that are no parameters. shared: the further names of parameters that a state dict
    has twice."""

    backbone: Backbone
    parameters: dict[str, Tensor]
    trained: set[str]
    order: list[str]
    buffers: dict[str, Tensor]
    shared: dict[str, str]


def _layout(model: Backbone | Method) -> Layout:
    backbone = model if isinstance(model, Backbone) else model.backbone
    named = {name.removeprefix("backbone."): p for name, p in model.named_parameters()}
    names = {id(p): name for name, p in named.items()}
    prefix = next(name for name, part in backbone.named_modules() if part is backbone.model)
    state = backbone.model.state_dict(keep_vars=True)
    order = [names.get(id(tensor), f"{prefix}.{key}") for key, tensor in state.items()]
    buffers = {name: tensor for name, tensor in zip(order, state.values(), strict=True) if name not in named}
    trained = {name for name, p in named.items() if p.requires_grad}
    shared = {f"{prefix}.{key}": name for key, name in zip(state, order, strict=True) if f"{prefix}.{key}" != name}
    return Layout(backbone, {name: p.detach() for name, p in named.items()}, trained, order, buffers, shared)


def _opened(name: str, tensors: Tensors, layout: Layout, withheld: set[str], sent: Sent | None) -> Captured:
    """The upload by the model's names, checked."""
    pairs = _in_order(name, tensors, layout) if isinstance(tensors, list) else _by_name(name, tensors, layout)
    upload: Gradients = {}
    for (key, tensor), target in pairs:
        if target in layout.buffers:
            continue
        like = layout.parameters[target]
        if reason := no_gradient(tensor.to(like.device), like):
            raise _error(name, f"{key} {reason}")
        upload[target] = tensor.to(like.device, torch.float32 if tensor.dtype == torch.float64 else tensor.dtype)
        if tensor.dtype == torch.float64 and not bool(upload[target].isfinite().all()):
            raise _error(name, f"{key} has numbers too large for float32")
    if missing := sorted(layout.trained - upload.keys() - withheld):
        reason = f"lacks {len(missing)} of {counted(len(layout.trained), 'tensors')} that the model trains"
        stated = "if the client never sent these tensors, name the defence that withholds them: exclude=PATTERN"
        raise _error(name, f"{reason} ({', '.join(missing[:3])}{' …' * (len(missing) > 3)}); {stated}")
    if not any(bool(g.any()) for g in upload.values()):
        raise _error(name, "contains only zeros")
    return _understood(name, upload, layout.parameters, sent)


def load_weights(model: Backbone | Method, tensors: Any) -> None:
    """Sets the model's weights to those that a server sent out, by name or as a list in the model's order."""
    name, layout = "the weights before the step", _layout(model)
    content = _tensors(name, tensors)
    pairs = _in_order(name, content, layout) if isinstance(content, list) else _by_name(name, content, layout)
    for (key, tensor), target in pairs:
        place = layout.buffers[target] if target in layout.buffers else layout.parameters[target]
        if place.shape != tensor.shape:
            raise _error(name, f"{key} has shape {list(tensor.shape)}, but shape {list(place.shape)} in the model")
    with torch.no_grad():
        for (_, tensor), target in pairs:
            (layout.buffers[target] if target in layout.buffers else layout.parameters[target]).copy_(tensor)


Pairs = list[tuple[tuple[str, Tensor], str]]


def _in_order(name: str, tensors: list[Tensor], layout: Layout) -> Pairs:
    """Arrays in the order of the state dict, of all parameters or of the trained ones."""
    parameters = [target for target in dict.fromkeys(layout.order) if target not in layout.buffers]
    trained = [target for target in parameters if target in layout.trained]
    orders = [layout.order, parameters, trained]
    order = next((order for order in orders if len(order) == len(tensors)), None)
    if order is None:
        lengths = f"{len(layout.order)} tensors in its state dict and {len(parameters)} parameters"
        raise _error(name, f"holds {counted(len(tensors), 'arrays')}, but the model has {lengths}")
    return [((f"array {at}", tensor), target) for at, (tensor, target) in enumerate(zip(tensors, order, strict=True))]


def _by_name(name: str, tensors: dict[str, Tensor], layout: Layout) -> Pairs:
    plain = {".".join(part for part in key.split(".") if part not in WRAPPERS): key for key in tensors}
    if len(plain) < len(tensors):
        raise _error(name, "some of its names differ only by a wrapper's prefix")
    targets = dict.fromkeys([*layout.parameters, *sorted(layout.buffers), *layout.shared])
    best: dict[tuple[tuple[str, str], ...], tuple[str, str]] = {}
    score = 0
    for file, model in ((file, model) for file in _prefixes(plain, plain) for model in _prefixes(targets, plain)):
        matches = tuple(
            (key, model + key[len(file) :])
            for key in plain
            if key.startswith(file) and model + key[len(file) :] in targets
        )
        if len(matches) > score:
            best, score = {}, len(matches)
        if score and len(matches) == score:
            best.setdefault(matches, (file, model))
    whole = min((len(file) for file, _ in best.values()), default=0)  # a name with a prefix of its own stays whole
    best = {matches: places for matches, places in best.items() if len(places[0]) == whole}
    if len(best) > 1:
        places = " and ".join(f"{model}…" for _, model in list(best.values())[:2])
        raise _error(name, f"its names fit several modules ({places}); give the names with their prefix")
    named = dict(next(iter(best), ()))
    if unknown := [key for key in plain if key not in named]:
        listed = f"{', '.join(plain[key] for key in unknown[:3])}{' …' * (len(unknown) > 3)}"
        plural = verb(len(unknown), "are")
        raise _error(name, f"{len(unknown)} of its {counted(len(plain), 'names')} {plural} not in the model ({listed})")
    return [((key, tensors[key]), layout.shared.get(named[bare], named[bare])) for bare, key in plain.items()]


def _prefixes(names: Iterable[str], wanted: Mapping[str, str]) -> list[str]:
    """Leading parts of names, dot included, that half as many of them share as there are wanted ones; "" first."""
    counts: dict[str, int] = {"": len(wanted)}
    for key in names:
        for dot in re.finditer(r"\.", key):
            counts[key[: dot.end()]] = counts.get(key[: dot.end()], 0) + 1
    return [prefix for prefix, count in counts.items() if 2 * count >= len(wanted)]


# --- what it is -----------------------------------------------------------------------------------------------------


def _understood(name: str, upload: Gradients, weights: Mapping[str, Tensor], sent: Sent | None) -> Captured:
    """The upload as weights before - after the step, or as the gradient."""
    size = math.sqrt(sum(float(weights[n].double().square().sum()) for n in upload))
    far = math.sqrt(sum(float((g.double() - weights[n].double()).square().sum()) for n, g in upload.items()))
    near = far <= NEAR * size
    if sent == "weights" and not near:
        reason = f"the relative difference between its weights and the model's is {far / max(size, 1e-30):.2g}"
        raise _error(name, f"{reason}; open the model as it was before the step")
    if near and sent in ("gradient", "difference"):
        raise _error(name, f"its values are the weights of the model, but sent={sent} was given")
    if near:
        coarse = next((dtype for dtype in COARSE if _is_of(dtype, _matrices(upload))), torch.float32)
        upload = {n: (weights[n].double() - g.double()).float() for n, g in upload.items()}
        if not any(bool(g.any()) for g in upload.values()):
            raise _error(name, "its weights equal the model's weights, so it contains no update")
        return _difference(name, upload, weights, coarse, "weights")
    for sign in (1, -1) if sent != "gradient" else ():
        if (dtype := _rounded_to(upload, weights, sign)) is not None:
            return _difference(name, {n: sign * g.float() for n, g in upload.items()}, weights, dtype, "difference")
    if sent == "difference":  # with noise, or of numbers too few to tell
        coarse = next((g.dtype for g in upload.values() if g.dtype in COARSE), torch.float32)
        return _difference(name, upload, weights, coarse, "difference")
    return Captured(name, upload, "gradient")


def _difference(
    name: str, upload: Gradients, weights: Mapping[str, Tensor], dtype: torch.dtype, sent: Sent
) -> Captured:
    """dtype: the type that the weights behind it are rounded to."""
    return Captured(name, upload, sent, _rounding(upload, weights, dtype), str(dtype).removeprefix("torch."))


def _rounded_to(upload: Gradients, weights: Mapping[str, Tensor], sign: int) -> torch.dtype | None:
    """The type of the weights before and after, if sign · upload is their difference; None where it is not."""
    before = torch.cat([weights[name].double().flatten() for name in upload])
    moved = torch.cat([sign * g.double().flatten() for g in upload.values()])
    small = (moved != 0) & (SMALLER * moved.abs() < before.abs())
    before, moved = before[small], moved[small]
    if len(moved) < LEAST:
        return None
    for dtype in COARSE:
        if any(_is_of(dtype, start - moved) for start in (before, before.to(dtype).double())):
            return dtype
    if any(_is_of(dtype, moved) for dtype in COARSE):  # so short that w - d often lands
        return None
    return torch.float32 if _is_of(torch.float32, before - moved) else None


def _is_of(dtype: torch.dtype, numbers: Tensor) -> bool:
    """Whether numbers are of a type, but for a few and for zeros, which are of all."""
    numbers = numbers[numbers != 0].double()
    return float((numbers.to(dtype).double() == numbers).double().mean()) >= LANDED  # of no number it is NaN


def _matrices(tensors: Mapping[str, Tensor]) -> Tensor:
    """The numbers of all matrices, which attacks read."""
    return torch.cat([t.double().flatten() for t in tensors.values() if t.dim() > 1] or [torch.zeros(0)])


def _rounding(upload: Gradients, weights: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """Deviation of the rounding on a number: over all matrices; of half precision, in the coarsest of them, for their
    steps differ widely. The client may have begun with rounded weights too, which differ from the model's by a rounding
    that nobody sees."""
    limits, squares = torch.finfo(dtype), list[Tensor]()
    for name, g in upload.items():
        if g.dim() > 1:
            after = (weights[name].double() - g.double()).abs().clamp(min=limits.smallest_normal)
            squares.append((limits.eps * torch.exp2(after.log2().floor())).square().flatten())
    if not squares:
        return 0.0
    mean = max(float(part.mean()) for part in squares) if dtype in COARSE else float(torch.cat(squares).mean())
    times = 1 if dtype == torch.float32 or _is_of(dtype, _matrices(weights)) else 2
    return math.sqrt(times * mean / 12)
