"""Golden numbers of the verbs: what a user reads in the JSON of each, flat as name -> value.

All look at small models that `write_runs` trains. Times, places and versions are left out.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file
from training import CASES, Values, flat, projections, train_plainly

import situs
from situs.cli.main import main

KEPT = Path(__file__).parent.parent / "data" / "kept"
LEFT_OUT = frozenset({
    "seconds", "second", "version", "torch", "device", "machine", "gib", "time", "minutes", "path", "of", "out", "page",
    "files", "written", "identity", "commit", "python", "situs", "date", "timm", "learn", "transformers", "command",
})  # fmt: skip
"""Words of keys that say where and when, not what."""
UNSTEADY = (".order_accuracy", ".reidentified", ".open", ".before", ".low", ".high")
"""Ends of keys whose numbers the last digit of a sum may decide: an assignment among equals, a threshold, the class
that a model of a few steps gives to most images, and the interval of two images, thirteen times their distance."""

RUNS: dict[str, dict[str, Any]] = {
    "mp3": CASES["mp3 vit"] | {"steps": 12},
    "hints": CASES["mp3 hints"] | {"steps": 12},
    "droppos": CASES["droppos vit"] | {"steps": 12},
    "mjp": CASES["mjp vit"] | {"steps": 24},
    "tuned": CASES["head"] | {"start": "mp3", "train": "all", "steps": 24},
    "clips": CASES["supervised clips"] | {"steps": 24},
    "clips-mp3": CASES["mp3 clips"] | {"steps": 12},
    "words": CASES["supervised bert"] | {"steps": 12},
    "language": CASES["language gpt2"] | {"steps": 12},
    "segments": CASES["segmentation vit"] | {"steps": 12},
    "objects": CASES["detection vit"] | {"steps": 12},
}  # fmt: skip
"""The models that verbs look at, in the order in which they are made."""

VERBS: dict[str, str] = {
    "accuracy": "evaluate accuracy @tuned",
    "accuracy clips": "evaluate accuracy @clips",
    "accuracy words": "evaluate accuracy @words",
    "consistency": "evaluate consistency @mjp --ratios 0,0.25,0.5",
    "position droppos": "evaluate position @droppos",
    "position mp3": "evaluate position @mp3",
    "position hints": "evaluate position @hints --ratios 0.5",
    "position clips": "evaluate position @clips-mp3 --ratios 0,0.5",
    "knn": "evaluate knn @mp3 --k 5",
    "knn clips": "evaluate knn @clips-mp3 --k 3",
    "probe position": "evaluate probe @mp3 --after @tuned",
    "probe class": "evaluate probe @tuned --kind class",
    "probe segments": "evaluate probe @segments --kind segments",
    "ensemble": "evaluate accuracy @tuned @mjp",
    "perplexity": "evaluate accuracy @language",
    "segments": "evaluate accuracy @segments",
    "objects": "evaluate accuracy @objects",
    "attention": "evaluate attention @tuned",
    "reconstruct mp3": "evaluate reconstruct @mp3",
    "reconstruct droppos": "evaluate reconstruct @droppos",
    "positions": "evaluate position --kind vectors @tuned @mjp",
    "correlation": "evaluate attention --kind correlation @tuned",
    "verify": "info @tuned --verify --steps 1",
    "audit positions": "evaluate position --kind all @droppos",
    "audit lock": "audit lock @locked --attacks public-base,drifted-base,no-base --base @exported --key @key"
    " --data @/images --drift 0,0.3",
    "audit split": "audit split @tuned --split train --count 4 --public 16 --attacks order,linkage,labels"
    " --defences none,noise=0.5 --permute rows",
    "audit gradients": "audit gradients @tuned --count 2 --defences none,noise=0.01,noise=1 --fail-above psnr=20"
    " --attacks patchembed,april,tokens",
    "audit gradients mjp": "audit gradients @mjp --count 2 --attacks patchembed,april,tokens",
    "audit gradients clips": "audit gradients @clips --count 1 --attacks patchembed,april,tokens",
    "audit texts": "audit texts @/bert --data @/lines.txt --count 2",
    "audit curve": "audit sweep @tuned --over noise --defences none --count 1 --attacks patchembed",
    "data check": "data check @/photos",
    "data pack": "data pack @/photos --short-side 16 --encoding png --workers 0",
    "info": "info @tuned",
}
"""The words of each verb. @NAME is a run's folder, @/NAME what `write_world` wrote there."""

