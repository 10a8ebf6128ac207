"""What `check` finds in a set that was made to hold one of each kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import write_coco
from image_files import encoded, write
from masked import write_ade
from PIL import Image

from situs.data.check import KINDS, check, survey
from situs.data.modalities.mask import MaskConfig
from situs.data.open import open_source
from situs.data.pack import PackConfig, pack
from situs.data.sources.memory import addressed
from situs.errors import SitusError


def noise(seed: int, height: int = 20, width: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    exif = Image.Exif()
    exif[0x0112] = 6
    root = tmp_path / "zoo"
    for number in range(8):
        write(root / f"train/a/{number}.png", encoded(noise(number)))
    deep = np.random.default_rng(9).integers(0, 65536, (20, 24), dtype=np.uint16)
    made = {
        "train/a/broken.jpg": encoded(noise(10), "JPEG")[:800],
        "train/a/none.png": b"text",
        "train/a/grey.png": encoded(noise(11).convert("L")),
        "train/a/cmyk.jpg": encoded(noise(12).convert("CMYK"), "JPEG"),
        "train/a/deep.png": encoded(Image.fromarray(deep)),
        "train/a/turned.jpg": encoded(noise(13), "JPEG", exif=exif),
        "train/a/huge.png": encoded(noise(14, 100, 120)),
        "train/a/long.png": encoded(noise(15, 10, 41)),
        "train/a/tiny.png": encoded(noise(16, 4, 4)),
        "train/a/twice.png": encoded(noise(1)),
        "train/b/other.bmp": encoded(noise(2), "BMP"),
        "val/a/0.png": encoded(noise(30)),
        "val/b/seen.bmp": encoded(noise(3), "BMP"),
        "train/a/notes.txt": b"",
    }
    for name, data in made.items():
        write(root / name, data)
    return root


def names(found, kind: str) -> list[str]:
    return [str(each) for each in found.issues[kind]]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_of_each_kind(zoo, workers):
    found = check(zoo, huge_mpx=0.01, workers=workers)
    assert found.images == {"train": 19, "val": 2}
    assert names(found, "grey") == ["train: a/deep.png", "train: a/grey.png"]
    assert names(found, "cmyk") == ["train: a/cmyk.jpg"]
    assert names(found, "deep") == ["train: a/deep.png"]
    assert names(found, "turned") == ["train: a/turned.jpg"]
    assert names(found, "huge") == ["train: a/huge.png (100 × 120)"]
    assert names(found, "odd") == ["train: a/long.png (10 × 41)", "train: a/tiny.png (4 × 4)"]
    assert names(found, "duplicate") == ["train: a/twice.png (as a/1.png)"]
    assert names(found, "same pixels") == ["train: b/other.bmp (as a/2.png)"]
    assert names(found, "contradiction") == ["train: b/other.bmp (label b, but a/2.png has the label a)"]
    assert names(found, "leak") == ["val: b/seen.bmp (as a/3.png)"]
    assert [each.name for each in found.issues["broken"]] == ["a/broken.jpg", "a/none.png"]
    assert "cannot be decoded" in found.issues["broken"][0].what
    assert {kind: len(every) for kind, every in found.issues.items()} == found.counts
    assert found.classes == {"a": 17, "b": 2}
    assert len(found.provenance.left_out) == 1 and "notes.txt" in found.provenance.left_out[0]
    assert found.failing() == ["broken"]
    assert found.failing(["leak", "checksum"]) == ["leak"]
    tables = {table.title.lower(): table.rows for table in found.details()}
    assert tables.keys() == {kind for kind, every in found.issues.items() if every}
    for kind, rows in tables.items():
        assert [[*row] for row in rows] == [
            [each.split or "all", each.name, each.what or None] for each in found.issues[kind]
        ]
    json.dumps(found.to_json())


def test_headers_alone(zoo):
    found = check(zoo, decode_pixels=False, workers=0)
    assert [each.name for each in found.issues["broken"]] == ["a/none.png"]  # the cut one has a whole header
    assert found.counts["duplicate"] == 1 and found.counts["same pixels"] == found.counts["leak"] == 0
    assert "were not decoded" in found.summary().notes[-1]


def test_a_clean_set_and_a_grey_one(tmp_path):
    for number in range(4):
        write(tmp_path / f"clean/{number}.png", encoded(noise(number)))
        write(tmp_path / f"grey/{number}.png", encoded(noise(number).convert("L")))
    clean = check(tmp_path / "clean", workers=0)
    assert sum(clean.counts.values()) == 0
    assert clean.summary().sentence == "4 images: no issues found."
    assert clean.sizes == {
        f"{w}_{s}": n for w in ("least", "median", "most") for s, n in (("height", 20), ("width", 24))
    }
    assert "height × width: 20 × 24" in clean.summary().notes
    headers = check(tmp_path / "clean", decode_pixels=False, workers=0)
    assert [(each.title, each.tone, each.mark) for each in (clean, headers)] == [
        ("clean: checked", "good", "No issues found"),
        ("clean: checked", "unsure", "No issues found, but images were not decoded"),
    ]
    assert check(tmp_path / "grey", workers=0).counts["grey"] == 0


def test_pixels_without_files():
    found = check("samples", splits=["test"], workers=0)
    assert found.counts["broken"] == 0 and sum(found.images.values()) == sum(found.classes.values())


def test_images_in_memory_are_surveyed_as_files_are() -> None:
    grey, colour = (np.asarray(noise(1).convert(mode)) for mode in ("L", "RGB"))
    source = open_source(addressed([grey, colour, colour / 255, colour, colour[:, :7]]))
    rows, issues = survey(source, True, [0, 1, 2, 3, 4])
    assert issues == [(2, "deep", "")]
    assert rows["grey"].tolist() == [True, False, False, False, False]
    assert rows["label"].tolist() == [-1] * 5 and not rows["broken"].any()
    assert rows["height"].tolist() == [20] * 5 and rows["width"].tolist() == [24, 24, 24, 24, 7]
    for column in ("pixels", "data"):
        assert rows[1][column] == rows[3][column] and len({*rows[column].tolist()}) == 4


def test_what_is_just_within_a_limit_is_no_issue(tmp_path: Path) -> None:
    """Of 20 pixels as the usual shorter side; 10,000 pixels are the most."""
    for number in range(9):
        write(tmp_path / f"{number}.png", encoded(noise(number)))
    sides = {"long": (10, 40), "longer": (10, 41), "small": (5, 19), "smaller": (4, 15), "large": (100, 100)}
    for number, (name, (height, width)) in enumerate((sides | {"larger": (100, 101)}).items(), 20):
        write(tmp_path / f"{name}.png", encoded(noise(number, height, width)))
        write(tmp_path / f"{name}-turned.png", encoded(noise(number + 20, width, height)))
    found = check(tmp_path, huge_mpx=0.01, workers=0)
    assert [each.name for each in found.issues["odd"]] == [
        *("longer-turned.png", "longer.png", "smaller-turned.png", "smaller.png")
    ]
    assert [each.name for each in found.issues["huge"]] == ["larger-turned.png", "larger.png"]
    assert found.sizes == {
        f"{word}_{side}": number
        for word, number in (("least", 4), ("most", 101), ("median", 20))
        for side in ("height", "width")
    } | {"median_width": 24}
    assert found.summary().notes[-1] == "height × width: from 4 × 4 to 101 × 101, median 20 × 24"
    assert (found.tone, found.mark) == ("unsure", "Issues to inspect")
    assert found.summary().numbers == (("6", "issues in 21 images"),)


@pytest.mark.parametrize(("grey", "colour", "issues"), [(1, 1, 0), (2, 2, 0), (1, 2, 1), (2, 3, 2), (2, 1, 0)])
def test_grey_images_are_odd_where_they_are_less_than_half(tmp_path: Path, grey: int, colour: int, issues: int) -> None:
    for number in range(grey + colour):
        picture = noise(number)
        write(tmp_path / f"{number}.png", encoded(picture.convert("L") if number < grey else picture))
    torn = encoded(noise(9).convert("L"), "JPEG")[:-200]  # whose header says that it is grey; it counts for neither
    write(tmp_path / "torn.jpg", torn)
    assert check(tmp_path, workers=0).counts["grey"] == issues


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_checksums_of_a_packed_set(zoo, tmp_path, kind):
    out = tmp_path / "out"
    pack(zoo, out, PackConfig(format=kind, shard_mib=0.01), workers=0)
    assert check(out, workers=0).counts["checksum"] == 0
    shards = sorted(file for file in out.glob("train-*"))
    data = bytearray(shards[0].read_bytes())
    data[len(data) // 2] ^= 1
    shards[0].write_bytes(bytes(data))
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    (out / f"train-99999{shards[0].suffix}").write_bytes(b"")
    found = check(out, workers=0)
    told = [(each.name, each.what.split(" ")[0:3]) for each in found.issues["checksum"]]
    assert told == [
        (shards[0].name, ["differs", "from", "what"]),
        (shards[1].name, ["is", "missing"]),
        (shards[2].name, ["has", *found.issues["checksum"][2].what.split(" ")[1:3]]),
        (f"train-99999{shards[0].suffix}", ["is", "not", "in"]),
    ]
    assert found.images == {"val": 2}
    assert "because shards are damaged" in found.provenance.left_out[0]


def packed(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Three images in one shard, and the manifest."""
    for number in range(3):
        write(tmp_path / f"images/{number}.png", encoded(noise(number)))
    pack(tmp_path / "images", tmp_path / "out", PackConfig(), workers=0)
    return tmp_path / "out/manifest.json", json.loads((tmp_path / "out/manifest.json").read_text())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "the manifest has version 2, but this version of situs reads only version 1"),
        *(({"file": name}, f"is damaged: {name!r} is not a file name of a shard") for name in ("", ".", "..", "a/b")),
        ({"bytes": "12"}, "is damaged: the size or the SHA-256 of 'part-00000.parquet' is missing"),
        ({"sha256": None}, "is damaged: the size or the SHA-256 of 'part-00000.parquet' is missing"),
        ({"shards": 7}, r"is damaged (TypeError: 'int' object is not iterable)"),
        (b"{torn", "is damaged (JSONDecodeError: Expecting property name"),
        (b"\xff", "is damaged (UnicodeDecodeError: "),
    ],
)
def test_a_manifest_that_is_wrong_is_one_sentence(tmp_path: Path, change: Any, said: str) -> None:
    file, manifest = packed(tmp_path)
    if isinstance(change, bytes):
        file.write_bytes(change)
    else:
        within = manifest["shards"][0] if {*change} & {*manifest["shards"][0]} else manifest
        within.update(change)
        file.write_text(json.dumps(manifest))
    with pytest.raises(SitusError, match=f"^{re.escape(f'{file}: {said}')}") as caught:
        check(tmp_path / "out", workers=0)
    assert "\n" not in str(caught.value)


