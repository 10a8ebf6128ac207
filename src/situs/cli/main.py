"""`situs`: finds the verb and runs it.

A verb is a frozen dataclass: its fields are the flags, its docstring is the help, and its method `run` does the work
and gives the exit status, None for 0. Its module, cyclopts and torch are imported only when it is called:
`situs --help` reads the dict below and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from situs.cli.retired import VERBS as RETIRED
from situs.errors import SitusError

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Start": {
        "demo": ("situs.cli.demo.run:Demo", "a tour on small images; writes demo/report.html"),
        "info": ("situs.cli.look:Info", "a model's parts, and which methods and locks apply"),
        "doctor": ("situs.cli.install:Doctor", "what is installed, what is missing, how to get it"),
        "completion": ("situs.cli.install:Completion", "shell completion for verbs and flags"),
    },
    "Train": {
        "data check": ("situs.cli.data:Check", "find broken, unusual and duplicate images"),
        "data pack": ("situs.cli.data:Pack", "pack a data set into shards of smaller images"),
        "pretrain": ("situs.cli.train:Pretrain", "pretrain with a method (MP3, MAE, …) on your images"),
        "finetune": ("situs.cli.train:Finetune", "train for classes, masks, objects or the next word"),
        "adapt": ("situs.cli.train:Adapt", "the best classifier from public weights and few labels"),
        "export": ("situs.cli.export:Export", "write a folder that timm, transformers or ONNX loads"),
    },
    "Evaluate": {
        "predict": ("situs.cli.evaluate:Predict", "write the class of every image to a csv file"),
        "features": ("situs.cli.evaluate:Features", "extract features of images or patches to one file"),
        "evaluate accuracy": ("situs.cli.evaluate:Accuracy", "top-1, mIoU, AP or perplexity, depending on the model"),
        "evaluate knn": ("situs.cli.evaluate:Knn", "k-nearest-neighbour accuracy of each layer's features"),
        "evaluate probe": ("situs.cli.evaluate:Probe", "linear probe on frozen features"),
        "evaluate consistency": ("situs.cli.evaluate:Consistency", "how predictions change when patches are shuffled"),
        "evaluate robustness": (
            "situs.cli.evaluate:Robustness",
            "corrupted, adversarial, out-of-distribution images",
        ),
        "evaluate position": ("situs.cli.evaluate:Position", "how much a model knows about position"),
        "evaluate attention": ("situs.cli.evaluate:Attention", "attention maps, and similarity between positions"),
        "evaluate reconstruct": ("situs.cli.evaluate:Reconstruct", "jigsaw puzzles solved by an MP3 or DropPos run"),
        "report": ("situs.cli.look:Report", "compare several runs on one page"),
        "play": ("situs.cli.look:Play", "a page that runs a small model in the browser"),
    },
    "Audit": {
        "audit gradients": ("situs.cli.audit:Gradients", "what gradients reveal about images; a gate for CI"),
        "audit texts": ("situs.cli.audit:Texts", "what gradients reveal about sentences"),
        "audit sweep": ("situs.cli.audit:Sweep", "how strong a defence must be"),
        "audit split": ("situs.cli.audit:Split", "what the server of split learning can learn"),
        "audit lock": ("situs.cli.audit:Lock", "attack a lock without its key"),
    },
    "Lock": {
        "keygen": ("situs.cli.keys:Keygen", "make a key file that only you can read"),
        "lock": ("situs.cli.keys:Lock", "permute a model's channels by a key (obfuscation)"),
        "unlock": ("situs.cli.keys:Unlock", "restore a locked model with its key, bit for bit"),
    },
    "Split": {
        "split certs": ("situs.cli.keys:Certs", "temporary certificates, to try out split learning"),
        "split serve": ("situs.cli.split:Serve", "serve a model's blocks to clients that keep their data"),
        "split train": ("situs.cli.split:Train", "train with a server's blocks; your data stays here"),
        "split infer": ("situs.cli.split:Infer", "measure accuracy, or generate text, through the server"),
        "split merge": ("situs.cli.split:Merge", "join the client's and the server's part into one run"),
    },
    "Study": {
        "study run": ("situs.cli.study:Run", "reproduce a paper's table or figure"),
        "study show": ("situs.cli.study:Show", "the table of a study, or a list of all studies"),
        "bench": ("situs.cli.bench:Bench", "time and memory of a training step; compare two results"),
    },
}
"""heading -> verb -> (module:class, one line). A verb may have two words: "evaluate accuracy"."""

VERBS = {verb: entry for section in SECTIONS.values() for verb, entry in section.items()}

HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()  # a closed pipe is noticed here, not while the interpreter shuts down
    except SitusError as error:
        if os.environ.get("SITUS_DEBUG"):
            raise
        print(f"situs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("situs: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `situs … | head`: the reader has closed the pipe, which is no mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in HELP:
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"situs {import_module('situs').__version__}")
        return 0
    if words[0] == "--install-completion":
        words = ["completion", *words[1:], "--install"]
    try:
        verb, arguments = find_verb(words)
    except SitusError as error:
        if "--json" in words:
            print(import_module("json").dumps({"error": str(error)}, indent=2, ensure_ascii=False))
        raise
    if verb not in VERBS:  # a group alone, such as `situs evaluate`
        print(overview(verb))
        return 0 if arguments else 2
    return run_verb(verb, arguments)


def verb_type(verb: str) -> type[Any]:
    """The class of a verb."""
    module, _, name = VERBS[verb][0].partition(":")
    return getattr(import_module(module), name)


def find_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb at the start of `words`, and its arguments; a group ("evaluate") only alone or before --help."""
    for count in (2, 1):
        verb = " ".join(words[:count])
        if verb in RETIRED:
            raise SitusError(f"situs {verb} was removed: {RETIRED[verb]}")
        if len(words) >= count and verb in VERBS:
            return verb, list(words[count:])
    group = any(verb.startswith(f"{words[0]} ") for verb in VERBS)
    if group and (len(words) == 1 or words[1] in HELP):
        return words[0], list(words[1:])
    raise _unknown_verb(words, group)


