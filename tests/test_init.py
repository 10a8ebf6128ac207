"""The public face: every name resolves, type checkers see the same names, and importing it costs no torch."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import situs
from situs.errors import SitusError

HOMES = situs._HOMES


@pytest.mark.parametrize("name", sorted(HOMES))
def test_name_resolves_to_its_home(name: str) -> None:
    assert getattr(situs, name) is getattr(import_module(HOMES[name]), name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(situs.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # `X as X` is what makes a re-export public to a type checker
    }
    assert seen == HOMES


def test_all_and_dir_list_the_face() -> None:
    assert set(situs.__all__) == {"__version__", *HOMES}
    assert set(situs.__all__) <= set(dir(situs))


def test_the_page_of_help_opens_with_every_function() -> None:
    """Its name and the first line of its docstring."""
    listed = dict(re.findall(r"^    (\w+) {2,}(.+)$", situs.__doc__ or "", re.MULTILINE))
    functions = {name: getattr(situs, name) for name in HOMES if name != "SitusError"}
    assert listed == {name: (each.__doc__ or "").partition("\n")[0] for name, each in functions.items()}
    assert all(inspect.isfunction(each) for each in functions.values())


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nosuchname'"):
        _ = situs.nosuchname  # pyright: ignore[reportAttributeAccessIssue]


def test_import_brings_no_heavy_package() -> None:
    heavy = {"torch", "timm", "transformers", "numpy", "matplotlib", "cyclopts"}
    code = f"import sys, situs; print(*sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == []


# --- the examples of the docstrings ---------------------------------------------------------------------------

INPUTS = {
    "finetune": ("runs/mp3",),
    "adapt": ("runs/mp3",),
    "export": ("runs/ft",),
    "predict": ("runs/ft",),
    "evaluate_accuracy": ("runs/ft",),
    "extract_features": ("runs/mp3",),
    "verify": ("runs/ft",),
    "lock": ("exported",),
    "unlock": ("locked", "owner.key"),
    "audit_lock": ("locked", "exported", "owner.key"),
    "audit_gradients": ("runs/ft",),
    "audit_split": ("runs/ft",),
    "find_defences": ("runs/ft",),
    "publish": ("runs/ft",),
    "SitusError": ("runs/mp3",),
    "audit_texts": ("bert", "texts.txt"),
}
"""Files that an example needs; what it writes must not exist."""

SLOW = {"adapt", "audit_gradients", "audit_lock", "audit_split", "audit_texts", "finetune", "find_defences"}
SLOW |= {"guard", "pretrain", "verify"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the embedded images, an export, a locked folder with its key, and a small language model."""
    from tiny_texts import write_folder

    base = tmp_path_factory.mktemp("world")
    shape = {"depth": 1, "embed_dim": 48, "num_heads": 3}
    backbone = {"name": "vit_tiny_patch16_224", "patch_size": 7, "model_args": shape}
    data = {"path": "samples", "img_size": 28, "channels": 1, "count": 64, "batch": 32}
    for name, method in (("mp3", "mp3"), ("ft", "supervised")):
        situs.pretrain(
            data, out=base / "runs" / name, method=method, backbone=backbone, steps=2, device="cpu", quiet=True
        )
    situs.export(base / "runs" / "ft", base / "exported")
    situs.lock(base / "exported", situs.new_key(base / "owner.key"), base / "locked")
    write_folder(base / "bert", "bert")
    (base / "texts.txt").write_text("w1 w2 w3\n")
    return base


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HOMES])
def test_the_example_of_a_name_runs_and_gives_what_it_says(
    name: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import doctest

    import timm
    import torch

    for path in INPUTS.get(name, ()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).symlink_to(world / path)
    monkeypatch.chdir(tmp_path)
    names = {"situs": situs, "torch": torch, "timm": timm}
    example = doctest.DocTestParser().get_doctest(getattr(situs, name).__doc__ or "", names, name, None, 0)
    assert example.examples, "a public name has an example"
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.DocTestRunner(optionflags=flags).run(example, out=report.append).failed == 0, "".join(report)


WITHOUT_CUDA = """
import builtins, pkgutil, sys
from importlib import import_module

import torch

def no_cuda(*_, **__):
    raise AssertionError("Torch not compiled with CUDA enabled")

torch.cuda._lazy_init = torch.cuda.current_device = torch.cuda.current_stream = no_cuda
torch.cuda.is_available = lambda: False
torch.cuda.device_count = lambda: 0
sys.modules["triton"] = None  # there is none for macOS
sys.platform = "darwin"
import situs

for module in pkgutil.walk_packages(situs.__path__, "situs."):
    if module.name in ("situs.__main__", "situs.data.resize_kernel") or ".kernels.gpu." in module.name:
        continue
    try:
        import_module(module.name)
    except situs.SitusError:
        pass  # an extra is not installed
backbone = import_module("situs.backbones").create_backbone("vit_tiny_patch16_224", img_size=32)
print(backbone(torch.zeros(1, 3, 32, 32)).shape)
"""


@pytest.mark.slow
def test_every_module_is_imported_where_torch_has_no_cuda_and_there_is_no_triton() -> None:
    """As on macOS, as far as that can be simulated here."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == "torch.Size([1,"


# --- wrong types ----------------------------------------------------------------------------------------------


class Strange:
    """A value that no argument allows."""


UNCHECKED = {("audit_gradients", "upload")} | {(name, "data") for name in HOMES} | {("adapt", "unlabelled")}
UNCHECKED |= {("adapt", "source"), ("finetune", "source"), ("audit_texts", "upload")}
"""Arguments that are checked where they are read: whatever has a length and items is data."""

FUNCTIONS = [name for name in HOMES if name != "SitusError"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_a_wrong_type_is_one_sentence_before_anything_begins(name: str, tmp_path: Path) -> None:
    """The argument, the value and what is allowed, for every argument and every option that a TypedDict lists."""
    function = getattr(situs, name)
    parameters = inspect.signature(function).parameters
    named = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    named += {"pretrain": ["resume", "steps"], "adapt": ["quiet"], "evaluate_accuracy": ["count"]}.get(name, [])
    for argument in named:
        if (name, argument) in UNCHECKED:
            continue
        others = {p.name: "x" for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        value = Strange()
        with pytest.raises(SitusError) as raised:
            function(**({argument: value} | {key: text for key, text in others.items() if key != argument}))
        sentence = str(raised.value)
        assert sentence.startswith(f"{argument}=<") and ": must be " in sentence and "\n" not in sentence
        assert raised.value.field == argument and raised.value.value is value
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: situs.guard("net"), r"module='net': must be a Module"),  # pyright: ignore[reportArgumentType]
        (
            lambda: situs.guard(timm_model(), limit=20),  # pyright: ignore[reportArgumentType]
            r"limit=20: must be text, such as 'psnr=20'",
        ),
        (lambda: situs.audit_gradients("m", "samples", defences=5), r"defences=5: must be a list of text or a Defence"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.audit_gradients("m", "samples", defences="none"), r"defences='none': must be a list of text"),
        (lambda: situs.audit_gradients("m", count=2.5), r"count=2.5: must be an integer"),
        (lambda: situs.audit_gradients(timm_model(), 5), r"the data: is an? int"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.adapt("m", data="d", out="o", minutes="1"), r"minutes='1': must be a finite number, such as 30"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.export("r", "o", form="tf"), r"form='tf': must be one of timm, hf, onnx or none"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.predict("m", batch=True), r"batch=True: must be an integer, such as 256"),
        (lambda: situs.predict("m", precision="fp64"), r"precision='fp64': must be one of bf16, fp16, fp32"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.open_model([1] * 99), r"source=a list: must be text, a path, a Module or a Model"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.open_model("vit_tiny_patch16_224", weights="random", device="gpu"), "device='gpu': must be cpu"),
        (lambda: situs.open_model("vit_tiny_patch16_224", weights="random", model_args=5), "model_args=5: must be"),
        (lambda: situs.open_model(timm_model(), example=5), "example: must be a tensor"),
        (lambda: situs.new_key(5), "path=5: must be text or a path"),  # pyright: ignore[reportArgumentType]
        (lambda: situs.pretrain("samples", preset="samples-mp3", out="o", steps="5"), "steps='5': must be an integer"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_types_and_their_sentences(
    call: Callable[[], object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SitusError, match=sentence):
        call()
    assert not [*tmp_path.iterdir()]


def timm_model() -> Any:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)


def test_numbers_of_numpy_and_tuples_are_as_good_as_pythons() -> None:
    import numpy as np

    from situs.config import checks_arguments

    @checks_arguments()
    def taken(count: int, share: float, names: Sequence[str], size: tuple[int, ...] | None = None) -> tuple[Any, ...]:
        return count, share, names, size

    assert taken(np.int64(3), np.float32(0.5), ("a",), size=[1, 2]) == (3, 0.5, ("a",), [1, 2])  # pyright: ignore[reportArgumentType]
    assert taken(3, 1, {"a": 1}.keys()) == (3, 1, {"a": 1}.keys(), None)  # pyright: ignore[reportArgumentType]
    for wrong in ((True, 0.5, []), (3, "1", []), (3, 0.5, "a"), (3, 0.5, [b"a"]), (3, 0.5, {"a": 1})):
        with pytest.raises(SitusError, match="must be"):
            taken(*wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        taken(1, 2.0)  # pyright: ignore[reportCallIssue]
