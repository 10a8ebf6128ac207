"""From the words of a command line to a verb's `Args`.

A verb with a config derives from `Recipe` and has one field made by `configured`:

    @dataclass(frozen=True)
    class Args(Recipe):
        data: Path
        config: PretrainConfig = configured(PretrainConfig)

Every field of the config is then a flag of the verb (`--batch 32`, `--optim.lr 1e-3`, `--method.mask-ratio .5`)
with the preset's and the user's TOML values as defaults, and each `choice` in it is a flag by itself:
`--method mae` says whose fields the `--method.*` flags are. `--help` shows the everyday flags, `--help optim` those of
a group with the values they have under that preset and method, `--help all` all of them.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import tyro

from situs.cli.helptext import (
    asked_topic,
    check_topic,
    everyday,
    free_flags,
    free_tables,
    groups_of,
    narrowed,
    other_flags,
    presets_text,
)
from situs.cli.mistakes import WIDE, sentence
from situs.config import Choice, choices_of, from_dict, merge
from situs.errors import SitusError
from situs.files import read_toml
from situs.presets import load_preset

T = TypeVar("T")
Ground = tuple[str, Callable[[Path], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a verb's config starts from: preset < TOML file < flags."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """A recipe that comes with situs (--help presets); flags override it."""

    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="FILE")] = None
    """A TOML file of your own, laid over the preset."""


@dataclass(frozen=True)
class _Configured:
    cls: type[Any]
    run_flag: str | None
    ground: Ground | None


def configured(cls: type[Any], run_flag: str | None = None, ground: Ground | None = None) -> Any:
    """The field of `Args` that holds the resolved config; every field of `cls` needs a default.

    run_flag: the flag (as "resume") whose value is a run folder; its config.json then replaces the preset.
    ground: a flag (as "from") and what makes of its value the tables that lie below the preset.
    """
    spec = _Configured(cls, run_flag, ground)
    return field(default_factory=cls, kw_only=True, metadata={"situs.configured": spec})


def parse(args_type: type[T], argv: Sequence[str], prog: str, description: str = "") -> T:
    """The verb's Args. Prints help and exits with 0, or what is wrong and exits with 2."""
    own: tuple[Field[Any], ...] = fields(args_type)  # pyright: ignore[reportArgumentType]
    found = [(f.name, f.metadata["situs.configured"]) for f in own if "situs.configured" in f.metadata]
    topic = asked_topic(argv)
    if not found:
        if topic is not None:
            return _tyro(everyday(args_type), ["--help"], prog, description)
        return _tyro(args_type, argv, prog, description)
    [(name, spec)] = found
    start = start_of(spec.cls, argv, spec.run_flag, spec.ground)
    layered = _layered_type(args_type, name, start)
    if topic is not None:
        _help(layered, name, start, topic, prog, description, _peek(argv, "--preset"))
    result = _tyro(layered, argv, prog, description)
    return args_type(**{f.name: getattr(result, f.name) for f in own})


def _help(
    args_type: type[Any], name: str, start: Any, topic: str, prog: str, description: str, preset: str | None
) -> NoReturn:
    """Prints what `topic` asks for, with the values that preset, file and chosen method give; exits with 0."""
    check_topic(topic, start)
    if topic == "presets":
        print(presets_text(preset))
        raise SystemExit(0)
    text = f"The flags --{topic}.* and their values." if topic in groups_of(start) else description
    try:
        _tyro(narrowed(args_type, name, start, topic), ["--help"], prog, text)
    except SystemExit:
        if below := free_flags(start, topic) if topic else other_flags(start, prog):
            print(below)
        raise
    raise AssertionError("the parser exits when asked for help")


