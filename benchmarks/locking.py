"""How fast is a lock, and in how much memory? A sharded model on disk, next to a plain copy of the same files.

    python benchmarks/locking.py --dir DIR                  # about 1.1 billion parameters, 2.2 GB in bfloat16
    python benchmarks/locking.py --dir DIR --size small     # a dry run of seconds

Makes a random Llama-like model in shards, then, several times in turn: copies the files, locks them, seals them, opens
them again. Copy and lock both end with fsync. Each runs in its own process, whose peak memory is printed beside its
memory after imports. Reads come from the page cache.

Then ViT-B (float32, as timm has it), on disk and in memory, and the dense product P W P⁻¹ of published code over the
same tensors in the same run. Figures are medians; CPU seconds are printed too, since other load slows only wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from situs.backbones import create_backbone
from situs.backbones.layout import Group
from situs.locks.folder import CONFIG, INDEX, structure_of, write_model
from situs.locks.groups import permute_state, random_keys, residual_only
from situs.locks.key import Key
from situs.locks.locking import lock, unlock

KEY = Key(bytes(range(32)))
SIZES: dict[str, dict[str, int]] = {
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
               num_key_value_heads=4, vocab_size=32000),
    "small": dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=4, vocab_size=4000),
}  # fmt: skip


def make_model(folder: Path, size: str, shard_bytes: int) -> tuple[int, int, int]:
    """Writes a random model shard by shard; gives its parameters, its shards and the bytes of the largest."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SIZES[size]}
    (folder / CONFIG).write_text(json.dumps(config))
    state = structure_of(folder).model.state_dict()
    shards: list[list[str]] = [[]]
    size_so_far = 0
    for name, tensor in state.items():
        if size_so_far and size_so_far + 2 * tensor.numel() > shard_bytes:
            shards.append([])
            size_so_far = 0
        shards[-1].append(name)
        size_so_far += 2 * tensor.numel()
    where, largest = {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(names, file)
        save_file({n: torch.randn(state[n].shape).bfloat16() for n in names}, folder / file, metadata={"format": "pt"})
        largest = max(largest, (folder / file).stat().st_size)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(tensor.numel() for tensor in state.values()), len(shards), largest


# --- one measurement, in a process of its own ---------------------------------------------------------------


def copy_files(source: Path, out: Path) -> None:
    out.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, out / path.name)
        handle = os.open(out / path.name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


DEEDS: dict[str, Callable[[Path, Path], Any]] = {
    "copy": copy_files,
    "lock": lambda source, out: lock(source, KEY, out),
    "lock --cover": lambda source, out: lock(source, KEY, out, cover=True),
    "lock --seal": lambda source, out: lock(source, KEY, out, seal=True),
    "unlock": lambda source, out: unlock(source, KEY, out),
}


def memory_mb(line: str) -> float:
    """VmRSS or VmHWM of this process. (ru_maxrss would begin with what its parent held.)"""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{line}:\s+(\d+) kB", status).group(1)) * 1.024e-3  # pyright: ignore[reportOptionalMemberAccess]


def measure_here(deed: str, source: Path, out: Path) -> None:
    """Prints wall and CPU seconds, the peak memory of this process, and its memory before the measurement."""
    import situs.train.run  # noqa: F401  (imports are not what is measured)

    if deed.startswith("lock"):
        structure_of(source)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, wall, cpu = memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    DEEDS[deed](source, out)
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, memory_mb("VmHWM"), before]))


def measure(deed: str, source: Path, out: Path) -> list[float]:
    words = [sys.executable, __file__, "--dir", str(out.parent), "--deed", deed, str(source), str(out)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def on_disk(place: Path, size: str, shard_bytes: int, rounds: int) -> None:
    source = place / "clear"
    parameters, count, largest = make_model(source, size, shard_bytes)
    total = sum(path.stat().st_size for path in source.iterdir())
    print(f"{parameters / 1e9:.3f} B parameters, bfloat16, {total / 1e6:,.0f} MB in {count} shards, "
          f"the largest {largest / 1e6:,.0f} MB; {rounds} rounds")  # fmt: skip
    locked = place / "locked"
    lock(source, KEY, locked)
    rows_of: dict[str, list[list[float]]] = {deed: [] for deed in DEEDS}
    for _ in range(rounds):
        for deed in DEEDS:
            out = place / "out"
            rows_of[deed].append(measure(deed, locked if deed == "unlock" else source, out))
            if deed == "unlock" and any((out / p.name).read_bytes() != p.read_bytes() for p in source.iterdir()):
                raise SystemExit("what was opened is not what was locked")
            shutil.rmtree(out)
    print(f"{'':14}{'MB/s':>8}{'wall s':>9}{'CPU s':>8}{'peak MB':>9}{'above imports':>15}{'of a shard':>12}")
    for deed, rows in rows_of.items():
        wall, cpu, peak, before = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{deed:14}{total / 1e6 / wall:8.0f}{wall:9.2f}{cpu:8.2f}{peak:9.0f}{peak - before:15.0f}"
              f"{(peak - before) * 1e6 / largest:12.2f}")  # fmt: skip
    print("unlock gave every file back bit for bit")


