"""Models of the Hugging Face hub by address: hf:OWNER/NAME@COMMIT.

Only such an address reaches the network. A commit is needed, because a branch can change; without a commit, the error
names today's commit. Situs fetches the model's config, its tokeniser and its safetensors, never a pickle and never
code. The files lie in the hub client's own cache; each is compared with the hash that the hub lists for the
commit, once. A commit that was fetched is opened without the network.

HF_ENDPOINT, HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE are those of the hub's client.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from situs.errors import SitusError, first_line
from situs.files import cache_folder, read_json, write_text

PREFIX = "hf:"
"""Prefix of an address, and of a local folder of transformers."""

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SMALL = re.compile(
    r"config\.json|preprocessor_config\.json|model\.safetensors\.index\.json|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|vocab\.txt|merges\.txt|chat_template\.jinja"
)
"""Files that are fetched whole if a repository has them; each at most `MOST_SMALL` bytes."""

SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
OWN = re.compile(r"situs_\w+\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MOST_SMALL = 64 << 20
MOST_RESTARTS = 2
SECONDS = 30.0
"""Longest wait for the hub's list of files."""

UNREACHABLE = "is not in the cache here, and the hub cannot be reached"

_ADDRESS = re.compile(r"hf:(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


class Listed(NamedTuple):
    """A file as the hub lists it. sha256: of a large file; blob: git's hash of any other."""

    size: int
    sha256: str
    blob: str


class Address(NamedTuple):
    """A model on the hub: OWNER/NAME, and the revision that the user gave."""

    name: str
    revision: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}{'@' if self.revision else ''}{self.revision}"


def hub_address(source: str | Path) -> Address | None:
    """The address on the hub that `source` is; None for a local path or a name."""
    match = _ADDRESS.fullmatch(str(source))
    if match is None or Path(str(source).removeprefix(PREFIX)).exists():
        return None
    return Address(match["name"], match["revision"] or "")


def local_folder(source: str | Path) -> Path:
    """The path that a model's source is: of an address on the hub the folder with its files, which are fetched first
    where they are not here; of hf:FOLDER the folder; otherwise the path itself."""
    address = hub_address(source)
    return Path(str(source).removeprefix(PREFIX)).expanduser() if address is None else fetch(address)


def fetch(address: Address) -> Path:
    """The folder of a model on the hub with everything that is read of it, checked against the hub's hashes."""
    if not _COMMIT.fullmatch(address.revision):
        raise _unpinned(address)
    folder = _cached(address)
    if folder is not None and (folder / CONFIG).is_file() and _is_recorded(address, folder):
        return folder
    if _is_offline():
        if folder is not None and _is_whole(folder):
            return folder
        raise _refusal(address, "is not in the cache here, and HF_HUB_OFFLINE forbids fetching it")
    listed = _ask(address, lambda: _list_files(address))
    for name in [name for name in listed if SMALL.fullmatch(name)]:
        folder = _fetch_file(address, name, listed[name])
    if folder is None or CONFIG not in listed:
        raise _refusal(address, "has no config.json, so it is not a model of timm or transformers")
    weights = _weights(address, folder, listed)
    for name in weights:
        _fetch_file(address, name, listed[name])
    names = sorted({*weights, *(name for name in listed if SMALL.fullmatch(name))})
    record = _record(address)
    with contextlib.suppress(OSError):  # then the hub is asked again
        record.parent.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps({"address": str(address), "files": names}))
    return folder


def _unpinned(address: Address) -> SitusError:
    """The error for an address without a commit, which names the commit of today where the hub can be asked."""
    problem = (
        "is a branch, a tag or a shortened commit hash, so it can point to other files later"
        if address.revision
        else "names no commit"
    )
    pinned = Address(address.name, "COMMIT (40 hexadecimal digits)")
    if not _is_offline():
        try:
            commit = str(_ask(address, lambda: _information(address, address.revision or None)).sha)
        except SitusError as error:
            if not str(error).endswith(UNREACHABLE):
                return error
        else:
            pinned = pinned._replace(revision=commit if _COMMIT.fullmatch(commit) else pinned.revision)
    return _refusal(address, f"{problem}; give {pinned}")


def _list_files(address: Address) -> dict[str, Listed]:
    """The files of a commit by name, as the hub lists them."""
    listing = _ask(address, lambda: _information(address, address.revision))
    if str(listing.sha) != address.revision:
        raise _refusal(address, f"the hub answers with another commit ({str(listing.sha)[:40]})")
    listed = {}
    for entry in listing.siblings or ():
        name = str(entry.rfilename)
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise _refusal(address, f"lists a file outside of its own folder ({name[:80]!r})")
        large = entry.lfs or {}
        sha256 = large.get("sha256") if isinstance(large, Mapping) else getattr(large, "sha256", None)
        listed[name] = Listed(int(entry.size or 0), str(sha256 or ""), str(entry.blob_id or ""))
        if SMALL.fullmatch(name) and listed[name].size > MOST_SMALL:
            raise _refusal(address, f"its {name} has {listed[name].size:,} bytes, more than {MOST_SMALL:,}")
    return listed


def _information(address: Address, revision: str | None) -> Any:
    from huggingface_hub import HfApi

    client = HfApi(endpoint=_endpoint())
    return client.model_info(address.name, revision=revision, files_metadata=True, timeout=SECONDS)


