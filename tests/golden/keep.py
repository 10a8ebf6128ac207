"""The golden numbers: how they are made, kept and compared.

    python tests/golden/keep.py            compares everything and prints what differs
    python tests/golden/keep.py --write    writes the files anew; the commit says why each value changed

Each file of `values/` holds, for one case, name -> value; a number with its tolerance, where that is wider than the
usual one. `--write` measures the tolerances: everything is computed a second time with other last digits, as another
processor has them (`training.other_rounding`). So a training's values are compared to about 1e-7: its batches and first
weights are float32 numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import defaults
import torch
import training
import verbs
from training import Values

FOLDER = Path(__file__).parent / "values"
EXPORTED = ("mp3 vit", "droppos rotary", "supervised swin", "segmentation vit", "supervised clips", "supervised bert")
"""Cases whose export is kept too."""

CLOSE = 1e-9
"""Of training: largest difference, as a share of the value where that is above 1."""
NEAR = 1e-4
"""Of verbs, which run in float32."""
KEPT_WITH = "2.14."
"""The torch of the values. Another one rounds otherwise: a whole verb's numbers may then differ by a hundredth, the
bytes of a file by a fifth. Draws, words and counts are the same with every torch."""
APART = 50.0
"""How many times what other rounding changes, a value may differ."""
ONE_IMAGE = 1 / 12 + 1e-6
"""A share of the 12 held-out images: of a model trained in float32, the class of one may differ."""


def names() -> Iterator[tuple[str, str]]:
    """Every case: its kind and its name."""
    yield from (("training", name) for name in training.CASES)
    yield from (("export", name) for name in EXPORTED)
    yield from (("verb", name) for name in (*verbs.VERBS, *verbs.FILES))
    yield "defaults", "configs"


def compute(kind: str, name: str, world: Path, out: Path) -> Values:
    """The values of a case as the code computes them now."""
    if kind == "defaults":
        return defaults.record()
    if kind == "training":
        return training.record(name, world, out)
    if kind == "export":
        return training.record_export(name, world, out)
    return verbs.FILES[name](world, out) if name in verbs.FILES else verbs.record_verb(name, world, out)


def file_of(kind: str, name: str) -> Path:
    """Where a case is kept."""
    return FOLDER / kind / f"{name.replace(' ', '-')}.json"


def differences(kind: str, kept: Mapping[str, Any], now: Values) -> list[str]:
    """A line for each value that is missing, new or another."""
    lines = [f"{name}: is no longer there" for name in kept.keys() - now.keys()]
    lines += [f"{name}: is new" for name in now.keys() - kept.keys()]
    for name in kept.keys() & now.keys():
        value, tolerance = kept[name] if isinstance(kept[name], list) else (kept[name], usual(kind, kept[name]))
        if kind == "verb" and isinstance(value, float) and 0 < value < 1 and abs(12 * value - round(12 * value)) < 1e-6:
            tolerance = max(tolerance, ONE_IMAGE)
        if kind == "verb" and not torch.__version__.startswith(KEPT_WITH):
            tolerance = max(tolerance, elsewhere(name, value))
        if apart(value, now[name]) > tolerance:
            lines.append(f"{name}: was {value!r}, is {now[name]!r} (tolerance {tolerance:g})")
    return sorted(lines)


def apart(one: Any, other: Any) -> float:
    """How far two values are apart; what is no number is equal or infinitely far."""
    real = [isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other)]
    if all(real) and math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    return 0.0 if one == other or (all(real) and math.isnan(one) and math.isnan(other)) else math.inf


def usual(kind: str, value: Any) -> float:
    """The tolerance of a value that has none of its own: integers, yes and no, and words are exact."""
    if not isinstance(value, float) or not math.isfinite(value):
        return 0.0
    return (CLOSE if kind == "training" else NEAR) * max(1.0, abs(value))


def elsewhere(name: str, value: Any) -> float:
    """The tolerance of a verb's value with another torch than the kept values'."""
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("bytes"):
        return 0.2 * value
    return 0.01 * max(1.0, abs(value)) if isinstance(value, float) and math.isfinite(value) else 0.0


def with_tolerances(kind: str, values: Values, others: Mapping[str, Any]) -> Values:
    """Values as they are kept: with a tolerance of their own where other rounding changes them by more than usual. A
    value that one other rounding happens not to change may differ as much as most of its kind in this case."""
    distances = {name: apart(value, others.get(name)) for name, value in values.items()}
    typical: dict[str, list[float]] = {}
    for name, value in values.items():
        if isinstance(value, float) and math.isfinite(value) and math.isfinite(distances[name]):
            typical.setdefault(family(name), []).append(distances[name] / max(1.0, abs(value)))
    kept: Values = {}
    for name, value in values.items():
        if not math.isfinite(distances[name]):
            kept[name] = None
            continue
        tolerance, distance = usual(kind, value), distances[name]
        if tolerance:
            distance = max(distance, statistics.median(typical[family(name)]) * max(1.0, abs(value)))
        kept[name] = value if APART * distance <= tolerance else [value, float(f"{APART * distance:.2g}")]
    return kept


def family(name: str) -> str:
    """The values that other rounding changes alike: a name's last word, and its words without their numbers in JSON."""
    return name.rsplit(" ", 1)[-1] if " " in name else re.sub(r"\d+", "", name)


def everything(only: str) -> dict[str, Values]:
    """The values of every case whose kind and name hold `only`, by both."""
    results = {}
    with tempfile.TemporaryDirectory() as place:
        world, asked = training.write_world(Path(place) / "world"), [case for case in names() if only in " ".join(case)]
        if any(kind == "verb" for kind, _ in asked):
            verbs.write_runs(world)
        for kind, name in asked:
            results[f"{kind}/{name}"] = compute(kind, name, world, Path(place) / kind / name.replace(" ", "-"))
    return results


def write(now: dict[str, Values], elsewhere: dict[str, Values]) -> None:
    """Keeps what is computed, a file a case. elsewhere: the same with other rounding; what differs beyond measure there
    (a word, a hash) is not kept."""
    for case, values in now.items():
        kind, _, name = case.partition("/")
        file = file_of(kind, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        others = elsewhere.get(case, values)
        kept = with_tolerances(kind, values, others)
        dropped = [key for key, value in kept.items() if value is None and values[key] is not None]
        if dropped:
            print(f"{case}: not kept, for rounding changes them: {', '.join(dropped)}")
        kept = {key: value for key, value in kept.items() if key not in dropped}
        file.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Compares or writes; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files anew")
    parser.add_argument("--only", default="", help="cases whose kind and name hold this, as 'training mp3'")
    options = parser.parse_args()
    if options.write:
        with training.other_rounding():
            elsewhere = everything(options.only)
        write(everything(options.only), elsewhere)
        return 0
    count, found = 0, 0
    for case, values in everything(options.only).items():
        kind, _, name = case.partition("/")
        kept = json.loads(file_of(kind, name).read_text(encoding="utf-8"))
        lines = differences(kind, kept, values)
        count, found = count + len(kept), found + len(lines)
        for line in lines:
            print(f"{case}: {line}")
    print(f"{count:,} values, {found:,} differ")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
