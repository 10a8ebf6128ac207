"""The tables of reference/verbs.md, config.md and attacks.md and of studies.md, made whenever the docs are built.

.venv/bin/python docs/make_reference.py verbs    (or config, attacks) prints a page; flags counts every flag;
glossary prints docs/glossary.md, models prints docs/models.json, and models_table the table of docs/models.md.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import situs
from situs.audit import ATTACKS, Knowledge, create_attack, create_defence
from situs.audit.attacks.base import Refused
from situs.audit.registry import attacks_table
from situs.audit.text.result import NAME as TEXT_ATTACK
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.cli.main import SECTIONS, verb_type
from situs.cli.parser.flags import Flag, configured_of, flags_of, metavar_of, texts_of
from situs.config import Checked, choices_of
from situs.errors import SitusError
from situs.limits import Rule
from situs.pages.glossary import glossary_page
from situs.studies.plan import load_study, study_names
from situs.train.assemble import RunConfig

HEADER = {"verbs": ("flag", "default", "meaning"), "config": ("field", "type", "default", "meaning")}
SPECIAL = re.compile(r"([|*$<>\[\]])")


def verbs_page() -> str:
    """Every verb: what it does, and its flags."""
    lines: list[str] = []
    for heading, verbs in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for verb in verbs:
            lines += [f"### situs {verb}", "", *_verb(verb_type(verb))]
    return "\n".join(lines)


def _verb(kind: type[Any]) -> Iterator[str]:
    held = configured_of(kind)
    flags = flags_of(kind, every=True)
    yield from _prose(inspect.getdoc(kind) or "")
    if held is not None and issubclass(held[1].cls, RunConfig):  # two hundred flags, told once
        flags = [flag for flag in flags if flag.in_args or not flag.group]
        yield "Every field of [a training's config](config.md#a-training) is a flag too, as `--optim.lr 1e-3`."
        yield ""
    yield from _table(HEADER["verbs"], ((_flag(flag), _shown(flag.default), _text(flag.help)) for flag in flags))


def flags_page() -> str:
    """Every flag that verbs have by themselves, how it is written, and in how many verbs it stands."""
    verbs: dict[str, list[str]] = {}
    written: dict[str, set[str]] = {}
    for verb in (verb for section in SECTIONS.values() for verb in section):
        for flag in flags_of(verb_type(verb)):
            if not flag.positional and (flag.in_args or "." not in flag.name):
                verbs.setdefault(flag.name, []).append(verb)
                written.setdefault(flag.name, set()).add("" if flag.kind is bool else flag.metavar)
    most = sorted(verbs, key=lambda name: (-len(verbs[name]), name))
    rows = ((_code(name), str(len(verbs[name])), _text(", ".join(sorted(written[name])))) for name in most)
    return "\n".join(_table(("flag", "verbs", "value"), rows))


def _flag(flag: Flag) -> str:
    if flag.positional:
        return _code(flag.metavar)
    return _code(flag.name if flag.kind is bool else f"{flag.name} {flag.metavar}")


def config_page() -> str:
    """Every config: first those of a training, by the tables of its file, then each other class by its module."""
    told: set[type[Any]] = set()
    about = "Each is a table of the TOML file that `--config` takes; a method's fields stand beside its `name`."
    lines = ["## A training", "", about, ""]
    for table in _tables(RunConfig, ""):
        lines += _config(f"### {table.title}", table.cls, table.prefix, told)
    lines += ["## Other settings", "", "Arguments of the functions and flags of the verbs named with each.", ""]
    for cls in config_classes():
        if cls not in told and not issubclass(cls, RunConfig):
            lines += _config(f"### {cls.__module__}.{cls.__name__}", cls, "", told)
    return "\n".join(lines)


class Table(NamedTuple):
    """A table of a training's file. prefix: what stands before its fields in a flag, as `data.audio.`."""

    title: str
    cls: type[Any]
    prefix: str


