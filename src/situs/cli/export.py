"""A run's model in a folder: `situs export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.errors import SitusError, counted


@dataclass(frozen=True)
class Export:
    """A model in a folder of its own that timm, transformers or an ONNX runtime loads without Situs.

    For example: situs export runs/ft --out exported
    """

    source: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The run folder; for ONNX any model's folder, or a timm name with its weights (NAME=FILE)."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The folder to write; it must not exist or be empty."""

    form: Annotated[Literal["timm", "hf", "onnx"] | None, Parameter(name="--format")] = None
    """timm, hf (transformers) or onnx; by default the library that the run's model is of."""

    features: Literal["logits", "pooled", "patches"] | None = None
    """What an ONNX graph gives: classes, one vector an image, or one a patch; by default classes where it has some."""

    ema: bool = True
    """The mean of the weights where there is one, or the weights themselves."""

    force: bool = False
    """Replace an export that is already there."""

    push: Annotated[str | None, Parameter(metavar="OWNER/NAME")] = None
    """Upload it to the Hugging Face hub too, where you are logged in; a new repository is private."""

    public: bool = False
    """With --push: a new repository is for all to see."""

    def run(self) -> None:
        """Writes the export, reads it again, says how to load it, and uploads it where that is asked for."""
        from situs.models.export import export_model
        from situs.models.hub import check_login, push_folder

        if self.public and self.push is None:
            raise SitusError("public: says who may see an upload, and none is asked for", field=("public", "push"))
        if self.push is not None:
            check_login(self.push)  # before the work is done
        asked = {"form": self.form, "features": self.features, "ema": None if self.ema else False, "force": self.force}
        export = export_model(self.source, self.out, **asked)
        after = "" if export.step is None else f" after {counted(export.step, 'updates')}"
        print(f"{self.out}: {export.architecture}{after}")
        for note in export.notes:
            print(note)
        if export.error is not None:
            print(f"Read again with {export.library}: its numbers differ by {export.error:.1e} of the largest at most.")
        if export.library == "timm":
            print(f'Load it with timm.create_model("local-dir:{self.out}", pretrained=True).')
        elif export.library == "transformers":
            print(f'Load it with transformers.{export.architecture}.from_pretrained("{self.out}").')
        if self.push is not None:
            print(push_folder(self.out, self.push, public=self.public))
