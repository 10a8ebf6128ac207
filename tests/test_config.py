"""Configs are strict both ways: what fits comes back the same, what does not fit is named with its path."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from os import PathLike
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Unpack, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from situs.config import (
    ANY,
    Checked,
    _allows,
    checks_arguments,
    choice,
    choices_of,
    convert,
    differences,
    from_dict,
    in_words,
    merge,
    tables_of,
    to_dict,
)
from situs.errors import SitusError
from situs.files import read_toml
from situs.limits import Count, Positive, Within
from situs.train.run import RunConfig


@dataclass(frozen=True)
class Optim(Checked):
    lr: Positive = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    milestones: tuple[int, ...] = ()
    clip: float | None = None
    kind: Literal["adamw", "sgd"] = "adamw"

    def check(self) -> None:
        if self.lr == 1e99 and self.kind == "sgd":
            raise SitusError(field=("lr", "kind"), value=self.lr, allowed="smaller for sgd")


class Mp3:
    @dataclass(frozen=True)
    class Config:
        mask_ratio: float = 0.75


class Mae:
    @dataclass(frozen=True)
    class Config:
        mask_ratio: float = 0.75
        decoder: int = 4


METHODS = {"mp3": Mp3, "mae": Mae}


@dataclass(frozen=True)
class Config:
    steps: int
    method: Any = choice(METHODS, "mp3")
    optim: Optim = field(default_factory=Optim)
    second: Optim | None = None
    compile: bool = False
    size: int | tuple[int, int] = 224
    out: Path = Path("runs")
    tags: list[str] = field(default_factory=list)
    model_args: dict[str, Any] = field(default_factory=dict)
    mixed: float | int | str = 0


finite = st.floats(allow_nan=False, allow_infinity=False)
optims = st.builds(
    Optim,
    lr=st.floats(min_value=1e-9, max_value=1e9),
    betas=st.tuples(finite, finite),
    milestones=st.lists(st.integers()).map(tuple),
    clip=st.none() | finite,
    kind=st.sampled_from(["adamw", "sgd"]),
)
text = st.text(st.characters(exclude_categories=["Cs"]))
configs = st.builds(
    Config,
    steps=st.integers(),
    method=st.builds(Mp3.Config, finite) | st.builds(Mae.Config, finite, st.integers()),
    optim=optims,
    second=st.none() | optims,
    compile=st.booleans(),
    size=st.integers() | st.tuples(st.integers(), st.integers()),
    out=st.sampled_from([Path("a/b"), Path("/x"), Path("é")]),
    tags=st.lists(text),
    model_args=st.dictionaries(text, st.none() | st.booleans() | st.integers() | finite | text),
    mixed=finite | st.integers() | text,
)


def exact(value: object) -> object:
    """Equality that tells 1 from 1.0 and True, all the way down."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value), *map(exact, value)]
    return type(value), value


@given(configs)
def test_round_trip_through_json_text(original: Config) -> None:
    again = from_dict(Config, json.loads(json.dumps(to_dict(original), allow_nan=False)))
    assert again == original
    assert type(again.method) is type(original.method)
    assert exact(to_dict(again)) == exact(to_dict(original))
    assert type(again.mixed) is type(original.mixed)


def test_free_tables_are_written_in_sorted_order() -> None:
    one = to_dict(Config(1, model_args={"b": 1, "a": {"d": 2, "c": 3}}))
    two = to_dict(Config(1, model_args={"a": {"c": 3, "d": 2}, "b": 1}))
    assert json.dumps(one) == json.dumps(two)
    assert list(one) == list(Config.__dataclass_fields__)


def test_integers_become_floats_and_lists_become_tuples() -> None:
    made = from_dict(Config, {"steps": 3, "optim": {"lr": 1, "betas": [0, 1]}, "size": [160, 224]})
    assert made.optim.lr == 1.0
    assert type(made.optim.lr) is float
    assert made.optim.betas == (0.0, 1.0)
    assert made.size == (160, 224)


