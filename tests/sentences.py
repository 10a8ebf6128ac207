"""Small sets of sentences, for the tiny models of `tiny_texts`: a sentence's first word decides its class."""

from __future__ import annotations

import json
import random
from pathlib import Path


def lines(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Sentences of 1 to 12 words with their labels: w0 to w9 stand first in class 0, w10 to w19 in class 1."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        first = chance.randrange(20)
        rest = [f"w{chance.randrange(20, 55)}" for _ in range(chance.randrange(12))]
        found.append((" ".join([f"w{first}", *rest]), int(first >= 10)))
    return found


def write_set(folder: Path, train: int = 48, val: int = 20) -> Path:
    """train.jsonl and validation.jsonl with "sentence" and "label"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 1), ("validation", val, 2)):
        rows = [json.dumps({"sentence": text, "label": label}) for text, label in lines(count, seed)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def write_pairs(folder: Path, train: int = 48, val: int = 20) -> Path:
    """train.jsonl and validation.jsonl with "a", "b" and "label": whether the first words of both are of one class."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 1), ("validation", val, 2)):
        rows = [
            json.dumps({"a": a, "b": b, "label": ("other", "same")[one == two]})
            for (a, one), (b, two) in zip(lines(count, seed), lines(count, seed + 10), strict=True)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def write_plain(folder: Path, words: int = 300) -> Path:
    """train.txt and valid.txt: each word is the one before it, plus 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, first in (("train", 0), ("valid", 7)):
        (folder / f"{name}.txt").write_text(" ".join(f"w{(first + number) % 50}" for number in range(words)))
    return folder
