"""Which files and tensors of a model's folder a lock takes.

A second copy of the weights, under any name, would bypass the lock. So only known small files are taken; any other
file is left out and named, or refused if it is large enough to hold a model. Every tensor of a weight file must be one
that the model has.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from situs.backbones.layout import Group
from situs.errors import SitusError
from situs.locks.shards import Spec, plain_source, read_header
from situs.locks.withhold import block_tensors

if TYPE_CHECKING:
    from situs.backbones.base import Backbone

MIB = 1 << 20
TABLE = "situs_positions.safetensors"
"""A position table beside the model (Swin's): clear, as embedding and head are."""

CONFIGS = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "modules.json",
    "image_processor_config.json", "feature_extractor_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "chat_template.jinja", "sentence_bert_config.json",
    "config_sentence_transformers.json", ".gitattributes",
)  # fmt: skip
TOKENS = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "model.safetensors.index.json")
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model")
CARDS = re.compile(
    r"(readme|model_?card|licen[cs]e|notice|copying|use_policy|citation)(\.(md|txt|rst|cff|bib))?", re.IGNORECASE
)
"""Names of files that a lock takes: settings, vocabularies, tokenizer models, and texts for people."""


def limit_of(name: str) -> int:
    """The largest size in bytes of a file with this name; 0: such a file is not taken."""
    base = name.rpartition("/")[2]
    if base in CONFIGS or CARDS.fullmatch(base):
        return MIB
    if base in TOKENS:
        return 64 * MIB
    return 16 * MIB if base in PIECES or name == TABLE else 0


def sort_files(folder: Path, besides: Collection[str], *, refuse: bool = True) -> tuple[list[str], list[str]]:
    """The other files in a folder and below it: (taken, left out); hidden folders end in /.

    besides: names that the caller handles. refuse: whether to refuse a large file instead of leaving it out.
    """
    taken, left_out = [], []
    for name in _listed(folder, left_out):
        if name in besides:
            continue
        size, limit = (folder / name).stat().st_size, limit_of(name)
        if size <= limit:
            _check_content(folder, name)
            taken.append(name)
        elif refuse and (limit or size > MIB):
            reason = f"more than the {limit / MIB:.0f} MiB allowed for it" if limit else "and its kind is unknown"
            raise SitusError(
                f"{folder}: {name} has {size / MIB:.1f} MiB, {reason}. The file may contain the "
                "unlocked weights; remove it first"
            )
        else:
            left_out.append(name)
    return sorted(taken), sorted(left_out)


def _listed(folder: Path, hidden: list[str]) -> list[str]:
    """Every file, by its path in the folder; adds hidden folders to `hidden`. Symbolic links are refused."""
    paths = []
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        hidden += [(here / name).relative_to(folder).as_posix() + "/" for name in folders if name.startswith(".")]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *names):
            path = here / name
            kind = path.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                kind_name = "a symbolic link" if stat.S_ISLNK(kind) else "neither a file nor a folder"
                raise SitusError(
                    f"{folder}: {path.relative_to(folder)} is {kind_name}; "
                    "first copy the folder with cp -rL, which replaces links by files"
                )
        paths += [(here / name).relative_to(folder).as_posix() for name in names]
    return paths


def _check_content(folder: Path, name: str) -> None:
    """Refuses a file whose content is not what its name says."""
    path = folder / name
    if name == TABLE:
        with plain_source(path) as source:
            names = [spec.name for spec in read_header(source, str(path)).tensors]
        if names != ["table"]:
            raise SitusError(f"{path}: contains more than a position table: {', '.join(names)[:200]}")
    elif name.rpartition("/")[2] not in PIECES:
        try:
            if "\0" in path.read_text(encoding="utf-8"):
                raise ValueError
        except ValueError:
            raise SitusError(
                f"{path}: has the name of a text file but is not text, and may contain weights; remove it"
            ) from None


def check_tensors(
    backbone: Backbone, specs: Mapping[str, Spec], names: Mapping[str, str], groups: Sequence[Group]
) -> list[str]:
    """Refuses a weight file in which parts of blocks would stay clear; returns small tensors that the model lacks.

    names: in the model -> in the file. groups: the residual groups, under the names in the file.
    """
    keyed = {member.tensor for group in groups for member in group.members}
    matrix = min(math.prod(specs[name].shape) for name in keyed if len(specs[name].shape) > 1)
    positions = {name for name, role in backbone.roles().items() if role.part == "position"}
    for model_name in block_tensors(backbone):
        name = names.get(model_name)
        if name is None or name in keyed or f"model.{model_name}" in positions:
            continue
        if len(specs[name].shape) > 1:
            raise SitusError(
                f"{backbone.name}: {name} is part of a block, but a key would not permute it, so the model was not "
                "locked"
            )
    used = set(names.values())
    extra = {name: spec for name, spec in specs.items() if name not in used}
    endings = {_ending(name) for name in keyed} - {""}
    total = 0
    for name, spec in extra.items():
        if _is_mask(backbone, spec) or _is_pooler(backbone, spec):
            continue
        size = math.prod(spec.shape)
        total += size
        if size >= matrix or _ending(name) in endings or 10 * total >= sum(math.prod(specs[n].shape) for n in keyed):
            raise SitusError(
                f"{backbone.name}: the weight file contains the tensor {name} {list(spec.shape)}, which the model does "
                "not use. This tensor may be an unlocked copy of a block. Save the model without it, and lock the new "
                "file"
            )
    return sorted(extra)


def _ending(name: str) -> str:
    """The part of a name after the block's number: blocks.3.attn.qkv.weight -> attn.qkv.weight."""
    return re.split(r"(?:^|[._/])\d+[._/]", name)[-1] if re.search(r"\d+[._/]", name) else ""


def _is_pooler(backbone: Backbone, spec: Spec) -> bool:
    """Whether this is the pooler of an encoder that is used without one (the published files of BERT and RoBERTa as
    masked language models): part of a head, and heads are clear in every lock."""
    prefix = getattr(backbone.model, "base_model_prefix", "")
    inner = getattr(backbone.model, prefix, None) if prefix else None
    if inner is None or getattr(inner, "pooler", None) is not None:
        return False
    layer, _, kind = spec.name.rpartition(".")
    shapes = {"weight": (backbone.dim, backbone.dim), "bias": (backbone.dim,)}
    return layer in (f"{prefix}.pooler.dense", f"{prefix}.pooler") and shapes.get(kind) == tuple(spec.shape)


def _is_mask(backbone: Backbone, spec: Spec) -> bool:
    """Whether this is a causal mask, which older files hold for each layer (GPT-2) and the library ignores."""
    patterns = getattr(backbone.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    square = len(spec.shape) == 4 and spec.shape[:2] == (1, 1) and spec.shape[2] == spec.shape[3]
    return (square or not spec.shape) and any(re.search(pattern, spec.name) for pattern in patterns)
