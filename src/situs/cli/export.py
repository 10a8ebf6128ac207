"""`situs export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.errors import counted


@dataclass(frozen=True)
class Export:
    """Write a model to a folder that timm, transformers or an ONNX runtime can load without Situs.

    For example: situs export runs/ft --out exported
    """

    source: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The training run to export. ONNX exports also accept a model folder or a timm model name with its weights
    (NAME=FILE)."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder, which must be new or empty."""

    form: Annotated[Literal["timm", "hf", "onnx"] | None, Parameter(name="--format")] = None
    """Format of the export: timm, hf (transformers) or onnx. Default: the library that the model comes from."""

    features: Literal["logits", "pooled", "patches"] | None = None
    """Output of the ONNX graph: logits, pooled (one vector per image) or patches (one vector per patch). Default:
    logits if the model has a classifier, otherwise pooled."""

    ema: bool = True
    """If the run has a moving average of the weights (EMA), export this average."""

    force: bool = False
    """Replace an existing export."""

    def run(self) -> None:
        """Writes the export, loads it again as a check, and prints how to load it."""
        from situs.models.export import export_model

        options = {
            "form": self.form,
            "features": self.features,
            "ema": None if self.ema else False,
            "force": self.force,
        }
        export = export_model(self.source, self.out, **options)
        after = "" if export.step is None else f" after {counted(export.step, 'updates')}"
        print(f"{self.out}: {export.architecture}{after}")
        for note in export.notes:
            print(note)
        if export.error is not None:
            differ = f"its outputs differ from the original model's by at most {export.error:.1e} (relative)"
            print(f"The export was loaded again with {export.library}: {differ}.")
        if export.library == "timm":
            print(f'Load it with timm.create_model("local-dir:{self.out}", pretrained=True).')
        elif export.library == "transformers":
            print(f'Load it with transformers.{export.architecture}.from_pretrained("{self.out}").')
