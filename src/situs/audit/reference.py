"""What a guard knows of a step and no attacker does: its real inputs, and whether what is sent is its gradient.

An attacker's picture is compared with the real input of the patch embedding (`Witness`, `draws`), in the normalisation
that fits the pixels (`units`). And since the guard has the images, it can compute the step's gradient c again
(`replay`) and compare what is sent, u, with it (`compare`): u = f · c + noise, with one factor f and noise of one
deviation on every number. Where factors differ between tensors (clipped one by one, layer-wise rates, LARS), where the
rest is no noise (centred gradients, another step), or where some numbers have less noise than others, an attack that
fits such an upload badly says nothing about privacy. The deviation of the noise is measured, not believed.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.attacks.base import Normalisation
from situs.audit.captured import Captured
from situs.audit.defences import Defence, Gradients, NoDefence, Noise, Step
from situs.audit.products import module_inputs
from situs.audit.scores import denormalise
from situs.audit.stem import SAME, Stem, embedding_of, on_input, rows_of

# --- chance ---------------------------------------------------------------------------------------------------------


class Chance(NamedTuple):
    """The state of every generator that a module may draw from without being given one."""

    torch: Tensor
    cuda: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Chance:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def same(self, other: Chance) -> bool:
        mine, theirs = ([chance.torch, *chance.cuda] for chance in (self, other))
        by_torch = len(mine) == len(theirs) and all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
        return by_torch and self.python == other.python and pickle.dumps(self.numpy) == pickle.dumps(other.numpy)


@contextmanager
def chance_kept() -> Iterator[None]:
    """Every generator as it was, afterwards."""
    before = Chance.now()
    try:
        yield
    finally:
        before.restore()


# --- the passes of a step -------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """A forward pass of a step, with all that is needed to repeat it.

    args, named: the module's arguments. modes: of its parts, training or not. mixed: the type of autocast. fed: the
    inputs [B, N, K] of the patch embedding, call after call. slopes: ∂loss/∂logits [B, classes], once it is known.
    implied: the slopes that the upload implies itself, where `slopes` is a guess.
    """

    args: tuple[Any, ...]
    named: dict[str, Any]
    modes: list[bool]
    chance: Chance
    mixed: torch.dtype | None = None
    fed: list[Tensor] = field(default_factory=list)
    slopes: Tensor | None = None
    implied: Tensor | None = None

    @property
    def images(self) -> Tensor | None:
        """The first tensor that the module was given."""
        return next((value for value in (*self.args, *self.named.values()) if isinstance(value, Tensor)), None)

    def add(self, slopes: Tensor) -> None:
        self.slopes = slopes.detach().clone() if self.slopes is None else self.slopes + slopes.detach()


class Witness:
    """Records the forward passes of a module in training mode in `passes` while `wanted()` is true. stray: whether a
    gradient came back to its first layer from elsewhere: the module in eval mode, or a part of it."""

    def __init__(self, module: nn.Module, stem: Stem | None, wanted: Callable[[], bool]) -> None:
        self.passes: list[Pass] = []
        self.stray = False
        self._open: Pass | None = None
        self._wanted, self._module = wanted, module
        # Functions, since a copy of the module copies its hooks and would else copy this object too.
        self._hooks = [
            module.register_forward_pre_hook(lambda *seen: self._begin(*seen), with_kwargs=True),  # noqa: PLW0108
            module.register_forward_hook(lambda _part, _args, output: self._end(output), always_call=True),
        ]
        if (handle := on_input(module, stem, lambda rows: self._take(rows))) is not None:  # noqa: PLW0108
            layer = embedding_of(module, stem)
            assert layer is not None
            after = layer.register_forward_hook(lambda part, _, output: self._leave(output) if part is layer else None)
            self._hooks += [handle, after]

    def forget(self) -> None:
        """Forgets what it recorded."""
        self.passes, self.stray = [], False

    def _leave(self, output: Any) -> None:
        if self._open is None and self._wanted():
            if output.requires_grad:
                output.register_hook(lambda _: setattr(self, "stray", True))
            else:
                self.stray = True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module is not self._module or not module.training or not self._wanted():
            return
        kept, by_name = _kept(args), {name: _kept(value) for name, value in named.items()}
        modes = [part.training for part in module.modules()]
        self._open = Pass(kept, by_name, modes, Chance.now(), _mixed(kept))

    def _take(self, rows: Tensor) -> None:
        if self._open is not None:
            self._open.fed.append(rows.clone())

    def _end(self, output: Any) -> None:
        if self._open is None:
            return
        seen, self._open = self._open, None
        logits = logits_of(output)
        if logits is not None and logits.requires_grad:
            logits.register_hook(seen.add)
        self.passes.append(seen)


def _kept(value: Any) -> Any:
    """The same with its tensors copied: the module may write into them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(_kept(part) for part in value) if type(value) in (tuple, list) else value


