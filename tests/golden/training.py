"""Golden numbers of training: every method on every kind of data and backbone that takes it, three steps in float64.

A case is what a user would give to `situs.pretrain` or `situs.finetune`. What is kept of it: of every batch and every
draw SHA-256 of its integers, and of its float32 numbers, which another processor rounds elsewhere, the norm and the
product with a fixed vector; the loss of each step; of each weight after the last its norm and product.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import sets
import torch
from safetensors.torch import load_file
from tiny_texts import write_folder as write_text_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import situs
from situs.methods import METHODS, Method

Values = dict[str, Any]
"""What is kept: a float, an int, a string or None by its name."""

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}
VIT = {"name": "vit_tiny_patch16_224", "patch_size": 4, "model_args": SMALL}
ROTARY = {"name": "eva02_tiny_patch14_224", "patch_size": 4, "model_args": SMALL}
MIXED = {"name": "vit_small_patch16_rope_mixed_224", "patch_size": 4, "model_args": SMALL}
RELATIVE = {"name": "vit_relpos_small_patch16_224", "patch_size": 4, "model_args": SMALL}
TOKENS = {"name": "deit_tiny_distilled_patch16_224", "patch_size": 4, "model_args": SMALL}
SWIN = {"name": "swin_tiny_patch4_window7_224",
        "model_args": {"depths": (1, 1), "embed_dim": 8, "num_heads": (1, 2), "window_size": 2}}  # fmt: skip
CELLS = {"name": "swin_tiny_patch4_window7_224", "positions": "sincos",
         "model_args": {"depths": (1, 1), "embed_dim": 8, "num_heads": (1, 2), "window_size": 2}}  # fmt: skip
RESNET = {"name": "resnet18", "model_args": {"channels": (8, 8, 8, 16)}}
CLIPS = {"name": "deit_tiny_patch16_224", "patch_size": (12, 1), "positions": "learned_sincos", "model_args": SMALL}
STRETCHES = CLIPS | {"patch_size": (1, 4)}

SHORT = {"decoder_width": 16, "decoder_heads": 2}
DROPPOS = {"name": "droppos", "mask_ratio": 0.5, **SHORT}
MAE = {"name": "mae", "decoder_depth": 1, **SHORT}
MJP = {"name": "mjp", "mask_ratio": 0.3}
SEGMENTS = {"name": "segmentation", "width": 8, "auxiliary_width": 8, "dropout": 0.0}
DETECTION = {"name": "detection", "width": 8, "hidden": 8, "anchor": 2.0, "proposals": 8, "anchors": 16, "regions": 8}
STRONG = {"crop": "resized", "flip": 0.5, "operations": 2, "mixup": 0.8, "cutmix": 1.0, "erasing": 0.25}

IMAGES: dict[str, Any] = {"data": {"path": "images", "img_size": 16}}
LARGER: dict[str, Any] = {"data": {"path": "images", "img_size": 32}}
PHOTOS: dict[str, Any] = {"data": {"path": "photos", "img_size": 16, "workers": 0}}
MASKS: dict[str, Any] = {
    "data": {"path": "masks", "img_size": 32, "workers": 0, "batch": 4, "masks": {"first": 1, "void": [0]}},
    "augment": {"crop": "scaled", "interpolation": "bilinear"},
}
OBJECTS: dict[str, Any] = {
    "data": {"path": "objects", "img_size": 32, "workers": 0, "batch": 4},
    "augment": {"crop": "fitted", "scales": [0.6, 1.5], "interpolation": "bilinear"},
}
SOUNDS: dict[str, Any] = {"data": {"path": "clips", "audio": {"seconds": 0.2, "mels": 12, "coefficients": 12}}}
RECORDINGS: dict[str, Any] = {"data": {"path": "series", "kind": "series", "workers": 0, "series": {"steps": 32}}}
SENTENCES: dict[str, Any] = {"data": {"path": "sentences"}}
RUNNING: dict[str, Any] = {"data": {"path": "running", "kind": "text", "text": {"longest": 16}}}

CASES: dict[str, dict[str, Any]] = {
    # images
    "mp3 vit": IMAGES | {"method": {"name": "mp3"}, "backbone": VIT},
    "mp3 hints": IMAGES | {"method": {"name": "mp3", "mask_ratio": 0.5, "anchor_ratio": 0.25}, "backbone": VIT},
    "mp3 tokens": IMAGES | {"method": {"name": "mp3", "mask_ratio": 0.5}, "backbone": TOKENS},
    "mp3 rotary": IMAGES | {"method": {"name": "mp3", "mask_ratio": 0.5}, "backbone": ROTARY},
    "mp3 rotary hints": IMAGES | {"method": {"name": "mp3", "anchor_ratio": 0.25}, "backbone": MIXED},
    "part vit": IMAGES | {"method": {"name": "part", "mask_ratio": 0.5, "scale": 1.5}, "backbone": VIT},
    "part rotary": IMAGES | {"method": {"name": "part"}, "backbone": ROTARY},
    "mp3 photos": PHOTOS | {"method": {"name": "mp3"}, "backbone": VIT, "augment": STRONG | {"mixup": 0, "cutmix": 0}},
    "droppos vit": IMAGES | {"method": DROPPOS, "backbone": VIT},
    "droppos visible": IMAGES | {"method": DROPPOS | {"affinity": "visible"}, "backbone": VIT},
    "droppos unweighted": IMAGES | {"method": DROPPOS | {"affinity": None, "sigma_start": 0.0}, "backbone": TOKENS},
    "droppos rotary": IMAGES | {"method": DROPPOS, "backbone": ROTARY},
    "droppos official": IMAGES | {
        "method": DROPPOS | {"name": "droppos-official", "target_grid": (5, 5)}, "backbone": VIT,
    },
    "droppos swin": LARGER | {"method": DROPPOS | {"mask_ratio": 0.75}, "backbone": CELLS},
    "mae vit": IMAGES | {"method": MAE, "backbone": VIT},
    "mae rotary": IMAGES | {"method": MAE, "backbone": ROTARY},
    "mjp vit": IMAGES | {"method": MJP, "backbone": VIT},
    "mjp index": IMAGES | {"method": MJP | {"index": "place", "dal": "none"}, "backbone": VIT},
    "mjp pca": IMAGES | {"method": MJP | {"dal": "pca"}, "backbone": VIT},
    "mjp linear": IMAGES | {"method": MJP | {"dal": "linear"}, "backbone": TOKENS},
    "mjp spp": IMAGES | {"method": {"name": "mjp", "shuffle": "spp", "unknown": False, "dal": "none"}, "backbone": VIT},
    "mjp rotary": IMAGES | {"method": MJP, "backbone": ROTARY},
    "mjp relative": IMAGES | {"method": MJP | {"dal": "none"}, "backbone": RELATIVE},
    "mjp swin": LARGER | {"method": MJP | {"dal": "none"}, "backbone": SWIN},
    "mjp resnet": LARGER | {
        "method": MJP | {"unknown": False, "dal": "none", "pixel_grid": (4, 4)}, "backbone": RESNET,
    },
    "mjp official": IMAGES | {
        "method": MJP | {"name": "mjp-official", "start_epoch": 0, "dal_warmup": 0}, "backbone": VIT,
    },
    "supervised vit": IMAGES | {"method": {"name": "supervised"}, "backbone": VIT},
    "supervised rotary": IMAGES | {"method": {"name": "supervised"}, "backbone": ROTARY},
    "supervised relative": IMAGES | {"method": {"name": "supervised"}, "backbone": RELATIVE},
    "supervised swin": LARGER | {"method": {"name": "supervised"}, "backbone": SWIN},
    "supervised resnet": LARGER | {"method": {"name": "supervised"}, "backbone": RESNET},
    "supervised photos": PHOTOS | {
        "method": {"name": "supervised", "label_smoothing": 0.1}, "backbone": VIT, "augment": STRONG,
        "optim": {"lr": 1e-3, "warmup_steps": 1, "ema": 0.9, "clip": 1.0, "layer_decay": 0.7, "weight_decay": 0.05},
        "train": {"accumulate": 2},
    },
    "supervised balanced": {
        "data": {"path": "images", "img_size": 16, "per_class": 6, "balanced": True},
        "method": {"name": "supervised"}, "backbone": TOKENS,
    },
    "segmentation vit": MASKS | {"method": SEGMENTS, "backbone": VIT},
    "segmentation rotary": MASKS | {"method": SEGMENTS, "backbone": ROTARY},
    "segmentation swin": MASKS | {"method": SEGMENTS, "backbone": SWIN},
    "detection vit": OBJECTS | {"method": DETECTION, "backbone": VIT},
    "detection rotary": OBJECTS | {"method": DETECTION, "backbone": ROTARY},
    "detection swin": OBJECTS | {"method": DETECTION, "backbone": SWIN},
    # clips
    "mp3 clips": SOUNDS | {"method": {"name": "mp3", "anchor_ratio": 0.1}, "backbone": CLIPS},
    "droppos clips": SOUNDS | {"method": DROPPOS, "backbone": CLIPS},
    "mae clips": SOUNDS | {"method": MAE, "backbone": CLIPS},
    "mjp clips": SOUNDS | {"method": MJP | {"dal": "none"}, "backbone": CLIPS},
    "supervised clips": SOUNDS | {"method": {"name": "supervised"}, "backbone": CLIPS},
    "part clips": SOUNDS | {"method": {"name": "part", "pairs": 5}, "backbone": CLIPS},
    # series
    "mp3 series": RECORDINGS | {"method": {"name": "mp3", "anchor_ratio": 0.1}, "backbone": STRETCHES},
    "supervised series": RECORDINGS | {"method": {"name": "supervised"}, "backbone": STRETCHES},
    "part series": RECORDINGS | {"method": {"name": "part"}, "backbone": STRETCHES},
    # sentences
    "mp3 bert": SENTENCES | {"method": {"name": "mp3", "mask_ratio": 0.5}, "backbone": {"name": "bert"}},
    "mp3 bert hints": SENTENCES | {"method": {"name": "mp3", "anchor_ratio": 0.3}, "backbone": {"name": "bert"}},
    "mp3 window": RUNNING | {"method": {"name": "offsets", "window": 4}, "backbone": {"name": "bert"}},
    "droppos bert": SENTENCES | {"method": DROPPOS, "backbone": {"name": "bert"}},
    "mjp bert": SENTENCES | {"method": MJP | {"dal": "none"}, "start": "bert"},
    "supervised bert": SENTENCES | {"method": {"name": "supervised"}, "start": "bert"},
    "supervised llama": SENTENCES | {"method": {"name": "supervised"}, "start": "llama"},
    "language gpt2": RUNNING | {"method": {"name": "language"}, "start": "gpt2"},
    "language llama": RUNNING | {"method": {"name": "language"}, "start": "llama"},
    # starting from others
    "head": IMAGES | {"method": {"name": "supervised"}, "start": "start", "train": "head"},
    "lora": IMAGES | {"method": {"name": "supervised"}, "start": "start", "train": "lora"},
    "all": IMAGES | {"method": {"name": "supervised"}, "start": "start", "positions": "sincos"},
}  # fmt: skip
"""What is trained, by name. start: a model of `write_world` that is fine-tuned."""


def write_world(root: Path) -> Path:
    """The sets and the models that cases and verbs start from, below `root`."""
    sets.write_images(root / "images", (16,))
    sets.write_images(root / "photos", (18, 25, 33))
    sets.write_masks(root / "masks")
    sets.write_objects(root / "objects")
    sets.write_clips(root / "clips")
    sets.write_series(root / "series")
    sets.write_sentences(root / "sentences")
    sets.write_running_text(root / "running")
    plain: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    for kind, more in (("bert", plain | {"num_hidden_layers": 1}), ("llama", {"num_hidden_layers": 1}),
                       ("gpt2", {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})):  # fmt: skip
        write_text_model(root / kind, kind, width=16, **more)
    with wide_methods():
        train("mp3 vit", root, root / "start")
    return root


# --- a run in float64 ----------------------------------------------------------------------------------------


def train(name: str, world: Path, out: Path) -> Path:
    """Trains a case for three steps into `out`."""
    return train_plainly({"steps": 3, **CASES[name]}, world, out)


def train_plainly(case: Mapping[str, Any], world: Path, out: Path) -> Path:
    """Trains what a case says into `out`."""
    case = deepcopy(dict(case))
    case["data"] = {"batch": 8, **case["data"], "path": str(world / case["data"]["path"])}
    words: dict[str, Any] = {"out": out, "seed": 1, "quiet": True, "device": "cpu"}
    words["optim"] = {"lr": 1e-3, "warmup_steps": 0} | case.pop("optim", {})
    if "start" in case:
        start = case.pop("start")
        begun = world / "runs" / start if (world / "runs" / start).is_dir() else world / start
        return situs.finetune(begun, validate_every=0, **words, **case)
    backbone = case["backbone"]
    if (world / backbone["name"]).is_dir():
        backbone["name"] = f"hf:{world / backbone['name']}"
    return situs.pretrain(**words, **case)


@contextmanager
def wide_methods() -> Iterator[None]:
    """Methods are in float64 once they are on their device."""
    plain: Any = Method.to

    def widened(self: nn.Module, *words: Any, **named: Any) -> nn.Module:
        return plain(nn.Module.double(self), *words, **named)

    with mock.patch.object(Method, "to", widened):
        yield


@contextmanager
def other_rounding() -> Iterator[None]:
    """Weights at the start, float32 inputs and draws of a step, and every product, sum and exponential are another
    number in their last digits: so much a result may differ on another processor."""
    move: Any = Method.to

    def moved(self: nn.Module, *words: Any, **named: Any) -> nn.Module:
        with torch.no_grad():
            for weight in self.parameters():  # drawn in float32
                weight.copy_(_jittered(weight.float(), 2))
        return move(self, *words, **named)

    marked = _ROUNDED_ELSEWHERE.set(True)
    try:
        with mock.patch.object(Method, "to", moved), _OtherRounding():
            yield
    finally:
        _ROUNDED_ELSEWHERE.reset(marked)


_ROUNDED_ELSEWHERE = ContextVar("whether float32 numbers are rounded as another processor might", default=False)
_FLOAT = Tensor.float


class _OtherRounding(TorchDispatchMode):
    """Moves the last digit of what these operations give, in their backward passes too."""

    MOVED = frozenset({
        "mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "convolution_backward", "_softmax",
        "native_layer_norm", "linalg_eigh", "_linalg_eigh", "_linalg_svd", "linalg_lstsq", "linalg_solve", "normal_",
        "_scaled_dot_product_flash_attention_for_cpu", "upsample_bilinear2d", "grid_sampler_2d",
    })  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in self.MOVED:
            return result
        if isinstance(result, Tensor):
            return result.copy_(_jittered(result, 1)) if name == "normal_" else _jittered(result, 1)
        return type(result)(_jittered(each, 1) if isinstance(each, Tensor) else each for each in result)


def _jittered(value: Tensor, digits: int) -> Tensor:
    """Each number moved by so many of its last digits, up or down. What is exact on every processor (counts, halves)
    stays."""
    if not value.is_floating_point() or value.device.type != "cpu":
        return value
    places = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
    moved = value * (1 + digits * torch.finfo(value.dtype).eps * (7 * places).cos().sign()).to(value.dtype)
    return moved.where(1024 * value != (1024 * value).round(), value)


def _unrounded(value: Tensor, **named: Any) -> Tensor:
    """`Tensor.float`, but float64 stays: a loss in float32 would hold seven digits."""
    return value if value.dtype == torch.float64 else _FLOAT(value, **named)


def record(name: str, world: Path, out: Path) -> Values:
    """Trains a case and gives what is kept of it."""
    widen = _rounded_elsewhere if _ROUNDED_ELSEWHERE.get() else _wide
    kind = METHODS[CASES[name]["method"]["name"]]
    forward: Any = kind.forward
    values, seen = dict[str, Any](), list[nn.Module]()

    def recorded(self: nn.Module, batch: Any, draws: Mapping[str, Tensor]) -> Any:
        if not torch.is_grad_enabled():  # no step: by it the time of a run is told
            return forward(self, batch._replace(inputs=_wide(batch.inputs)), {k: _wide(v) for k, v in draws.items()})
        step = len(seen)
        seen.append(self)
        fields = {"inputs": batch.inputs, "ids": batch.ids, "mask": batch.mask, **batch.targets}
        values.update(summaries({f"step {step} batch {key}": each for key, each in fields.items() if each is not None}))
        values.update(summaries({f"step {step} draw {key}": each for key, each in draws.items()}))
        targets = {key: widen(each) for key, each in batch.targets.items()}
        batch = batch._replace(inputs=widen(batch.inputs), targets=targets)
        with mock.patch.object(Tensor, "float", _unrounded):
            output = forward(self, batch, {key: widen(each) for key, each in draws.items()})
        assert output.loss.dtype == torch.float64, f"{name}: its loss is {output.loss.dtype}"
        values[f"step {step} loss"] = output.loss.item()
        return output

    with wide_methods(), mock.patch.object(kind, "forward", recorded):
        train(name, world, out)
    values |= {f"weight {key}": each for key, each in projections(dict(seen[-1].state_dict())).items()}
    return values


def record_export(name: str, world: Path, out: Path) -> Values:
    """What the export of a case holds: its config's numbers and words, and its tensors."""
    with wide_methods():
        run = train(name, world, out / "run")
    folder = situs.export(run, out / "export")
    values: Values = {
        f"tensor {key}": each for key, each in projections(load_file(folder / "model.safetensors")).items()
    }
    for file in sorted(folder.glob("*.json")):
        values |= {f"{file.name} {key}": each for key, each in flat(json.loads(file.read_text())).items()}
    values.pop("config.json transformers_version", None)
    return values


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _rounded_elsewhere(value: Tensor) -> Tensor:
    """float64 of float32 numbers that differ in their last digits."""
    return _wide(_jittered(value, 4) if value.dtype == torch.float32 else value)


