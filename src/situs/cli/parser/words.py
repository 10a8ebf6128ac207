"""The cyclopts parser of a verb's flags. It gives words; `situs.config` converts them, as it does for files."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import cyclopts
from cyclopts import App, Parameter

from situs.cli.parser.flags import Flag


def app_of(flags: Sequence[Flag], prog: str, about: str = "") -> App:
    """The parser of these flags; its help shows them in groups."""

    def verb(*_: Any, **__: Any) -> None:
        raise AssertionError("parsed, never called")

    positional = [flag for flag in flags if flag.positional]
    parameters = [
        inspect.Parameter(
            identifier(flag),
            inspect.Parameter.POSITIONAL_ONLY if flag.positional else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if flag.required else flag.default,
            annotation=_annotation(flag),
        )
        for flag in (*positional, *(flag for flag in flags if not flag.positional))
    ]
    verb.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    usage = " ".join([prog, *(flag.metavar for flag in positional), "[FLAGS]"])
    app = App(name=prog, help=about, usage=usage, help_flags=(), version_flags=(), result_action="return_value")
    app.default(verb)
    return app


def identifier(flag: Flag) -> str:
    """The name of a flag inside the parser."""
    return "flag_" + (flag.fields[0] if flag.positional else flag.name[2:].replace("-", "_").replace(".", "__"))


def _annotation(flag: Flag) -> Any:
    literals = [member for member in members_of(flag.kind) if get_origin(member) is Literal]
    words = [str(word) for literal in literals for word in get_args(literal)]
    if words and NoneType in members_of(flag.kind) and flag.default is not None:
        words.append("none")  # unsets the field
    kind: Any = str
    if get_origin(flag.kind) is dict:
        kind = dict[str, str]
    elif flag.positional and get_origin(flag.kind) is tuple:
        kind = tuple[str, ...]
    elif flag.kind is bool:
        kind = bool
    # A flag of `Args` that is off by default needs no --no-NAME; a preset may have set one of the config.
    twin = flag.kind is bool and not (flag.in_args and flag.default is False)
    return Annotated[
        kind,
        Parameter(
            name=flag.name,
            negative=None if twin else (),
            allow_repeating=kind in (str, bool),  # the last one counts, so that a script can append flags
            choices=words or None,
            allow_leading_hyphen="," in flag.metavar,  # the first number of a list may be negative
            show_choices=False,
            help=flag.help,
            metavar=flag.metavar if kind is str else None,
            show_default=_shown(flag),
            group="Arguments" if flag.positional else flag.group or "Flags",
        ),
    ]


def _shown(flag: Flag) -> Any:
    """How the help shows a default; False: not at all."""
    value = flag.default
    if value in (None, "", ()) or isinstance(value, dict) or (flag.in_args and value is False):
        return False
    if isinstance(value, bool):
        return lambda _: "yes" if value else "no"
    if isinstance(value, float):
        return lambda _: f"{value:.4g}"
    if isinstance(value, tuple):
        return lambda _: ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return True


def members_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if get_origin(kind) is Annotated:
        return members_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(inner for member in get_args(kind) for inner in members_of(member))
    return (kind,)


OTHERS = {
    "--model": "--backbone",
    "--arch": "--backbone",
    "--backbone": "--backbone.name",
    "--batch-size": "--batch",
    "--learning-rate": "--optim.lr",
    "--checkpoint": "--init",
    "--weights": "--init",
    "--gpu": "--device",
    "--output": "--out",
    "--max-steps": "--steps",
}
"""A flag of other programs -> ours."""


def similar_flag(word: str, flags: Sequence[Flag]) -> str:
    """The verb's flag that other programs call `word`, or that ends in it; "" if there is none."""
    names = [flag.name for flag in flags]
    ends = [name for name in names if name.endswith(f".{word.lstrip('-')}")]
    other = OTHERS.get(word, "")
    return next((name for name in (other, OTHERS.get(other, ""), *sorted(ends, key=_first)) if name in names), "")


def _first(name: str) -> bool:
    """Sorts the optimiser's flags first."""
    return not name.startswith("--optim.")


def sentence(error: cyclopts.CycloptsError, prog: str, flags: Sequence[Flag] = ()) -> str:
    """One sentence for an error of the parser; cyclopts' own sentence for kinds that are not listed here."""
    message = str(error).strip().rstrip(".")
    nearest = message.partition("Did you mean ")[2].strip('"?')
    hint = f"; did you mean {nearest}?" if nearest else ""
    match error:
        case cyclopts.UnknownOptionError():
            word = (error.token.keyword or error.token.value).partition("=")[0]
            other = similar_flag(word, flags)
            return f"{word}: {prog} has no such flag{f'; did you mean {other}?' if other else hint}"
        case cyclopts.UnusedCliTokensError():
            words = " ".join(error.unused_tokens or ())
            names = [name for name in ("--from", "--data", "--out") if any(flag.name == name for flag in flags)]
            if not any(flag.positional for flag in flags) and names:
                return f"{words}: {prog} takes no argument without a flag; did you mean {names[0]} {words}?"
            return f"{words}: too many arguments for {prog}; write a list with commas and without spaces"
        case cyclopts.MissingArgumentError() if error.argument is not None:
            needs = "needs a value" if error.keyword or error.argument.tokens else "must be given"
            return f"{error.keyword or error.argument.name}: {needs}"
        case cyclopts.CoercionError() if error.token is not None and get_args(error.target_type):
            name = error.token.keyword or (error.argument.name if error.argument else "")
            if get_origin(error.target_type) is dict:
                key, sign, value = error.token.value.partition("=")
                shown = f"{name}.{key} {value}" if sign else f"{name}.NAME VALUE"
                return f"{name} {error.token.value}: give its values one by one, as {shown}"
            *words, last = map(str, get_args(error.target_type))
            return f"{name} {error.token.value}: must be {', '.join(words)} or {last}{hint}"
    return message