def _tables(cls: type[Any], prefix: str) -> Iterator[Table]:
    """The config itself, then each config in it, a method's by its name."""
    yield Table(f"`[{prefix.rstrip('.')}]`" if prefix else "The run", cls, prefix)
    held, choices = get_type_hints(cls), choices_of(cls)
    for each in fields(cls):
        below = f"{prefix}{each.name}."
        if each.name in choices:
            options = choices[each.name].options
            for name in sorted(options):
                if options[name].__module__.startswith("situs."):  # and not another package's
                    yield Table(f'`[{below[:-1]}]` with `name = "{name}"`', options[name].Config, below)
        elif is_dataclass(held[each.name]):
            yield from _tables(held[each.name], below)  # pyright: ignore[reportArgumentType]


def config_classes() -> list[type[Any]]:
    """Every config of the package (each derives from `Checked`), by module."""
    for module in pkgutil.walk_packages(situs.__path__, "situs."):
        if not module.name.endswith("__main__"):
            with suppress(ModuleNotFoundError) if find_spec("triton") is None else nullcontext():
                import_module(module.name)  # kernels need Triton, which not every torch brings
    found, waiting = set(), [Checked]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found |= {cls for cls in below if is_dataclass(cls) and cls.__module__.startswith("situs.")}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__name__))


def _config(heading: str, cls: type[Any], prefix: str, told: set[type[Any]]) -> Iterator[str]:
    told.add(cls)
    texts, kinds = texts_of(cls), get_type_hints(cls, include_extras=True)
    rows = [
        (f"`{prefix}{each.name}`", _kind(kinds[each.name]), _shown(_default(each)), _text(texts[each.name]))
        for each in fields(cls)
        if each.name not in choices_of(cls) and not is_dataclass(kinds[each.name])
    ]
    yield from (heading, "", f"`{cls.__module__}.{cls.__name__}`", "", *_prose(cls.__doc__ or ""))
    if rows:
        yield from _table(HEADER["config"], rows)


def _default(each: Any) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _kind(kind: Any) -> str:
    """The words of a type, and its limits."""
    if kind is bool:
        return "yes or no"
    limits = ", ".join(dict.fromkeys(rule.allowed for rule in _rules(kind)))
    return _code(metavar_of(kind)) + (f", {_text(limits)}" if limits else "")


def _rules(kind: Any) -> Iterator[Rule]:
    for note in (*get_args(kind), *getattr(kind, "__metadata__", ())):
        if isinstance(note, Rule):
            yield note
        elif note is not kind:
            yield from _rules(note)


# --- Markdown -----------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    if value is MISSING:
        return "must be given"
    if value in (None, "", ()) or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        value = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return _code(value)


def _code(text: object) -> str:
    return f"`{str(text).replace('|', chr(92) + '|')}`"  # a bare bar would end the cell


def _text(text: str) -> str:
    """One line of ours as Markdown: what stands between backticks stays as it is, else signs stand for themselves."""
    parts = " ".join(text.split()).split("`")
    plain = [
        SPECIAL.sub(r"\\\1", part) if index % 2 == 0 else part.replace("|", r"\|") for index, part in enumerate(parts)
    ]
    return "`".join(plain)