def test_a_shard_alone_is_named_without_its_ending(tmp_path: Path) -> None:
    file, _ = packed(tmp_path)
    assert check(file.with_name("part-00000.parquet"), workers=0).title == "part-00000: checked"


def test_a_manifest_without_an_entry_names_it(tmp_path: Path) -> None:
    file, manifest = packed(tmp_path)
    for holder, key in ((manifest["shards"][0], "sha256"), (manifest["shards"][0], "file"), (manifest, "shards")):
        kept = holder.pop(key)
        file.write_text(json.dumps(manifest))
        with pytest.raises(SitusError, match=rf"manifest\.json: is damaged \(KeyError: '{key}'\)$"):
            check(tmp_path / "out", workers=0)
        holder[key] = kept


@pytest.mark.parametrize("content", [b"[]", b"7", b"{}", b'{"kind": "of another program", "version": 2, "shards": 3}'])
def test_a_manifest_of_another_program_is_none(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "a.png", encoded(noise(0)))
    (tmp_path / "manifest.json").write_bytes(content)
    found = check(tmp_path, workers=0)
    assert (found.images, sum(found.counts.values())) == ({"": 1}, 0)


def test_what_the_system_refuses_of_a_packed_set_is_told(tmp_path: Path) -> None:
    file, manifest = packed(tmp_path)
    shard = tmp_path / "out/part-00000.parquet"
    shard.unlink()
    shard.mkdir()
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    manifest["shards"].append(manifest["shards"][0] | {"file": "x" * 300})
    file.write_text(json.dumps(manifest))
    found = check(tmp_path / "out", workers=0)
    assert [(each.name, each.what) for each in found.issues["checksum"]] == [
        (shard.name, "cannot be read (Is a directory)"),
        ("x" * 300, "cannot be read (File name too long)"),
    ]
    file.unlink()
    file.mkdir()
    with pytest.raises(SitusError, match=rf"^{file}: cannot be read: is a directory$"):
        check(tmp_path / "out", workers=0)


