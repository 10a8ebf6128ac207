"""An export: the model alone, in its library's own format, with a model card.

timm:          model.safetensors under timm's own parameter names, config.json in timm's format, README.md;
               `timm.create_model("local-dir:DIR", pretrained=True)` needs nothing of Situs.
transformers:  what `save_pretrained` writes, preprocessor_config.json (how its images are prepared), and README.md.

What a method adds is left out, and so is a classifier that was never trained. A method with a classifier of its own
(segmentation) has its parts in situs_method.safetensors, which only Situs reads. A method that never uses positions
(MP3) leaves the table at its random initialisation: its patch rows are zeroed, so that the library's own forward gives
the trained features. The folder is written under another name and renamed.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from situs import __version__
from situs.backbones.base import Backbone
from situs.config import to_dict
from situs.data.preparation import Preparation
from situs.data.tokeniser import FILES, Tokeniser, tokeniser_files
from situs.errors import SitusError, verb
from situs.files import read_json, write_text
from situs.methods import classifies
from situs.methods.base import Method
from situs.train.checkpoint import Checkpoint
from situs.train.checkpoint.files import sync
from situs.train.checkpoint.state import check_fit

WEIGHTS, CONFIG, CARD, POSITIONS = "model.safetensors", "config.json", "README.md", "situs_positions.safetensors"
PREPARED, PARTS = "preprocessor_config.json", "situs_method.safetensors"
MULTI_LABEL = {"problem_type": "multi_label_classification"}
"""Entry of a config.json for multi-label classes: transformers' own, written to timm's file too."""

TRAINING_ONLY = ("drop_path_rate", "drop_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate")
"""Arguments of the model that belong to its training and are not exported."""

KEPT = ("fixed_input_size", "interpolation", "crop_mode", "pool_size", "classifier", "first_conv")
"""Entries of timm's own description that stay true; its licence, source and paper are another model's."""


@dataclass(frozen=True)
class ModelProvenance:
    """Where a model comes from.

    method: its name. data: name of the set. recipe: the run's config as plain tables. metrics: the last numbers of its
    log. step: updates made. ema: whether the weights are the mean of the run's. prepared: how its samples are prepared.
    classes: their names. protected: how the training protected its samples, one sentence each.
    """

    method: str
    data: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    ema: bool = False
    prepared: Preparation = field(default_factory=Preparation)
    classes: Sequence[str] | None = None
    protected: Sequence[str] = ()


@dataclass(frozen=True)
class Export:
    """What was written. notes: what a user of it must know, one sentence each.

    error: largest relative difference between its outputs and the model's, where it was checked. differs: whether the
    library's own forward differs from the trained one, as the notes say.
    """

    path: Path
    library: str
    notes: list[str] = field(default_factory=list)
    architecture: str = ""
    step: int | None = None
    error: float | None = None
    differs: bool = False


def load_checkpoint(method: Method, checkpoint: Checkpoint, *, ema: bool | None = None) -> bool:
    """Puts a checkpoint's weights into `method`. Returns whether they are the mean of the weights (EMA).

    ema: True asks for the mean and refuses where there is none, None takes it where there is one.
    """
    mean = checkpoint.tensors("ema") if ema is not False else {}
    if ema and not mean:
        raise SitusError(
            f"{checkpoint.path.name} has no moving average of the weights (EMA), because the run did not compute one",
            field="ema",
        )
    values = checkpoint.tensors("model") | mean
    check_fit(checkpoint.path.name, method.state_dict(), {name: value.shape for name, value in values.items()})
    method.load_state_dict(values)
    state = method.state_dict()
    for name, value in mean.items():  # last: a tied tensor has a second name, which the mean does not have
        state[name].copy_(value)
    return bool(mean)


def write_export(
    method: Method,
    folder: str | Path,
    provenance: ModelProvenance,
    *,
    force: bool = False,
    check: Callable[[Export], float | None] = lambda _: None,
) -> Export:
    """Writes the backbone of `method` to `folder` for the library it came from; see the file's head.

    provenance: for the model card. force: replace an export that is already there. check: opens what was written,
    before it is renamed to `folder`, and returns its error; where it raises, nothing is left.
    """
    folder = Path(folder)
    library = method.backbone.source.get("library")
    if library not in ("timm", "transformers"):
        raise SitusError(
            f"{method.backbone.name} cannot be exported, because Situs does not know the constructor of the wrapped "
            "module; create the model with create_backbone(name, …)"
        )
    backbone = copy.deepcopy(method.backbone).cpu()
    notes, has_positions = _erase_unused_positions(backbone, method, sentences=provenance.prepared.modality.ids)
    with new_folder(folder, force) as draft:
        if library == "timm":
            notes += _write_timm(draft, backbone, method, provenance)
        else:
            notes += _write_transformers(draft, backbone, method, provenance)
        if classifies(type(method)):
            state = method.state_dict()
            _save(draft / PARTS, {name: value for name, value in state.items() if not name.startswith("backbone.")})
            notes.append(
                f"The parts that the method {provenance.method} added are in {PARTS}. Only Situs reads this file; "
                f"{library} does not."
            )
        write_text(draft / CARD, card(backbone, provenance, notes))
        differs = has_positions or (draft / POSITIONS).is_file()
        export = Export(draft, library, notes, method.backbone.source["architecture"], provenance.step, differs=differs)
        error = check(export)
    return replace(export, path=folder, error=error)


@contextmanager
def new_folder(folder: Path, force: bool, files: tuple[str, ...] = (WEIGHTS, CONFIG, CARD)) -> Iterator[Path]:
    """A temporary folder to write to, renamed to `folder` at the end, or deleted where anything fails.

    force: replace a folder that has these `files`; any other folder that is not empty is refused.
    """
    _check_target(folder, force, files)
    draft = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for file in draft.iterdir():
            sync(file)
        _replace(folder, draft)
    except (OSError, SafetensorError) as error:
        raise SitusError(f"{folder}: the export could not be written: {error}", field="out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _erase_unused_positions(backbone: Backbone, method: Method, *, sentences: bool) -> tuple[list[str], bool]:
    """Zeroes positions that the training did not use; gives notes for the user, and whether any kind remains."""
    if method.sees_positions or "tokens" in backbone.refusals:
        return [], False
    kinds = backbone.positions().kinds
    remaining = backbone.erase_positions()
    notes = []
    if erased := [kind for kind in kinds if kind not in remaining]:
        notes.append(
            "The model was trained without positions. Its "
            f"{' and '.join(map(_WORDS.__getitem__, erased))} {verb(len(erased), 'were')} not trained, "
            f"so this export contains zeros as the entries of the {'words' if sentences else 'patches'}"
            f"{'' if remaining else ', and the forward pass of the library gives the trained features'}. "
            f"{_GIVE_WORDS if sentences else _GIVE}"
        )
    if remaining:
        notes.append(
            "The model was trained without positions. But the forward pass of the library (timm or transformers) still "
            f"applies the {' and '.join(map(_WORDS.__getitem__, remaining))}, because an export can set only "
            "weights to zero. Therefore the library's forward pass does not give the trained features. The "
            "command `situs features` gives them."
        )
    return notes, bool(remaining)


_GIVE = "To fine-tune with positions, first replace the zero entries with new position embeddings."
_GIVE_WORDS = (
    "To fine-tune with positions, start from the run instead of this export: in the run, these entries were not set "
    "to zero."
)
_WORDS = {"table": "position table", "bias": "relative position bias", "rotary": "rotation"}


def _write_timm(folder: Path, backbone: Backbone, method: Method, provenance: ModelProvenance) -> list[str]:
    model, notes = backbone.model, []
    state = model.state_dict()
    classes = model.num_classes
    if "label" not in method.needs_targets and classes:
        named = model.pretrained_cfg.get("classifier") or ()
        names = tuple(f"{name}." for name in ((named,) if isinstance(named, str) else named))
        state = {name: tensor for name, tensor in state.items() if not name.startswith(names)}
        classes = 0
        notes.append("The model has no classifier, because the run did not train a classifier.")
    config = timm_config(backbone, classes, provenance)
    config["situs"] = _situs_entries(method, provenance)
    write_text(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _save(folder / WEIGHTS, state)
    positions = {name: tensor for name, tensor in backbone.state_dict().items() if not name.startswith("model.")}
    if positions:
        _save(folder / POSITIONS, positions)
        notes.append(
            f"The trained position table is in {POSITIONS}, which only Situs reads. timm has no absolute position "
            "table for this architecture, so timm computes the features without the table."
        )
    return notes


def _situs_entries(method: Method, provenance: ModelProvenance) -> dict[str, Any]:
    """The entries of a config.json that only Situs reads."""
    entries = {"version": __version__, "method": provenance.method, "positions": method.sees_positions}
    if share := provenance.recipe.get("data", {}).get("held_out"):
        entries |= {"held_out": share}  # so that the model is always evaluated on what it never learned
    if classifies(type(method)):
        entries |= {"settings": to_dict(method.config)}
    return entries | provenance.prepared.to_situs()


def timm_config(backbone: Backbone, classes: int, provenance: ModelProvenance) -> dict[str, Any]:
    """timm's config.json: the architecture, its arguments, and how its images are prepared."""
    model, source = backbone.model, backbone.source
    pretrained: Mapping[str, Any] = model.pretrained_cfg
    arguments = {name: value for name, value in source["model_args"].items() if name not in TRAINING_ONLY}
    channels, size = backbone.input.channels, backbone.input.shape or tuple(pretrained["input_size"][1:])
    described = {name: pretrained[name] for name in KEPT if name in pretrained}
    if channels != 3:
        # timm would take these weights for three channels and average, or drop, them.
        described["first_conv"] = None
    described |= {"input_size": [channels, *size], **provenance.prepared.to_timm(pretrained, channels)}
    described |= {"num_classes": classes}
    config = {
        "architecture": source["architecture"],
        "num_classes": classes,
        "num_features": model.num_features,
        "model_args": arguments | {"num_classes": classes},
        "pretrained_cfg": described,
    }
    if classes and provenance.classes is not None:
        config["label_names"] = list(provenance.classes)
    if classes and provenance.prepared.multi_label:
        config |= MULTI_LABEL
    if situs := provenance.prepared.to_situs():
        config["situs"] = situs
    try:
        return json.loads(json.dumps(config))
    except TypeError as error:
        raise SitusError(f"model_args={arguments}: cannot be written to a config.json: {error}") from None


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """safetensors' own writer, with the mode and the errors of an ordinary file (it leaves 0600 and wraps errors)."""
    try:
        save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: I/O error: ")) from error
    path.chmod(0o644)


