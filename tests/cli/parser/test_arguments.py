"""One parser for a verb's own flags and every field of its config, over preset < TOML < flags."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

import situs.presets
from situs.cli.main import verb_type
from situs.cli.parser import arguments
from situs.cli.parser.arguments import Recipe, configured, parse
from situs.cli.train import Pretrain
from situs.config import Checked, choice, to_dict
from situs.errors import SitusError
from situs.limits import Count, Within
from situs.methods.droppos import DropPosConfig
from situs.train.checkpoint.files import with_checksum


@dataclass(frozen=True)
class Optim:
    """The optimiser."""

    lr: float = 1e-3
    """Learning rate at its height."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's two means."""


class Mp3:
    @dataclass(frozen=True)
    class Config(Checked):
        mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
        """Share of tokens left out of the context (η)."""


class Mae:
    @dataclass(frozen=True)
    class Config:
        decoder_depth: int = 4
        """Blocks of the decoder."""


METHODS = {"mp3": Mp3, "mae": Mae}


@dataclass(frozen=True)
class Config(Checked):
    batch: Count = 256
    """Images in a step."""

    steps: int | None = None
    """Stop after so many steps."""

    method: Any = choice(METHODS, "mp3")
    optim: Optim = field(default_factory=Optim)


@dataclass(frozen=True)
class Args(Recipe):
    """Pretrain a toy."""

    data: Path
    """Where the images lie."""

    out: Path = Path("runs")
    """The run's folder."""

    resume: Path | None = None
    """A run to go on with."""

    config: Config = configured(Config)


@pytest.fixture(autouse=True)
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy-mae.toml").write_text(
        'batch = 64\n[method]\nname = "mae"\ndecoder_depth = 8\n[optim]\nlr = 0.01\n'
    )
    (tmp_path / "toy-wrong.toml").write_text("batchsize = 64\n")
    monkeypatch.setattr(situs.presets, "folder", lambda: tmp_path)


def parsed(line: str) -> Args:
    return parse(Args, line.split(), prog="situs toy")


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a line that cannot be parsed; nothing is printed."""
    with pytest.raises(SitusError) as stop:
        parsed(line)
    assert capsys.readouterr() == ("", "")
    return str(stop.value)


def test_flags_of_the_verb_and_of_the_config_in_one_line() -> None:
    args = parsed("--data D --out O --batch 32 --steps 20 --method.mask-ratio .5 --optim.lr 1e-4 --optim.betas .8,.9")
    assert type(args) is Args
    assert args == Args(
        data=Path("D"),
        out=Path("O"),
        config=Config(batch=32, steps=20, method=Mp3.Config(0.5), optim=Optim(1e-4, (0.8, 0.9))),
    )


def test_nothing_given_is_the_config_s_own_defaults() -> None:
    assert parsed("--data D").config == Config()


def test_preset_below_toml_below_flags(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "my.toml"
    mine.parent.mkdir()
    mine.write_text("batch = 48\nsteps = 9\n[method]\ndecoder_depth = 6\n")
    preset = parsed("--data D --preset toy-mae")
    assert preset.preset == "toy-mae"
    assert preset.config == Config(batch=64, method=Mae.Config(8), optim=Optim(lr=0.01))
    both = parsed(f"--data D --preset=toy-mae --config {mine}")
    assert both.config == Config(batch=48, steps=9, method=Mae.Config(6), optim=Optim(lr=0.01))
    assert both.config_file == mine
    flags = parsed(f"--preset toy-mae --config {mine} --data D --batch 2 --method.decoder-depth 1")
    assert flags.config == Config(batch=2, steps=9, method=Mae.Config(1), optim=Optim(lr=0.01))


@dataclass(frozen=True)
class Model:
    depth: int = 12
    model_args: dict[str, Any] = field(default_factory=dict)
    """Arguments that somebody else's constructor takes."""


@dataclass(frozen=True)
class Free:
    model: Model = field(default_factory=Model)


@dataclass(frozen=True)
class FreeArgs(Recipe):
    config: Free = configured(Free)