def summaries(tensors: Mapping[str, Tensor]) -> Values:
    """What is kept of each tensor: SHA-256 where it holds integers, else its shape, norm and product."""
    values: Values = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            values[f"{name} shape"] = f"{tensor.dtype} {list(tensor.shape)}"
            values |= projections({name: tensor}, per_value=True)
        else:
            values[name] = digest(tensor)
    return values


def digest(value: Tensor) -> str:
    """SHA-256 of a tensor's kind, shape and bytes."""
    value = value.detach().contiguous()
    kind = f"{value.dtype} {list(value.shape)}".encode()
    return hashlib.sha256(kind + value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def projections(tensors: Mapping[str, Tensor], *, per_value: bool = False) -> dict[str, float]:
    """Of each tensor its norm, and its product with cos(1), cos(2), …, which a permutation of it changes.
    per_value: both over the root of the tensor's size."""
    values = {}
    for name, tensor in sorted(tensors.items()):
        flattened = tensor.detach().double().flatten()
        scale = max(len(flattened), 1) ** -0.5 if per_value else 1.0
        fixed = torch.arange(1.0, len(flattened) + 1, dtype=torch.float64).cos()
        values[f"{name} norm"] = flattened.norm().item() * scale
        values[f"{name} product"] = (flattened @ fixed).item() * scale
    return values


def flat(value: Any, name: str = "") -> Values:
    """Nested dicts and lists as one, names joined by points."""
    if isinstance(value, Mapping):
        parts = [flat(each, f"{name}.{key}" if name else str(key)) for key, each in value.items()]
    elif isinstance(value, list):
        parts = [flat(each, f"{name}.{number}") for number, each in enumerate(value)]
    else:
        return {name: value}
    return {key: each for part in parts for key, each in part.items()}
