"""Locks a model with a key: the channels between its blocks are permuted, so that it is useless without the key.

Embedding, positions, final norm and head stay clear unless they are withheld; the blocks' weights are moved, never
changed, and unlock gives back the same files bit for bit. Known small files are taken along (settings, tokenisers,
README, licence), others left out and named. A lock is obfuscation, not encryption: see situs audit lock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL
from situs.cli.model_args import ShapeArgs, asked_of
from situs.results import percent

if TYPE_CHECKING:
    from situs.backbones.base import Backbone
    from situs.locks.manifest import Manifest

HONEST = (
    "A lock is obfuscation, not encryption: whoever has the model it was made from can match the columns and find the "
    "key. situs audit lock {path} measures what that takes."
)


@dataclass(frozen=True, kw_only=True)
class Args(ShapeArgs):
    """A model, locked with a key."""

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """A run, the folder of a model (an export, or a timm or transformers folder with safetensors), or a timm name with
    its weights (NAME=FILE or --weights)."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key (situs key new)."""

    out: Annotated[Path, Parameter(metavar="DIR")]
    """The folder to write; it must not exist."""

    withhold: Annotated[tuple[str, ...], Parameter(metavar="PART")] = ()
    """Leave a part in a second file for the owner: embedding (all before the blocks), blocks=K (the first K), or
    both: embedding,blocks=K."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The second file to write (mode 0600); by default beside the locked folder."""

    seal: bool = False
    """Encrypt the files at rest as well (AES-256-GCM); the manifest, with names and shapes, stays readable."""

    cover: bool = False
    """Also move MLP units, heads and their channels: it hinders matching, and is no strength of its own."""


def run(args: Args) -> None:
    """Writes the locked folder and says what it is."""
    from situs.cli.passphrase import read_key
    from situs.locks.lock import lock

    key = read_key(args.key)
    asked: dict[str, Any] = {"groups": "all" if args.cover else "residual", "seal": args.seal}
    with _lockable(args) as source:
        locked = lock(source, key, args.out, withhold=args.withhold, withheld=args.withheld, **asked)
    print(f"{args.out}: {locked.manifest.model} locked with the key {key.id}.")
    print(_shares(locked.manifest))
    for note in locked.notes:
        print(note)
    if args.seal:
        print("Every file but manifest.json is encrypted with the same key; the manifest shows names and shapes.")
    print(HONEST.format(path=args.out))
    also = "" if locked.withheld is None else f" --withheld {locked.withheld}"
    print(f"Open it with situs unlock {args.out} --key {args.key}{also} --out DIR.")


@contextmanager
def _lockable(args: Args) -> Iterator[Backbone | str]:
    """What `lock` takes: a model's folder as it is, a run as the folder that its export is, another model opened."""
    from situs.models import open_model
    from situs.models.export import export_run
    from situs.models.open import model_folder
    from situs.train.run import is_run

    if is_run(args.model):
        with tempfile.TemporaryDirectory() as place:
            yield str(export_run(args.model, Path(place) / "export", ema=None if args.ema else False).path)
    elif Path(args.model).exists() or model_folder(args.model) is not None:
        yield args.model.removeprefix("hf:")
    else:
        yield open_model(args.model, **asked_of(args.model, args)).backbone.cpu()


def _shares(manifest: Manifest) -> str:
    """How much of the model moved, how much is withheld, and what is clear."""
    from situs.locks.withhold import words

    held, keyed, total = manifest.held(), manifest.keyed(), manifest.count(manifest.tensors)
    residual = [str(group.size) for group in manifest.groups if group.kind == "residual"]
    inner = len(manifest.groups) - len(residual)
    cover = f" and {inner} inner groups as cover" if inner else ""
    moved = percent(manifest.count(keyed - held) / total)
    said = (
        f"{len(keyed - held)} of {len(manifest.tensors)} tensors moved, {moved} of the parameters: "
        f"{' + '.join(residual)} residual channels{cover}."
    )
    if manifest.withheld is not None:
        share = percent(manifest.count(held) / total)
        said += f" Withheld in the second file, mode 0600: {words(manifest.withheld.parts)}, {share} of the parameters."
    gone = manifest.withheld is not None and "embedding" in manifest.withheld.parts
    return f"{said} {'Final' if gone else 'Embedding, positions, final'} norm and head are clear."
