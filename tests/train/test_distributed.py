from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import toy
from warm import warm

from situs.errors import SitusError
from situs.train import distributed
from situs.train.checkpoint import Checkpoint, RunFolder
from situs.train.checkpoint.files import read_folder, read_table

MOVES = {"widened": ("ddp/1", "fsdp/2"), "narrowed": ("fsdp/2", "ddp/1")}
"""How a run was begun, and how it was gone on with."""

SCENARIOS = [
    *("plain/ddp/1", "half@widened/ddp/1", "blocks/ddp/1"),
    *("plain/ddp/2", "drop_path/ddp/2", "interrupted/ddp/2", "plain/fsdp/2", "not_finite/fsdp/2"),
    *("blocks/fsdp/2", "plain@widened/fsdp/2", "half@narrowed/fsdp/2"),
    "plain@narrowed/ddp/1",
]
FOUR = {
    "spread": ("ddp/2", "fsdp/2"),
    "four_to_two": ("fsdp/4", "ddp/2"),
    "two_to_four": ("fsdp/2", "fsdp/4"),
    "four_to_one": ("fsdp/4", "ddp/1"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario of ranks.py, run once."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), SCENARIOS)


def run_ranks(out: Path, scenarios: list[str]) -> Path:
    status, printed, complaints = warm(Path(__file__).parent / "ranks.py", out, *scenarios)
    assert status == 0, complaints
    said = json.loads(printed.splitlines()[-1])  # before it some versions of gloo tell of their connections
    logs = {path.name: path.read_text() for path in out.iterdir() if path.is_file()}
    assert set(said) == {0}, f"{said}\n{logs}"
    return out


def last(folder: Path, step: int | None = None) -> Checkpoint:
    run = RunFolder.open(folder)
    if step is not None:
        state = read_folder(run.checkpoints / f"step-{step:08d}")
        assert isinstance(state, dict)
        return Checkpoint(run.checkpoints / f"step-{step:08d}", step, state)
    found = run.latest()
    assert found is not None
    return found


def near(kind: str) -> dict[str, float]:
    # FSDP of torch 2.9 differs by roundings of float32 where that of 2.14 keeps what DDP keeps.
    rounds = kind == "fsdp" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
    return dict(rtol=1e-5, atol=1e-7) if rounds else dict(rtol=1e-7, atol=1e-11)


def same_state(one: Checkpoint, two: Checkpoint, kind: str) -> None:
    """float64; AdamW's first moments hold the gradient itself, so a wrong mean shows there."""
    for file in ("model", "optimizer", "ema"):
        left, right = one.tensors(file), two.tensors(file)
        assert left.keys() == right.keys()
        assert left
        for name in left:
            torch.testing.assert_close(right[name], left[name], **near(kind), msg=lambda m, n=name: f"{n}: {m}")
    moments = one.tensors("optimizer")
    assert max(float(t.abs().max()) for n, t in moments.items() if n.endswith("exp_avg")) > 1e-4


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("step", [4, 8])
def test_two_ranks_are_one_rank_with_the_same_batch(ranks: Path, kind: str, step: int) -> None:
    # Accumulation, a ragged last batch (3 + 2 samples), layer-wise rates, clipping; another seed on rank 1.
    same_state(last(ranks / "plain-ddp-1", step), last(ranks / f"plain-{kind}-2", step), kind)


@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_with_other_ranks_and_is_the_same(ranks: Path, name: str) -> None:
    first, then = MOVES[name]
    begun, ended = last(ranks / name, 4), last(ranks / name)
    assert [begun.state["world"], ended.state["world"]] == [int(first[-1]), int(then[-1])]
    assert [begun.state["format"], ended.state["format"]] == [3 if "fsdp" in each else 2 for each in (first, then)]
    same_state(last(ranks / "plain-ddp-1"), ended, "fsdp")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_shard_is_a_rank_s_own_and_torch_reads_it(ranks: Path, tmp_path: Path) -> None:
    """No file holds a whole matrix; torch.distributed.checkpoint puts the parts together as we do."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    one, two = last(ranks / "plain-ddp-1"), last(ranks / "plain-fsdp-2")
    weights = one.tensors("model")
    files = [two.path / f"model.rank{rank}.safetensors" for rank in (0, 1)]
    for file in files:
        assert all(t.numel() <= weights[name].numel() // 2 + weights[name].stride(0)
                   for name, t in load_file(file).items())  # fmt: skip
        shutil.copy(file, tmp_path)
    whole = two.tensors("model")
    kept = {name: torch.empty_like(whole[name]) for file in files for name in load_file(file)}  # ties once
    load(kept, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert kept
    assert all(torch.equal(whole[name], value) for name, value in kept.items())


def test_a_block_is_gathered_when_it_is_run_and_no_longer(ranks: Path) -> None:
    for rank in (0, 1):
        found = json.loads((ranks / "blocks-fsdp-2" / f"whole.{rank}.json").read_text())
        assert found["forward"] == [found["block"]]  # of four
        assert max(found["backward"]) <= 2 * found["block"]  # the next may be on its way
    whole = json.loads((ranks / "blocks-ddp-1" / "whole.0.json").read_text())
    assert whole["forward"] == whole["backward"] == [4 * whole["block"]]  # what the count can see
    same_state(last(ranks / "blocks-ddp-1"), last(ranks / "blocks-fsdp-2"), "fsdp")


@pytest.mark.slow
def test_four_ranks_are_one_and_may_become_more_or_fewer(ranks: Path, tmp_path: Path) -> None:
    names = [f"plain/{kind}/4" for kind in ("ddp", "fsdp")] + ["blocks/fsdp/4"]
    for folder, (first, then) in FOUR.items():
        names += [f"half@{folder}/{first}", f"plain@{folder}/{then}"]
    out = run_ranks(tmp_path, names)
    for folder in ("plain-ddp-4", "plain-fsdp-4", *FOUR):
        same_state(last(ranks / "plain-ddp-1"), last(out / folder), "fsdp")
    same_state(last(ranks / "blocks-ddp-1"), last(out / "blocks-fsdp-4"), "fsdp")
    assert last(out / "plain-fsdp-4").state["files"].keys() > {f"model.rank{rank}.safetensors" for rank in range(4)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_log_is_the_mean_over_the_ranks(ranks: Path, kind: str) -> None:
    one, two = RunFolder.open(ranks / "plain-ddp-1").records(), RunFolder.open(ranks / f"plain-{kind}-2").records()
    assert [r["step"] for r in one] == [r["step"] for r in two] == [4, 8]
    for left, right in zip(one, two, strict=True):
        for name in ("loss", "accuracy", "gradient_norm", "lr"):
            assert right[name] == pytest.approx(left[name], rel=1e-5)


def test_one_rank_asked_to_stop_stops_all_and_the_rest_is_the_same(ranks: Path) -> None:
    peace, stopped = last(ranks / "drop_path-ddp-2"), last(ranks / "interrupted-ddp-2")
    assert peace.step == stopped.step == 8
    for file in ("model", "optimizer", "ema", "generators"):
        left, right = peace.tensors(file), stopped.tensors(file)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), file
    generators = peace.tensors("generators")["cpu"]
    assert not torch.equal(generators[0], generators[1])  # each rank's drop path is its own


def test_one_bad_rank_stops_all(ranks: Path) -> None:
    """The scenario asserts that both ranks stop."""
    folder = ranks / "not_finite-fsdp-2"
    assert RunFolder.open(folder).steps() == []  # step 3 was bad, the first checkpoint was due at 4
    state = read_table(folder / "nan" / "state.json")
    assert isinstance(state, dict)
    assert state["step"] == 3
    assert math.isfinite(float(state["values"]["loss"]))  # rank 0's own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_compiled_ranks_are_eager_ranks(ranks: Path, tmp_path: Path, kind: str) -> None:
    one, two = last(ranks / "plain-ddp-1"), last(run_ranks(tmp_path, [f"compiled/{kind}/2"]) / f"compiled-{kind}-2")
    left, right = one.tensors("model"), two.tensors("model")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=1e-6, atol=1e-9)


def test_ddp_is_not_heard_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of one channel has gradients in another layout than DDP's buckets, of which torch warns on each rank."""
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda module, **_: module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed.wrap_ddp(toy())
        warnings.warn("Grad strides do not match bucket view strides. This may indicate …", stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)


@pytest.mark.parametrize("named", [(), ("RANK",), ("WORLD_SIZE",)])
def test_alone_without_torchrun(named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets both variables; one of them alone is another program's."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1") if name in named else monkeypatch.delenv(name, raising=False)
    who = distributed.start("cpu")
    assert (who.rank, who.world, who.main, who.device.type) == (0, 1, True, "cpu")
    assert (distributed.rank(), distributed.world()) == (0, 1)
    distributed.barrier()
    value = torch.tensor([1.0, 2.0])
    assert distributed.mean(value) is value
    assert distributed.most(value) is value
    assert distributed.from_main({"a": 1}, torch.device("cpu")) == {"a": 1}
    assert torch.equal(distributed.rows(value, torch.device("cpu")), value[None])


def test_the_addresses_of_killed_ranks_are_not_taken_for_those_of_a_new_start(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, met = torch.distributed.HashStore(), []
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda _: iter([(kept, 0, 2)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, store, **_: met.append(store))
    for start in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        distributed._join("gloo")
    met[0].set("rank 0", "an address")
    assert not met[1].check(["rank 0"])
    met[1].set("rank 0", "another")
    assert met[2].get("rank 0") == b"another"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SitusError, match=r"device=cuda: this machine has no CUDA device"):
        distributed.start("cuda")


def test_the_gpu_of_a_mac_is_named_mps_and_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SitusError, match=r"^device=mps: torch cannot compute on this device; use cpu$"):
        distributed.start("mps")
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.ones(1))  # as on a machine that has it
    assert distributed.start("mps").device == torch.device("mps")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SitusError, match=r"^device=mps: a run with several ranks works only on cpu or cuda$"):
        distributed.start("mps")


def test_a_device_that_cannot_compute_is_an_error() -> None:
    with pytest.raises(SitusError, match=r"device=meta: torch cannot compute on this device; use cpu"):
        distributed.start("meta")
