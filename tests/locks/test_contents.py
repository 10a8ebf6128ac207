"""Every file and tensor that would carry the weights past a lock in clear is refused, or left out by name."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_texts import write_folder

from situs.errors import SitusError
from situs.locks.contents import MIB, TABLE, limit_of, sort_files
from situs.locks.folder import WHOLE
from situs.locks.key import Key
from situs.locks.locking import lock, unlock

pytest.importorskip("cryptography")

KEY = Key(bytes(range(32)))
COPIES = (
    "model.safetensors.bak", "model.safetensors.orig", "model.safetensors~", "MODEL.SAFETENSORS", "model.npy",
    "model.npz", "model.zip", "saved_model.pb", "pytorch_model.bin", "model.SafeTensors", "weights", "old/model.tar.gz",
    "config.json.bak", "CONFIG.JSON", "situs_positions.safetensors.bak", "old/situs_positions.safetensors",
)  # fmt: skip


@pytest.fixture
def source(model_folder, tmp_path) -> Path:
    return Path(shutil.copytree(model_folder("vit"), tmp_path / "source"))


def put(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_copies_of_the_weights_are_left_out_and_named(source, tmp_path):
    before = contents(source)
    weights = (source / WHOLE).read_bytes()
    for name in COPIES:
        put(source, name, weights)
    locked = lock(source, KEY, tmp_path / "locked")
    found = contents(locked.path)
    assert set(found) == set(before) | {"manifest.json"}
    pieces = [weights[at : at + 64] for at in range(len(weights) // 2, len(weights) // 2 + 6400, 64)]
    others = [content for name, content in found.items() if name != WHOLE]
    assert not any(piece in content for content in others for piece in pieces)
    assert len(locked.notes) == 1 and all(name in locked.notes[0] for name in COPIES)
    assert contents(unlock(locked.path, KEY, tmp_path / "open").path) == before


@pytest.mark.parametrize("name", COPIES)
def test_a_large_file_that_is_not_known_is_refused(source, tmp_path, name):
    path = put(source, name, b"")
    os.truncate(path, MIB + 1)
    with pytest.raises(SitusError, match=r"1\.0 MiB, and its kind is unknown") as refused:
        lock(source, KEY, tmp_path / "locked")
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "limit"),
    [("README.md", 1), ("preprocessor_config.json", 1), ("tokenizer.json", 64), ("tokenizer.model", 16)],
)
def test_a_known_name_has_a_limit(source, tmp_path, name, limit):
    path = put(source, name, b" ")
    os.truncate(path, limit * MIB + 1)
    with pytest.raises(SitusError, match=f"{name} has .* more than the {limit} MiB"):
        lock(source, KEY, tmp_path / "locked")
    path.write_bytes(b" " * MIB)
    assert name in lock(source, KEY, tmp_path / "locked").manifest.files


def test_a_known_name_must_hold_a_text(source, tmp_path):
    weights = (source / WHOLE).read_bytes()
    for name in ("README.md", "vocab.txt", "1_Pooling/config.json"):
        path = put(source, name, weights)
        with pytest.raises(SitusError, match=f"{name}: has the name of a text file but is not text"):
            lock(source, KEY, tmp_path / "locked")
        path.write_text("text\0")
        with pytest.raises(SitusError, match=f"{name}: has the name of a text file but is not text"):
            lock(source, KEY, tmp_path / "locked")
        path.write_text("ein Täfelchen")


def test_what_is_taken():
    taken = (
        "config.json", "1_Pooling/config.json", "README.md", "readme.MD", "LICENSE", "LICENCE.txt", "NOTICE",
        "merges.txt", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "preprocessor_config.json", TABLE,
        "model.safetensors.index.json", ".gitattributes", "modules.json", "generation_config.json",
    )  # fmt: skip
    assert all(limit_of(name) for name in taken)
    assert not any(limit_of(name) for name in (*COPIES, "README.npz", "LICENSE.zip", "tokenizer.json.gz", f"a/{TABLE}"))


def test_hidden_folders_are_named(source, tmp_path):
    put(source, ".git/objects/ab", b"weights")
    put(source, "tokens/.cache/b", b"weights")
    assert (
        "Files left out, because a lock copies only known small files: .git/, tokens/.cache/."
        in lock(source, KEY, tmp_path / "locked").notes
    )


def test_links_are_neither_followed_nor_dropped(source, tmp_path):
    secret = put(tmp_path, "secret/vocab.txt", b"a private text")
    for name, target in (("vocab.txt", secret), ("more", secret.parent), ("gone.txt", tmp_path / "nowhere")):
        (source / name).symlink_to(target)
        with pytest.raises(SitusError, match=rf"{name} is a symbolic link.*cp -rL"):
            lock(source, KEY, tmp_path / "locked")
        (source / name).unlink()
    real = (source / WHOLE).rename(tmp_path / "real")
    (source / WHOLE).symlink_to(real)
    with pytest.raises(SitusError, match=r"model\.safetensors is a symbolic link"):
        lock(source, KEY, tmp_path / "locked")
    assert not (tmp_path / "locked").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_does_not_hang(source, tmp_path):
    os.mkfifo(source / "vocab.txt")
    with pytest.raises(SitusError, match=r"vocab\.txt is neither a file nor a folder"):
        lock(source, KEY, tmp_path / "locked")


def test_retrained_takes_the_same_files_and_no_link(source, tmp_path):
    locked = lock(source, KEY, tmp_path / "locked").path
    put(locked, "optimizer.PT", b"moments")
    big = put(locked, "copy.npz", b"")
    os.truncate(big, 2 * MIB)
    secret = put(tmp_path, "secret.txt", b"a private text")
    (locked / "vocab.txt").symlink_to(secret)
    with pytest.raises(SitusError, match=r"vocab\.txt is a symbolic link"):
        unlock(locked, KEY, tmp_path / "open", retrained=True)
    (locked / "vocab.txt").unlink()
    opened = unlock(locked, KEY, tmp_path / "open", retrained=True)
    assert "copy.npz, optimizer.PT" in opened.notes[-1]
    assert set(contents(opened.path)) == set(contents(source))


@pytest.mark.parametrize("retrained", [False, True])
def test_opened_files_are_the_owners_alone(source, tmp_path, retrained):
    locked = lock(source, KEY, tmp_path / "locked").path
    opened = unlock(locked, KEY, tmp_path / "open", retrained=retrained).path
    assert {p.stat().st_mode & 0o777 for p in opened.rglob("*") if p.is_file()} == {0o600}


def test_a_position_table_is_a_table_alone(source, tmp_path):
    save_file({"table": torch.zeros(4, 24)}, source / TABLE)
    assert sort_files(source, [WHOLE])[0].count(TABLE) == 1
    save_file({"table": torch.zeros(4, 24), "blocks.0.attn.qkv.weight": torch.zeros(2)}, source / TABLE)
    with pytest.raises(SitusError, match="more than a position table"):
        lock(source, KEY, tmp_path / "locked")


# --- tensors ------------------------------------------------------------------------------------------------


def stray(source: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(source / WHOLE) | tensors, source / WHOLE, metadata={"format": "pt"})


QKV = "blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ema.blocks.0.attn.qkv.weight", lambda t: t),
        ("copy", lambda t: t),
        ("copy", lambda t: t.T.contiguous()),
        ("copy", lambda t: t.flatten()),
        ("copy", lambda t: (100 * t).to(torch.int8)),
        ("copy", lambda t: torch.cat([t, t])),
        ("ema.blocks.0.attn.qkv.weight", lambda t: t[:1]),  # by its name
        ("EMA.blocks.1.norm2.weight", lambda t: t[0, :]),
        ("module/0/attn.qkv.weight", lambda t: t[:1]),
    ],
)
def test_a_copy_of_the_blocks_in_the_file_is_refused(source, tmp_path, name, change):
    stray(source, **{name: change(load_file(source / WHOLE)[QKV]).clone()})
    with pytest.raises(SitusError, match=f"contains the tensor {name} .*does not use.*copy of a block"):
        lock(source, KEY, tmp_path / "locked")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("kind", "prefix"), [("masked", "bert"), ("roberta masked", "roberta")])
def test_a_pooler_that_the_model_does_not_use_is_kept_and_named(tmp_path, kind, prefix):
    """BERT's and RoBERTa's own files are of masked words and hold one; it is a head's part, as clear as the head."""
    pytest.importorskip("transformers")
    source, names = (
        write_folder(tmp_path / "source", kind),
        [f"{prefix}.pooler.dense.{each}" for each in ("bias", "weight")],
    )
    stray(source, **dict(zip(names, (torch.randn(48), torch.randn(48, 48)), strict=True)))
    written = lock(source, KEY, tmp_path / "locked")
    assert any(each.endswith(f"because the model does not use them: {', '.join(names)}.") for each in written.notes)
    unlock(tmp_path / "locked", KEY, tmp_path / "opened")
    assert (tmp_path / "opened" / WHOLE).read_bytes() == (source / WHOLE).read_bytes()
    for name, shape in ((f"{prefix}.pooler.dense.kernel", (48, 48)), (f"{prefix}.other.dense.weight", (48, 48))):
        stray(source, **{name: torch.randn(shape)})
        with pytest.raises(SitusError, match="copy of a block"):
            lock(source, KEY, tmp_path / "again")


