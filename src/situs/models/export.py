"""The model of a run in a folder of its own that timm or transformers loads without Situs."""

from __future__ import annotations

from pathlib import Path

from situs.config import to_dict
from situs.errors import SitusError
from situs.models.module import names_module
from situs.models.open import is_locked, model_folder
from situs.train.export import Export, ModelProvenance, last_metrics, write_export
from situs.train.run import is_run, load_run


def export_run(source: str | Path, to: str | Path, *, ema: bool | None = None, force: bool = False) -> Export:
    """Writes the run's model to the new folder `to`; any other model is refused with what it is instead.

    ema: the mean of the weights; None takes it where there is one. force: replace an export that is already there.
    """
    if not is_run(source):
        raise SitusError(f"{source}: holds no run; {_instead(str(source))}")
    config, method, folder, classes, checkpoint, averaged = load_run(source, ema=ema)
    provenance = ModelProvenance(
        method=config.method_name,
        data=config.data.path,
        recipe=to_dict(config),
        metrics=last_metrics(folder.records(), checkpoint.step),
        step=checkpoint.step,
        ema=averaged,
        classes=classes,
        multi_label=config.data.multi_label,
        tokeniser=config.data.text.tokeniser if config.data.kind == "text" else None,
        **config.data.told(),
    )
    return write_export(method, to, provenance, force=force)


def _instead(source: str) -> str:
    if is_locked(source):
        return "it is a locked folder, and situs unlock writes the model that it holds"
    if model_folder(source) is not None:
        return "it is a model's folder already, which its library loads as it is"
    if names_module(source):
        return "it is your own module, which no library makes again"
    if Path(source).exists():
        return "there is no config.json with checkpoints beside it"
    return "a model's name is all that its library needs to make it"