def _write_transformers(folder: Path, backbone: Backbone, method: Method, provenance: ModelProvenance) -> list[str]:
    from situs.backbones.hf.layers import quietly
    from situs.backbones.hf.text import DecoderBackbone

    headed = bool({"label", "words"} & {*method.needs_targets})
    model = backbone.model if headed else backbone.model.base_model
    backbone.source = {**backbone.source, "architecture": type(model).__name__}
    model.config.situs = _situs_entries(method, provenance)
    if "label" in method.needs_targets and provenance.classes is not None:
        model.config.id2label = dict(enumerate(provenance.classes))
        model.config.label2id = {name: number for number, name in enumerate(provenance.classes)}
        if provenance.prepared.multi_label:
            model.config.update(MULTI_LABEL)
    if provenance.prepared.tokeniser is not None:
        tokeniser = Tokeniser(provenance.prepared.tokeniser)
        with tokeniser_files(tokeniser.folder) as source:
            for name in FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
        if provenance.prepared.to_situs()["text"].get("pair") and getattr(backbone, "segments", False):
            # A generic tokeniser gives token types only where its settings name them.
            file, names = folder / "tokenizer_config.json", ["input_ids", "token_type_ids", "attention_mask"]
            settings = {**(read_json(file) if file.is_file() else {}), "model_input_names": names}
            write_text(file, json.dumps(settings, indent=2) + "\n")
        last = isinstance(backbone, DecoderBackbone) and "label" in method.needs_targets
        if last or model.config.pad_token_id is None:  # by which transformers finds a sentence's last token
            model.config.pad_token_id = tokeniser.pad
    with quietly():
        model.save_pretrained(folder)
    if backbone.input.shape is not None and model.main_input_name == "pixel_values":
        prepared = provenance.prepared.to_hf(backbone.input.shape, backbone.input.channels)
        write_text(folder / PREPARED, json.dumps(prepared, indent=2) + "\n")
    return [] if headed else ["The model has no classifier, because the run did not train a classifier."]