def _mixed(args: Sequence[Any]) -> torch.dtype | None:
    kind = next((value.device.type for value in args if isinstance(value, Tensor)), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def logits_of(output: Any) -> Tensor | None:
    """The logits of what a module gives: a tensor, or what has some by that name."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) else None


def replay(module: nn.Module, passes: Sequence[Pass]) -> Gradients | str:
    """The gradients of a step by the module's own names, computed again on a copy with the same weights, draws and
    slopes of its loss; or why that is impossible."""
    copy, total = deepcopy(module), Gradients()
    trained = {name: p for name, p in copy.named_parameters() if p.requires_grad}
    for step_pass in passes:
        if step_pass.slopes is None:
            return "no loss was backpropagated through the module's output"
        for part, mode in zip(copy.modules(), step_pass.modes, strict=True):
            part.training = mode
        kind = step_pass.slopes.device.type
        with (
            chance_kept(),
            torch.enable_grad(),
            torch.autocast(kind, step_pass.mixed, enabled=step_pass.mixed is not None),
        ):
            step_pass.chance.restore()
            logits = logits_of(
                copy(*_kept(step_pass.args), **{name: _kept(value) for name, value in step_pass.named.items()})
            )
        if logits is None or logits.shape != step_pass.slopes.shape:
            return "the module's output differed in a second pass of the same images"
        gradients = torch.autograd.grad(
            logits, list(trained.values()), step_pass.slopes.to(logits.dtype), allow_unused=True
        )
        for (name, p), g in zip(trained.items(), gradients, strict=True):
            total[name] = total.get(name, torch.zeros_like(p)) + (0 if g is None else g)
    return total


def guessed_passes(module: nn.Module, images: Tensor, gradients: Mapping[str, Tensor]) -> list[Pass]:
    """Two guesses at a step whose passes were not recorded, in eval mode: with the slopes of cross entropy for the
    labels that the classifier's gradient implies, and with the slopes that it implies itself; none without them.

    Its gradient is Σ slopes hᵀ over the batch, and the guard has the features h.
    """
    head = _head(module, images)
    if head is None or f"{head[0]}.weight" not in gradients:
        return []
    name, features, logits = head
    sent, inputs = gradients[f"{name}.weight"].double(), features.double()
    if (bias := gradients.get(f"{name}.bias")) is not None:
        sent = torch.cat([sent, bias.double()[:, None]], dim=1)
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    if len(inputs) > inputs.shape[1] or not bool(sent.isfinite().all()):
        return []
    slopes = (sent @ torch.linalg.pinv(inputs)).T.to(logits.dtype)
    by_labels = cross_entropy_slopes(logits, slopes.argmin(dim=1))
    modes = [False for _ in module.modules()]
    return [Pass((images,), {}, modes, Chance.now(), slopes=guess, implied=slopes) for guess in (by_labels, slopes)]


def cross_entropy_slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """∂loss/∂logits [B, classes] of the mean cross entropy."""
    return (logits.softmax(dim=1) - F.one_hot(labels, logits.shape[1])) / len(logits)


@torch.no_grad()
def _head(module: nn.Module, images: Tensor) -> tuple[str, Tensor, Tensor] | None:
    """The linear layer that gives the logits: its name, its input [B, D] and the logits; None where there is none."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _part, args, output: seen.append((name, args[0], output))

    linear = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_hook(note(name)) for name, part in linear]
    try:
        logits = logits_of(module(images.clone()))
    finally:
        for hook in hooks:
            hook.remove()
    same = [call for call in seen if logits is not None and call[1].dim() == 2 and call[2].equal(logits)]
    return same[-1] if same else None