# --- ViT-B, and the dense product ---------------------------------------------------------------------------


def timed(call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def dense_state(state: dict[str, torch.Tensor], groups: tuple[Group, ...], keys: dict[str, torch.Tensor]) -> None:
    """Every keyed axis by a product with the dense permutation matrix: W P⁻¹ where it is read, P W where written."""
    for group in groups:
        matrix = torch.eye(group.size)[keys[group.name]]
        for member in group.members:
            weight = state[member.tensor].float()
            moved = weight @ matrix.T if member.axis == weight.dim() - 1 else matrix @ weight
            state[member.tensor] = moved


def check_dense(state: dict[str, torch.Tensor], groups: tuple[Group, ...], keys: dict[str, torch.Tensor]) -> None:
    dense = dict(state)
    dense_state(dense, groups, keys)
    moved = permute_state(state, groups, keys)
    if not all(torch.equal(dense[name].to(value.dtype), value) for name, value in moved.items()):
        raise SystemExit("the dense product is not the same permutation")


def vit(place: Path, name: str, rounds: int) -> None:
    torch.manual_seed(0)
    backbone = create_backbone(name)
    source = place / name
    source.mkdir()
    write_model(backbone, source)
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
    state = dict(backbone.model.state_dict())
    groups = residual_only(backbone.groups())
    keys = random_keys(groups)
    outs = iter(range(10**6))
    check_dense(state, groups, keys)
    rows = {
        "lock, files": timed(lambda: lock(source, KEY, place / f"vit{next(outs)}"), rounds),
        "copy, files": timed(lambda: copy_files(source, place / f"vit{next(outs)}"), rounds),
        "lock, memory": timed(lambda: permute_state(state, groups, keys), rounds),
        "dense P W P⁻¹": timed(lambda: dense_state(dict(state), groups, keys), rounds),
    }
    print(f"\n{name}, {size:.0f} MB, median of {rounds}, {torch.get_num_threads()} threads")
    for what, (wall, cpu) in rows.items():
        print(f"  {what:15}{wall:8.3f} s wall{cpu:8.3f} s CPU")


def layer(size: str, rounds: int) -> None:
    """One block of the large model, in memory: the same tensors by index and by dense product."""
    entries = {**SIZES[size], "num_hidden_layers": 1, "vocab_size": 64}
    from transformers import LlamaConfig

    backbone = create_backbone(LlamaConfig(**entries, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    state = {name: value.bfloat16() for name, value in backbone.model.state_dict().items()}
    groups = residual_only(backbone.groups())
    keys = random_keys(groups)
    check_dense(state, groups, keys)
    index, _ = timed(lambda: permute_state(state, groups, keys), rounds)
    dense, _ = timed(lambda: dense_state(dict(state), groups, keys), rounds)
    print(f"\none block of {size}: by index {index:.3f} s, dense P W P⁻¹ {dense:.3f} s (× {dense / index:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the files go; they are removed at the end")
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--shard-mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deed", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.deed:
        measure_here(args.deed[0], Path(args.deed[1]), Path(args.deed[2]))
        return
    place = args.dir / f"situs-locking-{os.getpid()}"
    place.mkdir(parents=True)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}")
    try:
        on_disk(place, args.size, args.shard_mb * 10**6, args.rounds)
        vit(place, "vit_base_patch16_224" if args.size == "1b" else "vit_tiny_patch16_224", args.rounds)
        layer(args.size, args.rounds)
    finally:
        shutil.rmtree(place)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