def run_verb(verb: str, arguments: list[str]) -> int:
    """Imports the verb's module, parses its flags and runs it."""
    quiet_torch()
    shell = import_module("situs.cli.shell")
    return run_on_ranks(verb, lambda: shell.run_with_output(arguments, lambda: _work(verb, arguments)))


def _check_data(verb: str, arguments: Sequence[str]) -> None:
    """Refuses a --data path that does not exist before torch is imported, which takes seconds."""
    if "torch" in sys.modules or verb.startswith("study ") or any(word in HELP for word in arguments):
        return  # torch is loaded already, or the --data of a study holds NAME=PATH
    paths = [arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word == "--data"]
    paths += [word.removeprefix("--data=") for word in arguments if word.startswith("--data=")]
    for path in paths[-1:]:
        is_local = path and path != "samples" and not path.startswith("-") and "://" not in path
        if is_local and not os.path.exists(os.path.expanduser(path)):  # noqa: PTH110, PTH111  (pathlib costs the start)
            raise SitusError(f"{path}: no such folder or file (--data)", field="data")


def _work(verb: str, arguments: list[str]) -> int:
    _check_data(verb, arguments)
    kind = verb_type(verb)
    parse: Callable[..., Any] = import_module("situs.cli.parser.arguments").parse
    try:
        return parse(kind, arguments, prog=f"situs {verb}").run() or 0
    except SystemExit as stop:  # after --help
        return stop.code if isinstance(stop.code, int) else 2
    except SitusError as error:
        with_flags: Callable[..., str] = import_module("situs.cli.parser.flags").with_flags
        raise SitusError(with_flags(error, kind), field=error.fields, value=error.value) from error
    except OSError as error:
        if (refused := _refused(error, arguments)) is None:
            raise
        raise refused from error
    except (TypeError, NotImplementedError, RuntimeError) as error:
        if "MPS" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0][:160]
        raise SitusError(f"device=mps: torch cannot compute this on mps ({reason}); use --device cpu") from error


def _refused(error: OSError, arguments: Sequence[str]) -> SitusError | None:
    """The sentence for a path of the arguments that the system refuses, or a file in it: its name is too long, it is a
    circle of links, permission is denied. None for any other file."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, word in zip(["", *words], words, strict=False):
        named = (os.path.abspath(os.path.expanduser(path)) for path in word.split(","))  # noqa: PTH100, PTH111
        file = error.filename if isinstance(error.filename, str) else ""
        if error.strerror and any(f"{os.path.abspath(file)}/".startswith(f"{path}/") for path in named):  # noqa: PTH100
            ending = f" ({flag})" if flag.startswith("--") else ""
            return SitusError(f"{file}: cannot be used: {error.strerror.lower()}{ending}")
    return None


def overview(group: str = "") -> str:
    """The list of verbs, or of those in one group."""
    width = max(map(len, VERBS)) + 2
    name = f"situs {group}".strip()
    lines = [f"usage: {name} VERB [FLAGS]      {name} VERB --help"]
    if not group:
        lines.append("Situs pretrains, audits and locks transformers by their position information.")
    for heading, verbs in SECTIONS.items():
        listed = {verb: text for verb, (_, text) in verbs.items() if not group or verb.startswith(f"{group} ")}
        if listed:
            lines += ["", heading, *(f"  {verb:<{width}}{text}" for verb, text in listed.items())]
    if not group:
        lines += [
            "",
            "Every verb takes --quiet (only errors) and --json (one JSON document).",
            "situs --version prints the version.",
            "SITUS_DEBUG=1 shows the traceback of an error.",
        ]
    return "\n".join(lines)


def _unknown_verb(words: Sequence[str], group: bool) -> SitusError:
    """group: whether the first word is a group, so that the second one is unknown."""
    from difflib import get_close_matches

    name = " ".join(words[: 1 + group])
    if group and (os.sep in words[1] or os.path.exists(words[1])):  # noqa: PTH110  (pathlib costs the start)
        verbs = ", ".join(verb.removeprefix(f"{words[0]} ") for verb in VERBS if verb.startswith(f"{words[0]} "))
        return SitusError(
            f"situs {words[0]}: a verb is missing before {words[1]}; verbs: {verbs} (situs {words[0]} --help)"
        )
    tried = (" ".join(words[:2]), words[0])
    close = next((matches[0] for text in tried if (matches := get_close_matches(text, VERBS, n=1))), None)
    hint = "; verbs: " + ", ".join(sorted(VERBS)) if close is None else f"; did you mean {close!r}?"
    return SitusError(f"unknown verb {name!r}{hint} (situs --help)")


# --- under torchrun all ranks run a verb in `SHARED`; any other verb runs on the first rank alone ---


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
