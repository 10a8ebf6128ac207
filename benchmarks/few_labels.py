"""Few labels: kNN, class means, a probe, the head, LoRA, all layers and `situs adapt` beside each other.

    python benchmarks/few_labels.py --pets FOLDER --cifar FOLDER --weights DINOV2 --out few-labels --workers 8
    python benchmarks/few_labels.py --out few-labels --table

Oxford-IIIT Pets with 1, 5 and 22 labels a class at 98 px, CIFAR-100 with 10, 50 and 500 at 56 px; from
DINOv2's ViT-S/14, from the same after MP3, DropPos, MAE or PART on the set's training images without their labels, and
random weights. Rates are those of `situs adapt` (random weights: the better of two on the folds of the first draw,
twice the updates, and a new head where the others begin with a probe's); weight decays and the moment to stop are
chosen by cross-validation on the training labels. At one label a class nothing can be chosen: a training takes its last
update. A seed draws the labels, the folds and the order.

A row lies in its own file as soon as it is measured; the same command again goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.api import _resolve
from situs.data.config import DataConfig
from situs.data.loader import load_resident
from situs.data.modalities.image import ImagePipeline
from situs.data.open import open_source
from situs.data.sources.base import TensorSource
from situs.files import write_text
from situs.measure.accuracy import wilson
from situs.measure.adapt.bench import DECAYS, Bench
from situs.measure.adapt.run import EPOCHS as PASSES
from situs.measure.adapt.run import UPDATES
from situs.measure.adapt.ways import PARTS, WAYS, Initial, TriedWay, choose, folds_of
from situs.measure.finetune import FinetuneConfig
from situs.measure.knn import knn_accuracy, small_k
from situs.methods import METHODS
from situs.models.open import open_model
from situs.models.start import addressed_model, starting

MODEL = "vit_small_patch14_dinov2"
SIDES, COUNTS = {"pets": 98, "cifar": 56}, {"pets": (1, 5, 22), "cifar": (10, 50, 500)}
PRETRAINED, SCRATCH, DINO = ("mp3", "droppos", "mae", "part"), "scratch", "dinov2"
ADDED = "all layers + mp3"
"""All layers with MP3's loss beside that of the labels, as `--with mp3:weight=0.1` adds it."""
SCRATCH_RATES = (3e-4, 1e-3)
FOLDS = {("pets", 5): 5, ("pets", 22): 3, ("cifar", 10): 3, ("cifar", 50): 2, ("cifar", 500): 1}
LENGTH = {"pets": 1000, "cifar": 2000}


class Job(NamedTuple):
    """kind: pretrain, frozen or way."""

    kind: str
    set: str
    labels: int = 0
    seed: int = 0
    start: str = DINO
    way: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        words = [self.kind, self.set, str(self.labels), str(self.seed), self.start, self.way.replace(" ", "")]
        return "-".join(filter(None, words))

    @property
    def grid(self) -> Job | None:
        """The job that chooses its rate, where there is one and it is not this one."""
        other = self._replace(labels={1: 5, 500: 50}.get(self.labels, self.labels), seed=0)
        return None if other == self or self.start != SCRATCH else other

    @property
    def needs(self) -> list[Job]:
        """What must be measured before."""
        jobs = (
            []
            if self.start not in PRETRAINED or self.kind == "pretrain"
            else [Job("pretrain", self.set, start=self.start)]
        )
        if self.kind == "way":
            jobs.append(self._replace(kind="frozen", way=""))
            jobs += [self.grid] if self.grid is not None else []
        return jobs


def jobs_of(sets: Sequence[str]) -> list[Job]:
    """All of them, the most important first."""
    pairs = [(name, count) for name in sets for count in COUNTS[name]]
    small = [pair for pair in pairs if pair[1] != 500]
    large = [pair for pair in pairs if pair[1] == 500]
    starts, seeds = (DINO, *PRETRAINED, SCRATCH), (0, 1, 2)
    jobs = [Job("pretrain", name, start=start) for name in sets for start in PRETRAINED]
    jobs += [Job("frozen", *pair, seed, start) for seed in seeds for start in starts for pair in pairs]
    jobs += [Job("way", *pair, 0, start, "all layers") for start in starts for pair in large]
    jobs += [Job("way", *pair, 0, DINO, way) for pair in large for way in PARTS]
    jobs += [Job("way", *pair, seed, DINO, way) for seed in seeds for pair in small for way in PARTS]
    jobs += [Job("way", *pair, 0, SCRATCH, "all layers") for pair in small]
    jobs += [
        Job("way", *pair, seed, start, way)
        for way in ("all layers", "LoRA", "head")
        for seed in seeds
        for start in PRETRAINED
        for pair in small
    ]
    jobs += [Job("way", *pair, seed, SCRATCH, "all layers") for seed in seeds for pair in small]
    jobs += [Job("way", *pair, seed, DINO, way) for seed in seeds for pair in large for way in ("LoRA", "head")]
    jobs += [
        Job("way", *pair, seed, start, way)
        for seed in seeds
        for start in (*PRETRAINED, SCRATCH)
        for pair in large
        for way in ("LoRA", "head")
    ]
    jobs += [Job("way", *pair, seed, SCRATCH, way) for way in ("head", "LoRA") for seed in seeds for pair in small]
    jobs += [Job("way", *pair, seed, start, ADDED) for start in (DINO, SCRATCH) for seed in seeds for pair in small]
    return list(dict.fromkeys(jobs))


