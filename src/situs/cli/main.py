"""`situs`: finds the verb and runs it.

A verb is a module with a frozen dataclass `Args` and a function `run(args) -> int | None`. Its module, cyclopts and
torch are imported only when it is called: `situs --help` reads the dict below and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from situs.cli.ranks import hush, run_on_ranks
from situs.errors import SitusError

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Start": {
        "demo": ("situs.cli.demo.run", "see it all on a small set of real images; writes demo/report.html"),
    },
    "Train": {
        "pretrain": ("situs.cli.pretrain", "train a method (MP3, MAE, …) on your images, from a preset and flags"),
        "finetune": ("situs.cli.finetune", "classes, masks, objects or the next word, on a pretrained model"),
        "adapt": ("situs.cli.adapt", "the best classifier of public weights, own images and few labels"),
        "export": ("situs.cli.export", "a run's model in a folder that timm or transformers loads"),
    },
    "Data": {
        "data check": ("situs.cli.data.check", "broken, odd and repeated images of a set, before a run finds them"),
        "data pack": ("situs.cli.data.pack", "any set as shards of shrunk images: parquet or WebDataset"),
    },
    "Evaluate": {
        "predict": ("situs.cli.evaluate.predict", "the class of every image, with its probability, as a csv file"),
        "features": (
            "situs.cli.evaluate.features",
            "features of every image, pooled or by patch, as one safetensors file",
        ),
        "evaluate accuracy": (
            "situs.cli.evaluate.accuracy",
            "top-1 and balanced accuracy of a fine-tuned run",
        ),
        "evaluate consistency": ("situs.cli.evaluate.consistency", "what shuffled patches do to a classifier, over γ"),
        "evaluate position": (
            "situs.cli.evaluate.position",
            "how well a DropPos or MP3 run knows its patches' places",
        ),
        "evaluate knn": ("situs.cli.evaluate.knn", "nearest neighbours on the features of each layer"),
        "evaluate probe": ("situs.cli.evaluate.probe", "places, classes or masks that a linear classifier reads off"),
        "evaluate perplexity": ("situs.cli.evaluate.perplexity", "how unsure a language model is of the next word"),
        "evaluate objects": ("situs.cli.evaluate.objects", "COCO's AP of a detection, the worst images first"),
        "evaluate segments": ("situs.cli.evaluate.segments", "mIoU of a segmentation, the worst images first"),
        "evaluate robustness": (
            "situs.cli.evaluate.robustness",
            "corrupted, adversarial and unknown images: mCE, ImageNet-A, ImageNet-O",
        ),
        "evaluate ensemble": ("situs.cli.evaluate.ensemble", "several fine-tuned runs, each alone and together"),
    },
    "Analyze": {
        "analyze attention": ("situs.cli.analyze.attention", "where a model's heads look: over images, by offset"),
        "analyze reconstruct": ("situs.cli.analyze.reconstruct", "the jigsaw puzzles an MP3 or DropPos run solves"),
        "analyze positions": ("situs.cli.analyze.positions", "a model's position vectors: pictures, spectrum, reading"),
        "analyze correlation": ("situs.cli.analyze.correlation", "how alike the features of two places are"),
    },
    "Lock": {
        "verify": (
            "situs.cli.locks.verify",
            "which permutations of tokens and channels a model obeys, and why not others",
        ),
        "key new": ("situs.cli.locks.key_new", "a new key in a file that only you may read"),
        "lock": ("situs.cli.locks.lock", "a model that is useless without its key; obfuscation, not encryption"),
        "unlock": ("situs.cli.locks.unlock", "a locked model opened with its key, bit for bit"),
        "audit lock": (
            "situs.cli.audit.lock",
            "attack a lock as one without its key would, and say what is left of it",
        ),
    },
    "Split": {
        "split certs": ("situs.cli.split.certs", "throw-away certificates for a server and its clients"),
        "split serve": ("situs.cli.split.serve", "a model's blocks, for clients that keep their images and labels"),
        "split train": ("situs.cli.split.train", "train with a server's blocks; images and labels stay here"),
        "split infer": ("situs.cli.split.infer", "accuracy of such a training, with the server at work"),
        "split merge": ("situs.cli.split.merge", "the client's and the server's part as one ordinary run"),
    },
    "Audit": {
        "audit positions": ("situs.cli.audit.positions", "how much a model knows and gives away of position"),
        "audit split": ("situs.cli.audit.split", "what the server of split learning learns of the samples"),
        "audit gradients": ("situs.cli.audit.gradients", "what a model's gradients give away, with a gate for CI"),
        "audit curve": ("situs.cli.audit.curve", "the strength of a defence at which attacks on gradients stop"),
    },
    "Study": {
        "study list": ("situs.cli.study.list", "every table and figure of the papers: what it shows, needs and gave"),
        "study run": ("situs.cli.study.run", "repeat one: the paper's numbers, ours and the difference on a page"),
        "study show": ("situs.cli.study.show", "the table of a study as it stands"),
        "study pack": ("situs.cli.study.pack", "a study's folder as a few small files, for another machine"),
        "study unpack": ("situs.cli.study.unpack", "such files laid into a study's folder, to go on there"),
    },
    "Speed": {
        "bench step": ("situs.cli.bench.step", "what a training step costs: time, memory, share of the ceiling"),
        "bench compare": ("situs.cli.bench.compare", "two tables of steps: what became faster or slower"),
        "bench cost": ("situs.cli.bench.cost", "how a step's cost grows with batch, image size, depth and patches"),
    },
    "Look": {
        "report": ("situs.cli.analyze.report", "several runs side by side on one page, finished or still going"),
        "play": ("situs.cli.play", "a page that runs a small model: move patches, see its guesses, lock it"),
        "info": ("situs.cli.info", "what a model is made of, and which methods and locks apply to it"),
        "doctor": ("situs.cli.doctor", "what is installed here, what is missing and how to get it"),
        "completion": ("situs.cli.parser.completion", "a script that completes verbs and flags in your shell"),
    },
}
"""heading -> verb -> (module, one line). A verb may have two words: "evaluate ensemble"."""

RETIRED = {
    "audit finetuning": "situs study run lock fine-tunes a locked model with its key, without it and from scratch",
    "split cost": "situs study run st-figure8 counts a step, and python benchmarks/split.py --count one with a server",
}
"""verb that is gone -> what does its work."""

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


def find_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that opens `words` and what follows it; a group ("evaluate") only alone or before --help."""
    for count in (2, 1):
        verb = " ".join(words[:count])
        if len(words) >= count and verb in VERBS:
            return verb, list(words[count:])
    for count in (2, 1):
        if (verb := " ".join(words[:count])) in RETIRED:
            raise SitusError(f"situs {verb}: is no verb any more: {RETIRED[verb]}")
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
    module = import_module(VERBS[verb][0])
    parse: Callable[..., Any] = import_module("situs.cli.parser.arguments").parse
    try:
        return module.run(parse(module.Args, rest, prog=f"situs {verb}", description=module.__doc__)) or 0
    except SystemExit as stop:  # help was asked for
        return stop.code if isinstance(stop.code, int) else 2
    except SitusError as error:
        explained: Callable[..., str] = import_module("situs.cli.parser.flags").explained
        raise SitusError(explained(error, module.Args), field=error.fields, value=error.value) from error


def _example(verb: str, _: list[str]) -> int:
    modules = {each: module for each, (module, _) in VERBS.items()}
    print("\n".join(import_module("situs.cli.examples").examples_of(verb, modules)))
    return 0


def overview(group: str = "") -> str:
    """The list of verbs, or of those in one group."""
    width = max(map(len, VERBS)) + 2
    name = f"situs {group}".strip()
    lines = [f"usage: {name} VERB [FLAGS]      {name} VERB --help"]
    if not group:
        lines += [
            "",
            "Position in transformers: learn from it, measure what it gives away, use the freedom it leaves.",
        ]
    for heading, verbs in SECTIONS.items():
        shown = {verb: text for verb, (_, text) in verbs.items() if not group or verb.startswith(f"{group} ")}
        if shown:
            lines += ["", heading, *(f"  {verb:<{width}}{text}" for verb, text in shown.items())]
    if not group:
        lines += [
            "",
            "Every verb takes --quiet (errors alone), --json (one document), --example (a command to run).",
            "situs --version prints the version; SITUS_DEBUG=1 shows where a mistake was found.",
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
