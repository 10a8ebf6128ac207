"""A study's folder as a few small files, to go on with on another machine: results, logs and the models still needed.

    python scripts/study_parcel.py pack runs/lock parts
    python scripts/study_parcel.py unpack parts runs/elsewhere


A model goes along as a run whose weights are in half precision (ViT-S: 41 MiB), with its head, and without what
training would go on from. Its log goes with it in any case, so that the job stays done and its figures can be read.
Checkpoints of what was cut stay behind: it begins again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from situs.errors import SitusError
from situs.files import write_result, write_text
from situs.folder_lock import NAME as LOCK
from situs.folder_lock import lock_folder
from situs.studies.folder import FAILED, NOT_FINITE, SETTINGS, STUDY, StudyFolder, Task
from situs.studies.form import VERBS
from situs.studies.plan import texts_of

MIB = 1024 * 1024
PARTS = "study.tar.*"
GZIP = b"\x1f\x8b"


def pack_study(
    folder: str | Path, out: str | Path, *, mib: int = 15, models: bool = True, only: Sequence[str] = ()
) -> list[Path]:
    """Writes the study as files of at most so many MiB into a new folder; gives them in order.

    models: those that jobs which are not done yet start from go along. only: of these jobs alone, by name or pattern.
    Where a file that goes along is for its owner alone (mode 0600: a key), the parts are too.
    """
    study, out = StudyFolder.open(Path(folder)), Path(out)
    if mib < 1:
        raise SitusError(field="mib", value=mib, allowed=">= 1")
    if out.exists() and (not out.is_dir() or any(out.glob(PARTS))):
        raise SitusError(f"{out}: holds a packed study already, or is a file", field="out")
    whole, private = io.BytesIO(), False
    taken = {*study.chosen(only, needed=False)} if models else set()
    try:
        with tempfile.TemporaryDirectory() as place, tarfile.open(fileobj=whole, mode="w") as tar:
            for path, name in _contents(study, Path(place), taken):
                tar.add(path, name, recursive=False)
                private |= not path.stat().st_mode & 0o077  # a key, or pictures that an attack gave back
    except OSError as error:
        told = f"{error.filename or tempfile.gettempdir()}: {(error.strerror or str(error)).lower()}"
        raise SitusError(f"{folder}: cannot be packed: {told}", field="folder") from None
    data, size = gzip.compress(whole.getbuffer(), 1, mtime=0), mib * MIB  # which holds a checksum of all of it
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    parts = zip(_names(len(chunks)), chunks, strict=True)
    return [write_result(out / name, chunk, private=private) for name, chunk in parts]


def _contents(study: StudyFolder, place: Path, taken: set[str]) -> Iterator[tuple[Path, str]]:
    """The files that go along, and their names in the study's folder. taken: tasks whose models may."""
    for name in (STUDY, SETTINGS):
        yield study.path / name, name
    left = [task for task in study.tasks.values() if not study.done(task)]
    waiting = {needed for task in left for needed in task.needs.values()}
    for task in study.tasks.values():
        state = study.ended(task)
        for kind in ("toml", "json", "log"):
            if state and task.file(kind).is_file():
                yield task.file(kind), f"jobs/{task.name}.{kind}"
        folder, trained = task.folder, VERBS[task.job.verb].trains
        if not study.done(task):
            continue
        if trained and task.name not in waiting & taken:
            yield from _log(task)
            continue
        if trained and (folder / "checkpoints").is_dir():
            folder = _lighter(task, place / task.name, _steps(task, left))
        held = folder.rglob("*") if folder.is_dir() else [folder]  # a key is a file
        for file in sorted(path for path in held if path.is_file() and path.name != LOCK):
            yield file, (Path("jobs") / task.name / file.relative_to(folder)).as_posix()


def _log(task: Task) -> Iterator[tuple[Path, str]]:
    """The figures of a training, which go along in any case."""
    if (file := task.folder / "metrics.jsonl").is_file():
        yield file, f"jobs/{task.name}/{file.name}"


def _steps(task: Task, left: Sequence[Task]) -> set[int]:
    """The checkpoints of a run that jobs which are not done name: {JOB}/checkpoints/step-00001000."""
    named = re.compile(rf"\{{{re.escape(task.of)}\}}/checkpoints/step-(\d+)")
    own = [other.job for other in left if task.name in other.needs.values()]
    return {int(step) for job in own for text in texts_of([job.model, job.options]) for step in named.findall(text)}


def _lighter(task: Task, place: Path, steps: set[int]) -> Path:
    """A run with the weights of its model alone, and of these steps, in half precision."""
    import torch

    from situs.train.checkpoint import RunFolder
    from situs.train.checkpoint.files import write_state, write_tensors

    run = RunFolder.open(task.folder, writer=False)
    best = {"best": told} if (told := run.facts().get("best")) else {}
    for checkpoint in {each.step: each for each in (run.chosen(), *map(run.chosen, steps & {*run.steps()}))}.values():
        files: dict[str, dict[str, torch.Tensor]] = {}
        for kind in ("model", "ema"):
            held = checkpoint.tensors(kind).items()
            tensors = {name: t.half() if t.dtype == torch.float32 else t for name, t in held}
            if not all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point()):
                raise SitusError(f"{task.folder}: has weights that half precision does not hold")
            files |= {kind: tensors} if tensors else {}
        (there := place / "checkpoints" / checkpoint.path.name).mkdir(parents=True)
        state = {name: fact for name, fact in checkpoint.state.items() if name not in ("format", "files", "sha256")}
        facts = {
            f"{kind}.safetensors": write_tensors(there / f"{kind}.safetensors", tensors)
            for kind, tensors in files.items()
        }
        write_state(there, {**state, **best}, facts)
    for file in task.folder.iterdir():
        if file.is_file() and file.name != LOCK:
            shutil.copy(file, place)
    return place


