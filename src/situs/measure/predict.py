"""The predicted class of every sample and its probability, for data with or without labels."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from situs.config import checks_arguments
from situs.data.open import open_source
from situs.data.sampler import sample_of
from situs.data.sources.base import Source
from situs.data.sources.memory import addressed
from situs.data.text import Columns
from situs.errors import SitusError
from situs.files import write_result
from situs.measure.accuracy import check_numbers, logits_of
from situs.models.data import AnyData, AnyModel, check_kind, load_any, opened
from situs.models.inference import evaluating
from situs.models.model import check_classifier
from situs.train.distributed import Precision


class Prediction(NamedTuple):
    """path: of the sample below the data's folder, or its file and row. name: of the predicted class, None where the
    sample could not be read. probability: of that class, in [0, 1]."""

    path: str
    name: str | None
    probability: float | None


@dataclass(frozen=True)
class Predictions:
    """rows: one per sample, in the data's order, broken ones too. classes: of the model. left_out: sentences on what
    could not be read."""

    rows: tuple[Prediction, ...]
    classes: tuple[str, ...]
    left_out: Sequence[str] = ()

    @property
    def broken(self) -> list[str]:
        """The paths of the samples that could not be read."""
        return [row.path for row in self.rows if row.name is None]

    @property
    def counts(self) -> dict[str, int]:
        """How often each class was predicted, the most frequent first."""
        return dict(Counter(row.name for row in self.rows if row.name is not None).most_common())

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes path, class and probability as csv; a broken sample has only its path."""
        check_csv(path)
        file = io.StringIO()
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("path", "class", "probability"))
        for row in self.rows:
            table.writerow((row.path, *(("", "") if row.name is None else (row.name, f"{row.probability:.6f}"))))
        return write_result(Path(path), file.getvalue().encode("utf-8", "backslashreplace"))


def check_csv(path: str | os.PathLike[str]) -> None:
    """Refuses an output file that is no .csv, before the work is done."""
    if Path(path).suffix.lower() != ".csv":
        raise SitusError(field="out", value=str(path), allowed="a file ending in .csv")
    if Path(path).is_dir():
        raise SitusError(f"out={path}: must be a file ending in .csv, but is a folder", field="out")


@checks_arguments("data")
def predict(
    model: AnyModel,
    data: AnyData = None,
    *,
    out: str | os.PathLike[str] | None = None,
    split: str = "all",
    count: int | None = None,
    batch: int = 256,
    precision: Precision = "fp32",
    text: Columns | Mapping[str, str] | None = None,
) -> Predictions:
    """Predicts the class of every image, clip or sentence, with its probability; labels are not used.

    model: a classifier, whatever `open_model` takes. data: a path or a source; None for the samples that a run was
    trained on. out: a csv file to write as well. split: train, val or test; by default all. text: the columns of
    sentences. count: at most so many samples, the same every time. batch: samples per batch. precision: fp32, or bf16
    for autocast.

    >>> predictions = situs.predict("runs/ft", count=20, out="predictions.csv")
    >>> len(predictions.rows), len(predictions.classes)
    (20, 10)
    """
    if out is not None:
        check_csv(out)
    model = opened(model)
    check_classifier(model)
    place: str | Path | Source | None = addressed(data)
    source = place if isinstance(place, Source) else _open(model, place, split, text)
    loader = load_any(model, source, count=count, batch=batch)
    names, shares, rows = [], [], []
    with evaluating(model.backbone):
        for part in loader:
            logits = logits_of(model.backbone, part, precision)
            best = logits.float().softmax(dim=-1).max(dim=-1)
            shares.append(best.values)
            names.append(best.indices)
            rows.append(sample_of(part.ids))
    shares = torch.cat(shares).tolist()
    check_numbers(model.name, sum(shares))
    classes = model.classes or tuple(map(str, range(logits.shape[-1])))
    named = {row: (classes[name], share) for row, name, share in
             zip(torch.cat(rows).tolist(), torch.cat(names).tolist(), shares, strict=True)}  # fmt: skip
    source = loader.source
    every = tuple(Prediction(_path(source, row), *named.get(row, (None, None))) for row in range(len(source)))
    predictions = Predictions(every, tuple(classes), source.left_out())
    if out is not None:
        predictions.write(out)
    return predictions


def _open(model: Any, data: str | Path | None, split: str, text: Columns | Mapping[str, str] | None) -> Source:
    """The samples without their labels, as the model reads them."""
    config = model.samples
    if not (data or config.path):
        things = config.modality.things
        raise SitusError(
            f"{model.name}: is not a run, so its data is not known; give the {things} to classify", field="data"
        )
    config = config.read_as(model.name, {"text": text})
    config = replace(config.modality.unlabelled(config), path=str(data or config.path))
    check_kind(model, config)
    return open_source(config, split, labels=False)


def _path(source: Source, row: int) -> str:
    """The sample's key; for sentences, whose key is the sentence itself, the file and the row."""
    if source.things != "sentences":
        return source.key(row)
    whole, number = source.origin(row)
    return Path(getattr(whole, "entry", str)(number)).name