WRONG = {
    "unknown key": (
        {"steps": 1, "stpes": 2},
        "stpes: unknown key, perhaps steps; known keys here: compile, method, mixed, model_args, optim, out, second, ",
    ),
    "unknown nested key": (
        {"steps": 1, "optim": {"rl": 2}},
        "optim.rl: unknown key, perhaps lr; known keys here: betas, clip, kind, lr, milestones",
    ),
    "key of another choice": (
        {"steps": 1, "method": {"name": "mp3", "decoder": 2}},
        "method.decoder: unknown key; known keys here: mask_ratio",
    ),
    "unknown choice": (
        {"steps": 1, "method": {"name": "mp4"}},
        "unknown method 'mp4'; choose one of: mae, mp3",
    ),
    "choice not a table": (
        {"steps": 1, "method": "mp3"},
        "method='mp3': must be a table with the key 'name'",
    ),
    "missing": ({}, "Config: missing steps"),
    "text for a number": ({"steps": 1, "optim": {"lr": "high"}}, "optim.lr='high': must be a finite number"),
    "bool for an integer": ({"steps": True}, "steps=True: must be an integer"),
    "bool for a float": ({"steps": 1, "optim": {"lr": True}}, "optim.lr=True: must be a finite number"),
    "float for an integer": ({"steps": 1.0}, "steps=1.0: must be an integer"),
    "integer for a bool": ({"steps": 1, "compile": 1}, "compile=1: must be true or false"),
    "nan": ({"steps": 1, "optim": {"lr": math.nan}}, "optim.lr=nan: must be a finite number"),
    "overflow": ({"steps": 1, "optim": {"clip": 10**400}}, "must be a finite number or none"),
    "literal": ({"steps": 1, "optim": {"kind": "lion"}}, "optim.kind='lion': must be one of 'adamw', 'sgd'"),
    "short tuple": (
        {"steps": 1, "optim": {"betas": [0.9]}},
        "optim.betas=[0.9]: must be a list of 2: a finite number, a finite number",
    ),
    "inside a list": (
        {"steps": 1, "optim": {"milestones": [1, "x"]}},
        "optim.milestones[1]='x': must be an integer",
    ),
    "union": (
        {"steps": 1, "size": "big"},
        "size='big': must be an integer or a list of 2: an integer, an integer",
    ),
    "table in a union": ({"steps": 1, "second": {"lrr": 1}}, "second.lrr: unknown key, perhaps lr"),
    "not a table": ({"steps": 1, "optim": 3}, "optim=3: must be a table"),
    "post_init": ({"steps": 1, "optim": {"lr": 0}}, "optim.lr=0: must be > 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case: str) -> None:
    data, sentence = WRONG[case]
    with pytest.raises(SitusError) as caught:
        from_dict(Config, data, where="my.toml")
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("my.toml: ")
    assert "\n" not in str(caught.value)


def test_infinity_is_not_written() -> None:
    with pytest.raises(SitusError, match=r"method\.mask_ratio=inf: must be a finite number"):
        to_dict(Config(1, method=Mp3.Config(math.inf)))  # a config that checks nothing


def test_merge_lays_tables_over_tables() -> None:
    base = {"steps": 1, "optim": {"lr": 0.1, "clip": 1.0}, "tags": ["a"]}
    over = {"optim": {"lr": 0.2}, "tags": ["b"], "compile": True}
    assert merge(base, over) == {
        "steps": 1,
        "optim": {"lr": 0.2, "clip": 1.0},
        "tags": ["b"],
        "compile": True,
    }
    assert base == {"steps": 1, "optim": {"lr": 0.1, "clip": 1.0}, "tags": ["a"]}


def test_merge_drops_the_keys_of_another_choice() -> None:
    base = {"method": {"name": "mae", "decoder": 8}}
    choices = choices_of(Config)
    assert list(choices) == ["method"]
    assert merge(base, {"method": {"name": "mp3"}}, choices) == {"method": {"name": "mp3"}}
    assert merge(base, {"method": {"name": "mae", "mask_ratio": 0.5}}, choices) == {
        "method": {"name": "mae", "decoder": 8, "mask_ratio": 0.5}
    }
    # Elsewhere `name` is a key like any other.
    assert merge({"model": {"name": "a", "patch": 4}}, {"model": {"name": "b"}}, choices) == {
        "model": {"name": "b", "patch": 4}
    }


tables = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers(0, 3), max_size=3),
)


@given(tables, tables, tables)
def test_merge_is_associative_and_idempotent(a: dict, b: dict, c: dict) -> None:
    # A number between two tables cuts the lower one off, so the law holds where the kinds agree.
    assert merge(a, a) == a
    assert merge({}, a) == merge(a, {}) == a
    if kinds_agree(a, b) and kinds_agree(b, c) and kinds_agree(a, c):
        assert merge(merge(a, b), c) == merge(a, merge(b, c))


def kinds_agree(a: dict, b: dict) -> bool:
    return all(
        kinds_agree(a[k], b[k]) if isinstance(a[k], dict) and isinstance(b[k], dict) else type(a[k]) is type(b[k])
        for k in a.keys() & b.keys()
    )


