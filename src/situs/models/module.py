"""A user's own module: any `nn.Module` that turns images into logits, or into a dictionary that has some (those of
transformers), given as an instance or by name.

By name it is package.module:name or path/file.py:name, where the name is a module, a class, or a function that gives
one. It runs only as a whole: what needs its tokens, positions or blocks is refused with that reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from situs.backbones.base import InputSpec, WholeBackbone, refuses_tokens
from situs.core.tokens import Size, pair
from situs.errors import SitusError

WHOLE = "it is your own module and runs only as a whole"


class OwnModule(WholeBackbone):
    """A module behind the interface of backbones as far as it goes: `forward` and parameters."""

    refusals: ClassVar[dict[str, str]] = refuses_tokens(WHOLE)

    def __init__(self, module: nn.Module, name: str, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(module, name, (0, 0), 0, 0, 0)
        self.input = InputSpec(img_size, in_chans)
        self.source = {"library": "own", "architecture": name}
        self.normalisation: tuple[Sequence[float], Sequence[float]] | None = None
        """Mean and deviation of the channels that it expects; ImageNet's where None."""
        self.held: str | None = None
        """The type its weights were held in, where that is less than float32."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            self.require("tokens")
        with _plain_encoder():
            found = self.model(x.clone())  # one that writes into its input would change the images of whoever asks
        return getattr(found, "logits", found) if not isinstance(found, dict) else found.get("logits", found)


@contextmanager
def _plain_encoder() -> Iterator[None]:
    """torch's encoder layers as their operators: of the fused one, which frozen layers take, there is no derivative."""
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
    """The module as a backbone, in eval mode; one in half precision is copied to float32.

    One that does not give logits [1, classes] for one image is refused. normalisation: mean and deviation of the
    channels that it expects; ImageNet's where None. kind: the class of the backbone.
    """
    module, held = in_float32(module, keep=(torch.float64,))
    backbone = kind(module.eval(), name or type(module).__name__, pair(img_size), in_chans)
    backbone.normalisation, backbone.held = normalisation, held
    like = next(backbone.parameters(), torch.zeros(0))
    images = torch.randn(1, in_chans, *pair(img_size), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            found = backbone(images.to(like.device, like.dtype))
    except Exception as error:  # whatever the user's own code raises
        said = error if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        raise SitusError(
            f"{backbone.name} does not take images {list(images.shape)}: {said} (img_size, in_chans)"
        ) from error
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[0] != 1:
        said = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SitusError(f"{backbone.name} gives {said} for one image, and must give logits [1, classes]")
    return backbone


def in_float32(module: nn.Module, keep: Sequence[torch.dtype] = ()) -> tuple[nn.Module, str | None]:
    """The module, or a copy in float32 where it was held in another type than that or `keep`, and that type's name."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32, *keep}
    if not types:
        return module, None
    return deepcopy(module).float(), str(types.pop()).removeprefix("torch.")


def names_module(source: str) -> bool:
    """Whether `source` is package.module:name or file.py:name, and not a folder or a name of a library ("hf:…")."""
    place, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or place == "hf":
        return False
    return place.endswith(".py") or all(part.isidentifier() for part in place.split("."))


def make_module(source: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """What package.module:name or file.py:name stands for: a module as it is, else what calling it gives.

    arguments: of that call.
    """
    place, _, name = source.rpartition(":")
    try:
        make = getattr(_import(place), name)
    except Exception as error:  # whatever the user's own code raises while it is imported
        said = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise SitusError(f"{source}: cannot be had as package.module:name or file.py:name: {said} (MODEL)") from error
    if not isinstance(make, nn.Module):
        make = _call(source, make, dict(arguments or {}))
    elif arguments:
        raise SitusError(f"model_args={dict(arguments)}: {source} is made already", field="model_args")
    if not isinstance(make, nn.Module):
        raise SitusError(f"{source}: gives {type(make).__name__}, and must give an nn.Module (MODEL)")
    return make


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        return _import_from(Path.cwd(), place)  # as python -m does
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {place}")
    return _import_from(file.parent, file.stem)


def _import_from(folder: Path, name: str) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_module(name)


def _call(source: str, make: Any, arguments: dict[str, Any]) -> Any:
    if not callable(make):
        raise SitusError(
            f"{source}: is {type(make).__name__}, and must be a module, or a function that gives one (MODEL)"
        )
    try:
        return make(**arguments)
    except SitusError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        given = ", ".join(arguments) or "no arguments"
        raise SitusError(f"{source}: is called with {given} and ends with {said}", field="model_args") from error
