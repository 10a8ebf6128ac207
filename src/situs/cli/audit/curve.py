"""The strength of a defence at which attacks on gradients stop: plots of what comes back of images or texts.

For example: situs audit curve runs/ft --data samples --over noise --count 2 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from situs.audit import Deadline, trace_defences, trace_texts
from situs.audit.deadline import first_ctrl_c
from situs.audit.text.audit import first_lines
from situs.cli.audit.evidence import command_of
from situs.cli.parser.model_args import ModelArgs, asked_of, check_folder
from situs.cli.progress import remark
from situs.cli.result import INTERRUPTED, present
from situs.errors import SitusError
from situs.limits import Count
from situs.models.open import is_run
from situs.pages import write_numbers

COUNT = 4
"""Images or sentences of a curve, where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """What comes back over the strength of a defence, by attackers who know it."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images to attack, as training reads them."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Instead, for a model of words: sentences, one a line; over noise, clip or precision."""

    curve: Annotated[tuple[str, ...], Parameter(name="--over", metavar="NAMES")] = ("noise", "precision", "fedavg")
    """Apart by commas: noise, clip (with noise, as DP-SGD), precision, fedavg, dropout; texts: noise, clip
    and precision, by default noise and precision."""

    defences: Annotated[tuple[str, ...], Parameter(name="--defence", metavar="NAMES")] = ("auto",)
    """What else is done, a line each, apart by commas; by default none and no-pe-gradient."""

    attacks: Annotated[tuple[str, ...], Parameter(name="--attack", metavar="NAMES")] = (
        "patchembed",
        "tokens",
        "patchembed-prior",
    )
    """Apart by commas; of each point the one that got most is shown."""

    count: Count | None = None
    """Images or sentences: the first that can be read; by default 4, or as many as there are."""

    split: str | None = None
    """train, val or test, where images are split; else train."""

    classes: Count | None = None
    """Of a model without a classifier; else 1000, of texts 2."""

    batch: Count = 1
    """Images or sentences in a step."""

    seed: int = 0
    """Of random weights and of noise."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """For all attacks together, in even shares, from the first on."""

    out: Annotated[Path, Parameter(metavar="FOLDER")] = Path("curve")
    """Where curve.json, curve.html and its figures go."""


def run(args: Args) -> int:
    """Traces, prints the table and writes the files."""
    if (args.data is None) == (args.texts is None) and not (args.data is None and is_run(args.model)):
        raise SitusError("give images or a file of sentences to attack, one of them", field=("data", "texts"))
    check_folder(args.out, "curve")
    deadline = Deadline(remark, args.time_limit)
    given: dict[str, Any] = {
        **asked_of(args.model, args),
        **{name: getattr(args, name) for name in ("batch", "seed")},
        "count": args.count or COUNT,
        **({} if args.classes is None else {"classes": args.classes}),
        "facts": {"command": command_of("audit curve", args)},
        "deadline": deadline,
        "keep": lambda result: write_numbers(result, args.out),
    }
    auto = args.defences == ("auto",)
    with first_ctrl_c(deadline):
        if args.texts is not None:
            for name in ("defences", "attacks", "split", "weights", "img_size", "patch_size"):
                if getattr(args, name) != getattr(Args, name):
                    raise SitusError(f"{name}: has no part in curves of texts; leave it out", field=(name, "texts"))
            others = {name: given[name] for name in given if name not in ("weights", "img_size", "patch_size")}
            others["count"] = len(first_lines(args.texts, args.count, args.batch, COUNT))
            over = {} if args.curve == Args.curve else {"over": args.curve}
            found = trace_texts(args.model, args.texts, **over, **others)
        else:
            beside = {} if auto else {"beside": args.defences}
            more = {"attacks": args.attacks, "split": args.split}
            found = trace_defences(args.model, args.data, args.curve, **beside, **more, **given)
        present(found, args.out)
    return INTERRUPTED if deadline.interrupted else 0
