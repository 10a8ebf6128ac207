"""What a linear classifier reads off frozen features: the place of patches without a position, or the class of images.

For example: situs evaluate probe runs/droppos --kind position --after runs/finetuned --out look
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from, open_one_of
from situs.cli.result import print_cells, tell_left_out, write_result

if TYPE_CHECKING:
    from situs.evaluate.probe import Fitted
    from situs.models import Model


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
    model = open_from(args)
    if args.data is None and model.data.path:  # a second model is judged on the same images
        args = replace(args, data=model.data.path, held_out=model.data.held_out)
    models = {model.name: model}
    if args.after is not None:
        after = open_one_of(args.after, args).holding_out(args.held_out)
        models[after.name if after.name != model.name else f"{after.name} (after)"] = after
    (_position if args.kind == "position" else _class)(args, models)


def _position(args: Args, models: dict[str, Model]) -> None:
    from situs.errors import SitusError
    from situs.evaluate import probe_page as pages
    from situs.evaluate.probe_position import follow, probe_position

    unknowns = follow({name: (each.trained, each.positions) for name, each in models.items()})
    probes, facts = {}, {}
    for name, model in models.items():
        train, test, facts[name] = _loaders(args, model)
        held = unknowns[name]
        found = probe_position(
            model.trained,
            train,
            test,
            ratio=args.ratio,
            seed=args.seed,
            precision=args.precision,
            positions=model.positions,
            unknown=held,
            weight_decays=args.weight_decays,
        )
        tell_left_out(train, test)
        probes[name] = found, held
    grids = {model.backbone.out_grid for model in models.values()}
    if len(grids) > 1:
        raise SitusError(f"the two models have grids of {' and '.join(map(str, sorted(grids)))} places (--after)")
    page, pictures = pages.position_page(probes, grids.pop(), _shown(facts))
    print_cells(_title(facts), *pages.position_table(probes))
    print(pages.position_finding(probes))
    numbers = {
        name: {
            **facts[name],
            "accuracy": probe.score.accuracy,
            "distance": probe.distance,
            "constant_guess_distance": probe.guess,
            "patches": probe.score.count,
            "unknown": held.words,
            **_fit(probe.fitted, probe.train_count),
        }
        for name, (probe, held) in probes.items()
    }
    print(
        write_result(
            args.out,
            "probe-position",
            {"ratio": args.ratio, "models": numbers},
            page,
            pictures,
            of=[*models.values()],
        )
    )


def _class(args: Args, models: dict[str, Model]) -> None:
    from situs.evaluate import probe_page as pages
    from situs.evaluate.probe_class import probe_class
    from situs.models.data import check_labels

    probes, facts, classes = {}, {}, ()
    for name, model in models.items():
        train, test, facts[name] = _loaders(args, model)
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
        tell_left_out(train, test)
    page, pictures = pages.class_page(probes, classes, _shown(facts))
    print_cells(_title(facts), *pages.class_table(probes))
    print(pages.class_finding(probes))
    numbers = {
        name: {
            **facts[name],
            "pool": probe.pool,
            "accuracy": probe.score.accuracy,
            "loss": probe.score.loss,
            "count": probe.score.count,
            **_fit(probe.fitted, probe.train_count),
        }
        for name, probe in probes.items()
    }
    print(write_result(args.out, "probe-class", {"models": numbers}, page, pictures, of=[*models.values()]))


def _loaders(args: Args, model: Model) -> tuple[Any, Any, dict[str, Any]]:
    """The images to fit to, those to score on, and how all was made."""
    from situs.models.data import load_bank, made_with

    train, test = load_bank(
        model, args.data, args.split, args.batch, bank_count=args.train_count, count=args.count, flag="--train-count"
    )
    return train, test, made_with(model, test, args.seed, args.precision) | {"fitted_to": train.source.name}


def _fit(fitted: Fitted, train_count: int) -> dict[str, Any]:
    tried = [asdict(each) for each in fitted.tried]
    return {"train_images": train_count, "weight_decay": fitted.weight_decay, "tried": tried}


def _shown(facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One list of facts; those of a second model bear its name."""
    (_, first), *rest = facts.items()
    return first | {f"{key} ({name})": value for name, each in rest for key, value in each.items()}


def _title(facts: dict[str, dict[str, Any]]) -> str:
    return next(iter(facts.values()))["data"]