def test_only_the_first_issues_of_a_kind_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 2), ("f", 2)):
        write(tmp_path / f"{name}.png", encoded(noise(seed)))
    for number in range(3):
        write(tmp_path / f"torn{number}.png", b"torn")
    monkeypatch.setattr("situs.data.check.LISTED", 2)
    found = check(tmp_path, workers=0)
    assert (found.counts["duplicate"], found.counts["broken"]) == (4, 3)
    assert names(found, "duplicate") == ["b.png (as a.png)", "c.png (as a.png)"]
    assert [each.name for each in found.issues["broken"]] == ["torn0.png", "torn1.png"]
    notes = {table.title: table.caption for table in found.details()}
    assert notes["Duplicate"].startswith("4 in all, 2 of them listed here. Meaning: the same bytes as")
    sentence = "9 images: 3 broken, 4 duplicates."
    assert (found.summary().sentence, found.tone) == (sentence, "bad")
    [figure] = found.figures()
    bars = list(figure.values[0].items())
    assert bars[:3] == [("duplicate", (4, "unsure")), ("broken", (3, "bad")), ("checksum", (0, "good"))]
    assert len(bars) == len(KINDS) and {each for _, each in bars[2:]} == {(0, "good")}


def test_an_unknown_kind_names_those_there_are(zoo):
    with pytest.raises(SitusError, match="unknown kind of issue 'blurred'; choose one of: annotation, broken, "):
        check(zoo, splits=["val"], workers=0).failing(["blurred"])
    assert {"broken", "grey", "cmyk", "deep", "huge", "duplicate", "odd"} <= KINDS.keys()


