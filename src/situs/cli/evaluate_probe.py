"""What a linear classifier reads off frozen features: the place of patches without a position, or the class of images.

For example: situs evaluate probe runs/droppos --kind position --after runs/finetuned --out look
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from, open_one_of
from situs.cli.result import present

if TYPE_CHECKING:
    from situs.data.loader import Loader
    from situs.evaluate.probe import Probes
    from situs.models import Model
    from situs.results import Provenance


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Linear probe on a frozen backbone."""

    kind: Literal["position", "class"] = "position"
    """What is read: the place of patches whose position was taken away, or the class of the image."""

    after: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """A second model on the same page, such as the first one fine-tuned."""

    train_count: Annotated[int, Parameter(metavar="IMAGES")] = 2000
    """At most so many images of the training split to fit to."""

    ratio: Annotated[float, Parameter(metavar="SHARE")] = 0.75
    """position: share of the patches whose position is taken away."""

    pool: Literal["mean", "cls"] = "mean"
    """class: the mean of the patch tokens, or the CLS token."""

    weight_decays: Annotated[tuple[float, ...], Parameter(metavar="λ,λ,…")] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """Weight decays to choose from, on a part of the training split."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the backbone."""


def run(args: Args) -> None:
    """Fits, scores, prints the table and writes the page."""
    from situs.results import Provenance

    model = open_from(args)
    if args.data is None and model.data.path:  # a second model is judged on the same images
        args = replace(args, data=model.data.path, held_out=model.data.held_out)
    models = {model.name: model}
    if args.after is not None:
        after = open_one_of(args.after, args).holding_out(args.held_out)
        models[after.name if after.name != model.name else f"{after.name} (after)"] = after
    found = (_position if args.kind == "position" else _class)(args, models)
    present(replace(found, provenance=Provenance.joint(found.made.values())), args.out)


def _position(args: Args, models: dict[str, Model]) -> Probes[Any]:
    from situs.errors import SitusError
    from situs.evaluate.probe_position import PositionProbes, follow, probe_position

    unknowns = follow({name: (each.trained, each.positions) for name, each in models.items()})
    probes, made = {}, {}
    for name, model in models.items():
        train, test = _loaders(args, model)
        probes[name] = probe_position(
            model.trained,
            train,
            test,
            ratio=args.ratio,
            seed=args.seed,
            precision=args.precision,
            positions=model.positions,
            unknown=unknowns[name],
            weight_decays=args.weight_decays,
        )
        made[name] = _made(args, model, train, test)
    grids = {model.backbone.out_grid for model in models.values()}
    if len(grids) > 1:
        raise SitusError(f"the two models have grids of {' and '.join(map(str, sorted(grids)))} places (--after)")
    return PositionProbes(probes, made, grid=grids.pop(), ratio=args.ratio)


def _class(args: Args, models: dict[str, Model]) -> Probes[Any]:
    from situs.evaluate.probe_class import ClassProbes, probe_class
    from situs.models.data import check_labels

    probes, made, classes = {}, {}, ()
    for name, model in models.items():
        train, test = _loaders(args, model)
        classes = check_labels(test)
        probes[name] = probe_class(
            model.trained,
            train,
            test,
            len(classes),
            pool=args.pool,
            seed=args.seed,
            precision=args.precision,
            positions=model.positions,
            weight_decays=args.weight_decays,
        )
        made[name] = _made(args, model, train, test)
    return ClassProbes(probes, made, classes=classes)


def _loaders(args: Args, model: Model) -> tuple[Loader, Loader]:
    """The images to fit to, and those to score on."""
    from situs.models.data import load_bank

    return load_bank(
        model, args.data, split=args.split, batch=args.batch, train_count=args.train_count, count=args.count
    )


def _made(args: Args, model: Model, train: Loader, test: Loader) -> Provenance:
    from situs.models.data import made_with

    return made_with(model, test, args.seed, args.precision, beside=[train], more={"fitted_to": train.source.name})
