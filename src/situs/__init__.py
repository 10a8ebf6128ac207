"""Position in transformers: pretrain with it, measure what training gives away, lock models and split their training.

    pretrain           Trains a method on images and returns the folder of the run.
    finetune           Trains a classifier, starting from a pretrained model, and returns the folder of the run.
    adapt              Finds the best classifier for your images and few labels, and returns the comparison.
    export             Writes a run's model to a folder that timm, transformers or ONNX loads, and returns the folder.
    open_model         Opens any model: a run, an export, a locked folder, a timm name, a model folder, your own module.
    predict            Predicts the class of every image, clip or sentence, with its probability; labels are not used.
    evaluate_accuracy  Measures the accuracy of a classifier on a split: top-1, balanced, and of each class.
    extract_features   Extracts the features of every sample of a split, with the samples' names and labels.
    verify             Measures to which permutations of tokens and channels a model is equivariant, and why not.
    new_key            Makes a key and writes it to a new file that only its owner can read (mode 0600).
    lock               Locks a model with a key into the new folder `out`; `unlock` restores its files bit for bit.
    unlock             Opens a locked folder with its key into the new folder `out`: the original files, bit for bit.
    audit_lock         Attacks a locked folder without its key, and measures what is left of the lock.
    audit_gradients    Measures what training gradients give away about images: every attack against every defence.
    audit_texts        Measures what gradients give away about sentences, with and without that of the word embedding.
    audit_split        Measures what the server of split learning can learn about samples, for each defence.
    find_defences      Finds the weakest setting of each defence that keeps every attack below a limit, and its cost.
    guard              Attacks the gradients of your own training loop every so many steps; raises or logs if they leak.
    publish            Writes the numbers, figures and page of a result, and returns the path of the page.

What measures or attacks returns a result: `print(result)` shows its findings, and `publish` writes its page. In the
examples "samples" are images that Situs brings, runs/mp3 and runs/ft are folders that `pretrain` and `finetune` wrote,
"exported" and "locked" those that `export` and `lock` wrote, and "bert" is a language model's folder with a tokeniser.

In the signatures `AnyModel` is whatever `open_model` takes, `AnyData` a path, "samples", or data in memory (`pretrain`
lists the kinds), and `AnyKey` a key or its file. psnr, in dB, is how close a recovered image is to its original: a
blind guess often has 8 to 15, and 200 means that every byte is right. "psnr=20" as a limit calls more than 20 a leak.

A mistake in an argument raises `SitusError`, a `ValueError` of one sentence. Everything else is in the packages below:
`situs.backbones` is one interface to the steps of every transformer, `situs.methods` holds the training methods, and
`situs.engines` has the guard for Flower and NVFlare; the API reference of the documentation lists them. pytest finds
the fixture `leak_gate`. In a shell, `situs --help` lists the same functions as commands.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from situs.api import adapt as adapt
    from situs.api import export as export
    from situs.api import finetune as finetune
    from situs.api import open_model as open_model
    from situs.api import pretrain as pretrain
    from situs.audit import audit_gradients as audit_gradients
    from situs.audit import audit_texts as audit_texts
    from situs.audit import find_defences as find_defences
    from situs.audit import guard as guard
    from situs.audit.split.audit import audit_split as audit_split
    from situs.errors import SitusError as SitusError
    from situs.locks import audit_lock as audit_lock
    from situs.locks import lock as lock
    from situs.locks import new_key as new_key
    from situs.locks import unlock as unlock
    from situs.locks import verify as verify
    from situs.measure import evaluate_accuracy as evaluate_accuracy
    from situs.measure import extract_features as extract_features
    from situs.measure import predict as predict
    from situs.pages import publish as publish

# The module of each public name, imported on first use, so that `import situs` does not import torch.
_HOMES = {
    "pretrain": "situs.api",
    "finetune": "situs.api",
    "adapt": "situs.api",
    "export": "situs.api",
    "open_model": "situs.api",
    "predict": "situs.measure",
    "evaluate_accuracy": "situs.measure",
    "extract_features": "situs.measure",
    "verify": "situs.locks",
    "new_key": "situs.locks",
    "lock": "situs.locks",
    "unlock": "situs.locks",
    "audit_lock": "situs.locks",
    "audit_gradients": "situs.audit",
    "audit_texts": "situs.audit",
    "audit_split": "situs.audit.split.audit",
    "find_defences": "situs.audit",
    "guard": "situs.audit",
    "publish": "situs.pages",
    "SitusError": "situs.errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'situs' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next look-up finds it
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
