"""Attack a locked model as somebody without its key would, and say what is left of the lock.

For example: situs audit lock locked/ --key owner.key --images PHOTOGRAPHS
             situs audit lock locked/ --attacker public-base,drifted-base --base MODEL --drift 0.3 1 3

A lock is obfuscation, not encryption: who has the model it was made from reads the key off its weights, and who has
a few images may come near it without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL
from situs.cli.tables import print_table
from situs.errors import SitusError, unknown_name
from situs.results import percent

if TYPE_CHECKING:
    from torch import Tensor

    from situs.backbones.base import Backbone
    from situs.backbones.layout import Group
    from situs.cli.audit_lock_samples import Samples
    from situs.locks.key import Key
    from situs.locks.manifest import Manifest
    from situs.locks.recover import Recovery

    Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Args:
    """Attacks on a lock."""

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder (situs lock)."""

    attacker: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """no-base, images, public-base, drifted-base or labels; several by comma or by giving the flag again. By default
    no-base, images where there are --images or --texts, and public-base where there is a --base."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """What the attacker has: a run, an export or model folder, or a timm name with --weights."""

    weights: Annotated[str | None, Parameter(metavar="FILE")] = None
    """The weights of a --base that is a timm name."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's key, to judge the attacks by; not needed where --base is the very model that was locked."""

    images: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Unlabelled images for the attacker `images`, any that look like those the model was made for."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The same for a model of words: a file with a text on each line; the locked folder brings the tokeniser."""

    count: Annotated[int, Parameter(metavar="SAMPLES")] = 24
    """So many of the --images or --texts, chosen at random and the same every time."""

    drift: Annotated[tuple[float, ...], Parameter(metavar="X")] = (0.3,)
    """drifted-base: noise on the base, in standard deviations of each tensor."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images: for the attacker `labels`, and to measure accuracy before and after every attack."""

    k: int = 100
    """Labelled samples that the attacker `labels` has."""

    steps: int = 200
    """Updates that the attacker `labels` makes."""

    test: int = 1000
    """Images that accuracy is measured on."""

    seed: int = 0
    """Of the drift and of the attacker's training."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Write report.html and audit.json there."""


@dataclass(frozen=True)
class Target:
    """What is attacked, and what the auditor knows beside it. samples, test: images and labels; seen: without."""

    backbone: Backbone
    groups: tuple[Group, ...]
    state: dict[str, Tensor]
    base: dict[str, Tensor] | None
    truth: dict[str, Tensor] | None
    samples: Labelled | None
    test: Labelled | None
    seen: Samples | None
    idle: dict[str, str]
    """attackers that have nothing to start from -> a sentence that says why."""
    kept: str = ""
    """What the owner kept back, for the table's title."""


def run(args: Args) -> None:
    """Runs the attacks, prints the table and the strength, writes the page."""
    from situs.locks.recover import strength_bits, verdict

    names = attackers_of(args)
    target = _target(args)
    results = [result for name in names if name not in target.idle for result in attack(name, target, args)]
    lacking = ({"images"} - set(names) - target.idle.keys()) if results else set[str]()
    rows = [header(target), *(row_of(result, target) for result in results)]
    sizes = " + ".join(str(g.size) for g in target.groups if g.kind == "residual")
    inner = sum(g.kind != "residual" for g in target.groups)
    cover = f", {inner} inner groups as cover" if inner else ""
    print_table(f"{target.backbone.name}: {sizes} residual channels{cover}{target.kept}", rows)
    said = " ".join([verdict(results, lacking), *target.idle.values()])
    print(said)
    if args.out is not None:
        _write(args.out, target, results, said, strength_bits(results, lacking))
        print(f"wrote {args.out / 'report.html'} and {args.out / 'audit.json'}")


def attackers_of(args: Args) -> list[str]:
    """The attackers asked for, each once, in order; what one of them lacks is said before anything is loaded."""
    from situs.locks.recover import ATTACKERS

    given = [name.strip() for text in args.attacker for name in text.split(",") if name.strip()]
    unlabelled = args.images is not None or args.texts is not None
    usual = {"no-base": True, "images": unlabelled, "public-base": args.base is not None}
    names = list(dict.fromkeys(given)) or [name for name, able in usual.items() if able]
    for name in names:
        if name not in ATTACKERS:
            raise unknown_name("attacker (--attacker)", name, ATTACKERS)
        if name.endswith("-base") and name != "no-base" and args.base is None:
            raise SitusError(f"attacker={name}: needs the model that the attacker has (--base)")
        if name == "labels" and args.data is None:
            raise SitusError("attacker=labels: needs labelled images (--data)")
        if name == "images" and not unlabelled:
            raise SitusError("attacker=images: needs unlabelled images or texts (--images, --texts)")
    if args.images is not None and args.texts is not None:
        raise SitusError(
            f"images={args.images}, texts={args.texts}: a model takes one or the other (--images, --texts)"
        )
    if any(not amount >= 0 for amount in args.drift):
        raise SitusError(f"drift={min(args.drift)}: must be at least 0 (--drift)")
    for name in ("k", "steps", "test", "count"):
        if getattr(args, name) < 1:
            raise SitusError(f"{name}={getattr(args, name)}: must be at least 1 (--{name})")
    return names