def start_of(cls: type[T], argv: Sequence[str], run_flag: str | None = None, ground: Ground | None = None) -> T:
    """The config before flags: preset < TOML, or a run's own config, with the choices that `argv` names."""
    choices = choices_of(cls)
    preset, toml = _peek(argv, "--preset"), _peek(argv, "--config")
    run = _peek(argv, f"--{run_flag}") if run_flag else None
    layers: dict[str, Any] = {}
    sources = []
    if run is not None:
        if preset or toml:
            raise SitusError(f"--{run_flag} {run} brings the run's own config: leave out --preset and --config")
        from situs.train.checkpoint import read_config  # torch, which other verbs' flags do without

        sources.append(str(Path(run) / "config.json"))
        layers = read_config(Path(run))
    elif ground is not None and (given := _peek(argv, f"--{ground[0]}")) is not None:
        layers = ground[1](Path(given))
    if preset is not None:
        sources.append(f"preset {preset}")
        layers = merge(layers, load_preset(preset), choices)
    if toml is not None:
        sources.append(toml)
        layers = merge(layers, read_toml(toml), choices)
    for path in choices:
        if (name := _peek(argv, _flag(path))) is not None:
            layers = merge(layers, _nested(f"{path}.name", name), choices)
    for path in free_tables(cls):
        layers = merge(_nested_values(path, argv), layers, choices)
    return from_dict(cls, layers, where=" + ".join(sources))


def _nested_values(path: str, argv: Sequence[str]) -> dict[str, Any]:
    """The keys of a free table that `argv` gives a value, in tables: the parser only knows keys that are there."""
    values: dict[str, Any] = {}
    prefix = f"{_flag(path)}."
    for word in argv:
        if word.startswith(prefix):
            flag, key = word.partition("=")[0], word.removeprefix(prefix).partition("=")[0].replace("-", "_")
            values[key] = _literal(_peek(argv, flag) or "")
    return _nested(path, values) if values else {}


def _literal(text: str) -> Any:
    """A number or true or false where the text is one, or else the text itself."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _layered_type(args_type: type[Any], name: str, start: Any) -> type[Any]:
    """`args_type` with the config's start as its default, and one more flag for each choice in the config."""
    cls: type[Any] = type(start)
    # An empty name keeps the config's own name out of the flags: --batch, not --config.batch.
    whole = (
        name,
        Annotated[cls, tyro.conf.arg(name="")],
        field(default_factory=lambda: start, kw_only=True),
    )
    added = [_choice_field(index, path, chosen, start) for index, (path, chosen) in enumerate(choices_of(cls).items())]
    return make_dataclass(args_type.__name__, [whole, *added], bases=(args_type,), frozen=True)


def _choice_field(index: int, path: str, chosen: Choice, start: Any) -> tuple[str, Any, Any]:
    held = start
    for key in path.split("."):
        held = getattr(held, key)
    text = f"{', '.join(sorted(chosen.options))}; --help {path} shows the flags of the one chosen."
    names = Literal[tuple(sorted(chosen.options))]  # pyright: ignore[reportInvalidTypeForm]
    kind = Annotated[names, tyro.conf.arg(name=_flag(path).removeprefix("--"), metavar="NAME", help=text)]
    return f"choice_{index}", kind, field(default=chosen.name_of(held), kw_only=True)


def _tyro(args_type: type[T], argv: Sequence[str], prog: str, description: str) -> T:
    """tyro's parser; what is wrong comes out as a SitusError of one sentence, that of a config as itself."""
    complaints = io.StringIO()
    asks = {"-h", "--help"} & set(argv)
    try:
        with contextlib.redirect_stderr(complaints), nullcontext() if asks else _columns(WIDE):
            return tyro.cli(args_type, args=list(argv), prog=prog, description=description or None)
    except SystemExit as stop:
        if asks:
            raise
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, SitusError):
                raise cause from None
            cause = cause.__context__
        raise SitusError(sentence(complaints.getvalue(), argv, prog)) from None


@contextlib.contextmanager
def _columns(count: str) -> Iterator[None]:
    """The width that the parser takes the terminal to have."""
    held = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = count
    try:
        yield
    finally:
        if held is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = held


def _peek(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a flag that takes one, before any parser runs."""
    value = None
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")


def _nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: _nested(rest, value) if rest else value}
