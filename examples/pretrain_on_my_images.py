"""Pretrain on my images, then fine-tune with few labels: python examples/pretrain_on_my_images.py"""

import argparse
from pathlib import Path

import timm

import situs
from situs.measure import evaluate_position

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="samples", help="a folder with a sub-folder for each class")
parser.add_argument("--out", type=Path, default=Path("runs/tutorial"), help="a new folder for the runs")
parser.add_argument("--steps", type=int, default=60, help="updates of each training")
parser.add_argument("--labels", type=int, default=500, help="images whose labels are used")
parser.add_argument("--count", type=int, default=500, help="test images")
args = parser.parse_args()

# Settings for small grey images and a CPU; the tutorial has settings for photographs.
data = {"path": args.data, "img_size": 28, "channels": 1}
model = {"patch_size": 7, "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4}}
batch = 64 if args.data == "samples" else None  # None: Situs chooses
quiet = {"batch": batch, "device": "cpu", "quiet": True}

# 1. Pretrain: MP3 predicts the position of every patch. No label is used.
pretrained = situs.pretrain(
    data,
    method={"name": "mp3", "mask_ratio": 0.5},
    backbone={"name": "vit_tiny_patch16_224", **model},
    optim={"lr": 3e-3, "warmup_epochs": 0, "clip": 1.0},
    augment={"crop": "pad", "pad": 2},
    steps=args.steps,
    out=args.out / "mp3",
    **quiet,
)

# 2. Look at the result: how many positions does the model predict correctly?
places = evaluate_position(pretrained, count=args.count, ratios=(0.0, 0.5))
print(places.summary().sentence)

# 3. Fine-tune with few labels; train the same model from random weights too.
few = {**data, "count": args.labels}
recipe = {
    "optim": {"lr": 3e-3, "warmup_epochs": 0, "clip": 1.0},
    "augment": {"crop": "pad", "pad": 2},
}
tuned = situs.finetune(
    pretrained,
    data=few,
    steps=args.steps,
    out=args.out / "tuned",
    **recipe,
    **quiet,
)
scratch = situs.pretrain(
    few,
    method="supervised",
    backbone={"name": "vit_tiny_patch16_224", **model},
    steps=args.steps,
    out=args.out / "scratch",
    **recipe,
    **quiet,
)
for name, run in (("after MP3", tuned), ("from random weights", scratch)):
    found = situs.evaluate_accuracy(run, args.data, count=args.count)
    top1 = 100 * found.accuracy.top1
    print(f"{name}: {top1:.1f} % of {found.accuracy.count} test images, with {args.labels} labels")

# 4. Take the model elsewhere: timm loads the export without Situs.
exported = situs.export(tuned, args.out / "exported")
loaded = timm.create_model(f"local-dir:{exported}", pretrained=True)
print(type(loaded).__name__, "loaded by timm from", exported)