def unpack_study(parts: str | Path, out: str | Path) -> list[str]:
    """Lays a packed study into the folder `out`, new or of the same study; gives the jobs that it brought.

    What is done there already stays as it is.
    """
    out, whole = Path(out), _whole(Path(parts))
    try:
        return _unpacked(parts, whole, out)
    except OSError as error:
        told = (error.strerror or str(error)).lower()
        raise SitusError(
            f"{out}: cannot be written: {told}; run the same command again once it can be", field="out"
        ) from None


def _unpacked(parts: str | Path, whole: bytes, out: Path) -> list[str]:
    with tempfile.TemporaryDirectory(dir=_made(out.parent)) as place:
        try:
            with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as tar:
                tar.extractall(place, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise SitusError(f"{parts}: cannot be unpacked: {error}", field="parts") from None
        come = StudyFolder.open(Path(place))
        if (out / SETTINGS).is_file():
            here = StudyFolder.open(out)
            if (here.name, here.scale) != (come.name, come.scale):
                said = f"{out}: holds {here.name} at scale {here.scale}, and not {come.name} at {come.scale}"
                raise SitusError(said, field="out")
            try:  # what comes, held to the study that is here
                seeds = max(here.seeds, come.seeds)
                StudyFolder(come.path, here.study, here.name, here.scale, seeds).check_recipes()
            except SitusError as error:
                said = str(error).removeprefix(f"{come.path}: ").partition(";")[0]
                raise SitusError(f"{parts}: is of another study than lies in {out}: {said}", field="parts") from None
        elif out.exists() and not (out.is_dir() and {each.name for each in out.iterdir()} <= {LOCK, STUDY}):
            # these two alone: an unpacking was cut here
            raise SitusError(f"{out}: is not a study's folder, and not empty", field="out")
        out.mkdir(exist_ok=True)
        with lock_folder(out):
            new = not (out / SETTINGS).is_file()
            for name in (STUDY, SETTINGS):
                if new or (name == SETTINGS and StudyFolder.open(out).seeds < come.seeds):
                    write_text(out / name, (come.path / name).read_text(encoding="utf-8"))
            (out / "jobs").mkdir(exist_ok=True)
            return [task.name for task in come.tasks.values() if _laid(come, task, out)]


def _whole(parts: Path) -> bytes:
    """The packed study of all its parts, in order; one that is missing or damaged is refused."""
    found = {path.name: path for path in parts.glob(PARTS)}
    told = sorted({name.rpartition("of")[2] for name in found})
    if len(told) > 1:
        raise SitusError(f"{parts}: holds parts of several packed studies (of {' and of '.join(told)})", field="parts")
    count = int(told[0]) if told and told[0].isdigit() else 0
    if not found or len(found) != count or found.keys() != {*_names(count)}:
        raise SitusError(f"{parts}: holds {len(found)} of {count or 'the'} parts of a packed study", field="parts")
    try:
        data = b"".join(found[name].read_bytes() for name in _names(count))
        return gzip.decompress(data) if data.startswith(GZIP) else data  # those of older versions were not compressed
    except (OSError, EOFError, zlib.error) as error:
        raise SitusError(f"{parts}: a part of the packed study is damaged: {error}", field="parts") from None


def _names(count: int) -> list[str]:
    return [f"study.tar.{number:03d}of{count:03d}" for number in range(1, count + 1)]


def _laid(come: StudyFolder, task: Task, out: Path) -> bool:
    """Puts a job that ended into `out`, its state last; not where what is there is as much or more."""
    there = out / "jobs" / task.name
    here = StudyFolder(out, come.study, come.name, come.scale, come.seeds)
    if not _more(come, here, task):
        return False
    if come.done(task):  # what was begun there is no model of it
        shutil.rmtree(there, ignore_errors=True)
        there.unlink(missing_ok=True)
    if task.folder.exists():
        shutil.move(task.folder, there)
    for kind in ("toml", "log", "json"):
        if task.file(kind).is_file():
            shutil.copy(task.file(kind), there.with_name(f"{task.name}.{kind}"))
    return True


def _more(come: StudyFolder, here: StudyFolder, task: Task) -> bool:
    """Whether what came of a job is more than is here. Of one that was cut nothing came: its checkpoints stayed."""
    own = here.tasks[task.name]
    state, held = come.ended(task), here.ended(own)
    if not here.done(own):
        return come.done(task) or (state == NOT_FINITE != held) or (state == FAILED and not held)
    same = state == held and come.state(task).get("weights") == here.state(own).get("weights")
    return same and come.model_here(task) and not here.model_here(own)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    """Packs or unpacks, and says what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path, help="the study's folder, or that of the files")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--mib", type=int, default=15, help="size of a file at most")
    parser.add_argument("--no-models", action="store_true", help="leave the models behind that jobs still start from")
    parser.add_argument("--only", nargs="*", default=(), metavar="JOB", help="the models of these jobs, by pattern")
    args = parser.parse_args()
    try:
        if args.verb == "pack":
            written = pack_study(args.source, args.out, mib=args.mib, models=not args.no_models, only=args.only)
        else:
            written = unpack_study(args.source, args.out)
    except SitusError as error:
        sys.exit(f"study_parcel: {error}")
    print("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