def attack(name: str, target: Target, args: Args) -> list[Recovery]:
    """The results of one attacker: one, or one for each drift."""
    from situs.locks import recover
    from situs.locks.recover_adapter import AdapterConfig, recover_with_labels

    owner = None
    if target.test is not None and target.truth is not None:
        owner = _score(target)(recover.opened(target.state, target.groups, target.truth))
    if name == "labels":
        assert target.samples is not None
        assert target.test is not None
        settings = AdapterConfig(steps=args.steps, seed=args.seed)
        sets, known = (target.samples, target.test), {"truth": target.truth, "owner": owner}
        return [recover_with_labels(target.backbone, target.groups, *sets, settings, **known)]
    if name == "no-base":
        inputs = None if target.samples is None else target.samples[0]
        found = [recover.recover_blind(target.backbone, target.groups, truth=target.truth, inputs=inputs)]
    elif name == "images":
        from situs.locks.recover_images import recover_with_samples

        assert target.seen is not None
        seen, known = target.seen, {"truth": target.truth, "seed": args.seed}
        found = [recover_with_samples(target.backbone, target.groups, seen.batches, had=seen.had, **known)]
    else:
        assert target.base is not None
        drifts = args.drift if name == "drifted-base" else (None,)
        found = []
        for amount in drifts:
            base = target.base if amount is None else recover.drift(target.base, amount, args.seed)
            label = name if amount is None else f"{name}, {amount:g} ×"
            got = recover.recover_with_base(target.state, base, target.groups, truth=target.truth, attacker=label)
            found.append(got)
    if target.test is None:
        return found
    return [recover.scored(each, target.state, target.groups, _score(target), owner) for each in found]


# --- what is attacked -------------------------------------------------------------------------------------------


def _target(args: Args) -> Target:
    from situs.cli.audit_lock_samples import read_samples
    from situs.locks.folder import names_in_file
    from situs.locks.lock import rename
    from situs.locks.manifest import permutations_of, read_manifest
    from situs.locks.owner import left_of
    from situs.locks.recover import check_finite, exact_truth, without
    from situs.locks.withhold import words

    key = None
    if args.key is not None:
        from situs.cli.passphrase import read_key

        key = read_key(args.key)
    manifest = read_manifest(args.locked, key)
    base = None if args.base is None else _base(args)
    with _readable(args.locked, manifest, key) as folder:
        backbone, gone = left_of(folder, replace(manifest, sealed=False))
        samples, test = _labelled(folder, args, gone)
        embedded = manifest.withheld is None or "embedding" not in manifest.withheld.parts
        unlabelled = embedded and (args.images is not None or args.texts is not None)
        seen = read_samples(folder, backbone, args.images, args.texts, args.count) if unlabelled else None
    names = names_in_file(backbone, {spec.name: spec for spec in manifest.specs()})
    groups = without(rename(manifest.groups, {name: own for own, name in names.items()}), gone)
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    for name in gone:  # not there, and so neither right nor wrong
        state[name].zero_()
    backbone.eval().model.load_state_dict(state)  # in training mode an embedding may drop out
    for weights, what in ((state, str(args.locked)), (base or {}, f"base={args.base}")):
        check_finite(weights, what)
    truth = permutations_of(manifest, key) if key is not None else None
    if truth is None and base is not None:
        truth = exact_truth(state, base, groups)
    idle = {} if embedded else {"images": "The attacker `images` has nothing to start from: the embedding is withheld."}
    kept = "" if manifest.withheld is None else f"; {words(manifest.withheld.parts)} withheld"
    return Target(backbone, groups, state, base, truth, samples, test, seen, idle, kept)


@contextmanager
def _readable(locked: Path, manifest: Manifest, key: Key | None) -> Iterator[Path]:
    """The folder whose weights an attacker sees: with a seal, what is under it, as everybody who runs the model has."""
    if not manifest.sealed:
        yield locked
        return
    if key is None:
        raise SitusError(
            f"{locked}: is sealed, so the file is encrypted and nothing was attacked; with the owner's key the audit "
            "opens the seal and attacks the locked weights under it, which who runs the model has (--key)"
        )
    from situs.locks.lock import unseal

    with tempfile.TemporaryDirectory() as place:
        unseal(locked, manifest, key, Path(place))
        yield Path(place)


