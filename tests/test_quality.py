"""The rules that a machine can hold and no linter of `make lint` does: names, mirrors, no local paths."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import grimp
import names
import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}


def sources() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def test_no_package_without_a_name() -> None:
    packages = {part for path in sources() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert "core" in packages
    assert packages & FORBIDDEN_NAMES == set()


def test_tests_mirror_the_source() -> None:
    """A package's test file is named for a source file of that package: test_timm.py, test_timm_context.py."""
    modules = {path.relative_to(ROOT / "src" / "situs").with_suffix("").as_posix() for path in sources()}
    packages = {module.split("/")[0] for module in modules if "/" in module}
    strangers = []
    for path in (path for package in sorted(packages) for path in (ROOT / "tests" / package).rglob("test_*.py")):
        words = path.stem.removeprefix("test_").split("_")
        folder = path.parent.relative_to(ROOT / "tests").as_posix()
        names = {f"{folder}/{'_'.join(words[:count])}" for count in range(1, len(words) + 1)}
        names.add(f"{folder}/__{words[0]}__")  # test_init.py is for __init__.py
        if not names & modules:
            strangers.append(path.relative_to(ROOT).as_posix())
    assert strangers == []


COVERED = {
    "situs.cli.demo.findings": "test_run",
    "situs.cli.demo.stage": "test_run",
    "situs.core.components": "test_mjp_dal",
    "situs.core.when": "test_droppos",
    "situs.methods.official": "test_mjp",
    "situs.methods.offsets": "test_base_texts",
    "situs.audit.run": "test_engine",
    "situs.audit.registry": "test_plugins",
    "situs.audit.attacks": "test_attacks",
    "situs.audit.cases": "test_settings",
    "situs.audit.defences": "test_client",
    "situs.audit.defences.base": "test_client",
    "situs.audit.defences.trained": "test_client",
    "situs.audit.positions": "test_knowledge",
    "situs.backbones.config": "test_create",
    "situs.backbones.hf.blocks": "test_create",
    "situs.backbones.timm.blocks": "test_layout",
    "situs.data.sources.base": "test_open",
    "situs.data.sources.manifest": "test_check",
    "situs.data.modalities": "test_config",
    "situs.data.pipeline": "test_modalities",
    "situs.data.text": "test_text",
    "situs.data.modalities.base": "test_config",
    "situs.locks.attacks.adapter": "test_recovery",
    "situs.locks.equivariance.experiment": "test_groups",
    "situs.methods": "test_registry",
    "situs.models.module": "test_open",
    "situs.pages.remedies": "test_init",
    "situs.split.blocks": "test_client",
    "situs.split.serving": "test_run",
    "situs.split.whole": "test_run",
    "situs.studies": "test_plan_load",
    "situs.studies.words": "test_run",
    "situs.methods.measured": "test_mp3",
    "situs.train.assemble": "test_run",
    "situs.train.config": "test_loop",
    "situs.measure.predict": "test_evaluate_predict",
    "situs.train.contract": "test_loop",
}
"""Modules without a test file of their own name, and the one that covers each: its name, in whatever folder it lies."""


def test_every_module_is_covered_by_a_test_of_its_name_or_by_one_that_is_listed() -> None:
    """src/situs/a/b.py by tests/a/test_b.py or test_b_more.py; a module that only gathers others' names needs none."""
    tests = {
        path.relative_to(ROOT / "tests").with_suffix("").as_posix() for path in (ROOT / "tests").rglob("test_*.py")
    }
    bare = set()
    for path in sources():
        if not re.search(r"^(def|class) ", path.read_text(), re.MULTILINE):
            continue
        folder, _, name = path.relative_to(ROOT / "src" / "situs").with_suffix("").as_posix().rpartition("/")
        own = f"{folder}/test_{name.strip('_')}".removeprefix("/")
        if not any(test == own or test.startswith(f"{own}_") for test in tests):
            bare.add(".".join(["situs", *folder.split("/"), name]).replace("..", ".").removesuffix(".__init__"))
    assert bare - COVERED.keys() == set(), "neither a test of this name nor a line in COVERED"
    assert COVERED.keys() - bare == set(), "in COVERED, and gone or covered by name"
    assert set(COVERED.values()) <= {test.rpartition("/")[2] for test in tests}


def test_no_import_circle() -> None:
    """Between files, imports inside functions among them; what only a type checker reads is left out."""
    graph = grimp.build_graph("situs", exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 100
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while free := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in free}
    while free := left.keys() - set().union(*left.values()):  # what only leads into a circle
        left = {module: imported for module, imported in left.items() if module not in free}
    assert {module: imported & left.keys() for module, imported in left.items()} == {}


def test_only_the_command_line_knows_flags() -> None:
    """Below it an error knows fields. Docstrings may name a flag, and so may the help of a config's field."""
    found = []
    for path in (path for path in sources() if "cli" not in path.parts):
        if not re.search(r"(?:(?<!\S)|['\"}n])\(?--[a-z]", path.read_text()):  # to parse them all takes seconds
            continue
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [each for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        flags = [
            flag
            for each in texts
            if id(each) not in told
            for flag in re.findall(r"(?<!\S)\(?--[a-z][\w-]+", each.value)
        ]
        found += [f"{path.relative_to(ROOT)}: {flag}" for flag in flags if flag != "--concatenate"]  # tar's own
    assert found == []


def test_no_generator_is_decorated_with_a_gradient_mode() -> None:
    """torch throws into a decorated generator with a signature that Python 3.12 deprecates: say it inside instead."""
    found = []
    for path in sources():
        text = path.read_text()
        if "yield" not in text or not re.search(r"@.*_(grad|mode)", text):  # to parse them all takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(isinstance(each, ast.Yield) for each in ast.walk(node)):
                modes = [mode for mode in map(ast.unparse, node.decorator_list) if "_grad" in mode or "_mode" in mode]
                found += [f"{path.relative_to(ROOT)}: {node.name} {mode}" for mode in modes]
    assert found == []


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return texts


def test_no_path_of_one_machine_is_committed() -> None:
    # Spelled in pieces so that this file does not find itself.
    local = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "tmp", "root", "home")) + r")/\w")
    found = [name for name, text in tracked_texts().items() if local.search(text)]
    assert found == []


def test_names_that_say_nothing_stay_rare(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    own: int\n\ndef f(given):\n    found, rest = given\n    self.told = found"
    )
    assert names.count(tmp_path).total() == 4
    counts = names.count(ROOT / "src")
    assert len(counts) > 200
    assert counts.total() <= 100, counts.most_common(10)


def test_the_files_that_the_design_names_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "src" / "situs" / name).is_file()] == []


def test_the_same_pythons_are_promised_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = " ".join(project["classifiers"])
    promised = sorted(map(int, re.findall(r"Python :: 3\.(\d+)", words)))
    first, last = promised[0], promised[-1]
    assert promised == list(range(first, last + 1))
    assert project["requires-python"] == f">=3.{first},<3.{last + 1}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"PYTHONS := {' '.join(f'python3.{minor}' for minor in promised)}\n" in makefile
    assert f"(3, {first}) <= sys.version_info < (3, {last + 1})" in makefile
    for name in ("README.md", "Makefile"):
        said = set(re.findall(r"(?i)python 3\.(\d+) to 3\.(\d+)", (ROOT / name).read_text()))
        assert said == {(str(first), str(last))}, name