def dropout_of(module: nn.Module, passes: Sequence[Pass]) -> float:
    """The largest rate of a dropout layer that was in training mode in some pass."""
    rates = [0.0]
    for step_pass in passes:
        for part, mode in zip(module.modules(), step_pass.modes, strict=True):
            rates += [part.p] if mode and isinstance(part, nn.modules.dropout._DropoutNd) else []
    return max(rates)


@torch.no_grad()
def draws(module: nn.Module, stem: Stem | None, images: Tensor) -> tuple[list[Tensor], str]:
    """The inputs [B, N, K] of the patch embedding for images, in training and in eval mode, and why its input in a step
    that was not watched is unknown: the module draws random numbers before it; "" where it does not."""
    copy, seen, drew = deepcopy(module), list[Tensor](), False
    layer, modes = embedding_of(copy, stem), (True, True, True, False)
    if stem is None or layer is None:
        return [], "the input of the module's first layer cannot be recorded"
    with chance_kept():
        for mode in modes:
            copy.train(mode)
            before = Chance.now()
            try:
                with module_inputs(layer, last=0) as inputs:
                    copy(images.clone())
            except Exception as error:  # noqa: BLE001  (whatever the user's own code raises)
                return [], f"the input of the module's first layer cannot be computed: {error}"
            drew = drew or not before.same(Chance.now())
            seen += [rows_of(layer, part.detach(), stem).clone() for part in inputs]
    if len(seen) < len(modes) or len({rows.shape for rows in seen}) > 1:
        return seen, "the module's first layer does not get the same input in training mode as in eval mode"
    if drew or any(not same(rows, seen[0]) for rows in seen[1:3]):
        reason = (
            "in training mode the module changes its images at random, so the input of its first layer in this step"
        )
        remedy = "Give the optimizer to the guard, so that it records this input, or call `look` outside autocast"
        return [seen[-1]], f"{reason} is not known. {remedy}"
    return [seen[0], seen[-1]], ""


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two inputs differ by rounding alone."""
    return one.shape == other.shape and float((one - other).norm()) <= SAME * float(other.norm())


# --- what is sent against the gradient of the step ------------------------------------------------------------------

QUIET = 1e-4
"""Noise below this share of a gradient's own size is none: a gradient that is made again differs by as much."""

EVEN = 0.1
"""Relative: deviations of the noise on two tensors that differ by less, and what chance explains, are one."""

SURE = 5.0
"""Deviations by which a number must be off to be no chance."""

NOTHING = 1e-5
"""Of the size of all numbers: a tensor below it is rounding alone."""

SMALL = 64
"""Tensors of fewer numbers are looked at together."""


class Match(NamedTuple):
    """u = factor · clean + noise of deviation sigma, where `wrong` is ""; else why not. factors: of each tensor, where
    they differ. resolved: whether the noise leaves the factor to be seen. quiet: whether there is no noise."""

    clean: Gradients
    factor: float
    sigma: float
    quiet: bool
    resolved: bool
    wrong: str = ""
    factors: Mapping[str, float] = {}

    def in_units(self, upload: Captured) -> tuple[Captured, Defence]:
        """The upload in units of the gradient, and its noise as a defence."""
        factor = self.factor if self.resolved else 1.0
        gradients = {name: g / factor for name, g in upload.gradients.items()}
        noise = NoDefence() if self.quiet else Noise(self.sigma / factor)
        return replace(upload, gradients=gradients, rounding=upload.rounding / factor), noise


