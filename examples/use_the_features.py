"""Use a model's features with other tools: python examples/use_the_features.py"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

import situs
from situs.measure.features import extract_features, write_features

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a run, an export, a model's folder or NAME=FILE; by default a short run of MP3")
parser.add_argument("--data", default="samples", help="a folder with a sub-folder for each class")
parser.add_argument("--out", type=Path, default=Path("runs/features"), help="a folder for the files")
parser.add_argument("--steps", type=int, default=40, help="updates of this short run")
parser.add_argument("--count", type=int, default=500, help="images of each split")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

source = args.model or situs.pretrain(
    {"path": args.data, "img_size": 28, "channels": 1},
    method={"name": "mp3", "mask_ratio": 0.5},
    backbone={
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4},
    },
    optim={"lr": 3e-3, "warmup_epochs": 0, "clip": 1.0},
    batch=64,
    steps=args.steps,
    out=args.out / "mp3",
    device="cpu",
    quiet=True,
)
model = situs.open_model(source)

# 1. One vector per image, in a file; images.names.csv lists the image of each row.
train = extract_features(model, args.data, split="train", count=args.count)
test = extract_features(model, args.data, split="test", count=args.count)
write_features(args.out / "images.npz", train)
print("images:", np.load(args.out / "images.npz")["features"].shape)

# 2. Any tool can read the features: here a linear classifier of scikit-learn.
centre = train.features.mean(dim=0)
spread = train.features.std(dim=0).clamp(min=1e-6)
known, asked = ((found.features - centre) / spread for found in (train, test))
probe = LogisticRegression(max_iter=500).fit(known.numpy(), train.labels.numpy())
right = 100 * probe.score(asked.numpy(), test.labels.numpy())
print(f"linear classifier: {right:.1f} % of {args.count} test images")

# 3. Or a search: find the nearest training image of each test image.
known, asked = (found / found.norm(dim=1, keepdim=True) for found in (known, asked))
nearest = (asked @ known.T).argmax(dim=1)
same = 100 * (train.labels[nearest] == test.labels).double().mean()
print(f"nearest image is of the same class: {same:.1f} %")
print(f"the image most like {test.names[0]} is {train.names[int(nearest[0])]}")

# 4. One vector per patch, for search within images, segmentation, detection.
patches = extract_features(model, args.data, split="test", count=4, tokens="patches")
print("patches:", tuple(patches.features.shape), "on the grid", tuple(patches.facts["grid"]))
