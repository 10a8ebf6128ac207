"""What torchrun's ranks do: all of them run a verb in `SHARED`; any other verb runs on the first rank alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from pathlib import Path

SHARED = frozenset(
    {
        "pretrain",
        "finetune",
        "evaluate accuracy",
        "evaluate consistency",
        "evaluate position",
    }
)
"""Verbs whose work is divided among the ranks; the first rank prints and writes."""

NAMES = ("RANK", "WORLD_SIZE")
"""Environment variables of torchrun, by which a process group is joined."""


def on_ranks() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in NAMES)


def quiet_torch() -> None:
    """Before torch is imported: its C++ code logs only errors, since every rank would repeat the warnings."""
    if on_ranks():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def run_on_ranks(verb: str, run: Callable[[], int | None]) -> int:
    """Runs the verb if this rank takes part in it; gives its exit status."""
    if not on_ranks():
        return run() or 0
    rank = int(os.environ["RANK"])
    if verb not in SHARED:
        if rank:
            return 0
        for name in NAMES:  # otherwise the first rank would wait for the others
            del os.environ[name]
        return run() or 0
    with ExitStack() as stack:
        if rank:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))))
        status = run() or 0
    import_module("situs.train.distributed").stop()
    return status
