"""Hugging Face models as backbones, by exact class: from a model, a config, or a local folder.

Only an address hf:OWNER/NAME@COMMIT is fetched (`situs.hub`), and no code of a folder is run. Which class a config
becomes: the one it names in `architectures`; else the bare model of its type; with `num_classes`, the classifier of its
type.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig
from situs.backbones.hf import image, text
from situs.backbones.hf.layers import Head, quietly
from situs.backbones.weights import HEADS, read_state_dict, refuse_misfits
from situs.errors import SitusError, missing_extra, unknown_name
from situs.hub import local_folder


class Kind(NamedTuple):
    """The classes of one config type. name: what they begin with. adapter: wraps them. heads: by the end of a class's
    name, first the bare model's, then the classifier's. pooler: whether the bare model has one to leave out."""

    name: str
    adapter: Callable[[Any, Head, tuple[int, int] | None], Backbone]
    heads: dict[str, Head]
    pooler: bool = False

    @property
    def bare(self) -> tuple[str, dict[str, Any]]:
        """The model without a head (`num_classes=0`), and what leaves its pooler out."""
        return f"{self.name}Model", {"add_pooling_layer": False} if self.pooler else {}

    @property
    def classifier(self) -> str:
        """The class that `num_classes` makes of any of them."""
        return f"{self.name}{list(self.heads)[1]}"


def _image(name: str, adapter: Any, pooled: Head, classes: Head, pooler: bool = False, of: str = "Image") -> Kind:
    return Kind(name, adapter, {"Model": pooled, f"For{of}Classification": classes}, pooler)


def _encoder(name: str, adapter: Any, classes: Head, pooler: bool = True, **more: Head) -> Kind:
    heads = {"Model": text.pooled, "ForSequenceClassification": classes, "ForMaskedLM": text.masked_words}
    return Kind(name, adapter, heads | more, pooler)


def _decoder(name: str, adapter: Any, words: str = "ForCausalLM") -> Kind:
    classes = {"Model": text.hidden, "ForSequenceClassification": text.last_classes}
    return Kind(name, adapter, classes | {words: text.next_words})


_DINO = (image.dinov2_pooled, image.dinov2_classes)
KINDS: dict[str, Kind] = {
    "vit": _image("ViT", image.ViTBackbone, image.vit_pooled, image.vit_classes, pooler=True),
    "dinov2": _image("Dinov2", image.Dinov2Backbone, *_DINO),
    "dinov2_with_registers": _image("Dinov2WithRegisters", image.Dinov2RegistersBackbone, *_DINO),
    image.AST: _image("AST", image.ASTBackbone, image.ast_pooled, image.ast_classes, of="Audio"),
    "albert": _encoder("Albert", text.AlbertBackbone, text.bert_classes),
    "bert": _encoder("Bert", text.TextEncoder, text.bert_classes),
    "camembert": _encoder("Camembert", text.RobertaBackbone, text.first_classes),
    "distilbert": _encoder("DistilBert", text.DistilBertBackbone, text.distilbert_classes, pooler=False),
    "electra": _encoder("Electra", text.TextEncoder, text.first_classes, pooler=False, ForPreTraining=text.replaced),
    "roberta": _encoder("Roberta", text.RobertaBackbone, text.first_classes),
    "xlm-roberta": _encoder("XLMRoberta", text.RobertaBackbone, text.first_classes),
    "gpt2": _decoder("GPT2", text.GPT2Backbone, "LMHeadModel"),
    "gpt_neox": _decoder("GPTNeoX", text.GPTNeoXBackbone),
    "llama": _decoder("Llama", text.LlamaBackbone),
    "mistral": _decoder("Mistral", text.MistralBackbone),
    "qwen2": _decoder("Qwen2", text.QwenBackbone),
    "qwen3": _decoder("Qwen3", text.QwenBackbone),
}

FAMILIES: dict[str, tuple[Kind, Head]] = {
    f"{kind.name}{ending}": (kind, head) for kind in KINDS.values() for ending, head in kind.heads.items()
}
"""transformers class -> how it is wrapped. A subclass, or a class of the same name elsewhere, is refused."""

ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("clip", "clip_vision_model"),
        "Situs does not run transformers' CLIP; use its image tower in timm, such as vit_base_patch16_clip_224",
    ),
    "swin": "Situs does not run transformers' Swin; use a model of timm, such as swin_tiny_patch4_window7_224",
    "deit": "Situs does not run transformers' DeiT; use a model of timm, such as deit_small_distilled_patch16_224",
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        "Situs does not run DeBERTa, because its attention uses tables of distances between words; use RoBERTa",
    ),
    "beit": "Situs does not run transformers' BEiT; use a model of timm, such as beit_base_patch16_224",
}
"""Config types that users try -> why they are refused, and what to use instead."""

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def create_hf_backbone(source: Any, wanted: BackboneConfig) -> Backbone:
    """A backbone over a transformers model.

    source: a `PreTrainedModel` (wrapped as it is; another img_size replaces its table), a config (fresh weights), the
    path of a folder with config.json and weights, or of a config.json alone (fresh weights); a path may start with
    "hf:". wanted: img_size is (height, width) of images, or (1, length) of a text model's positions; model_args are
    config entries to change; positions, another kind than its own, are for image models.
    New models are in training mode, like torch's modules; an existing model keeps its mode.
    """
    transformers = _transformers()
    if isinstance(source, transformers.PreTrainedModel):
        model = source
    else:
        if isinstance(source, transformers.PreTrainedConfig):
            config, folder = copy.deepcopy(source), None
        else:
            config, folder = _read(source, need_weights=wanted.weights is None)
        model = _build(
            _changed(config, _entries(wanted, config.model_type)), wanted.weights, folder, wanted.num_classes
        )
    _check_places(type(model).__name__, model.config.model_type)
    kind = type(model)
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        raise unknown_name("Hugging Face model class", f"{kind.__module__}.{kind.__name__}", FAMILIES)
    family, head = FAMILIES[kind.__name__]
    backbone = family.adapter(model, head, wanted.size)
    if wanted.positions is not None:
        if not isinstance(backbone, image.ImageBackbone):
            reason = f"positions={wanted.positions!r}: {backbone.name} is a text model and keeps its own positions"
            raise SitusError(reason, field="positions")
        backbone.set_positions(wanted.positions)
    entries = model.config.to_diff_dict()
    backbone.source = {"library": "transformers", "architecture": backbone.name, "model_args": entries}
    return backbone


def _check_places(name: str, model_type: str) -> None:
    """Refuses a model that users try and Situs does not support, with the reason."""
    reason = (image.UNPLACED | ELSEWHERE).get(model_type)
    if reason is not None:
        raise SitusError(f"{name} is refused: {reason}", field="backbone.name")


def _entries(wanted: BackboneConfig, model_type: str) -> dict[str, Any]:
    """The requested settings as entries of a transformers config; those without an entry are refused."""
    if wanted.drop_path:
        raise SitusError(
            f"drop_path={wanted.drop_path}: applies only to timm models, because models of the library transformers "
            "have no drop rate that increases from block to block",
            field="backbone.drop_path",
        )
    entries = {} if wanted.patch_size is None else {"patch_size": wanted.patch_size}
    if model_type == image.AST:  # always of one channel
        if wanted.size is not None:
            entries["num_mel_bins"], entries["max_length"] = wanted.size
    elif wanted.in_chans != BackboneConfig.in_chans:
        entries["num_channels"] = wanted.in_chans
    return {**entries, **wanted.model_args}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "hf", "a Hugging Face backbone") from error
    return transformers


def _read(source: Any, *, need_weights: bool) -> tuple[Any, Path | None]:
    """The config at a path, and the folder of its weights (None: new weights)."""
    path = local_folder(source)
    file = path / "config.json" if path.is_dir() else path
    if file.name != "config.json" or not file.is_file():
        raise SitusError(
            f"{source}: is not a folder with a config.json of the library transformers; give a model of the "
            "Hugging Face hub as hf:OWNER/NAME@COMMIT"
        )
    kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    _check_places(f"model_type {kind} in {file}", str(kind))
    if kind not in KINDS:
        raise unknown_name(f"model_type in {file}", str(kind), KINDS)
    try:
        config = _transformers().AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a value of another kind than transformers wants
        raise SitusError(f"{file}: transformers cannot read this file ({' '.join(str(error).split())})") from error
    if path == file or not need_weights:
        return config, None
    if not any(file for pattern in WEIGHT_FILES for file in path.glob(pattern)):
        raise SitusError(
            f"{source}: the folder has no weights; give its config.json for a new model, or give weights=FILE"
        )
    return config, path


def _changed(config: Any, model_args: Mapping[str, Any]) -> Any:
    if not model_args:
        return config
    from huggingface_hub.errors import StrictDataclassError

    kind, entries = type(config), config.to_diff_dict()
    for key in model_args:
        if key not in config.to_dict():
            raise unknown_name(f"entry of {kind.__name__} (model_args)", key, config.to_dict())
    try:
        return kind.from_dict({**entries, **model_args})
    except (TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise SitusError(
            f"model_args={dict(model_args)}: {kind.__name__} does not accept these arguments ({reason})"
        ) from error


def _class_of(config: Any, num_classes: int | None) -> tuple[str, dict[str, Any]]:
    """The class for a config, and the arguments of its constructor."""
    _check_places(f"model type {config.model_type}", config.model_type)
    if config.model_type not in KINDS:
        raise unknown_name("transformers model type", config.model_type, KINDS)
    kind = KINDS[config.model_type]
    name = (config.architectures or [kind.bare[0]])[0]
    if name not in FAMILIES:
        raise unknown_name("Hugging Face model class", name, FAMILIES)
    if num_classes is None:
        return name, {}
    if num_classes == 0:
        return kind.bare
    if num_classes < 0:
        raise SitusError(field="num_classes", value=num_classes, allowed="at least 0")
    return FAMILIES[name][0].classifier, {}


def _build(config: Any, weights: str | Path | None, folder: Path | None, num_classes: int | None) -> Any:
    name, arguments = _class_of(config, num_classes)
    if num_classes:
        config.num_labels = num_classes
    kind = getattr(_transformers(), name)
    if weights is None and folder is None:
        return kind(config, **arguments)
    state = None if weights is None else read_state_dict(weights)
    model, report = _load(kind, config, folder, state, arguments)
    bare, without_pooler = KINDS[config.model_type].bare
    if name == bare and report["missing_keys"] and all(key.startswith("pooler.") for key in report["missing_keys"]):
        # Saved without its pooler, which no entry of the config tells.
        model, report = _load(kind, config, folder, state, without_pooler)
    # A published folder often keeps a second head beside the one its config names, so leftovers are allowed there.
    leftovers = report["unexpected_keys"] if folder is None else ()
    wrong = sorted(key for key, *_ in report["mismatched_keys"])
    # Another head than was saved may be asked for; what else does not fit, from_pretrained would only warn of.
    fresh = HEADS if num_classes is not None else ()
    what = f"weights={weights or folder}"
    refuse_misfits(what, name, sorted(report["missing_keys"]), sorted(leftovers), wrong, fresh)
    return model.train()


def _load(
    kind: Any, config: Any, folder: Path | None, state: dict[str, Tensor] | None, arguments: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """A model with a folder's weights, or with `state`, and from_pretrained's report on them."""
    # transformers saves some models under the names of its older releases; from_pretrained knows them all.
    try:
        with quietly():
            return kind.from_pretrained(
                folder,
                config=config,
                state_dict=state,
                local_files_only=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **arguments,
            )
    except Exception as error:  # transformers lets through a different class for each kind of damage
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise SitusError(f"{folder or 'weights'}: cannot be loaded as {kind.__name__} ({why})") from error
