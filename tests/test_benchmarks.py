"""A benchmark says what failed by its status, measures the rest, and gives peers the same work."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from warm import warm

from situs.bench.cases import StepCase, Timing
from situs.bench.measure import measure_case

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
METHODS = BENCHMARKS / "methods.py"
SMALL = ["--model", "vit_tiny_patch16_224", "--img-size", "16", "--patch-size", "8", "--depth", "1", "--batch", "2",
         "--device", "cpu", "--warmup", "1", "--steps", "1", "--repeats", "1"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status", "rows"),
    [
        (["--cases", "supervised", "--peers", "timm"], 0, ["supervised", "timm"]),
        (["--cases", "mp3:2.0", "supervised", "--peers"], 1, ["supervised"]),
        (["--cases", "mp3:2.0", "nosuchmethod", "--peers"], 1, []),
    ],
)
def test_the_status_says_whether_every_case_was_measured(
    words: list[str], status: int, rows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(METHODS), *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(METHODS), run_name="__main__")
    assert int(ended.value.code or 0) == status
    printed = capsys.readouterr()
    lines = [line.split()[0] for line in printed.out.splitlines() if line.startswith("  ")]
    assert lines == (["case", *rows] if rows else [])
    failed = [case for case in ("mp3:2.0", "nosuchmethod") if case in words]
    assert printed.out.endswith(f"failed, see above: {', '.join(failed)}\n") == bool(failed)
    assert ("mask_ratio=2.0: must be in [0, 1)" in printed.err) == ("mp3:2.0" in words)


def test_a_peer_is_given_as_many_operations() -> None:
    measure_peer = runpy.run_path(str(METHODS))["measure_peer"]
    case = StepCase(model="vit_tiny_patch16_224", img_size=16, patch_size=8, model_args={"depth": 1}, batch=4)
    timing, cpu = Timing(warmup=1, steps=1, repeats=1), torch.device("cpu")
    assert measure_peer("timm", case, timing, cpu).flops == measure_case(case, timing, cpu).flops


def test_photographs_of_every_form_and_size_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg")
    words = ["--photos", str(tmp_path), "--sides", "20", "300", "--size", "16", "--batch", "2", "--count", "8"]
    words += ["--workers", "0", "--seconds", "0.01", "--device", "cpu", "--augment", "none", "--cases"]
    monkeypatch.setattr(sys, "argv", ["photographs.py", *words])
    runpy.run_path(str(BENCHMARKS / "photographs.py"), run_name="__main__")
    table = capsys.readouterr().out.partition("The loader alone, img/s")[2].splitlines()[2:]
    rows = [line.split() for line in table if line.startswith("  ")]
    forms = ["folder", "parquet", "webdataset"]
    assert [row[:2] for row in rows if "device" not in row] == [
        *(["20", form] for form in forms),
        *(["300", form] for form in [*forms, "packed"]),  # 20 pixels are not shrunk to 256
    ]
    assert len(rows) == 9 and all(float(row[-1].replace(",", "")) > 0 for row in rows)


def test_a_figure_that_takes_too_long_is_given_up() -> None:
    there = runpy.run_path(str(BENCHMARKS / "photographs.py"))
    started = time.perf_counter()
    with pytest.raises(there["TooLongError"]), there["within"](0.05):
        time.sleep(20)
    assert time.perf_counter() - started < 10


def test_clips_are_fed_and_their_share_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--presets", "speech-mp3", "--device", "cpu", "--batch", "4", "--count", "8", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["clips.py", *words, "--repeats", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "clips.py"), run_name="__main__")
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  speech-mp3")]
    share = float(row[5])
    assert int(ended.value.code or 0) == int(share < 80)
    assert [float(figure.replace(",", "")) > 0 for figure in row[1:5]] == [True] * 4


def test_without_flower_its_benchmark_is_one_sentence() -> None:
    """In a process of its own, for a benchmark imports its neighbour by name."""
    code = (
        "import runpy, sys; sys.modules['flwr'] = None; sys.path.insert(0, sys.argv[1]); "
        "sys.argv = ['flower.py']; runpy.run_path(sys.path[0] + '/flower.py', run_name='__main__')"
    )
    said = "flwr is not installed: pip install flwr, best into an environment of its own\n"
    assert warm("-c", code, METHODS.parent) == (1, "", said)


def test_the_published_attack_takes_the_cosine_of_all_gradients_and_the_tools_total_variation() -> None:
    """Beside the tool's own terms: one vector of all gradients; the mean over all differences, both ways, times 0.2."""
    made = runpy.run_path(str(BENCHMARKS / "attacks.py"))
    chance = torch.Generator().manual_seed(0)
    guess, sent = ({n: torch.randn(2, *s, generator=chance) for n, s in (("a", (3, 4)), ("b", (5,)))} for _ in range(2))
    attack = made["InvertingGradients"](made["PUBLISHED"])
    found = attack.measure(sent, None, 0.0)(guess)
    flat = [torch.cat([part.flatten(1) for part in each.values()], dim=1).double() for each in (guess, sent)]
    torch.testing.assert_close(found.double(), 1 - torch.nn.functional.cosine_similarity(*flat), atol=1e-6, rtol=0)
    image = torch.randn(1, 1, 3, 8, 8, generator=chance)
    steps = torch.cat([image.diff(dim=-2).abs().flatten(), image.diff(dim=-1).abs().flatten()])
    from situs.audit.attacks.matching import variation

    assert float(attack.config.smooth * variation(image)) == pytest.approx(0.2 * float(steps.mean()))
    assert (attack.config.lr, attack.config.signed, attack.config.border) == (0.1, True, 0)