SLOW = frozenset({"audit curve", "audit split", "audit gradients clips", "probe position", "probe segments"})
"""Verbs that are compared among the slow tests."""


def write_runs(world: Path) -> Path:
    """The runs of `RUNS`, beside the sets of `write_world`; an export of one, and a lock of it by the kept key."""
    runs = world / "runs"
    for name, case in RUNS.items():
        train_plainly(case, world, runs / name)
    situs.export(runs / "tuned", runs / "exported")
    shutil.copy(KEPT / "owner.key", runs / "key")
    (runs / "key").chmod(0o600)
    lock_the_same(runs / "exported", runs / "key", runs / "locked")
    (world / "lines.txt").write_text("w3 w7 w1 w9\nw4 w3 w8 w2\n")
    return world


def document_of(line: str, world: Path, out: Path) -> dict[str, Any]:
    """What a verb prints as JSON, with its exit status. Its page is not drawn."""
    words = [
        str(world / word[2:]) if word.startswith("@/") else str(world / "runs" / word[1:]) if word[0] == "@" else word
        for word in line.split()
    ]
    words += [] if words[0] in ("verify", "info") else ["--out", str(out)]
    words += [] if words[0] in ("data", "info") else ["--device", "cpu"]
    printed, complaints = io.StringIO(), io.StringIO()
    undrawn = mock.patch("situs.pages.publish", lambda _, place, **more: Path(place) / "page.html")
    with redirect_stdout(printed), redirect_stderr(complaints), undrawn:
        status = main([*words, "--json"])
    if status not in (0, 3, 4):
        raise AssertionError(f"situs {' '.join(words)} ended with {status}: {complaints.getvalue()[-500:]}")
    return {"exit": status, **json.loads(printed.getvalue())}


def record_verb(name: str, world: Path, out: Path) -> Values:
    """What is kept of a verb: numbers, yes and no, and short words; where and when it was is left out."""
    values = {}
    for key, value in flat(document_of(VERBS[name], world, out)).items():
        words = {
            word for part in key.split(".") for word in part.lower().replace(" ", "_").replace("-", "_").split("_")
        }
        if (
            not words & LEFT_OUT
            and not key.endswith(UNSTEADY)
            and "order_accuracy." not in key
            and not (isinstance(value, str) and (len(value) > 24 or "/" in value))
        ):
            values[key] = value
    return values


# --- verbs whose result is a file ---------------------------------------------------------------------------


def features(world: Path, out: Path) -> Values:
    """Norm and product of the features of the validation split."""
    out.mkdir(parents=True)
    words = [
        "features",
        str(world / "runs" / "tuned"),
        "--out",
        str(out / "features.safetensors"),
        "--device",
        "cpu",
        "--quiet",
    ]
    assert main(words) == 0
    return projections(load_file(out / "features.safetensors"))


def predictions(world: Path, out: Path) -> Values:
    """Class and probability of every image."""
    out.mkdir(parents=True)
    assert (
        main(["predict", str(world / "runs" / "tuned"), "--out", str(out / "rows.csv"), "--device", "cpu", "--quiet"])
        == 0
    )
    rows = csv.DictReader((out / "rows.csv").read_text().splitlines())
    values: Values = {}
    for number, row in enumerate(rows):
        values |= {f"{number}.{key}": _number(value) for key, value in row.items() if "/" not in value}
    return values


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def locks(world: Path, out: Path) -> Values:
    """The tensors of a kept export locked with a kept key, and whether the key gives its files back."""
    lock_the_same(KEPT / "export", world / "runs" / "key", out / "locked")
    situs.unlock(out / "locked", world / "runs" / "key", out / "open")
    values: Values = projections(load_file(out / "locked" / "model.safetensors"))
    for file in sorted((out / "open").iterdir()):
        values[f"{file.name} as before"] = file.read_bytes() == (KEPT / "export" / file.name).read_bytes()
    return values


def lock_the_same(model: Path, key: Path, out: Path) -> None:
    """Locks with the same salt every time."""
    same = {"token_bytes": lambda count: bytes(range(count)), "token_hex": lambda count: "5a" * count}
    with mock.patch.multiple("secrets", **same):
        situs.lock(model, key, out)


FILES: dict[str, Callable[[Path, Path], Values]] = {
    "features": features,
    "predict": predictions,
    "lock": locks,
}
