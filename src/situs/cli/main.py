"""`situs`: finds the verb and runs it.

A verb is a frozen dataclass: its fields are the flags, its docstring is the help, and its method `run` does the work
and gives the exit status, None for 0. Its module, cyclopts and torch are imported only when it is called:
`situs --help` reads the dict below and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from situs.cli.ranks import hush, run_on_ranks
from situs.cli.retired import VERBS as RETIRED
from situs.errors import SitusError

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Start": {
        "demo": ("situs.cli.demo.run:Demo", "see it all on small images; writes demo/report.html"),
        "info": ("situs.cli.look:Info", "what a model is made of, which methods and locks apply"),
        "doctor": ("situs.cli.install:Doctor", "what is installed here, and how to get what is missing"),
        "completion": ("situs.cli.install:Completion", "a script that completes verbs and flags in your shell"),
    },
    "Train": {
        "data check": ("situs.cli.data:Check", "broken, odd and repeated images of a set, before a run"),
        "data pack": ("situs.cli.data:Pack", "any set as shards of shrunk images"),
        "pretrain": ("situs.cli.train:Pretrain", "train a method (MP3, MAE, …) on your images"),
        "finetune": ("situs.cli.train:Finetune", "classes, masks, objects or the next word"),
        "adapt": ("situs.cli.train:Adapt", "the best classifier of public weights and few labels"),
        "export": ("situs.cli.export:Export", "a folder that timm, transformers or ONNX loads"),
    },
    "Evaluate": {
        "predict": ("situs.cli.evaluate:Predict", "the class of every image, as a csv file"),
        "features": ("situs.cli.evaluate:Features", "features of every image or patch, as one file"),
        "evaluate accuracy": ("situs.cli.evaluate:Accuracy", "top-1, mIoU, AP or perplexity, by the model's kind"),
        "evaluate knn": ("situs.cli.evaluate:Knn", "nearest neighbours on the features of each layer"),
        "evaluate probe": ("situs.cli.evaluate:Probe", "what a linear classifier reads off frozen features"),
        "evaluate consistency": ("situs.cli.evaluate:Consistency", "what shuffled patches do to a classifier"),
        "evaluate robustness": ("situs.cli.evaluate:Robustness", "corrupted, adversarial and unknown images"),
        "evaluate position": ("situs.cli.evaluate:Position", "how much a model knows of position"),
        "evaluate attention": ("situs.cli.evaluate:Attention", "where heads look, and how alike two places are"),
        "evaluate reconstruct": ("situs.cli.evaluate:Reconstruct", "the jigsaw puzzles an MP3 or DropPos run solves"),
        "report": ("situs.cli.look:Report", "several runs side by side on one page"),
        "play": ("situs.cli.look:Play", "a page that runs a small model in the browser"),
    },
    "Audit": {
        "audit gradients": ("situs.cli.audit:Gradients", "what gradients give away of images; a gate for CI"),
        "audit texts": ("situs.cli.audit:Texts", "the same of sentences"),
        "audit sweep": ("situs.cli.audit:Sweep", "how strong a defence must be"),
        "audit split": ("situs.cli.audit:Split", "what the server of split learning learns"),
        "audit lock": ("situs.cli.audit:Lock", "attack a lock as one without its key would"),
    },
    "Lock": {
        "keygen": ("situs.cli.keys:Keygen", "a new key in a file that only you may read"),
        "lock": ("situs.cli.keys:Lock", "a model that is useless without its key (obfuscation)"),
        "unlock": ("situs.cli.keys:Unlock", "a locked model opened with its key, bit for bit"),
    },
    "Split": {
        "split certs": ("situs.cli.keys:Certs", "throw-away certificates, to try it out"),
        "split serve": ("situs.cli.split:Serve", "a model's blocks, for clients that keep their data"),
        "split train": ("situs.cli.split:Train", "train with a server's blocks; the data stays here"),
        "split infer": ("situs.cli.split:Infer", "accuracy of such a training, with the server"),
        "split merge": ("situs.cli.split:Merge", "the client's and the server's part as one run"),
    },
    "Study": {
        "study run": ("situs.cli.study:Run", "repeat a paper's table or figure"),
        "study show": ("situs.cli.study:Show", "its table as it stands; without a name: all there are"),
        "bench": ("situs.cli.bench:Bench", "what a training step costs: time, memory; comparisons"),
    },
}
"""heading -> verb -> (module:class, one line). A verb may have two words: "evaluate accuracy"."""

VERBS = {verb: entry for section in SECTIONS.values() for verb, entry in section.items()}

HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; gives its exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()  # a reader that is gone shows here and not in the interpreter's last breath
    except SitusError as error:
        if os.environ.get("SITUS_DEBUG"):
            raise
        print(f"situs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("situs: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `situs … | head`: no one reads on, which is no mistake
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
        verb, rest = find_verb(words)
    except SitusError as error:
        if "--json" in words:
            print(import_module("json").dumps({"error": str(error)}, indent=2, ensure_ascii=False))
        raise
    if verb not in VERBS:  # a group by itself
        print(overview(verb))
        return 0 if rest else 2
    return run_verb(verb, rest)


def verb_type(verb: str) -> type[Any]:
    """The class of a verb."""
    module, _, name = VERBS[verb][0].partition(":")
    return getattr(import_module(module), name)


def find_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that opens `words` and what follows it; a group ("evaluate") only alone or before --help."""
    for count in (2, 1):
        verb = " ".join(words[:count])
        if verb in RETIRED:
            raise SitusError(f"situs {verb} is gone: {RETIRED[verb]}")
        if len(words) >= count and verb in VERBS:
            return verb, list(words[count:])
    group = any(verb.startswith(f"{words[0]} ") for verb in VERBS)
    if group and (len(words) == 1 or words[1] in HELP):
        return words[0], list(words[1:])
    raise _unknown_verb(words, group)