def _check_target(folder: Path, force: bool, expected: tuple[str, ...]) -> None:
    """Refuses a target that is not empty; with `force`, one that is no export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SitusError(f"{folder}: is a file; an export is a folder", field="out")
    names = {path.name for path in folder.iterdir()}
    if names and not force:
        raise SitusError(
            f"{folder}: is not empty; set force to replace the export, or choose another folder",
            field=("force", "out"),
        )
    if names and not {*expected} <= names:
        raise SitusError(f"{folder}: is not empty and contains no export, so it is not replaced", field="out")


def _replace(folder: Path, draft: Path) -> None:
    """Renames `draft` to `folder`, which it replaces."""
    sync(draft)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)


# --- the model card: what it is, what made it, how to load it; it names no path of this machine ----------------------

_NOT_ON_CARD = frozenset(
    {"step", "epoch", "lr", "seconds", "images_per_second", "data_wait", "memory_gib", "loss_scale", "epsilon"}
)
"""Entries of the log about the run, not its outcome; ε is given for all steps, even where an earlier one was chosen."""


def last_metrics(records: Iterable[Mapping[str, Any]], step: int) -> dict[str, float]:
    """The newest value of each number in a log's records, up to update `step`."""
    metrics: dict[str, float] = {}
    for record in records:
        if record["step"] <= step:
            metrics |= {n: v for n, v in record.items() if isinstance(v, int | float) and n not in _NOT_ON_CARD}
    return metrics


