"""Ranges through every fault that passes, and one sentence for those that do not."""

from __future__ import annotations

import builtins
import os
import sys
from email.message import Message
from ssl import SSLCertVerificationError
from urllib.error import HTTPError, URLError

import pytest

from situs.data.open import open_source
from situs.data.sources import remote
from situs.data.sources.remote import (
    TRIES,
    RangedFile,
    RemoteError,
    list_folder,
    read_pieces,
    read_whole,
    state_of,
    with_retries,
)
from situs.errors import SitusError

DATA = bytes(range(256)) * 40


def read_range(url, start, end):
    return b"".join(read_pieces(url, start, end))


@pytest.mark.parametrize(
    "faults",
    [
        *([], ["cut"], ["503"], ["500", "cut", "429"], ["short"], ["ignore range"]),
        *(["other range"], ["no word"], ["too much"], ["other range", "cut", "too much"]),
    ],
)
def test_what_passes_is_tried_again(server, faults):
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = list(faults)
    assert read_range(f"{server.url}/a.tar", 100, 3000) == DATA[100:3000]
    assert server.faults["/a.tar"] == []


def test_a_server_that_sends_other_bytes_than_were_asked_for_is_refused(server):
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = ["other range"] * 99
    with pytest.raises(
        RemoteError, match=r"\(the server sent bytes 101-3000/10240 instead of the requested bytes 100-2999\)"
    ):
        read_range(f"{server.url}/a.tar", 100, 3000)


def test_a_server_that_cuts_every_answer_is_read_to_the_end(server):
    server.files["/a.tar"], server.most = DATA, 300
    assert read_range(f"{server.url}/a.tar", 100, len(DATA)) == DATA[100:]
    assert server.sent["/a.tar"] == len(DATA) - 100  # nothing twice


def test_what_is_missing_of_a_piece_is_counted(server):
    """Each answer is half of what was asked for, until that is one byte."""
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = ["short"] * 99
    with pytest.raises(RemoteError, match=r"cannot be fetched \(0 bytes were received instead of 1\)$"):
        read_range(f"{server.url}/a.tar", 100, 3000)


def test_a_file_that_became_shorter_is_told(server):
    server.files["/a.tar"] = DATA[:500]
    with pytest.raises(RemoteError, match=r"\(its server answers 416: the file ends before the requested bytes\)"):
        read_range(f"{server.url}/a.tar", 600, 700)
    assert len(server.asked) == 1


def test_of_a_server_without_ranges_all_is_asked_for_once(server, monkeypatch):
    monkeypatch.setattr(remote, "PIECE", 512)
    server.files["/a.tar"] = DATA
    server.rangeless.add("/a.tar")
    pieces = [*read_pieces(f"{server.url}/a.tar", 1000, len(DATA))]
    assert b"".join(pieces) == DATA[1000:] and {len(each) for each in pieces[:-1]} == {512}
    assert server.sent["/a.tar"] == len(DATA)
    server.faults["/a.tar"] = ["cut", "", ""]  # begun again, and taken from where it was
    server.rangeless.clear()
    assert read_range(f"{server.url}/a.tar", 1000, 3000) == DATA[1000:3000]


def test_a_small_file_must_be_small_and_whole(server):
    server.files["/manifest.json"] = DATA
    with pytest.raises(RemoteError, match=r"manifest.json: is longer than 1,000 bytes"):
        read_whole(f"{server.url}/manifest.json", 1000)
    assert read_whole(f"{server.url}/manifest.json", len(DATA)) == DATA
    server.faults["/manifest.json"] = ["cut"]
    assert read_whole(f"{server.url}/manifest.json") == DATA and server.faults["/manifest.json"] == []


def test_a_whole_file_and_its_state(server):
    server.files["/a.tar"] = DATA
    assert read_whole(f"{server.url}/a.tar") == DATA
    before = state_of(f"{server.url}/a.tar")
    assert before.size == len(DATA) and before.version
    server.rangeless.add("/a.tar")  # which answers the request of one byte with all of them
    assert state_of(f"{server.url}/a.tar") == before
    server.files["/a.tar"] = DATA[::-1]
    assert state_of(f"{server.url}/a.tar").version != before.version


def test_a_server_that_does_not_tell_the_length_is_refused(server):
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = ["no length"] * 9
    with pytest.raises(RemoteError, match=r"/a.tar: the server does not give the length of the file$"):
        state_of(f"{server.url}/a.tar")
    assert len(server.asked) == 1


