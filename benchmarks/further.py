"""Public weights pretrained further by position: which layers may move, and how fast.

    python benchmarks/further.py --pets FOLDER --weights DINOV2 --out OUT [--part 0 --parts 5: a fifth of the rows]
    python benchmarks/further.py --out OUT --table

DINOv2's ViT-S/14 at 98 px on the 814 training photographs of Oxford-IIIT Pets, without labels, by DropPos, MP3 and MAE.
A row is a setting: all weights, only the last blocks, LoRA, rates that fall with the depth, or all weights behind a
method's head that was trained first. After 0, 30, 100, 300 and 1,000 updates a linear probe and neighbours with 22
labels a class are measured on the 296 test images, the backbone frozen; after MP3 without positions, as it learns.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from few_labels import Job, Study, read_sets

from situs.backbones.lora import add_lora, low_rank_names
from situs.data.loader import make_loader
from situs.data.sources.base import TensorSource
from situs.measure.adapt.bench import Bench, updates
from situs.measure.adapt.ways import Initial
from situs.measure.finetune import finetune_config
from situs.measure.knn import knn_accuracy
from situs.measure.probe.linear import fit_linear
from situs.methods import METHODS
from situs.methods.base import Method
from situs.models.start import addressed_model
from situs.train.optim import OptimConfig
from situs.train.run import make_method
from situs.train.tuning import TuningConfig

LABELS = Job("frozen", "pets", 22)
LOOKS = (0, 30, 100, 300, 1000)


class Setting(NamedTuple):
    """last: blocks that are trained; None: every weight. first: updates of what the method adds, before the others."""

    lr: float
    last: int | None = None
    lora: bool = False
    layer_decay: float = 1.0
    first: int = 0


SETTINGS = {
    **{f"all weights, {lr:g}": Setting(lr) for lr in (1e-6, 1e-5)},
    **{f"last {last} blocks, 1e-05": Setting(1e-5, last=last) for last in (8, 4, 2)},
    "LoRA, 0.0001": Setting(1e-4, last=0, lora=True),
    "layer decay 0.65, 1e-05": Setting(1e-5, layer_decay=0.65),
    "head first, then all at 1e-06": Setting(1e-6, first=300),
}


def look(bench: Bench, learner: Method, blind: bool) -> dict[str, float]:
    """Neighbours and a probe on the learner's frozen features."""
    source = addressed_model(copy.deepcopy(learner.backbone))
    assert source is not None
    backbone = bench.make(Initial("", source, None, "none" if blind else None), "class means")[1].backbone
    features, labels, _ = bench.features(backbone)
    test, truth, _ = bench.features(backbone, test=True)
    probe = fit_linear(features, labels, len(bench.classes), 1e-2)
    right = (probe(test).argmax(dim=1) == truth).double().mean()
    return {"kNN": knn_accuracy(features, labels, test, truth, 10), "probe": float(right)}


def rows(study: Study, method: str, setting: Setting, total: int) -> Iterator[dict[str, Any]]:
    """What is measured after some of the updates."""
    bench = study.bench(LABELS)
    data = replace(bench.config.data, balanced=False)
    config = finetune_config(bench.config, study.origin(LABELS).source, None)
    learns: dict[str, Any] = {"method": METHODS[method].Config(), "tuning": TuningConfig(), "init_positions": True}
    config = replace(config, data=data, **learns)
    learner = make_method(config, None)
    bench.start(config, learner.backbone)
    if setting.lora:
        add_lora(learner.backbone, 8, 16.0, ("qkv",))
    depth = len(learner.backbone.block_modules())
    trained = range(depth) if setting.last is None else range(depth - setting.last, depth)
    moving = (*(f"model.blocks.{block}." for block in trained), *low_rank_names(learner.backbone))
    for name, weight in learner.backbone.named_parameters():
        weight.requires_grad_(weight.requires_grad and (setting.last is None or name.startswith(moving)))
    learner = learner.to(bench.device)
    blind = not METHODS[method].uses_positions(config.method)
    yield {"step": 0, **look(bench, learner, blind)}
    body = [parameter for parameter in learner.backbone.parameters() if parameter.requires_grad]
    source = TensorSource(study.images("pets")["train"][0], None, None, "pets")
    for parameter in body:
        parameter.requires_grad_(not setting.first)
    loader = make_loader(data, config.augment, bench.device, source=source)
    for _ in updates(learner, loader, replace(config, optim=OptimConfig(lr=1e-3)), setting.first):
        pass
    for parameter in body:
        parameter.requires_grad_(True)
    optim = OptimConfig(lr=setting.lr, layer_decay=setting.layer_decay)
    loader = make_loader(data, config.augment, bench.device, source=source)
    for step in updates(learner, loader, replace(config, optim=optim), total):
        if step in LOOKS:
            yield {"step": step, **look(bench, learner.eval(), blind)}
            learner.train()


def table(out: Path) -> None:
    """The probe after 100, 300 and 1,000 updates, in percent."""
    print("| what is trained | DropPos | MP3 | MAE |\n|---|---|---|---|")
    for name in SETTINGS:
        cells = []
        for method in ("droppos", "mp3", "mae"):
            file = out / "further" / f"{method}, {name}.json"
            seen = json.loads(file.read_text()) if file.exists() else []
            cells.append(" / ".join(f"{100 * row['probe']:.0f}" for row in seen if row["step"] >= 100) or "not run")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pets")
    parser.add_argument("--weights", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table(args.out)
    study = Study(args.out, args.weights, args.device, None)
    (args.out / "further").mkdir(parents=True, exist_ok=True)
    read_sets(args.out, args.pets, None)
    jobs = [(method, name) for name in SETTINGS for method in ("droppos", "mp3", "mae")]
    for method, name in jobs[args.part :: args.parts]:
        seen = list(rows(study, method, SETTINGS[name], args.updates))
        (args.out / "further" / f"{method}, {name}.json").write_text(json.dumps(seen))
        print(method, name, seen, flush=True)
    return None


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