def _labelled(folder: Path, args: Args, gone: frozenset[str]) -> tuple[Labelled | None, Labelled | None]:
    """The labelled images to learn from and to be judged on, as the model takes them, where there are some."""
    if args.data is None:
        return None, None
    if gone:
        raise SitusError(f"data={args.data}: parts of the model are withheld, so it cannot be run on images (--data)")
    from situs.models import open_model
    from situs.models.data import check_classes

    model = open_model(str(folder))
    sets = []
    for split, count in (("train", args.k), ("val", args.test)):
        loader = _loader(model.data, args.data, split, count)
        check_classes(model, loader)
        sets.append(_tensors(loader))
    return sets[0], sets[1]


def _loader(data: Any, path: str, split: str, count: int) -> Any:
    from situs.data.loader import make_loader
    from situs.data.sources import open_source
    from situs.data.subset import Subset

    source = Subset(open_source(path, split, channels=data.channels, held_out=data.held_out), count)
    return make_loader(replace(data, path=path, split=split, batch=min(count, 256)), None, source=source)


def _tensors(loader: Any) -> tuple[Tensor, Tensor]:
    import torch

    batches = list(loader)
    return torch.cat([b.inputs for b in batches]), torch.cat([b.targets["label"] for b in batches])


def _base(args: Args) -> dict[str, Tensor]:
    from situs.models import open_model

    assert args.base is not None
    try:
        model = open_model(args.base, weights=args.weights)
    except SitusError as error:
        raise SitusError(f"base={args.base}: {error}") from error
    return dict(model.backbone.model.state_dict())


def _score(target: Target) -> Any:
    import copy

    from situs.locks.recover_adapter import accuracy_of

    assert target.test is not None
    images, labels = target.test
    trial = copy.deepcopy(target.backbone)

    def score(state: Any) -> float:
        trial.model.load_state_dict(dict(state))
        return accuracy_of(trial, images, labels)

    return score


# --- what is said -----------------------------------------------------------------------------------------------


def header(target: Target) -> tuple[str, ...]:
    """The table's first row; accuracies only where there is data."""
    scores = ("locked", "after attack", "with the key") if target.test is not None else ()
    return ("attacker", "key recovered", "bits left", *scores, "seconds", "what it took")


def row_of(result: Recovery, target: Target) -> tuple[str, ...]:
    """One attack as text."""
    from situs.locks.recover import SEED_BITS

    share = "not judged" if result.share is None else f"{percent(result.share)} ({result.right} of {result.size})"
    bits = "not judged" if result.bits is None else f"{min(float(SEED_BITS), result.bits):.0f}"
    scores = [_percent(value) for value in (result.before, result.after, result.owner)]
    if result.control is not None:
        scores[1] += f" (random blocks {_percent(result.control)})"
    shown = scores if target.test is not None else []
    return (result.attacker, share, bits, *shown, f"{result.seconds:.2f}", result.cost)


def _percent(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _write(out: Path, target: Target, results: list[Recovery], said: str, strength: float | None) -> None:
    from situs.cli.scores import write_scores
    from situs.locks.recover import ATTACKERS
    from situs.report import figures
    from situs.report.html import Page

    told = ("attacker", "size", "right", "share", "bits", "seconds", "cost", "agreement", "failed")
    fields = (*told, "before", "after", "owner", "control")
    held = [{name: getattr(result, name) for name in fields} for result in results]
    whole = {"model": target.backbone.name, "strength_bits": strength, "verdict": said, "attacks": held}
    write_scores(out / "audit.json", whole)
    page = Page("Attacks on a lock", lead=f"{target.backbone.name}, locked{target.kept}: {said}")
    section = page.section("What each attacker got")
    section.table(header(target), [row_of(result, target) for result in results])
    section.facts({name: f"{text}." for name, text in ATTACKERS.items()})
    drifted = [(r.attacker, r.share) for r in results if r.attacker.startswith("drifted") and r.share is not None]
    if len(drifted) > 1:
        amounts = [float(name.split(", ")[1].removesuffix(" ×")) for name, _ in drifted]
        line = {"key recovered": (amounts, [100 * share for _, share in drifted])}
        labels = "noise on the base, in standard deviations", "residual channels recovered, %"
        drawn = figures.curves(line, *labels, y_limits=(0, 100))
        section.figure(figures.png(drawn), "Linear assignment against a base that drifted.")
    section.note(
        "Bits left, at most the seed's 256: log2 of the orders of the channels that are still wrong, the attacker "
        "being taken to know which; where most are right, log2 of the exchanges that put one after the other right; 0 "
        "where accuracy came back without the key. J tells how well the two sides agree, which needs no key: a search "
        "that failed ends where those from random hints do. Inner groups (MLP units, heads, their channels) never "
        "count: moving them leaves the function as it was."
    )
    page.write(out / "report.html")