def _weights(address: Address, folder: Path, listed: Mapping[str, Listed]) -> list[str]:
    """The names of the files of weights, all of them safetensors."""
    extra = [name for name in listed if OWN.fullmatch(name)]
    if WEIGHTS in listed:
        return [WEIGHTS, *extra]
    if INDEX in listed:
        shards = _shards(address, folder)
        for name in shards:
            if name not in listed:
                raise _refusal(address, f"its {INDEX} names {name}, which the hub does not list")
        return [*shards, *extra]
    pickles = sorted(name for name in listed if name.endswith(PICKLES))
    if pickles:
        reason = f"has its weights only as {pickles[0]}, a pickle, which can run code; {WEIGHTS} is needed"
        raise _refusal(address, reason)
    raise _refusal(address, f"has no {WEIGHTS}")


def _shards(address: Address, folder: Path) -> list[str]:
    """The names of the shards in the index of a model's weights."""
    try:
        names = sorted({*read_json(folder / INDEX)["weight_map"].values()})
    except (SitusError, KeyError, AttributeError, TypeError) as error:
        raise _refusal(address, f"its {INDEX} is not an index of shards") from error
    for name in names:
        if not SHARD.fullmatch(str(name)):
            raise _refusal(address, f"its {INDEX} names {str(name)[:80]!r}, which is not a safetensors shard")
    return names


def _fetch_file(address: Address, name: str, listed: Listed) -> Path:
    """Fetches one file, checks it, and gives its folder. A file that differs from its hash is deleted."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    class Progress(tqdm):
        """The client's progress bar, which ends a fetch that begins again and again: the client itself never would."""

        restarts = 0

        def update(self, n: float | None = 1) -> bool | None:
            self.restarts += n is not None and n < 0
            if self.restarts > MOST_RESTARTS:
                raise OSError("the connection failed repeatedly")
            return super().update(n)

    path = Path(
        _ask(
            address,
            lambda: hf_hub_download(
                address.name,
                name,
                revision=address.revision,
                cache_dir=os.environ.get("HF_HUB_CACHE") or None,
                endpoint=_endpoint(),
                library_name="situs",
                tqdm_class=Progress,
            ),
        )
    )
    if problem := _differs(path, listed):
        for place in (path.resolve(), path):
            place.unlink(missing_ok=True)
        raise _refusal(address, f"its {name} {problem}; the downloaded file was deleted from this machine")
    return path.parent


def _differs(path: Path, listed: Listed) -> str:
    """How a file differs from what the hub lists; empty if it does not."""
    size = path.stat().st_size
    if size != listed.size:
        return f"has {size:,} bytes instead of {listed.size:,}"
    with path.open("rb") as file:
        if listed.sha256:
            return "" if hashlib.file_digest(file, "sha256").hexdigest() == listed.sha256 else "differs in its SHA-256"
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # git's own hash
        while data := file.read(1 << 20):
            digest.update(data)
    return "" if digest.hexdigest() == listed.blob else "differs from its hash in git"


def _ask(address: Address, ask: Callable[[], T]) -> T:
    """What the hub answers; a failure is one sentence."""
    try:
        return ask()
    except SitusError:
        raise
    except Exception as error:  # the client lets through a different class for each failure
        raise _refusal(address, _reason(error)) from error


def _reason(error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    cause = error.__cause__
    if status is None and isinstance(cause, Exception) and "LocalEntryNotFoundError" in kinds:
        return _reason(cause)  # the client says that the file is not in its cache; why not, its cause says
    if "GatedRepoError" in kinds:
        return "is gated: accept its terms on the hub, and log in (hf auth login)"
    if "RevisionNotFoundError" in kinds:
        return "the hub has no such commit"
    if "RepositoryNotFoundError" in kinds or status in (401, 403):
        return "is not on the hub, or is private and needs a login (hf auth login)"
    if "EntryNotFoundError" in kinds and status is not None:
        return "a file that the hub lists is not there"
    if status == 429:
        return "the hub refuses further requests for now (429); try again later"
    if status is not None:
        return f"the hub answers {status}"
    if "RemoteProtocolError" in kinds:
        return "the connection failed repeatedly"
    if "TooManyRedirects" in kinds:
        return "the hub redirects without end"
    if kinds & {"ConnectionError", "ConnectError", "TimeoutException", "LocalEntryNotFoundError", "gaierror"}:
        return UNREACHABLE
    return f"cannot be fetched ({type(error).__name__}: {first_line(error)})"


def _refusal(address: Address, problem: str) -> SitusError:
    return SitusError(f"{address}: {problem}", field=("source", "model", "init"))


# --- what is here -----------------------------------------------------------------------------------------------------


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _cached(address: Address) -> Path | None:
    """The folder of a commit in the hub client's cache."""
    from huggingface_hub import try_to_load_from_cache

    cache = os.environ.get("HF_HUB_CACHE") or None
    path = try_to_load_from_cache(address.name, CONFIG, revision=address.revision, cache_dir=cache)
    return Path(path).parent if isinstance(path, str) else None


def _record(address: Address) -> Path:
    """The file that says which files of a commit were fetched and checked."""
    return cache_folder("hub") / f"{address.name.replace('/', '--')}@{address.revision}.json"


def _is_recorded(address: Address, folder: Path) -> bool:
    try:
        names = read_json(_record(address)).get("files")
    except SitusError:
        return False
    return isinstance(names, list) and all((folder / str(name)).is_file() for name in names)


def _is_whole(folder: Path) -> bool:
    """Whether a folder that another program has fetched has all its weights."""
    if not (folder / INDEX).is_file():
        return (folder / WEIGHTS).is_file()
    try:
        names = _shards(Address(folder.name, ""), folder)
    except SitusError:
        return False
    return all((folder / name).is_file() for name in names)