def test_none_takes_back_what_a_file_gave(tmp_path: Path) -> None:

    (tmp_path / "own.toml").write_text('init = "weights.safetensors"\n[data]\nsplit = "test"\n')
    words = ["--config", str(tmp_path / "own.toml"), "--data", "samples"]
    assert parse(Pretrain, words, "situs pretrain").config.init == "weights.safetensors"
    bare = parse(Pretrain, [*words, "--init", "none", "--data.split", "none"], "situs pretrain").config
    assert (bare.init, bare.data.split) == (None, None)
    none = parse(Pretrain, [*words, "--init", "./none"], "situs pretrain").config  # a file of that name
    assert none.init == "./none"
    full = parse(Pretrain, ["--method", "droppos"], "situs pretrain").config.method
    off = parse(Pretrain, ["--method", "droppos", "--method.affinity", "none"], "situs pretrain").config.method
    assert (full, replace(full, affinity=None)) == (DropPosConfig(), off)


@pytest.mark.parametrize(("word", "size"), [("28", (28, 28)), ("28,56", (28, 56)), ("none", None)])
def test_one_number_is_both_sides_of_the_images(word: str, size: tuple[int, int] | None) -> None:

    words = ["--data", "samples", "--backbone.img-size", word]
    assert parse(Pretrain, words, "situs pretrain").config.backbone.size == size