def test_what_a_guard_costs_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "test_vit", "--size", "32", "--patch", "8", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["guard.py", *words])
    runpy.run_path(str(BENCHMARKS / "guard.py"), run_name="__main__")
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows] == ["guard", "none", "patchembed", "all closed forms"]
    assert all(float(row[2]) >= 0 for row in rows[2:])


def test_tokens_a_second_of_text_and_what_a_way_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from tiny_texts import write_folder

    words = [
        "--model",
        str(write_folder(tmp_path, "bert", width=16)),
        "--device",
        "cpu",
        "--batch",
        "2",
        "--length",
        "8",
    ]
    words += ["--steps", "1", "--warmup", "1", "--repeats", "1", "--ways", "situs", "loop"]
    monkeypatch.setattr(sys, "argv", ["text.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "text.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")][1:]
    assert ended.value.code == 0 and [row[:3] for row in rows] == [["2", "8", "situs"], ["2", "8", "loop"]]
    for *_, milliseconds, tokens in rows:
        assert float(tokens.replace(",", "")) == pytest.approx(16e3 / float(milliseconds), rel=0.05)


def test_jobs_of_few_labels_come_after_what_they_need_and_adapt_is_chosen_of_their_rows(tmp_path: Path) -> None:
    study = runpy.run_path(str(BENCHMARKS / "few_labels.py"))
    jobs, job = study["jobs_of"](["pets", "cifar"]), study["Job"]
    assert len({each.name for each in jobs}) == len(jobs)
    assert all(need in jobs for each in jobs for need in each.needs)
    way = "all layers"
    assert job("way", "cifar", 500, 1, "scratch", way).grid == job("way", "cifar", 50, 0, "scratch", way)
    assert job("way", "cifar", 500, 1, "mp3", way).grid is None  # the rates of adapt
    right = {"kNN": "1111", "class means": "1000", "linear probe": "1100"}
    ways = {way: {"hits": 50, "count": 100, "right": text} for way, text in right.items()}
    rows = [job("frozen", "pets", 5)._asdict() | {"ways": ways}]
    trained = {"hits": 90, "count": 100, "right": "1111", "updates": 3, "total": 4, "rate": 0.1}
    rows.append(job("way", "pets", 5, 0, "dinov2", "LoRA")._asdict() | trained)
    (tmp_path / "rows").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "rows" / f"{number}.json").write_text(json.dumps(row))
    found = study["table"](tmp_path, lambda *_: torch.tensor([0, 0, 1, 1]))
    assert [(each["taken"], each["top1"], each["within"]) for each in found["adapt"]] == [("LoRA", 0.9, True)]
    assert next(row for row in found["rows"] if row["LoRA"])["linear probe"] == [0.5]
