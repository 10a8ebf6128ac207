"""The tiny sets behind the golden numbers: images, masks, objects, clips, series, sentences, the same bytes every time.

No random generator of a library decides a pixel: SHAKE-256 does, which no version changes.
"""

from __future__ import annotations

import hashlib
import io
import json
import wave
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ash", "birch", "cedar")
WORDS = 50


def drawn(name: str, *shape: int) -> np.ndarray:
    """Bytes [shape] that follow from `name` alone."""
    size = int(np.prod(shape))
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(size), dtype=np.uint8).reshape(shape)


def picture(name: str, height: int, width: int, label: int) -> np.ndarray:
    """Pixels [height, width, 3]: coarse patches of colour, brighter with the class, and a little noise."""
    coarse = drawn(f"coarse {name}", 4, 4, 3).astype(np.int64)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    noise = drawn(f"noise {name}", height, width, 3).astype(np.int64) // 8
    return (coarse[rows][:, columns] // 2 + noise + 40 * label).clip(0, 255).astype(np.uint8)


def write_images(root: Path, sides: tuple[int, ...], train: int = 24, val: int = 12) -> Path:
    """train/ and val/ with a folder a class; sides: heights and widths are taken from them in turn."""
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % len(CLASSES)
            height, width = sides[number % len(sides)], sides[(number + 1) % len(sides)]
            folder = root / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture(f"{split} {number}", height, width, label)).save(folder / f"{number:03}.png")
    return root


def write_masks(root: Path, train: int = 6, val: int = 3) -> Path:
    """images/ and annotations/ as ADE20K has them: a box of class 2 on a ground of class 1, a first row of 0."""
    for split, count in (("training", train), ("validation", val)):
        for number in range(count):
            pixels, (top, left) = picture(f"{split} mask {number}", 36, 40, 0), drawn(f"box {split} {number}", 2) % 16
            mask = np.ones((36, 40), dtype=np.uint8)
            mask[top : top + 14, left : left + 18] = 2
            pixels[mask == 2] = 255 - pixels[mask == 2] // 4
            mask[0] = 0
            for kind, array in (("images", pixels), ("annotations", mask)):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(root / kind / split / f"{number:04}.png")
    (root / "objectInfo150.txt").write_text("Idx\tRatio\tTrain\tVal\tName\n1\t0.6\t6\t3\tground\n2\t0.4\t6\t3\tbox\n")
    return root


def write_objects(root: Path, train: int = 6, val: int = 3) -> Path:
    """COCO's files: one or two boxes an image, of two classes, outlined as polygons."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    kinds = [{"id": 1, "name": "low"}, {"id": 5, "name": "tall"}]
    for split, count in (("train", train), ("val", val)):
        images, boxes = [], []
        (root / f"{split}2017").mkdir(exist_ok=True)
        for number in range(count):
            pixels = picture(f"{split} objects {number}", 40, 48, 0)
            for each in range(1 + number % 2):
                tall = (number + each) % 2
                x, y = (int(v) % 20 for v in drawn(f"place {split} {number} {each}", 2))
                w, h = (12, 18) if tall else (20, 10)
                pixels[y : y + h, x : x + w] = (230, 60, 60) if tall else (60, 60, 230)
                outline = [x, y, x + w, y, x + w, y + h, x, y + h]
                boxes.append({"id": len(boxes) + 1, "image_id": number + 1, "category_id": (1, 5)[tall], "iscrowd": 0,
                              "bbox": [x, y, w, h], "area": w * h, "segmentation": [outline]})  # fmt: skip
            name = f"{number:04}.png"
            Image.fromarray(pixels).save(root / f"{split}2017" / name)
            images.append({"id": number + 1, "file_name": name, "height": 40, "width": 48})
        table = {"images": images, "annotations": boxes, "categories": kinds}
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(table))
    return root


def write_clips(root: Path, speakers: int = 6) -> Path:
    """Speech Commands' folders, a fifth of a second a clip: a tone of the word under the speaker's noise. Speakers 3
    and 4 are for validation, by the hash that Speech Commands has."""
    time = np.arange(3200)
    for word, name in enumerate(("yes", "no", "up")):
        for speaker in range(speakers):
            triangle = np.abs((time * (3 + 2 * word)) % 320 - 160) - 80  # exact where a sine is not
            noise = drawn(f"clip {word} {speaker}", 3200).astype(np.int64) - 128
            samples = (100 * triangle + 20 * noise).astype("<i2")
            file = root / name / f"{speaker:08x}_nohash_0.wav"
            file.parent.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            with wave.open(buffer, "wb") as out:
                out.setnchannels(1)
                out.setsampwidth(2)
                out.setframerate(16_000)
                out.writeframes(samples.tobytes())
            file.write_bytes(buffer.getvalue())
    return root


def write_series(root: Path, count: int = 8) -> Path:
    """Recordings of two channels and 40 to 47 steps, in folders of two classes."""
    for split, many in (("train", count), ("val", count // 2)):
        for label, name in enumerate(("rising", "falling")):
            (root / split / name).mkdir(parents=True)
            for number in range(many):
                steps = 40 + number
                noise = drawn(f"series {split} {label} {number}", 2 * steps).reshape(2, steps).astype(np.float32)
                ramp = np.arange(steps, dtype=np.float32) * (4 - 8 * label)
                np.save(root / split / name / f"{number}.npy", ramp + noise * np.array([[1.0], [0.25]], np.float32))
    return root


def sentence(name: str) -> tuple[str, int]:
    """1 to 10 words and the class, which the first word decides."""
    length, first, *rest = (int(value) for value in drawn(f"sentence {name}", 12))
    words = [first % 20, *(20 + value % (WORDS - 20) for value in rest[: length % 10])]
    return " ".join(f"w{word}" for word in words), int(first % 20 >= 10)


def write_sentences(root: Path, train: int = 24, val: int = 12) -> Path:
    """train.jsonl and validation.jsonl with a sentence and its label."""
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("validation", val)):
        rows = (sentence(f"{split} {number}") for number in range(count))
        lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
        (root / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def write_running_text(root: Path, words: int = 300) -> Path:
    """train.txt and valid.txt: each word is the one before it and 1, 2 or 3 more."""
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid"):
        steps = np.cumsum(drawn(f"running {split}", words).astype(np.int64) % 3 + 1) % WORDS
        (root / f"{split}.txt").write_text(" ".join(f"w{word}" for word in steps))
    return root