def answered(status: int) -> HTTPError:
    return HTTPError("https://h/a.tar", status, "", Message(), None)


@pytest.mark.parametrize(
    ("error", "temporary", "said"),
    [
        (URLError(ConnectionRefusedError(111, "Connection refused")), True, "[Errno 111] Connection refused"),
        (
            URLError(SSLCertVerificationError(1, "certificate verify failed")),
            False,
            "certificate verify failed",
        ),
        (URLError("no host given"), True, "<urlopen error no host given>"),
        (TimeoutError("timed out at https://me:pw@h/a"), True, "timed out at https://h/a"),
        (PermissionError(13, "Permission denied"), False, "[Errno 13] Permission denied"),
        (FileNotFoundError(2, "gone"), False, "no such file"),
        (ValueError("bad\naddress"), False, "bad"),
        *((answered(status), False, f"its server answers {status}") for status in (400, 401, 403, 405, 451)),
        *((answered(status), True, f"its server answers {status}") for status in (408, 425, 429, 500, 503)),
        *((answered(status), False, "no such file") for status in (404, 410)),
        (answered(416), False, "its server answers 416: the file ends before the requested bytes"),
    ],
    ids=str,
)
def test_only_what_may_pass_is_tried_again(error, temporary, said, monkeypatch):
    pauses, tries = [], []
    monkeypatch.setattr("time.sleep", pauses.append)

    def ask():
        tries.append(1)
        raise error

    for url, most in (("https://h/a.tar?key=hidden", TRIES if temporary else 1), ("hf://datasets/a/b.tar", 1)):
        tries.clear()
        with pytest.raises(RemoteError) as met:
            with_retries(url, ask)
        assert str(met.value) == f"{url.partition('?')[0]}: cannot be fetched ({said})"
        assert len(tries) == most
    assert len(pauses) == (TRIES - 1 if temporary else 0)