def test_differences_are_told_field_by_field() -> None:
    start = Config(1, method=Mae.Config(decoder=8))
    changed = Config(1, method=Mae.Config(mask_ratio=0.5, decoder=8))
    assert differences(start, changed) == {"method.mask_ratio": (0.75, 0.5)}
    assert differences(start, Config(1, method=Mp3.Config())) == {
        "method.name": ("mae", "mp3"),
        "method.decoder": (8, None),
    }


def test_values_by_path_are_tables_and_none_is_given_twice() -> None:
    given = [("lr", "optim.lr", 1), ("seed", "train.seed", 2), ("seed", "seed", 2), ("optim", "optim", {"ema": 3})]
    assert tables_of(given) == {"optim": {"lr": 1, "ema": 3}, "train": {"seed": 2}, "seed": 2}
    with pytest.raises(SitusError, match="lr and optim set the same"):
        tables_of([("lr", "optim.lr", 1), ("optim", "optim", {"lr": 1})])


def test_rules_hold_however_a_config_is_made() -> None:
    for make in (lambda: Config(1, optim=Optim(lr=0)), lambda: from_dict(Config, {"steps": 1, "optim": {"lr": 0}})):
        with pytest.raises(SitusError) as caught:
            make()
        assert (caught.value.field or "").endswith("lr")
        assert (caught.value.value, caught.value.allowed) == (0, "> 0")
    for wrong in ({"lr": "high"}, {"betas": (0.9,)}, {"kind": "lion"}, {"milestones": (1.5,)}, {"clip": math.nan}):
        with pytest.raises(SitusError) as caught:
            Optim(**wrong)
        assert (caught.value.field or "").partition("[")[0] == next(iter(wrong))


def test_what_binds_several_fields_is_named_with_the_path() -> None:
    with pytest.raises(SitusError) as caught:
        from_dict(Config, {"steps": 1, "second": {"lr": 1e99, "kind": "sgd"}}, where="a.toml")
    assert caught.value.fields == ("second.lr", "second.kind")
    assert str(caught.value) == "a.toml: second.lr=1e+99: must be smaller for sgd"


@dataclass(frozen=True)
class Ruled(Checked):
    length: Count | None = None
    shares: tuple[Annotated[float, Within("[0, 1)")], ...] = ()


@dataclass(frozen=True)
class Renewed(Checked):
    retired: ClassVar = {"old": (True, "it is always so"), "any": (ANY, "it has no effect")}
    lr: float = 1.0


def test_a_setting_that_is_gone_is_taken_with_what_it_always_is_now() -> None:
    for data in ({"old": True}, {"any": 3, "lr": 1.0}, {"any": None}):
        assert from_dict(Renewed, data) == Renewed()
    for old in (False, None, "x"):
        with pytest.raises(SitusError, match=f"^old={old}: is no longer a setting; it is always so$") as error:
            from_dict(Renewed, {"old": old})
        assert error.value.field == "old"
    with pytest.raises(SitusError, match="unknown key"):
        from_dict(Renewed, {"older": True})


def test_none_is_said_by_its_name_where_text_does_not_fit() -> None:
    made = from_dict(Config, {"steps": 1, "optim": {"clip": "none"}})
    assert made.optim.clip is None
    with pytest.raises(SitusError, match="steps='none': must be an integer"):
        from_dict(Config, {"steps": "none"})


@pytest.mark.parametrize("value", [["a/"], {"x": "a/"}, ["a/", 1]])
def test_a_union_changes_no_value_that_fits_a_later_member(value: Any) -> None:
    kind = list[Path] | dict[str, Path] | list[str | int] | dict[str, str]
    assert exact(convert(kind, value, "a")) == exact(value)
    assert convert(list[Path] | tuple[Path, ...], ["a/"], "a") == [Path("a")]


def test_a_rule_within_a_union_and_a_list() -> None:
    assert from_dict(Ruled, {"length": 3, "shares": [0, 0.5]}) == Ruled(3, (0.0, 0.5))
    for data, sentence in (
        ({"length": 0}, "length=0: must be >= 1"),
        ({"length": "x"}, "length='x': must be an integer >= 1 or none"),
        ({"shares": [0.5, 1.0]}, "shares[1]=1.0: must be in [0, 1)"),
        ({"shares": 3}, "shares=3: must be a list, each a finite number in [0, 1)"),
    ):
        with pytest.raises(SitusError) as caught:
            from_dict(Ruled, data)
        assert str(caught.value) == sentence


