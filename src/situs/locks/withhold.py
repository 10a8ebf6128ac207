"""Parts of a model that its owner withholds, in a second file: the embedding, the first blocks.

Whoever has images and the clear embedding can recover the key from the first blocks (`situs audit lock`). Without these
parts that attack is not possible.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from situs.backbones.base import Backbone
from situs.errors import SitusError, counted
from situs.locks.key import Key, codes_of
from situs.locks.manifest import PART, Manifest
from situs.locks.seal import reading, writing
from situs.locks.shards import ByteSource, Header, Sink, make_header, new_private_file, parse_header, read_header

NAME = "withheld.safetensors"
"""The name of the second file in codes and keys, wherever it lies."""

_ORIGINAL = "original_headers"


def parse_parts(parts: str | Sequence[str]) -> tuple[str, ...]:
    """Checked parts ("embedding", "blocks=K") in their order in the model."""
    parts = parts.split(",") if isinstance(parts, str) else parts
    for part in parts:
        if not PART.fullmatch(part):
            raise SitusError(field="withhold", value=part, allowed="embedding or blocks=K with K at least 1")
    if len({part.partition("=")[0] for part in parts}) < len(parts):
        raise SitusError(f"withhold={', '.join(parts)}: a part is named twice", field="withhold")
    return tuple(sorted(parts, key=lambda part: part != "embedding"))


def described(parts: Sequence[str]) -> str:
    """The parts in words: "the embedding and the first 2 blocks"."""
    names = {"embedding": "the embedding", "blocks=1": "the first block"}
    return " and ".join(names.get(part, f"the first {part.removeprefix('blocks=')} blocks") for part in parts)


def tensors_of(backbone: Backbone, parts: Sequence[str]) -> set[str]:
    """The names in the model of the tensors of these parts."""
    depths, names = _depths(backbone), set[str]()
    for part in parts:
        if part == "embedding":
            unknown = next((name for name, role in backbone.roles().items() if role.part == "unknown"), None)
            if unknown is not None:
                raise SitusError(
                    f"withhold=embedding: it is not known whether {unknown} of {backbone.name} comes before or "
                    "after the blocks, so the embedding cannot be withheld",
                    field="withhold",
                )
            names |= {name for name, depth in depths.items() if depth == 0}
            continue
        count, blocks = int(part.removeprefix("blocks=")), len(backbone.block_modules())
        if count >= blocks:
            separate = "" if blocks == backbone.depth else " with separate weights"
            reason = f"{backbone.name} has {counted(blocks, 'blocks')}{separate}, but at least one block must remain"
            raise SitusError(f"withhold={part}: {reason}", field="withhold")
        names |= {name for name, depth in depths.items() if 1 <= depth <= count}
    # Tied parameters too: a head that shares the word embedding would reveal it.
    named = dict(backbone.model.named_parameters(remove_duplicate=False))
    shared = {id(named[name]) for name in names if name in named}
    return names | {name for name, parameter in named.items() if id(parameter) in shared}


def block_tensors(backbone: Backbone) -> set[str]:
    """The names of all tensors in the blocks."""
    return {name for name, depth in _depths(backbone).items() if 1 <= depth <= len(backbone.block_modules())}


def _depths(backbone: Backbone) -> dict[str, int]:
    """The depth of each tensor of the wrapped model, under the model's names."""
    inside = {name: role for name, role in backbone.roles().items() if name.startswith("model.")}
    return {name.removeprefix("model."): role.depth for name, role in inside.items()}


def second_header(headers: Mapping[str, Header], names: set[str], lock_id: str) -> Header:
    """The header of the second file: its tensors shard by shard, the lock's id, and the headers of the clear files."""
    tensors = [spec for header in headers.values() for spec in header.tensors if spec.name in names]
    original = {name: base64.b64encode(header.raw).decode() for name, header in headers.items()}
    return make_header(tensors, {"lock_id": lock_id, _ORIGINAL: json.dumps(original)})


def default_path(out: str | Path) -> Path:
    """Where the second file is written by default: beside the locked folder, never in it."""
    return Path(out).with_name(f"{Path(out).name}.{NAME}")


@contextmanager
def new_second(path: Path, header: Header, seal: Key | None, lock_id: str) -> Iterator[Sink]:
    """The owner's second file, open for its tensors: mode 0600, complete or absent."""
    with new_private_file(path, "what is withheld", "withheld") as file, writing(file, seal, lock_id, NAME) as sink:
        sink.write(header.raw)
        yield sink


@contextmanager
def open_second(
    folder: Path, manifest: Manifest, key: Key, path: str | Path | None
) -> Iterator[tuple[ByteSource | None, Header | None, dict[str, Header]]]:
    """(the second file, read up to its header; the header; the headers of the clear files), empty if none is needed.

    Refused unless it is the one that the manifest names.
    """
    withheld = manifest.withheld
    if withheld is None:
        if path is not None:
            raise SitusError(
                f"{path}: is not needed, because nothing was withheld from {folder}; do not set `withheld`",
                field="withheld",
            )
        yield None, None, {}
        return
    if path is None:
        reason = f"lacks the parts withheld by the lock ({described(withheld.parts)}): give the owner's second file too"
        raise SitusError(f"{folder}: {reason}", field="withheld")
    path = Path(path)
    if not path.is_file():
        raise SitusError(f"{path}: does not exist, but is needed to open {folder}", field="withheld")
    with reading(path, NAME, manifest, key) as reader:
        header = read_header(reader, str(path))
        if codes_of(key, manifest.lock_id).of("header", NAME, header.raw) != withheld.header:
            raise SitusError(
                f"{path}: does not contain the parts withheld from {folder}, or was altered", field="withheld"
            )
        originals = json.loads(header.notes[_ORIGINAL])
        yield reader, header, {name: parse_header(base64.b64decode(raw), str(path)) for name, raw in originals.items()}
