"""A user's own module: any `nn.Module` that turns images into logits, or into an output with `logits` (as transformers
does), given as an instance or by name.

A name is package.module:name or path/file.py:name of a module, a class, or a function that returns one. The module runs
only as a whole: what needs its tokens, positions or blocks is refused with that reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from situs.backbones.base import InputSpec, WholeBackbone, refuses_tokens
from situs.core.tokens import Size, pair
from situs.errors import SitusError
from situs.files import load_code
from situs.models.inference import evaluating

AnyModule = TypeVar("AnyModule", bound=nn.Module)
WHOLE = "it is your own module and runs only as a whole"


class OwnModule(WholeBackbone):
    """A module as a backbone with `forward` and parameters only."""

    refusals: ClassVar[dict[str, str]] = refuses_tokens(WHOLE)

    def __init__(self, module: nn.Module, name: str, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(module, name, (0, 0), 0, 0, 0)
        self.input = InputSpec(img_size, in_chans)
        self.source = {"library": "own", "architecture": name}
        self.normalisation: tuple[Sequence[float], Sequence[float]] | None = None
        """Mean and deviation of the channels that it expects; None: ImageNet's."""
        self.original_dtype: str | None = None
        """The dtype of its weights before they were converted to float32."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            self.require("tokens")
        with _plain_encoder():
            output = self.model(x.clone())  # a module that writes into its input would change the caller's images
        return getattr(output, "logits", output) if not isinstance(output, dict) else output.get("logits", output)


@contextmanager
def _plain_encoder() -> Iterator[None]:
    """Turns off torch's fused encoder layer, which frozen layers use and which has no derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def wrap_module(
    module: nn.Module,
    img_size: Size,
    *,
    in_chans: int = 3,
    name: str = "",
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None,
    kind: type[OwnModule] = OwnModule,
) -> OwnModule:
    """The module as a backbone, in the mode it is in; one in half precision is copied to float32.

    A module that does not give logits [1, classes] for one image is refused. normalisation: mean and deviation of the
    channels that it expects; None: ImageNet's. kind: the class of the backbone.
    """
    module, original_dtype = in_float32(module, keep=(torch.float64,))
    backbone = kind(module, name or type(module).__name__, pair(img_size), in_chans)
    backbone.normalisation, backbone.original_dtype = normalisation, original_dtype
    like = next(backbone.parameters(), torch.zeros(0))
    images = torch.randn(1, in_chans, *pair(img_size), generator=torch.Generator().manual_seed(0))
    try:
        with evaluating(backbone):
            logits = backbone(images.to(like.device, like.dtype))
    except Exception as error:  # whatever the user's own code raises
        reason = error if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        raise SitusError(
            f"{backbone.name} does not take images of the shape {list(images.shape)} (check img_size and in_chans): "
            f"{reason}"
        ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != 1:
        output = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise SitusError(f"{backbone.name} returns {output} for one image; it must return logits of shape [1, classes]")
    return backbone


SIZES = (224, 32, 28, 16, 48, 64, 96, 112, 128, 160, 192, 256, 384)
"""Image sizes to try on a module that declares none."""


def deduce_input(module: nn.Module, channels: int | None = None) -> tuple[tuple[int, int], int] | None:
    """The image size and the channels of a module: what it declares, the one its position table has rows for, or else
    the only size tried that it takes.

    None where it takes none, or several: then the size is the user's to choose. channels: where they are known.
    """
    module, _ = in_float32(module)
    first = next((part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)), None)
    if channels is None and isinstance(first, nn.Conv2d):
        channels = first.in_channels
    chans = (3, 1) if channels is None else (channels,)
    for size in dict.fromkeys(_declared_sizes(module)):
        if fitting := _fitting(module, [size], chans):
            return fitting[0]
    tables, layers = _patch_sides(module, first)
    if isinstance(first, nn.Linear):  # of the flattened image, unless it takes others too
        layers = [math.isqrt(first.in_features // count) for count in chans]
    for sides in (tables, (*layers, *SIZES)):
        if fitting := _fitting(module, [(side, side) for side in sides], chans):
            return fitting[0] if len(fitting) == 1 else None
    return None


def _fitting(
    module: nn.Module, sizes: Sequence[tuple[int, int]], channels: Sequence[int]
) -> list[tuple[tuple[int, int], int]]:
    """The first two (size, channels) that the module takes."""
    pairs = ((size, count) for size in dict.fromkeys(sizes) if min(size) > 0 for count in channels)
    return list(itertools.islice((pair for pair in pairs if _takes(module, *pair)), 2))


def _takes(module: nn.Module, size: tuple[int, int], channels: int) -> bool:
    try:
        wrap_module(module, size, in_chans=channels)
    except SitusError:
        return False
    return True


def _declared_sizes(module: nn.Module) -> Iterator[tuple[int, int]]:
    """What the module and its parts call img_size, image_size or input_size, also in their configs."""
    for part in module.modules():
        for holder in (part, getattr(part, "config", None), getattr(part, "pretrained_cfg", None)):
            for name in ("img_size", "image_size", "input_size"):
                value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
                sides = (value, value) if isinstance(value, int) else value
                if isinstance(sides, tuple | list) and len(sides) >= 2 and all(isinstance(side, int) for side in sides):
                    yield sides[-2], sides[-1]


def _patch_sides(module: nn.Module, first: nn.Module | None) -> tuple[list[int], list[int]]:
    """Sides of square images, cut to patches by the first convolution: those whose patches are as many as a position
    table has rows, and those that a layer of all patches flattened, or of one row for each, would take."""
    if not isinstance(first, nn.Conv2d) or first.stride[0] != first.stride[1]:
        return [], []
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    tables, layers = [], []
    for parameter in module.parameters():
        shape, width = parameter.shape, first.out_channels
        if shape[-1:] == (width,) and (id(parameter) in embeddings or (len(shape) == 3 and shape[0] == 1)):
            tables += [shape[-2] - special for special in (0, 1, 2)]  # tokens in front of the patches
        elif len(shape) == 2 and shape[1] % width == 0:
            layers.append(shape[1] // width)
    return _sides(tables, first.stride[0]), _sides(layers, first.stride[0])


def _sides(counts: Sequence[int], patch: int) -> list[int]:
    """The sides of square images of so many patches; a single patch or two are none."""
    return [math.isqrt(count) * patch for count in counts if count >= 4 and math.isqrt(count) ** 2 == count]


def in_float32(module: nn.Module, keep: Sequence[torch.dtype] = ()) -> tuple[nn.Module, str | None]:
    """The module, or a float32 copy where its dtype is neither float32 nor in `keep`, and that dtype's name."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32, *keep}
    if not types:
        return module, None
    return deepcopy(module).float(), str(types.pop()).removeprefix("torch.")


def in_eval_mode(module: AnyModule) -> AnyModule:
    """The module if it is in eval mode; else a copy over the same tensors that is, so that its own mode stays."""
    if not any(part.training for part in module.modules()):
        return module
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        return deepcopy(module, shared).eval()
    except Exception:  # noqa: BLE001  (a user's own module may have parts that cannot be copied)
        return module.eval()


def make_module(source: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """The module that package.module:name or file.py:name names; a class or function is called with `arguments`."""
    make = load_code(source, "MODEL ")
    if not isinstance(make, nn.Module):
        make = _call(source, make, dict(arguments or {}))
    elif arguments:
        raise SitusError(
            f"model_args={dict(arguments)}: {source} is already a module, but only a class or a function takes "
            "arguments; do not set model_args",
            field="model_args",
        )
    if not isinstance(make, nn.Module):
        raise SitusError(f"MODEL {source} returns {type(make).__name__}; it must return an nn.Module")
    return make


def _call(source: str, make: Any, arguments: dict[str, Any]) -> Any:
    if not callable(make):
        raise SitusError(
            f"MODEL {source} is {type(make).__name__}; it must be an nn.Module, or a function that returns an nn.Module"
        )
    try:
        return make(**arguments)
    except SitusError:
        raise
    except Exception as error:
        names = ", ".join(arguments) or "no arguments"
        reason = f"called with {names}, it raised {type(error).__name__}: {error}"
        raise SitusError(f"{source}: {reason}", field="model_args") from error