def card(backbone: Backbone, provenance: ModelProvenance, notes: Sequence[str]) -> str:
    """The model card in Markdown, with the header that model hubs read."""
    library, architecture = backbone.source["library"], backbone.source["architecture"]
    parts = [
        f"---\nlibrary_name: {library}\n{_task(provenance)}tags:\n- situs\n- {provenance.method}\n---",
        f"# {architecture}, trained with the method {provenance.method}",
        _what(backbone, provenance),
        *notes,
        "## Loading it",
        _loading(library, architecture),
    ]
    if provenance.metrics:
        rows = [f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in provenance.metrics.items()]
        parts += ["## Last logged values up to this checkpoint", "\n".join(["| metric | value |", "|---|---|", *rows])]
    if provenance.recipe:
        recipe = json.dumps(public(provenance.recipe), indent=2, ensure_ascii=False)
        parts += ["## Recipe", f"Situs {__version__}, with this config:", f"```json\n{recipe}\n```"]
    return "\n\n".join(parts) + "\n"


def _task(provenance: ModelProvenance) -> str:
    """The hub's name of the task, where it has one."""
    if not provenance.prepared.modality.pixels or provenance.prepared.modality.labelled_unit:
        return ""
    trained = provenance.classes is not None and provenance.method in ("supervised", "mjp", "mjp-official")
    return f"pipeline_tag: image-{'classification' if trained else 'feature-extraction'}\n"


def _what(backbone: Backbone, provenance: ModelProvenance) -> str:
    count = sum(parameter.numel() for parameter in backbone.model.parameters())
    facts = [f"- Parameters: {count:,}"]
    facts += [f"- {line}" for line in provenance.prepared.facts(backbone.input.shape, backbone.input.channels)]
    if provenance.data:
        facts.append(f"- Data: {last_name(provenance.data)}")
    if provenance.prepared.multi_label and provenance.classes is not None:
        many = "any number of them per image (multi-label): the sigmoid of an output is the probability of its class"
        facts.append(f"- Classes: {len(provenance.classes)}, {many}")
    if (unit := provenance.prepared.modality.labelled_unit) and provenance.classes is not None:
        facts.append(f"- Classes: {len(provenance.classes)}, one for each {unit}")
    if provenance.step is not None:
        facts.append(f"- Updates: {provenance.step:,}")
    facts.append(
        f"- Weights: {'the moving average (EMA) of' if provenance.ema else 'those of'} the exported checkpoint"
    )
    return "\n".join([*facts, *(f"- {sentence}" for sentence in provenance.protected)])


def _loading(library: str, architecture: str) -> str:
    if library == "timm":
        code = 'import timm\n\nmodel = timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True)'
    else:
        code = (
            f'from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("PATH_OF_THIS_FOLDER")'
        )
    return f"```python\n{code}\n```"


def public(value: Any) -> Any:
    """A config's tables with every path cut to its last name, so that a card names no folders of a machine."""
    if isinstance(value, Mapping):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    return last_name(value) if isinstance(value, str) else value


def last_name(text: str) -> str:
    """The last part of a path with / or \\; other text unchanged."""
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2] or text