def _prose(text: str) -> Iterator[str]:
    """A docstring's paragraphs; an indented one is shown as it is."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        drawn = paragraph.startswith("    ")
        yield from (("```text", inspect.cleandoc(paragraph), "```") if drawn else (_text(paragraph),))
        yield ""


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    header = tuple(header)
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell.replace(chr(10), ' ') for cell in row)} |"
    yield ""


def attacks_page() -> str:
    """Every attack of every scenario, and the papers around them."""
    table = attacks_table()
    rows = ([_text(cell) for cell in row] for row in table.cells()[1:])
    lines = ["## Ours", "", *_table(map(str, table.header), rows), "## Neighbours in the literature", ""]
    papers = tomllib.loads((Path(__file__).parent / "neighbours.toml").read_text(encoding="utf-8"))["neighbours"]
    header = ("name", "paper", "threat model", "what it does", "here")
    return "\n".join([*lines, *_table(header, ([_text(cell) for cell in paper.values()] for paper in papers))])


# --- models.json ---------------------------------------------------------------------------------------------

SHALLOW = ({"depth": 2}, {})
"""Arguments that leave few blocks of a timm model, the first that it takes; the depth does not change what applies."""

MODEL_TYPES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "embedding_size": 32,
    "mlp_ratio": 2,
}
"""Sizes of the small models of text; each config takes those that it knows. Models of images keep their width, since
attacks compare it with the number of tokens."""


def models() -> dict[str, Any]:
    """`models.json`: every family of models that the contract tests open, and what applies to it.

    Models to which the same applies are one entry of `kinds`.
    """
    import timm

    kinds: dict[str, dict[str, Any]] = {}
    for library, name in contract_models():
        entry = {"library": library, **model_entry(library, name)}
        kinds.setdefault(json.dumps(entry, sort_keys=True), {**entry, "names": []})["names"].append(name)
    ordered = sorted(kinds.values(), key=lambda kind: (kind["library"], kind["class"], kind["names"][0]))
    return {"timm": timm.__version__, "kinds": ordered}


def contract_models() -> list[tuple[str, str]]:
    """(library, name) of every model that the contract tests open: timm's names, and transformers' classes."""
    from situs.backbones.hf.create import FAMILIES  # tests/backbones/hf/test_create.py opens each of them

    tests = Path(__file__).parents[1] / "tests" / "contracts" / "test_backbones.py"
    names = re.findall(r'^    "(\w+)": dict\(', tests.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [*(("timm", name) for name in names), *(("transformers", name) for name in FAMILIES)]


def model_entry(library: str, name: str) -> dict[str, Any]:
    """What applies to one model: class, positions, methods, locks and attacks, and why the others do not."""
    import torch

    from situs.models.describe import describe

    with torch.device("meta"):
        backbone = _small(library, name)
    info = describe(backbone)
    reasons = {verdict.name: verdict.reason for verdict in (*info.methods, *info.locks) if not verdict.holds}
    images = "images" not in backbone.refusals
    attacks = _image_attacks(_small(library, name)) if images else _text_attacks(backbone)
    reasons |= {attack: reason for attack, reason in attacks.items() if reason}
    return {
        "class": type(backbone.model).__name__,
        "positions": info.facts["position"],
        "methods": [verdict.name for verdict in info.methods if verdict.holds],
        "locks": [verdict.name for verdict in info.locks if verdict.holds],
        "attacks": [attack for attack, reason in attacks.items() if not reason],
        "reasons": {key: reason.replace(backbone.name, "it") for key, reason in sorted(reasons.items())},
    }


def _small(library: str, name: str) -> Backbone:
    """A model of this name or class with few blocks; one of transformers is narrow too."""
    if library == "transformers":
        import transformers

        kind = getattr(transformers, name)
        known = inspect.signature(kind.config_class.__init__).parameters
        sizes = MODEL_TYPES if "vocab_size" in known else {"num_hidden_layers": MODEL_TYPES["num_hidden_layers"]}
        config = kind.config_class(**{key: value for key, value in sizes.items() if key in known})
        if name.startswith("AST"):  # its patches must not overlap
            config.frequency_stride = config.time_stride = config.patch_size
        config.architectures = [name]
        return create_backbone(config)
    for arguments in SHALLOW:
        try:
            return create_backbone(name, model_args=arguments)
        except SitusError as error:
            refusal = error
    raise refusal


def _image_attacks(backbone: Backbone) -> dict[str, str]:
    """Attack on gradients of images -> why it does not apply, "" if it does; without a defence but for the prior's."""
    known = {"patchembed-prior": Knowledge(defence=create_defence("noise=1e-3"))}
    size = backbone.input.shape or (224, 224)
    names = [name for name, _ in backbone.named_parameters()]
    answers = {}
    for attack in (name for name, kind in ATTACKS.items() if not kind.active):
        ready = create_attack(attack).prepare(backbone, names, replace(known.get(attack, Knowledge()), size=size))
        answers[attack] = ready.reason if isinstance(ready, Refused) else ""
    return answers


def _text_attacks(backbone: Backbone) -> dict[str, str]:
    """The attack on gradients of sentences -> why it does not apply to this class, "" if it does."""
    kind = type(backbone.model).__name__
    causal = "context" in backbone.refusals
    bare = causal and kind.endswith("Model") and "LMHead" not in kind
    return {TEXT_ATTACK: "it has no head to train" if bare else ""}