def test_a_free_table_takes_any_key_from_flags(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[model.model_args]\nembed_dim = 96\nkept = true\n")
    line = f"--config {tmp_path / 'own.toml'} --model.model-args.embed-dim 48 --model.model-args.rate=.1"
    line += " --model.model-args.pool avg --model.model-args.init_values 1e-5"
    held = parse(FreeArgs, line.split(), prog="situs test").config.model.model_args
    assert held == {"embed_dim": 48, "kept": True, "rate": 0.1, "pool": "avg", "init_values": 1e-5}
    off = parse(FreeArgs, [*line.split(), "--model.model-args.kept", "false"], prog="situs test")
    assert off.config.model.model_args["kept"] is False


def test_the_parser_is_made_of_the_flags_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    app_of = arguments.app_of
    monkeypatch.setattr(
        arguments, "app_of", lambda flags, *more: made.append([flag.name for flag in flags]) or app_of(flags, *more)
    )
    parse(FreeArgs, ["--model.model-args.rate=.1", "--model.model-args.pool", "avg"], prog="situs test")
    with pytest.raises(SitusError, match=r"--model\.model-arg"):
        parse(FreeArgs, ["--model.model-arg.rate", "1"], prog="situs test")  # all, to say which was meant
    assert made[0] == ["--model.model-args"] and {*made[0]} < {*made[1]}


def test_method_by_name_takes_its_own_flags() -> None:
    assert parsed("--data D --method mae --method.decoder-depth 2").config.method == Mae.Config(2)
    # Another method than the preset's: the preset's method table goes, the rest of it stays.
    other = parsed("--data D --preset toy-mae --method=mp3").config
    assert other == Config(batch=64, method=Mp3.Config(), optim=Optim(lr=0.01))


def test_resume_starts_from_the_run_s_own_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(with_checksum(to_dict(Config(batch=5, method=Mae.Config(3))), "config.json"))
    args = parsed(f"--data D --resume {tmp_path} --steps 7")
    assert args.config == Config(batch=5, steps=7, method=Mae.Config(3))
    assert json.loads((tmp_path / "config.json").read_text())["method"] == {"name": "mae", "decoder_depth": 3}
    with pytest.raises(SitusError) as stop:
        parsed(f"--data D --resume {tmp_path} --preset toy-mae")
    assert stop.value.fields == ("resume", "preset", "config")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--data D --method.mask-ratio 1.2", r"^method\.mask_ratio=1\.2: must be in \[0, 1\)$"),
        ("--data D --batch 0", r"^batch=0: must be >= 1$"),
        ("--data D --preset nosuch", "^unknown preset 'nosuch'; choose one of: toy-mae, toy-wrong$"),
        (
            "--data D --preset toy-wrong",
            "^preset toy-wrong: batchsize: unknown key, perhaps batch; known keys here: batch, ",
        ),
        ("--data D --method mp4", "unknown method 'mp4'; choose one of: mae, mp3$"),
        ("--data D --config nosuch.toml", "^nosuch.toml: cannot be read: no such file"),
        ("--data D --resume nosuch", r"nosuch: is not a run: it has no config\.json$"),
    ],
)
def test_a_mistake_in_the_config_is_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SitusError, match=sentence):
        parsed(line)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--data D --batch many", "batch='many'"),
        ("--data D --optim.betas 0.9", "optim.betas=[0.9]"),
        ("--data D --method mae --method.mask-ratio .5", "--method.mask-ratio"),
        ("--data D --preset", "--preset"),
        ("--batch 3", "--data"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refused(line, capsys)


def helped(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed before the parser exits with 0."""
    with pytest.raises(SystemExit) as stop:
        parsed(line)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_everyday_flags_and_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped("--preset toy-mae --help", capsys)
    for words in ("--preset NAME", "--config FILE", "--method NAME", "mae, mp3;", "[default: mae]", "--resume PATH"):
        assert words in shown
    assert "Images in a step." in shown
    assert "The run's folder." in shown
    assert "Blocks of the decoder." not in shown
    assert "  method  --method.decoder-depth\n  optim   --optim.lr, betas\n" in shown


@pytest.mark.parametrize("help_words", ["--help method", "--help=method", "-h method --batch 3"])
def test_help_of_a_group_shows_its_flags_under_that_preset(help_words: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped(f"--preset toy-mae {help_words}", capsys)
    assert "--method.decoder-depth INT" in shown
    assert "Blocks of the decoder. [default: 8]" in shown
    assert "--preset" not in shown
    assert "--optim" not in shown
    assert "mask-ratio" in helped(f"--preset toy-mae --method mp3 {help_words}", capsys)


def test_help_all_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped("--preset toy-mae --help all", capsys)
    for words in ("--preset NAME", "--batch INT", "--method.decoder-depth INT", "--optim.betas FLOAT,FLOAT"):
        assert words in shown


def test_help_with_an_unknown_topic_names_those_there_are() -> None:
    with pytest.raises(SitusError, match="unknown topic of --help 'optin'; choose one of: all, method, optim, presets"):
        parsed("--help optin")


DEFAULTS: dict[str, dict[str, Any]] = {
    "evaluate consistency": {"ratios": (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9), "batch": 256},
    "evaluate position": {
        "ratios": None,
        "position_ratios": None,
        "precision": "fp32",
        "folds": 5,
        "equivariance": True,
    },
    "evaluate knn": {"k": None, "temperature": 0.07, "train_count": 10000},
    "evaluate probe": {
        "kind": "position",
        "train_count": 2000,
        "ratio": 0.75,
        "pool": "mean",
    },
    "evaluate robustness": {"corruptions": ("all",), "severities": (1, 2, 3, 4, 5), "precision": "fp32", "ema": True},
    "evaluate accuracy": {"average": "softmax", "mode": "slide"},
    "evaluate attention": {"count": 64, "show": 6, "depth": "norm"},
    "evaluate reconstruct": {"count": 64, "show": 6, "pairs": 2},
    "audit gradients": {
        "count": None,  # 12, or as many as there are
        "attacks": None,  # patchembed, tokens, patchembed-prior; with an active server, the crafted ones
        "server": "honest",
        "batch": 1,
        "labels": "inferred",
        "distance": "l2",
        "iterations": 1000,
        "pictures": True,
    },
    "info": {"steps": 3, "tokens": 32},
}
"""Figures decided by a paper, or by which results in the docs were made."""


@pytest.mark.parametrize("verb", DEFAULTS)
def test_what_a_verb_does_unless_it_is_told(verb: str) -> None:
    given = {each.name: each.default for each in fields(verb_type(verb))}
    assert {name: given[name] for name in DEFAULTS[verb]} == DEFAULTS[verb]