def compare(upload: Gradients, clean: Gradients) -> Match:
    """What is sent against the step's gradient, tensor by tensor and over all numbers."""
    pairs = {n: _finite(upload[n], clean[n]) for n in upload if n in clean}
    size = {n: float(c.square().sum()) for n, (_, c) in pairs.items()}
    count = {n: len(c) for n, (_, c) in pairs.items()}
    total, numbers = sum(size.values()), sum(count.values())
    if not math.sqrt(total) > 1e-30:
        return Match(clean, 1.0, 0.0, False, False, "the gradient of these images is 0")
    whole = sum(float(u @ c) for u, c in pairs.values()) / total
    typical = math.sqrt(total / numbers)
    of_each, off, loud = dict[str, float](), dict[str, float](), dict[str, float]()
    for n, (u, c) in pairs.items():
        if not count[n] or math.sqrt(size[n] / count[n]) <= NOTHING * typical:  # rounding, as of a key's bias
            continue
        factor = float(u @ c) / size[n]
        left = float((u - factor * c).norm()) / math.sqrt(count[n])
        fine = max(QUIET, 2 * torch.finfo(upload[n].dtype).eps)
        usual = abs(factor) * max(math.sqrt(size[n] / count[n]), 1e-2 * typical)
        loud |= {n: left / max(usual, 1e-300)} if left > fine * usual else {}
        of_each[n], off[n] = factor, SURE * left / math.sqrt(size[n])
    quiet = not loud
    middle = sorted(of_each, key=lambda n: of_each[n])[len(of_each) // 2]
    common = whole if abs(whole - of_each[middle]) <= off[middle] + 1e-2 * abs(whole) else of_each[middle]
    sigma = math.sqrt(sum(float((u - common * c).square().sum()) for u, c in pairs.values()) / numbers)
    sure = SURE * sigma / math.sqrt(total) + 1e-2 * abs(common)
    differ = {n: f for n, f in of_each.items() if abs(f - common) > off[n] + sure}
    resolved = common > 2 * SURE * sigma / math.sqrt(total)
    plain = Match(clean, common, 0.0 if quiet else sigma, quiet, resolved)
    if differ and 0 < len(loud) < len(of_each) / 2:  # there is no noise, and something else was done to a few
        most = max(loud, key=lambda n: loud[n])
        reason = "the upload is not the gradient of one step on these images"
        return plain._replace(wrong=f"{reason}: the relative error of {most} is {loud[most]:.2g}", factors=of_each)
    if differ:
        shown = sorted(differ, key=lambda n: -abs(math.log(max(abs(differ[n] / common), 1e-9))))[:3]
        listed = ", ".join(f"{n} × {differ[n] / common:.3g}" for n in shown)
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        reason = (
            f"the tensors of the upload are scaled by different factors ({listed}{more}): each tensor was clipped "
            "separately, each layer has its own learning rate, or the upload comes from other images"
        )
        return plain._replace(wrong=reason, factors=of_each)
    return (
        plain if quiet else plain._replace(wrong=_uneven(pairs, common, sigma, {n: g.shape for n, g in upload.items()}))
    )


STATED = 1.15
"""Noise that hides the gradient's size may be this many times the stated noise."""

ODD = 3.0
"""Deviations by which the factor of a gradient under larger noise may differ from 1."""


def match_upload(
    module: nn.Module,
    names: Mapping[str, str],
    upload: Gradients,
    images: Tensor,
    defence: Defence,
    local_steps: int = 1,
    passes: list[Pass] | None = None,
) -> tuple[Match | None, list[Pass], str]:
    """An upload compared with the recomputed gradient of its step, the passes behind it, and why that proves nothing.

    names: of the module -> of the upload. defence: as stated. passes: as recorded; None where they must be guessed.
    """
    named = {theirs: upload[ours] for theirs, ours in names.items() if ours in upload}
    ways = [passes] if passes is not None else [[step] for step in guessed_passes(module, images, named)]
    matches: list[tuple[Match, list[Pass]]] = []
    for way in ways:
        gradient = replay(module, way)
        if isinstance(gradient, str):
            return None, way, f"the step's gradient could not be recomputed: {gradient}"
        match = compare(upload, {names[name]: g for name, g in gradient.items() if name in names})
        match = match._replace(wrong=match.wrong or _unlike_stated(match, defence, len(images), local_steps))
        matches.append((match, way))
        if not match.wrong:
            return match, way, ""
    if not matches:
        unknown = "the step's gradient could not be recomputed, so the noise in the upload is not known"
        return None, [], f"{unknown}: give the optimizer to the guard, or also send the gradient of the classifier"
    match, way = max(matches, key=lambda pair: bool(pair[0].factors))
    return match, way, match.wrong


def _unlike_stated(match: Match, defence: Defence, batch: int, local_steps: int) -> str:
    """Why the upload may be something else than the gradient under larger noise; "" where it is that.

    Where the noise hides the gradient's numbers, another step could hide there too (Adam's are all of one size).
    """
    stated, step = defence.noise_level(batch), defence.step(Step(batch, local_steps))
    clean = [c.double() for c in match.clean.values()]
    size, count = math.sqrt(sum(float(c.square().sum()) for c in clean)), sum(c.numel() for c in clean)
    if match.quiet or match.factor * size > match.sigma * math.sqrt(count):
        return ""
    if step.adam or step.local_steps > 1:
        kind = "a step of Adam" if step.adam else f"{step.local_steps} local steps"
        return f"the upload is the update of {kind}, in which noise hides the gradient"
    off = (match.factor - 1) * size / match.sigma  # in deviations
    if match.resolved and off <= ODD:
        return ""  # all of it was scaled down: clipped
    if match.sigma <= STATED * stated and abs(off) <= ODD:
        return ""
    return (
        f"the upload is {match.factor:.3g} times the gradient of these images plus a difference with the standard "
        f"deviation {match.sigma:.3g}, but the stated noise is {stated:g}, so the difference may not be noise"
    )


def _finite(sent: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """Both flat in float64, of the numbers that did not overflow."""
    there = sent.isfinite().flatten()
    return sent.double().flatten()[there], clean.double().flatten().to(sent.device)[there]


def _uneven(
    pairs: Mapping[str, tuple[Tensor, Tensor]], factor: float, sigma: float, shapes: Mapping[str, torch.Size]
) -> str:
    """Why what is left beside the gradient is no noise of one deviation, from number to number; "" where it is."""
    left = {n: u - factor * c for n, (u, c) in pairs.items()}
    small = [r for r in left.values() if len(r) < SMALL]
    parts = {n: r for n, r in left.items() if len(r) >= SMALL}
    for n, r in (parts | ({"the small tensors": torch.cat(small)} if small else {})).items():
        size = float(r.square().mean().sqrt())
        if abs(size / sigma - 1) > EVEN + SURE / math.sqrt(2 * len(r)):
            return (
                "the upload is not the gradient of one step on these images plus noise with the same standard "
                f"deviation everywhere. The residual has the standard deviation {size:.3g} on {n}, but {sigma:.3g} "
                "over all tensors"
            )
        along = float((r[:-1] * r[1:]).sum()) / sigma**2
        if max(abs(float(r.sum())) / sigma, abs(along)) > (SURE + 1) * math.sqrt(len(r)):
            return (
                f"the noise in {n} is not independent noise: its mean is not 0, or neighbouring numbers are correlated"
            )
        shape = shapes.get(n, torch.Size([len(r)]))
        if len(shape) > 1 and len(r) == shape.numel() and _stands_out(r.view(-1, shape[1:].numel()) / sigma):
            return (
                f"the gradient of these images was subtracted from the upload. What is left of {n} is not noise, "
                "because it is larger in some directions than in others"
            )
    return ""


def _stands_out(matrix: Tensor) -> bool:
    """Whether some direction of a matrix is larger than independent numbers of deviation 1 make it."""
    rows, columns = matrix.shape
    square = matrix @ matrix.T if rows < columns else matrix.T @ matrix
    most = (1 + EVEN) * (math.sqrt(rows) + math.sqrt(columns)) + SURE
    return float(torch.linalg.eigvalsh(square)[-1].clamp(min=0).sqrt()) > most


# --- units ----------------------------------------------------------------------------------------------------------

LEVELS_OFF, LEVELS_SHARE, DISTINCT = 0.02, 0.99, 16
"""Pictures are bytes where this share of their numbers, of so many different ones, is as near to a level of 255."""

BEYOND, BEYOND_SHARE = 0.02, 0.02
"""Pictures lie in [0, 1] where no more than this share is beyond it by more than that."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def units(images: Tensor, stated: Normalisation) -> tuple[Normalisation, str]:
    """The normalisation (means, deviations) that images [B, C, H, W] speak for, and one sentence where it is not the
    stated one."""
    channels = images.shape[1]
    usual: dict[str, Normalisation] = {
        "0 and 1": ((0.0,) * channels, (1.0,) * channels),
        "0.5 and 0.5": ((0.5,) * channels, (0.5,) * channels),
    }
    usual |= {"ImageNet's": IMAGENET} if channels == 3 else {}
    fits = {name: _speaks(images, normalisation) for name, normalisation in usual.items()}
    inside, bytes_, ends = _speaks(images, stated)
    low, high = float(images.min()), float(images.max())
    assumed = next((name for name, normalisation in usual.items() if _equal(normalisation, stated)), "the stated ones")
    opened = f"the images have values from {low:.3g} to {high:.3g}. The assumed mean and deviation are {assumed}"
    for name, (there, lattice, full) in fits.items():
        better = (lattice and not bytes_) or (full and not ends and not bytes_) or not inside
        if there and better and not _equal(usual[name], stated):
            return usual[name], f"{opened}, but the images fit {name}: give normalisation=(means, deviations)"
    if inside:
        return stated, ""
    range_of_images = ((low,) * channels, (max(high - low, 1e-6),) * channels)
    return (
        range_of_images,
        (
            f"{opened}. With this mean and deviation, image values would lie outside 0 to 1: give "
            "normalisation=(means, deviations)"
        ),
    )


def _speaks(images: Tensor, normalisation: Normalisation) -> tuple[bool, bool, bool]:
    """Of images under a normalisation: whether they lie in [0, 1], are bytes, and reach both ends exactly."""
    pictures = denormalise(images, *normalisation, clip=False)
    beyond = ((pictures < -BEYOND) | (pictures > 1 + BEYOND)).double().mean()
    inside = float(beyond) <= BEYOND_SHARE
    levels = pictures * 255
    near = ((levels - levels.round()).abs() <= LEVELS_OFF).double().mean()
    many = len(levels.round().unique()) >= DISTINCT
    ends = abs(float(pictures.min())) < 1e-5 and abs(float(pictures.max()) - 1) < 1e-5
    return inside, inside and many and float(near) >= LEVELS_SHARE, inside and ends


def _equal(one: Normalisation, other: Normalisation) -> bool:
    numbers = [torch.tensor([list(part) for part in normalisation]) for normalisation in (one, other)]
    return numbers[0].shape == numbers[1].shape and torch.allclose(numbers[0], numbers[1], atol=1e-4)