def models_page() -> str:
    """The table of docs/models.md: a row for each kind of `models.json`."""
    kinds = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))["kinds"]
    every = {name for kind in kinds if kind["library"] == "timm" for name in kind["methods"]}  # of images
    passive = {name for name, attack in ATTACKS.items() if not attack.active}
    rows: dict[tuple[str, ...], tuple[dict[str, str], list[str]]] = {}
    for kind in kinds:
        answers = {key: ", ".join(kind[key]) or "none" for key in ("positions", "methods", "locks", "attacks")}
        if len(lacking := sorted({*every} - {*kind["methods"]})) < len(every) / 2:
            answers["methods"] = f"all but {', '.join(lacking)}" if lacking else "all"
        if len(lacking := sorted(passive - {*kind["attacks"]})) < len(passive) / 2:
            answers["attacks"] = f"all but {', '.join(lacking)}" if lacking else "all"
        if not kind["attacks"]:
            answers["attacks"] = f"none: {kind['reasons'].get(TEXT_ATTACK, 'see models.json')}"
        family = f"`{kind['class']}`" if kind["library"] == "timm" else kind["library"]
        reasons = sorted(kind["reasons"]) if kind["library"] == "timm" else []
        rows.setdefault((family, *answers.values(), *reasons), (answers, []))[1].extend(kind["names"])
    table = [
        [key[0], f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else ""), *answers.values()]
        for key, (answers, names) in rows.items()
    ]
    header = ["class", "models", "positions", "methods", "locks", "attacks on gradients"]
    return "\n".join(_table(header, table))


def studies_page() -> str:
    """Every study: what it shows of which paper, and what is missing."""
    lines = ["## Every study", ""]
    by_paper: dict[str, list[tuple[str, str, str]]] = {}
    for name in study_names():
        study = load_study(name, configs=False)
        missing = dict.fromkeys(each.package + ("" if each.whole else " (in part)") for each in study.missing)
        title = f"{study.place}: {study.title}" if study.paper else study.title
        by_paper.setdefault(study.paper, []).append((f"`{name}`", _text(title), _text(", ".join(missing)) or "–"))
    for paper, rows in by_paper.items():
        lines += _table((_text(paper) or "of Situs", "shows", "missing"), rows)
    return "\n".join(lines)


def api_page() -> str:
    """The functions and modules of `api.toml`, as directives of autodoc."""
    listed = tomllib.loads((Path(__file__).parent / "api.toml").read_text(encoding="utf-8"))
    functions = [".. automodule:: situs.api", "   :members: pretrain, finetune, adapt, export, open_model"]
    parts = {"The functions of `situs`": functions + _directives("autofunction", listed["functions"])}
    parts |= {title: _directives("automodule", modules) for title, modules in listed["modules"].items()}
    blocks = [["", f"## {title}", "", "```{eval-rst}", *lines, "```"] for title, lines in parts.items()]
    return "\n".join(line for block in blocks for line in block)


def _directives(kind: str, names: list[str]) -> list[str]:
    """A line for each name, and `:no-index:` for a name that begins with a minus sign."""
    lines: list[str] = []
    for name in names:
        lines += [f".. {kind}:: situs.{name.removeprefix('-')}", *(["   :no-index:"] if name.startswith("-") else [])]
    return lines


PAGES = {
    "api": api_page,
    "reference/verbs": verbs_page,
    "reference/config": config_page,
    "reference/attacks": attacks_page,
    "studies": studies_page,
}
"""Pages of the docs -> what makes their tables."""


def add_tables(app: object, name: str, source: list[str]) -> None:
    """Sphinx's event `source-read`: what is written by hand opens the page, the tables follow."""
    if name in PAGES:
        source[0] = f"{source[0]}\n{PAGES[name]()}"


if __name__ == "__main__":
    if sys.argv[1] == "flags":
        sys.exit(print(flags_page()))
    if sys.argv[1] == "glossary":
        sys.exit(print(glossary_page(), end=""))
    if sys.argv[1] == "models":
        sys.exit(print(json.dumps(models(), indent=1, ensure_ascii=False)))
    if sys.argv[1] == "models_table":
        sys.exit(print(models_page()))
    hand = Path(__file__).parent / "reference" / f"{sys.argv[1]}.md"
    print(f"{hand.read_text(encoding='utf-8')}\n{PAGES[f'reference/{sys.argv[1]}']()}")
