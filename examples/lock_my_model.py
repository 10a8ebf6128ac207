"""Lock a model with a key, open it, and attack the lock: python examples/lock_my_model.py"""

import argparse
from pathlib import Path

import situs

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="samples", help="a folder with a sub-folder for each class")
parser.add_argument("--out", type=Path, default=Path("runs/lock"), help="a new folder for everything")
parser.add_argument("--steps", type=int, default=60, help="updates of the training")
parser.add_argument("--count", type=int, default=500, help="test images")
args = parser.parse_args()

# 1. A model worth locking: a small classifier, as a folder that timm loads.
run = situs.pretrain(
    {"path": args.data, "img_size": 28, "channels": 1, "count": 2000},
    method="supervised",
    backbone={
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4, "global_pool": "avg"},
    },
    optim={"lr": 5e-3, "warmup_epochs": 0, "clip": 1.0},
    augment={"crop": "pad", "pad": 2},
    batch=64,
    steps=args.steps,
    out=args.out / "run",
    device="cpu",
    quiet=True,
)
clear = situs.export(run, args.out / "clear")

# 2. A key, and the lock. Keep the key; hand out the locked folder.
key = situs.new_key(args.out / "owner.key")
print(situs.lock(clear, key, args.out / "locked"))

# 3. With the key the model is the same. Without the key its parts do not fit together.
models = {
    "clear": situs.open_model(clear),
    "locked, without the key": situs.open_model(args.out / "locked"),
    "locked, with the key": situs.open_model(args.out / "locked", key=key),
}
for name, model in models.items():
    found = situs.evaluate_accuracy(model, args.data, split="test", count=args.count)
    print(f"{name}: {100 * found.accuracy.top1:.1f} % of {args.count} test images")

# 4. Attack the lock. An attacker with the original model gets the key.
print(situs.audit_lock(args.out / "locked", base=clear, key=key))