def test_a_copy_in_small_pieces_is_refused(source, tmp_path):
    rows = load_file(source / WHOLE)[QKV]
    stray(source, **{f"piece{i}": row.clone() for i, row in enumerate(rows)})
    with pytest.raises(SitusError, match="copy of a block"):
        lock(source, KEY, tmp_path / "locked")


def test_a_small_tensor_of_no_model_is_named(source, tmp_path):
    stray(source, **{"seq_relationship.weight": torch.zeros(2, 24), "embeddings.position_ids": torch.arange(5)})
    locked = lock(source, KEY, tmp_path / "locked")
    assert "embeddings.position_ids, seq_relationship.weight" in locked.notes[0]
    assert contents(unlock(locked.path, KEY, tmp_path / "open").path) == contents(source)


def test_causal_masks_of_older_files_are_no_blocks(model_folder, tmp_path):
    """GPT-2's files of 2019 keep each layer's mask; transformers itself leaves them out."""
    source = Path(shutil.copytree(model_folder("gpt2"), tmp_path / "source"))
    stray(source, **{"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()})
    assert "h.0.attn.bias" in lock(source, KEY, tmp_path / "locked").notes[0]
    stray(source, **{"transformer.h.0.attn.bias": torch.ones(24, 96)})
    with pytest.raises(SitusError, match="copy of a block"):
        lock(source, KEY, tmp_path / "again")


def test_a_block_that_no_group_moves_is_refused(source, tmp_path, monkeypatch):
    """A class of which one layer was forgotten: better no lock than half a one."""
    from dataclasses import replace

    from situs.backbones import Backbone

    whole = Backbone.groups

    def forgetful(backbone):
        return tuple(
            replace(group, members=tuple(m for m in group.members if "blocks.1.mlp.fc2.weight" not in m.tensor))
            for group in whole(backbone)
        )

    monkeypatch.setattr(Backbone, "groups", forgetful)
    with pytest.raises(
        SitusError, match=r"blocks\.1\.mlp\.fc2\.weight is part of a block, but a key would not permute it"
    ):
        lock(source, KEY, tmp_path / "locked")


@pytest.mark.parametrize(
    ("name", "mib", "more", "taken", "said"),
    [
        ("config.json", 1, 0, True, ""),
        ("config.json", 1, 1, False, "has 1.0 MiB, more than the 1 MiB allowed for it"),
        ("sub/README.md", 1, 0, True, ""),
        ("LICENSE", 1, 1, False, "more than the 1 MiB allowed for it"),
        ("spiece.model", 16, 0, True, ""),
        ("spiece.model", 16, 1, False, "has 16.0 MiB, more than the 16 MiB allowed for it"),
        ("tokenizer.json", 64, 1, False, "has 64.0 MiB, more than the 64 MiB allowed for it"),
        ("notes.doc", 1, 0, False, ""),  # no kind that is known, and too small for a model
        ("notes.doc", 1, 1, False, "has 1.0 MiB, and its kind is unknown"),
        ("notes.doc", 0, 0, True, ""),
    ],
)
def test_files_at_the_bounds_of_their_sizes(name: str, mib: int, more: int, taken: bool, said: str, tmp_path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as out:
        out.truncate(mib * MIB + more) if name.endswith(("model", "doc")) or more else out.write(b"a" * mib * MIB)
    if said:
        with pytest.raises(SitusError, match=re.escape(said)):
            sort_files(tmp_path, ())
        assert sort_files(tmp_path, (), refuse=False) == ([], [name])
    else:
        assert sort_files(tmp_path, ()) == (([name], []) if taken else ([], [name]))
    assert sort_files(tmp_path, (name,)) == ([], [])
