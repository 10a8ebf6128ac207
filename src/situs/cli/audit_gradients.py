"""What a model's gradients give away: attacks against defences on your images, with a page and a gate for CI."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from situs.audit.gradients import Audit
    from situs.data.batch import Batch
    from situs.evaluate.subject import Subject

GATE_FAILED = 3
"""Exit status of an audit whose gate is not passed."""


@dataclass(frozen=True)
class Args:
    """What a model's gradients give away."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, an export folder, or a timm name."""

    images: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """Images to attack; any layout that training reads."""

    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE|pretrained|random")] = None
    """For a timm name: a weight file or those timm publishes; random where nothing is said."""

    img_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="SIDE|HEIGHT WIDTH")] = None
    """For a timm name: image size in pixels, where it differs from the model's own."""

    classes: int = 1000
    """Classes of the new classifier that a model without one gets; labels are the images' own, or count through."""

    count: int = 12
    """How many images, from the first on."""

    attack: str = "patchembed,april"
    """Attacks by name, apart by commas."""

    defence: str = "none,noise,clip,no-pe-gradient"
    """Defences by name, apart by commas; a setting stands behind "=": noise=1e-4, clip=0.5, mjp=0.27."""

    batch: int = 1
    """Images in the audited step."""

    local_steps: int = 1
    """Steps of plain SGD behind one upload (FedAvg)."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type gradients are sent in."""

    lpips: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """LPIPS weights (AlexNet, checked by sha256); without them LPIPS is not reported."""

    fail_above: Annotated[str | None, tyro.conf.arg(metavar="METRIC=NUMBER")] = None
    """A gate, as psnr=20: exit status 3 if any attack brings any image above it."""

    seed: int = 0
    """Seed of random weights and of the defences' noise."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("audit")
    """Where gradients.json and report.html go."""


def run(args: Args) -> int:
    """Audits, prints the table, writes the files, and says by its status whether the gate is passed."""
    from situs.audit import create_attack, create_defence
    from situs.audit.gradients import Step, audit_gradients, gate
    from situs.audit.lpips import Lpips
    from situs.audit.threat import DTYPES
    from situs.config import check_range
    from situs.train.distributed import start

    for name in ("count", "batch", "local_steps", "classes"):
        check_range(name, getattr(args, name), 1, flag=f"--{name.replace('_', '-')}")
    attacks = [create_attack(name) for name in _names(args.attack)]
    defences = [create_defence(name) for name in _names(args.defence)]
    lpips = None if args.lpips is None else Lpips(args.lpips)
    device = start(args.device).device
    subject = _open(args, device)
    batch, names = _load(args, subject, device)
    audit = audit_gradients(
        subject.backbone,
        batch.images,
        _labels(subject, batch),
        attacks,
        defences,
        normalisation=subject.data.normalisation,
        step=Step(args.batch, args.local_steps, DTYPES[args.precision], args.seed),
        names=names,
        lpips=lpips,
    )
    leaks = None if args.fail_above is None else gate(audit, args.fail_above)
    _report(args, audit, subject, leaks)
    return GATE_FAILED if leaks else 0


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _open(args: Args, device: Any) -> Subject:
    """The model; a new classifier where it has none, because a client's loss needs one."""
    import torch

    from situs.backbones import create_backbone
    from situs.core.tokens import pair
    from situs.evaluate.subject import PUBLISHED, RANDOM, open_subject
    from situs.train.run import is_run

    size = None if args.img_size is None else pair(args.img_size)
    named = not is_run(args.model) and not (Path(args.model) / "config.json").is_file()
    weights = args.weights or (RANDOM if named else None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        subject = open_subject(args.model, weights=weights, img_size=size, device=device)
        if is_run(args.model) or weights == PUBLISHED or _outputs(subject) != subject.backbone.out_dim:
            return subject
        # As many outputs as channels: pooled features, and no classes.
        file = None if weights == RANDOM else weights
        backbone = create_backbone(args.model, img_size=size, weights=file, num_classes=args.classes)
    return replace(subject, backbone=backbone.to(device).eval())


def _outputs(subject: Subject) -> int:
    import torch

    shape = (1, subject.backbone.in_chans, *subject.data.size)
    with torch.no_grad():
        return subject.backbone(torch.zeros(shape, device=next(subject.backbone.parameters()).device)).shape[-1]


def _load(args: Args, subject: Subject, device: Any) -> tuple[Batch, list[str]]:
    """The first images, prepared as the model sees them, and their names."""
    from situs.data.loader import make_loader
    from situs.data.sources import open_source

    source = open_source(args.images, None, channels=subject.data.channels)
    config = replace(subject.data, path=args.images, batch=args.count, workers=0, resident="never")
    batch = next(iter(make_loader(config, None, device, source=source)))
    return batch, [f"{source.name} {number}" for number in batch.ids.tolist()]


def _labels(subject: Subject, batch: Batch) -> Any:
    """The images' own labels where the classifier has them all, else 0, 1, 2 … through its classes."""
    import torch

    classes = _outputs(subject)
    if batch.labels is not None and int(batch.labels.max()) < classes:
        return batch.labels
    return torch.arange(len(batch.images), device=batch.images.device) % classes


def _report(args: Args, audit: Audit, subject: Subject, leaks: list[str] | None) -> None:
    from situs import __version__
    from situs.audit.gradients import to_json, verdict
    from situs.audit.page import make_page, reasons, table
    from situs.cli.scores import write_scores
    from situs.cli.tables import print_table
    from situs.report.html import show

    height, width = audit.images.shape[2:]
    facts = {
        "model": audit.model,
        "weights": str(subject.facts.get("weights", subject.facts["kind"])),
        "images": f"{len(audit.images)} of {Path(args.images).name}, {height} × {width} pixels",
        "gradients": f"{args.precision}, batch {args.batch}, local steps {args.local_steps}",
        "seed": args.seed,
        "situs": __version__,
    }
    if any(pair.reason is None for pair in audit.pairs):
        header, rows = table(audit, ("psnr", "ssim", "order_accuracy", "reidentified"))
        rows = [[show(cell) for cell in row] for row in (header, *rows)]
        print_table(f"{audit.model}, {facts['images']}", rows)
    if said := reasons(audit):
        print_table("Does not apply, or is not exact", said)
    print(verdict(audit))
    write_scores(args.out / "gradients.json", {**facts, "gate": leaks, **to_json(audit)})
    page = make_page(audit, facts, leaks).write(args.out / "report.html")
    print(f"{page}: the page; {page.with_name('gradients.json').name} has every image's numbers")
    for leak in leaks or ():
        print(f"gate {args.fail_above} not passed: {leak}")