def test_each_pause_is_twice_as_long(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(remote, "PAUSE", 0.5)
    monkeypatch.setattr("time.sleep", pauses.append)
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = ["503"] * (TRIES - 1)
    assert read_range(f"{server.url}/a.tar", 100, 3000) == DATA[100:3000]
    assert pauses == [0.5, 1, 2, 4, 8]


@pytest.mark.parametrize(("fault", "said", "tries"), [("404", "no such file", 1), ("403", "answers 403", 1)])
def test_what_does_not_pass_is_told_at_once(server, fault, said, tries):
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = [fault] * 9
    with pytest.raises(RemoteError, match=rf"/a.tar: cannot be fetched \(.*{said}"):
        read_range(f"{server.url}/a.tar?key=hidden", 0, 10)
    assert sum(path.startswith("/a.tar") for _, path, _ in server.asked) == tries


def test_one_that_never_comes_back_is_one_sentence(server):
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = ["503"] * 99
    with pytest.raises(RemoteError, match=r"cannot be fetched \(its server answers 503\)$"):
        read_range(f"{server.url}/a.tar", 0, 10)
    assert len(server.asked) == TRIES
    server.stop()
    with pytest.raises(RemoteError, match=r"^http://127.0.0.1:\d+/b.tar: cannot be fetched \([^\n]+\)$") as met:
        state_of(f"{server.url}/b.tar?key=hidden")
    assert "hidden" not in str(met.value)


def test_a_file_read_here_and_there(server):
    server.files["/a"] = DATA
    file = RangedFile(f"{server.url}/a", len(DATA))
    assert file.readable() and file.seekable() and not file.writable()
    assert file.seek(-6, os.SEEK_END) == len(DATA) - 6 and file.read(100) == DATA[-6:] and file.read(1) == b""
    file.seek(10)
    assert file.read(5) == DATA[10:15] and file.tell() == 15 and file.seek(2, os.SEEK_CUR) == 17
    assert file.read() == DATA[17:]


def test_other_schemes_go_the_same_way(tmp_path, monkeypatch):
    (tmp_path / "a.tar").write_bytes(DATA)
    assert read_range(f"file://{tmp_path}/a.tar", 5, 9) == DATA[5:9]
    monkeypatch.setattr(remote, "PIECE", 512)
    pieces = [*read_pieces(f"file://{tmp_path}/a.tar", 5, 1500)]
    assert b"".join(pieces) == DATA[5:1500] and [*map(len, pieces)] == [512, 512, 471]
    assert state_of(f"file://{tmp_path}/a.tar").size == len(DATA)
    assert list_folder(f"file://{tmp_path}") == [f"file://{tmp_path}/a.tar"]
    with pytest.raises(SitusError, match="nosuch://x: cannot be read"):
        state_of("nosuch://x")


def test_a_store_that_does_not_tell_the_length_is_refused(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: {"name": path, "type": "file", "size": None})
    with pytest.raises(RemoteError, match=r"^memory://a.tar: the server does not give the length of the file$"):
        state_of("memory://a.tar")


def test_a_scheme_whose_package_is_missing_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ocifs", None)
    with pytest.raises(SitusError, match=r"^reading oci://host/a.tar needs another package: .*ocifs"):
        state_of("oci://host/a.tar?key=hidden")


def test_a_missing_extra_is_named(monkeypatch):
    own = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "fsspec":
            raise ImportError(name)
        return own(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SitusError, match=r"needs the package 'fsspec': pip install 'situs\[remote\]'"):
        state_of("s3://host/a.tar?key=hidden")


# --- the Hugging Face hub -------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A set of four images in two shards on a stand-in for the hub."""
    pytest.importorskip("fsspec")
    constants = pytest.importorskip("huggingface_hub").constants
    import pyarrow as pa
    import pyarrow.parquet as pq
    from hub_server import Hub
    from image_files import noise

    hub = Hub()
    for number, split in enumerate(("train", "test")):
        images = [{"bytes": noise(2 * number + index, 8, 8), "path": None} for index in (0, 1)]
        pq.write_table(pa.table({"image": images, "label": [0, 1]}), tmp_path / "shard.parquet")
        hub.files[f"data/{split}-00000-of-00001.parquet"] = (tmp_path / "shard.parquet").read_bytes()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(remote, "_hub_files", {})
    monkeypatch.setenv("SITUS_CACHE", str(tmp_path / "cache"))
    yield hub
    hub.close()


HUB_SET = "hf://datasets/someone/small"


@pytest.mark.parametrize("address", [HUB_SET, f"{HUB_SET}@main", f"{HUB_SET}/data/train-00000-of-00001.parquet"])
def test_a_set_of_the_hub_is_read(hub, address):
    source = open_source(address, "train")
    assert len(source) == 2 and source.read(1)["label"] == 1
    assert tuple(source.read(0)["image"].shape) == (3, 8, 8)


def test_the_hub_is_asked_for_a_repository_once(hub, tmp_path):
    """Whatever else is read before."""
    (tmp_path / "a.tar").write_bytes(DATA)
    assert read_whole(f"file://{tmp_path}/a.tar") == DATA
    name = "data/train-00000-of-00001.parquet"
    for _ in range(2):
        assert read_whole(f"{HUB_SET}/{name}") == hub.files[name]
    asked = [path for _, path, _ in hub.seen if path.startswith("/api/datasets/")]
    assert len(asked) == len(set(asked)) > 0


def test_what_the_hub_lists_is_held_against_what_it_sends(hub):
    shard = remote.mount(HUB_SET) / "data/train-00000-of-00001.parquet"
    hub.fault, hub.where = "flip", "data/train-00000-of-00001.parquet"
    with pytest.raises(SitusError, match=r"train-00000-of-00001.parquet: differs from what its server lists \(SHA"):
        remote.ensure_local(shard)
    hub.fault = ""
    remote.ensure_local(shard)
    assert shard.read_bytes() == hub.files["data/train-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("status", "where", "reason"),
    [(401, "", "answers 401"), (403, "api", "answers 403"), (429, "api", "answers 429"), (500, "api", "answers 500")],
)
def test_a_refusal_of_the_hub_is_one_sentence(hub, status, where, reason):
    hub.fault, hub.status, hub.where = "status", status, where
    with pytest.raises(SitusError, match=rf"^hf://datasets/someone/small.*: .*{reason}[^\n]*$"):
        open_source(f"{HUB_SET}/data/train-00000-of-00001.parquet", "train")


def test_no_such_set_on_the_hub_and_no_hub_are_one_sentence(hub):
    with pytest.raises(SitusError, match=r"^hf://datasets/someone/large: contains no parquet or tar files$"):
        open_source("hf://datasets/someone/large", "train")
    hub.close()
    with pytest.raises(SitusError, match=r"^hf://datasets/someone/small[^\n]*cannot be fetched \([^\n]*\)$"):
        open_source(HUB_SET, "train")
