"""Position in transformers: learn from it, measure what it gives away, use the freedom it leaves.

    pretrain           Trains a method on images; gives the folder of the run.
    finetune           Trains a classifier on a pretrained model; gives the folder of the run.
    adapt              Makes the best classifier of a model, own images and few labels; gives what was tried.
    export             Writes a run's model to a folder that timm or transformers loads; gives the folder.
    open_model         Opens any model: a run, an export, a locked folder, a name, a folder, your own module.
    predict            Names the class of every image, clip or sentence, with its probability; labels are not looked at.
    evaluate_accuracy  Measures top-1 and balanced accuracy of a classifier on a split, and which classes it knows.
    verify             Measures which permutations of its tokens and channels a model obeys, and what breaks the others.
    new_key            Draws a key and writes it to a new file that only its owner may read (mode 0600).
    lock               Locks a model with a key into the new folder `out`; its files come back bit for bit (`unlock`).
    unlock             Opens a locked folder into the new folder `out`: the files that were locked, bit for bit.
    audit_lock         Attacks a locked folder as somebody without its key would, and says what is left of the lock.
    audit_gradients    What a model's training gradients give away of images: every attack against every defence.
    audit_texts        What a model's training gradients give away of sentences, with or without the words' own.
    publish            Writes the numbers, the pictures and the page, the page last; gives its path.

A mistake in what you give is a `SitusError`, a `ValueError` of one sentence. All else lives in the packages below, such
as `situs.backbones`, one interface to the steps of every transformer, and `situs.methods`, the ideas to learn with; the
documentation's API reference lists them. In a shell, `situs --help` lists the same functions and more as commands.
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
    from situs.errors import SitusError as SitusError
    from situs.locks import audit_lock as audit_lock
    from situs.locks import lock as lock
    from situs.locks import new_key as new_key
    from situs.locks import unlock as unlock
    from situs.locks import verify as verify
    from situs.measure import evaluate_accuracy as evaluate_accuracy
    from situs.measure import predict as predict
    from situs.pages import publish as publish

# Where each public name lives; it is loaded on first use, so that `import situs` imports no torch.
_HOMES = {
    "pretrain": "situs.api",
    "finetune": "situs.api",
    "adapt": "situs.api",
    "export": "situs.api",
    "open_model": "situs.api",
    "predict": "situs.measure",
    "evaluate_accuracy": "situs.measure",
    "verify": "situs.locks",
    "new_key": "situs.locks",
    "lock": "situs.locks",
    "unlock": "situs.locks",
    "audit_lock": "situs.locks",
    "audit_gradients": "situs.audit",
    "audit_texts": "situs.audit",
    "publish": "situs.pages",
    "SitusError": "situs.errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'situs' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