# --- one job -----------------------------------------------------------------------------------------------------


class Study:
    """The sets, the weights and the folder of the rows. updates: of a training, for a quick look at the script."""

    def __init__(self, out: Path, weights: str, device: str, updates: int | None) -> None:
        self.out, self.weights, self.device, self.updates = out, weights, torch.device(device), updates
        self.sets: dict[str, dict[str, Any]] = {}
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")

    def images(self, name: str) -> dict[str, Any]:
        """train, test: images [n, 3, H, W] uint8 and labels [n]; classes."""
        if name not in self.sets:
            self.sets[name] = torch.load(self.out / f"{name}.pt", weights_only=True)
        return self.sets[name]

    def row(self, job: Job) -> dict[str, Any]:
        """What a job has measured."""
        return json.loads((self.out / "rows" / f"{job.name}.json").read_text())

    def origin(self, job: Job) -> Initial:
        """The weights that a job begins with."""
        if job.start == DINO:
            return Initial("", f"{MODEL}={self.weights}")
        backbone = open_model(MODEL, weights="random", img_size=SIDES[job.set]).backbone
        blind = False
        if job.start != SCRATCH:
            state = torch.load(self.out / f"{job.set}-{job.start}.pt", weights_only=True)
            backbone.load_state_dict(state, strict=False)
            blind = not METHODS[job.start].uses_positions(METHODS[job.start].Config())
        source = addressed_model(backbone)
        assert source is not None
        return Initial(job.start, source, "learned" if blind else None, "none" if blind else None)

    def bench(self, job: Job) -> Bench:
        """Labels drawn by the job's seed, so many of each class."""
        images = self.images(job.set)
        pixels, labels = images["train"]
        rows = torch.arange(len(labels))
        if job.labels:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(job.seed))
            by_class = [order[labels[order] == label][: job.labels] for label in range(len(images["classes"]))]
            rows = torch.cat(by_class).sort().values
        side = SIDES[job.set]
        added = {"added": ["mp3:weight=0.1"], "tuning": {"parts": "all"}} if job.way == ADDED else {}
        config, _ = _resolve(FinetuneConfig, {"preset": "few-labels", "seed": job.seed, **added,
                           "data": {"path": "samples", "img_size": side}}, {})  # fmt: skip
        classes = tuple(images["classes"])
        train = TensorSource(pixels[rows], labels[rows], classes, job.set)
        test = TensorSource(images["test"][0], images["test"][1], classes, f"{job.set} (test)")
        return Bench(config, train, test, labels[rows], classes, self.device, starting(None))

    def measure(self, job: Job) -> dict[str, Any]:
        """The row of a job."""
        bench = self.bench(job)
        if job.kind == "pretrain":
            return self._pretrain(job, bench)
        origin = self.origin(job)
        plain = self.bench(job._replace(way=""))
        backbone = plain.make(origin, "class means")[1].backbone
        features, labels, _ = plain.features(backbone)
        folds = folds_of(bench.labels, seed=job.seed)
        if job.kind == "frozen":
            return self._frozen(job, bench, origin, backbone, features, folds)
        decay = None if job.start == SCRATCH else self.row(job._replace(kind="frozen", way=""))["decay"]
        per = max(1, len(labels) // min(256, max(8, len(labels) // 10)))
        total = self.updates or max(UPDATES, PASSES * per)
        if job.start == SCRATCH:
            total *= 2
        way: Any = job.way.partition(" + ")[0]
        rates: list[float | None] = [None]  # those of adapt
        if job.start == SCRATCH:
            rates = [*SCRATCH_RATES] if job.grid is None else [self.row(job.grid)["rate"]]
        optim = {rate: {} if rate is None else {"lr": rate, "layer_decay": 1.0} for rate in rates}
        if job.labels == 1:
            rate = rates[0]
            tried = TriedWay(way, origin, torch.full((len(labels),), torch.nan), 0.0, total, total)
        else:
            settings: Any = (way, origin, features, decay, folds, FOLDS[job.set, job.labels], total)
            every = {rate: bench.trained(*settings, **optim[rate]) for rate in rates}
            rate = max(every, key=lambda rate: float(every[rate].right.nansum()))
            tried = every[rate]
        test, _ = bench.judge(bench.refit(tried, features, decay, **optim[rate])[1].backbone)
        return {"rate": rate, "updates": tried.updates, "total": total, "right": letters(tried.right),
                "hits": round(test.top1 * test.count), "count": test.count}  # fmt: skip

    def _pretrain(self, job: Job, bench: Bench) -> dict[str, Any]:
        source = TensorSource(self.images(job.set)["train"][0], None, None, job.set)
        total, learner = self.updates or LENGTH[job.set], None
        for trained in bench.pretrained(self.origin(job._replace(start=DINO)), job.start, source, total):
            learner = trained
        assert learner is not None
        state = {name: value.cpu() for name, value in learner.backbone.state_dict().items()}
        place = self.out / f"{job.set}-{job.start}.pt"
        torch.save(state, place.with_suffix(".part"))
        place.with_suffix(".part").replace(place)
        return {"updates": total}

    def _frozen(
        self, job: Job, bench: Bench, origin: Initial, backbone: Any, features: Tensor, folds: Tensor
    ) -> dict[str, Any]:
        one = job.labels == 1
        untested = torch.full((len(folds),), torch.nan)
        rows = bench.frozen(origin, features, folds) if not one else [
            TriedWay("kNN", origin, untested, 1), TriedWay("class means", origin, untested, 20.0),
            TriedWay("linear probe", origin, untested, DECAYS[-2])]  # fmt: skip
        test, truth, _ = bench.features(backbone, test=True)
        k = small_k(len(folds), len(bench.classes))
        near = knn_accuracy(features, bench.labels.to(features.device), test, truth, k)
        ways: dict[str, Any] = {"kNN": {"hits": round(near * len(truth)), "count": len(truth)}}
        for tried in rows[1:]:
            scores, _ = bench.judge(bench.refit(tried, features, tried.setting)[1].backbone)
            ways[tried.way] = {"hits": round(scores.top1 * scores.count), "count": scores.count}
        for tried in rows:
            ways[tried.way] |= {"right": letters(tried.right), "setting": tried.setting}
        return {"decay": rows[2].setting, "ways": ways}


def letters(right: Tensor) -> str:
    """Right answers as text: 1, 0, and - where an image was not tested."""
    return "".join("-" if value != value else str(int(value)) for value in right.tolist())


def numbers(text: str) -> Tensor:
    """The reverse."""
    return torch.tensor([torch.nan if letter == "-" else float(letter) for letter in text], dtype=torch.double)


# --- many jobs ---------------------------------------------------------------------------------------------------


def work(study: Study, jobs: Sequence[Job], until: float) -> None:
    """Takes one job after another that nobody has taken and whose needs are there, until all are taken."""
    rows = study.out / "rows"
    while time.time() < until:
        waiting = False
        for job in jobs:
            lock = rows / f"{job.name}.lock"
            if lock.exists():
                continue
            if not (study.out / f"{job.set}.pt").exists() or not all(
                (rows / f"{e.name}.json").exists() for e in job.needs
            ):
                waiting = True
                continue
            try:
                os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            began = time.time()
            try:
                row = study.measure(job)
            except Exception as error:  # noqa: BLE001  (a row with a gap, and the others go on)
                (rows / f"{job.name}.failed").write_text(f"{type(error).__name__}: {error}")
                print(f"{job.name}: FAILED {type(error).__name__}: {error}", flush=True)
                break
            row = {**job._asdict(), **row, "seconds": round(time.time() - began, 1)}
            write_text(rows / f"{job.name}.json", json.dumps(row))
            print(f"{job.name}: {row['seconds']} s {row.get('hits', '')}", flush=True)
            break
        else:
            if not waiting:
                return
            time.sleep(0.5)


def read_sets(out: Path, pets: str | None, cifar: str | None) -> list[str]:
    """Writes both sets as tensors, each image of pets as its central square of 128 px; gives the names."""
    for name, folder, size in (("pets", pets, (128, 128)), ("cifar", cifar, (32, 32))):
        if folder is None or (out / f"{name}.pt").exists():
            continue
        parts: dict[str, Any] = {}
        for split in ("train", "test"):
            source = open_source(folder, split, channels=3)
            pipeline = ImagePipeline(source, DataConfig(img_size=size), None, resident=size)
            values = load_resident(pipeline, "cpu", 4 << 30).values
            parts[split], parts["classes"] = (values["image"], values["label"]), list(source.classes or ())
        torch.save(parts, out / f"{name}.part")
        (out / f"{name}.part").replace(out / f"{name}.pt")
    return [name for name in SIDES if (out / f"{name}.pt").exists()]


# --- the table ---------------------------------------------------------------------------------------------------

COLUMNS = ("kNN", *WAYS, ADDED)


def rows_of(out: Path) -> Iterator[dict[str, Any]]:
    """Every way of every start: set, labels, seed, start, way, hits, count, right."""
    for file in sorted((out / "rows").glob("*.json")):
        row = json.loads(file.read_text())
        same = {name: row[name] for name in ("set", "labels", "seed", "start")}
        if row["kind"] == "way" and "hits" in row:
            yield {
                **same,
                **{name: row[name] for name in ("way", "hits", "count", "right", "updates", "total", "rate")},
            }
        for way, scores in row.get("ways", {}).items():
            yield {**same, "way": way, **scores}


def table(out: Path, labels_of: Any) -> dict[str, Any]:
    """Mean top-1 over the seeds by set, labels, start and way; and what `adapt` chooses from DINOv2 alone, and with the
    starts after pretraining."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows_of(out):
        cells.setdefault((row["set"], row["labels"], row["start"], row["way"]), []).append(row)
    lines: list[dict[str, Any]] = []
    for name, counts in COUNTS.items():
        for count in counts:
            for start in (DINO, *PRETRAINED, SCRATCH):
                line: dict[str, Any] = {"set": name, "labels": count, "start": start}
                for way in COLUMNS:
                    seen = cells.get((name, count, start, way), [])
                    line[way] = [row["hits"] / row["count"] for row in sorted(seen, key=lambda row: row["seed"])]
                lines.append(line)
    return {"rows": lines, "adapt": list(_adapted(out, labels_of))}


def _adapted(out: Path, labels_of: Any) -> Iterator[dict[str, Any]]:
    every = list(rows_of(out))
    for name, counts in COUNTS.items():
        for count in counts:
            for seed in (0, 1, 2):
                for starts in ((DINO,), *((DINO, start) for start in PRETRAINED)):
                    rows = [row for row in every if (row["set"], row["labels"], row["seed"]) == (name, count, seed)]
                    rows = [row for row in rows if row["start"] in starts]
                    if not rows or len({row["start"] for row in rows}) < len(starts):
                        continue
                    tried = [
                        TriedWay(
                            row["way"],
                            Initial("" if row["start"] == DINO else row["start"], ""),
                            numbers(row["right"]),
                        )
                        for row in rows
                    ]
                    if count == 1:
                        tried = [trial for trial in tried if trial.way == "class means" and not trial.origin.name]
                    taken = choose(tried, labels_of(name, count, seed))
                    row = next(r for r in rows if (r["way"], r["start"]) == (taken.way, taken.origin.name or DINO))
                    best = max(rows, key=lambda r: r["hits"])
                    low, high = wilson(best["hits"], best["count"])
                    share = row["hits"] / row["count"]
                    yield {
                        "set": name, "labels": count, "seed": seed, "starts": starts, "taken": taken.name,
                        "top1": share, "best": f"{best['way']}, {best['start']}",
                        "best_top1": best["hits"] / best["count"], "interval": (low, high), "within": low <= share,
                    }  # fmt: skip


def main() -> None:
    """Reads the words of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pets")
    parser.add_argument("--cifar")
    parser.add_argument("--weights", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--updates", type=int, help="of every training, to try the script")
    parser.add_argument("--sets", nargs="+", default=list(SIDES))
    parser.add_argument("--only", default="", help="jobs whose name matches this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    (args.out / "rows").mkdir(parents=True, exist_ok=True)
    study = Study(args.out, args.weights, args.device, args.updates)
    until = time.time() + 60 * args.minutes
    if not args.table and not args.worker:
        read_sets(args.out, args.pets, args.cifar)
        for stale in (args.out / "rows").glob("*.lock"):
            stale.unlink()
        for whole in (args.out / "rows").glob("*.json"):
            whole.with_suffix(".lock").touch()
    if args.worker or (args.workers == 1 and not args.table):
        work(study, [job for job in jobs_of(args.sets) if re.search(args.only, job.name)], until)
    elif not args.table:
        words = [sys.executable, *sys.argv, "--worker"]
        running = [subprocess.Popen(words) for _ in range(args.workers)]
        for process in running:
            process.wait()
    if args.worker:
        return

    def labels(name: str, count: int, seed: int) -> Tensor:
        return study.bench(Job("frozen", name, count, seed)).labels

    print(json.dumps(table(args.out, labels), indent=1))


if __name__ == "__main__":
    main()