def run_verb(verb: str, rest: list[str]) -> int:
    """Imports the verb's module, parses its flags and runs it."""
    hush()
    shell = import_module("situs.cli.shell")
    work = _work
    if shell.asked_in(rest, "example"):
        work = _example
    return run_on_ranks(verb, lambda: shell.speak(rest, lambda: work(verb, rest)))


def _check_data(verb: str, rest: Sequence[str]) -> None:
    """Refuses data that is nowhere before torch is imported, which takes seconds; what else is wrong is said later."""
    if "torch" in sys.modules or verb.startswith("study ") or any(word in HELP for word in rest):
        return  # nothing would be saved; the --data of studies gives names to paths
    places = [rest[at + 1] for at, word in enumerate(rest[:-1]) if word == "--data"]
    places += [word.removeprefix("--data=") for word in rest if word.startswith("--data=")]
    for place in places[-1:]:
        known = not place or place == "samples" or place.startswith("-") or "://" in place
        if not known and not os.path.exists(os.path.expanduser(place)):  # noqa: PTH110, PTH111  (as above)
            raise SitusError(f"{place}: no such folder or file (--data)", field="data")


def _work(verb: str, rest: list[str]) -> int:
    _check_data(verb, rest)
    kind = verb_type(verb)
    parse: Callable[..., Any] = import_module("situs.cli.parser.arguments").parse
    try:
        return parse(kind, rest, prog=f"situs {verb}").run() or 0
    except SystemExit as stop:  # help was asked for
        return stop.code if isinstance(stop.code, int) else 2
    except SitusError as error:
        explained: Callable[..., str] = import_module("situs.cli.parser.flags").explained
        raise SitusError(explained(error, kind), field=error.fields, value=error.value) from error


def _example(verb: str, _: list[str]) -> int:
    print("\n".join(import_module("situs.cli.examples").examples_of(verb, {v: at for v, (at, _) in VERBS.items()})))
    return 0


def overview(group: str = "") -> str:
    """The list of verbs, or of those in one group."""
    width = max(map(len, VERBS)) + 2
    name = f"situs {group}".strip()
    lines = [f"usage: {name} VERB [FLAGS]      {name} VERB --help"]
    if not group:
        lines += [
            "Position in transformers: learn from it, measure what it gives away, use it.",
        ]
    for heading, verbs in SECTIONS.items():
        shown = {verb: text for verb, (_, text) in verbs.items() if not group or verb.startswith(f"{group} ")}
        if shown:
            lines += ["", heading, *(f"  {verb:<{width}}{text}" for verb, text in shown.items())]
    if not group:
        lines += [
            "",
            "Every verb takes --quiet, --json (one document), --example (a command).",
            "situs --version prints the version; SITUS_DEBUG=1 shows where a mistake arose.",
        ]
    return "\n".join(lines)


def _unknown_verb(words: Sequence[str], group: bool) -> SitusError:
    """group: whether the first word is one, so that the second is what nobody knows."""
    from difflib import get_close_matches

    said = " ".join(words[: 1 + group])
    if group and (os.sep in words[1] or os.path.exists(words[1])):  # noqa: PTH110  (pathlib costs the start)
        verbs = ", ".join(verb.removeprefix(f"{words[0]} ") for verb in VERBS if verb.startswith(f"{words[0]} "))
        return SitusError(f"situs {words[0]} needs a verb before {words[1]}: {verbs} (situs {words[0]} --help)")
    tried = (" ".join(words[:2]), words[0])
    close = next((found[0] for text in tried if (found := get_close_matches(text, VERBS, n=1))), None)
    hint = "; verbs: " + ", ".join(sorted(VERBS)) if close is None else f"; did you mean {close!r}?"
    return SitusError(f"unknown verb {said!r}{hint} (situs --help)")