def test_a_contradiction_names_the_image_whose_label_it_compares(tmp_path):
    """The first image with the same pixels; a duplicate is named after the first with the same bytes, another image."""
    pixels = noise(7)
    write(tmp_path / "a/1.png", encoded(pixels))
    for name in ("b/2.bmp", "b/3.bmp"):
        write(tmp_path / name, encoded(pixels, "BMP"))
    found = check(tmp_path, workers=0)
    assert names(found, "duplicate") == ["b/3.bmp (as b/2.bmp)"]
    assert names(found, "same pixels") == ["b/2.bmp (as a/1.png)"]
    assert names(found, "contradiction") == [
        "b/2.bmp (label b, but a/1.png has the label a)",
        "b/3.bmp (label b, but a/1.png has the label a)",
    ]


def test_several_classes_an_image_are_counted_and_held_to_each_other(tmp_path):
    for name, seed in (("a.png", 1), ("b.png", 1), ("c.png", 2), ("d.png", 2), ("e.png", 3)):
        write(tmp_path / name, encoded(noise(seed)))
    for name in "fgh":
        write(tmp_path / f"{name}.png", encoded(noise(4)))
    labels = {"a": "1,0", "b": "0,0", "c": "1,1", "d": ",1", "e": "0,1", "f": "0,", "g": "1,0", "h": "0,1"}
    write(tmp_path / "labels.csv", b"file,x,y\n" + "".join(f"{n}.png,{v}\n" for n, v in labels.items()).encode())
    found = check(tmp_path, multi_label=True, workers=0)
    assert found.classes == {"x": 3, "y": 4}
    assert "2 classes, from 3 images (x) to 4 (y)" in found.summary().notes
    assert [(each.name, each.what) for each in found.issues["contradiction"]] == [
        ("b.png", "not x; in a.png, these labels are the opposite"),
        ("g.png", "x; in f.png, these labels are the opposite"),
    ]
    assert found.counts["duplicate"] == 4  # of c and d one label is unknown, which is no contradiction
    without = check(tmp_path, workers=0)
    assert not without.classes
    assert any("its table of labels was not read" in each for each in without.provenance.left_out)