def test_toml_is_read_and_its_errors_are_sentences(tmp_path: Path) -> None:
    good, bad, latin = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "latin.toml"
    good.write_text('steps = 7\n[method]\nname = "mae"\ndecoder = 2\n')
    bad.write_text("steps = \n")
    latin.write_bytes(b'out = "\xe9"\n')
    assert from_dict(Config, read_toml(good)) == Config(7, method=Mae.Config(decoder=2))
    for path, sentence in (
        (bad, "bad.toml: is not valid TOML: .*line 1"),
        (latin, "latin.toml: cannot be read: it is not text in UTF-8"),
        (tmp_path / "none.toml", "none.toml: cannot be read: no such file"),
        (tmp_path, "cannot be read: is a directory"),
    ):
        with pytest.raises(SitusError, match=sentence):
            read_toml(path)


def configs() -> Iterator[type[Any]]:
    """Every config class of a run, the methods' own among them."""
    for found in choices_of(RunConfig).values():
        yield from (option.Config for option in found.options.values())
    yield from filter(is_dataclass, get_type_hints(RunConfig).values())


WORDS = [
    pytest.param(kind, name, id=f"{kind.__name__}.{name}")
    for kind in configs()
    for name, hint in get_type_hints(kind).items()
    if "Literal" in str(hint)
]


@pytest.mark.parametrize(("kind", "name"), WORDS)
def test_a_config_made_in_python_refuses_a_word_that_is_no_choice(kind: type[Any], name: str) -> None:
    with pytest.raises(SitusError) as caught:
        kind(**{name: "relativ"})
    assert (caught.value.field, caught.value.value) == (name, "relativ")
    assert "positions" in {each.values[1] for each in WORDS}


@pytest.mark.parametrize(
    ("kind", "words", "good", "bad"),
    [
        (int, "an integer", 3, True),
        (float, "a finite number", 3, "3"),
        (bool, "true or false", True, 1),
        (str | Path | None, "text, a path or none", None, 3),
        (PathLike, "a path", Path("x"), "x"),
        (PathLike[str], "a path", Path("x"), "x"),
        (list[int], "a list of an integer", [1, 2], [1, "2"]),
        (Sequence[str], "a list of text", ("a",), "a"),
        (Sequence[Any], "a list", [1, "2"], 3),
        (Mapping[str, int], "a dict", {"a": 1}, [("a", 1)]),
        (Literal["a"], "'a'", "a", "b"),
        (Literal["a", 1], "one of a, 1", 1, True),
        (Annotated[int, Within(">= 1")], "an integer >= 1", 1, 0),
        (Callable[[], int], "a function", print, 3),
        (OSError, "an OSError", OSError(), ValueError()),
        (Timer, "a Timer", Timer(0, print), 3),
    ],
)
def test_a_type_is_named_and_checked(kind: Any, words: str, good: Any, bad: Any) -> None:
    assert in_words(kind) == words
    assert _allows(kind, good) and not _allows(kind, bad)


class More(TypedDict, total=False):
    rate: Annotated[float, Within("[0, 1)")]


@checks_arguments("own", extra=lambda: {"Folder": Path})
def verb(
    count: int,
    word: str = "jpeg",
    *,
    where: Folder | None = None,  # type: ignore[name-defined]  # noqa: F821
    own: int = 0,
    odd: NoSuch = 0,  # type: ignore[name-defined]  # noqa: F821
    **more: Unpack[More],
) -> tuple[Any, ...]:
    return count, word, where, own, odd, more


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        (("3",), {}, "count='3': must be an integer"),
        ((3, 4), {}, "word=4: must be text, such as 'jpeg'"),
        ((3,), {"word": None}, "word=None: must be text, such as 'jpeg'"),
        ((3,), {"where": "x"}, "where='x': must be a path or none"),
        ((3,), {"rate": 1.0}, r"rate=1.0: must be a finite number in \[0, 1\)"),
        ((["x" * 56],), {}, r"count=\['x{56}'\]: must be an integer"),
        ((["x" * 57],), {}, "count=a list: must be an integer"),
        (("a\n",), {}, r"count='a\\n': must be an integer"),
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_refused_before_the_function_begins(args: Any, options: Any, said: str) -> None:
    with pytest.raises(SitusError, match=f"^{said}$") as caught:
        verb(*args, **options)
    assert caught.value.field == said.partition("=")[0]


def test_arguments_that_fit_or_that_nobody_can_check_pass() -> None:
    given = {"where": Path("x"), "own": "checked by itself", "odd": "of no type that is known", "rate": 0.5, "other": 1}
    assert verb(3, **given) == (3, "jpeg", Path("x"), given["own"], given["odd"], {"rate": 0.5, "other": 1})
    assert verb(count=3, word="png") == (3, "png", None, 0, 0, {})
