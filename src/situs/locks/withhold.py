"""Parts of a model that its owner keeps back: the embedding, the first blocks, in a second file.

Whoever has images and the clear embedding can read the key off the first blocks (`situs audit lock`). Without these
parts that attack has nothing to start from.
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
"""What the second file is called where its name is part of a key."""

_ORIGINAL = "original_headers"


def parse_parts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parts as they are given, in their order in the model: "embedding", "blocks=K"."""
    given = given.split(",") if isinstance(given, str) else given
    for part in given:
        if not PART.fullmatch(part):
            raise SitusError(field="withhold", value=part, allowed="embedding or blocks=K with K at least 1")
    if len({part.partition("=")[0] for part in given}) < len(given):
        raise SitusError(f"withhold={', '.join(given)}: a part is named twice", field="withhold")
    return tuple(sorted(given, key=lambda part: part != "embedding"))


def words(parts: Sequence[str]) -> str:
    """The parts as one says them: "the embedding and the first 2 blocks"."""
    known = {"embedding": "the embedding", "blocks=1": "the first block"}
    return " and ".join(known.get(part, f"the first {part.removeprefix('blocks=')} blocks") for part in parts)


def tensors_of(backbone: Backbone, parts: Sequence[str]) -> set[str]:
    """The names, in the model, of the tensors that these parts are."""
    depths, held = _depths(backbone), set[str]()
    for part in parts:
        if part == "embedding":
            unknown = next((name for name, role in backbone.roles().items() if role.part == "unknown"), None)
            if unknown is not None:
                raise SitusError(
                    f"withhold=embedding: whether {unknown} of {backbone.name} stands before or behind the blocks is "
                    "not known here",
                    field="withhold",
                )
            held |= {name for name, depth in depths.items() if depth == 0}
            continue
        count, blocks = int(part.removeprefix("blocks=")), len(backbone.block_modules())
        if count >= blocks:
            own = "" if blocks == backbone.depth else " with weights of their own"
            said = f"{backbone.name} has {counted(blocks, 'blocks')}{own}, and one at least must stay"
            raise SitusError(f"withhold={part}: {said}", field="withhold")
        held |= {name for name, depth in depths.items() if 1 <= depth <= count}
    # Other names of the same parameters too: a head that is tied to the words would give them away.
    named = dict(backbone.model.named_parameters(remove_duplicate=False))
    shared = {id(named[name]) for name in held if name in named}
    return held | {name for name, parameter in named.items() if id(parameter) in shared}


def block_tensors(backbone: Backbone) -> set[str]:
    """The names of all tensors in the blocks."""
    return {name for name, depth in _depths(backbone).items() if 1 <= depth <= len(backbone.block_modules())}


def _depths(backbone: Backbone) -> dict[str, int]:
    """How deep each tensor of the wrapped model stands, under the model's own names."""
    inside = {name: role for name, role in backbone.roles().items() if name.startswith("model.")}
    return {name.removeprefix("model."): role.depth for name, role in inside.items()}


def second_header(headers: Mapping[str, Header], held: set[str], lock_id: str) -> Header:
    """The header of the second file: its tensors shard by shard, whose it is, and the headers of the clear files."""
    tensors = [spec for header in headers.values() for spec in header.tensors if spec.name in held]
    original = {name: base64.b64encode(header.raw).decode() for name, header in headers.items()}
    return make_header(tensors, {"lock_id": lock_id, _ORIGINAL: json.dumps(original)})


def beside(out: str | Path) -> Path:
    """Where the second file is written unless the owner says where: beside the locked folder, never in it."""
    return Path(out).with_name(f"{Path(out).name}.{NAME}")


@contextmanager
def new_second(path: Path, header: Header, seal: Key | None, lock_id: str) -> Iterator[Sink]:
    """The owner's second file, to write its tensors to: mode 0600, complete or not there."""
    with new_private_file(path, "what is withheld", "withheld") as file, writing(file, seal, lock_id, NAME) as sink:
        sink.write(header.raw)
        yield sink


@contextmanager
def open_second(
    folder: Path, manifest: Manifest, key: Key, path: str | Path | None
) -> Iterator[tuple[ByteSource | None, Header | None, dict[str, Header]]]:
    """The second file of a lock behind its header, the header, and those of the clear files; nothing where none is.

    Refused unless it is the one that the manifest names.
    """
    withheld = manifest.withheld
    if withheld is None:
        if path is not None:
            raise SitusError(f"{path}: nothing was withheld from {folder}", field="withheld")
        yield None, None, {}
        return
    if path is None:
        said = f"lacks {words(withheld.parts)}, withheld when it was locked: give the owner's second file too"
        raise SitusError(f"{folder}: {said}", field="withheld")
    path = Path(path)
    if not path.is_file():
        raise SitusError(f"{path}: no such file, and {folder} cannot be opened without it", field="withheld")
    with reading(path, NAME, manifest, key) as reader:
        header = read_header(reader, str(path))
        if codes_of(key, manifest.lock_id).of("header", NAME, header.raw) != withheld.header:
            raise SitusError(f"{path}: is not what was withheld from {folder}, or was altered", field="withheld")
        kept = json.loads(header.notes[_ORIGINAL])
        yield reader, header, {name: parse_header(base64.b64decode(raw), str(path)) for name, raw in kept.items()}