def test_masks_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    write_ade(tmp_path, {"training": 6, "validation": 1}, names=False)
    (tmp_path / "classes.txt").write_text("ground\ndisc\n")
    masks = sorted((tmp_path / "annotations" / "training").iterdir())
    masks[0].unlink()
    masks[1].write_bytes(b"no image")
    Image.fromarray(np.ones((5, 5), np.uint8)).save(masks[2])
    with Image.open(masks[3]) as file:
        array = np.array(file)
    Image.fromarray(array + 9).save(masks[3])
    write(tmp_path / "images" / "training" / "ADE_00000004.png", b"no image")
    found = check(tmp_path, masks=MaskConfig(1, (0,)), workers=0)
    assert found.images == {"training": 6, "validation": 1}
    assert (found.counts["annotation"], found.counts["broken"]) == (4, 1)
    said = [each.what for each in found.issues["annotation"]]
    assert "has no mask of the same name in" in said[0] and "its mask" in said[1]
    assert "and its mask 5 × 5" in said[2] and "contains the class number" in said[3]
    assert found.classes == {"ground": 2, "disc": 2}
    assert "2 classes, of 2 images each" in found.summary().notes
    assert found.failing() == ["broken", "annotation"]
    assert check(tmp_path / "images", workers=0).counts["annotation"] == 0  # as images alone
    assert check(tmp_path, masks=MaskConfig(1, (0,)), workers=0, decode_pixels=False).classes == {}


def test_objects_that_are_none_are_named(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["annotations"][0]["bbox"][2] = 0
        told["annotations"][1]["segmentation"] = [[-9, -9, -5, -9, -5, -5]]
        told["annotations"][3]["segmentation"] = []

    write_coco(tmp_path, {"train": 4, "val": 2}, change)
    Image.new("RGB", (7, 7)).save(tmp_path / "train2017" / f"{3:012}.png")
    found = check(tmp_path, workers=0)
    assert found.images == {"train": 4, "val": 2}
    assert (found.counts["annotation"], found.counts["no object"], found.counts["broken"]) == (1, 3, 0)
    assert "is 7 × 7, but its annotations say 40 × 50" in found.issues["annotation"][0].what
    told = [f"{each.name}: {each.what}" for each in found.issues["no object"]]
    assert "the outline of annotation 2 encloses no pixel" in told[0]
    assert told[1:] == [
        "annotation 1: with a box that has no area within its image",
        "annotation 4: without an outline",
    ]
    assert found.classes == {"rectangle": 4, "disc": 2, "crowd of dots": 2}
    assert found.failing() == ["annotation"]
    plain = check(tmp_path, target="class", workers=0)
    assert plain.counts["annotation"] == plain.counts["no object"] == 0
