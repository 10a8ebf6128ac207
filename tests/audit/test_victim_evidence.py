"""The audit's file: it keeps to its schema, the schema refuses what is none, and the weights' hash is what it says."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree as ET

import pytest
import torch
from builders import small_vit
from outcomes import outcome, undone
from torch import nn

from situs.audit import Matching, MatchingConfig, PatchEmbedding, create_attack, create_defence
from situs.audit.cases import TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.gradients import SCHEMA, Audit, Fallback, attack_gradients
from situs.audit.victim import evidence, weights_digest
from situs.gate import Judgement, Limit, Ruling, junit
from situs.results import Provenance

FILE = Path(__file__).resolve().parents[2] / "docs" / "methods" / "gradients.schema.json"
Breaks = Callable[[Any], list[str]]


def example(**fields: Any) -> Audit:
    torch.manual_seed(0)
    images = (torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    with mock.patch("situs.audit.gradients.FALLBACK", Fallback(iterations=20)):  # its form matters, not what it finds
        return attack_gradients(
            small_vit(depth=1, width=32, num_classes=5).eval(),
            TestSet(images, torch.arange(2), ((0.5,) * 3, (0.25,) * 3)),
            [PatchEmbedding(), create_attack("april"), create_attack("adaptive-mjp")],
            [create_defence(name) for name in ("none", "noise", "no-pe-gradient", "mjp=0")],
            search=MatchingConfig(),
            **fields,
        )


FACTS = {
    "weights": "random",
    "images": "2 of photographs, 16 × 16 pixels",
    "gradients": "fp32, batch 1, local steps 1",
    "labels": "inferred",
    "search": "l2",
    "seed": 0,
    "made": "2026-11-15T20:41:02+00:00",
    "command": "situs audit gradients m --data photographs",
    "situs": "0.1",
    "torch": "2.14",
    "weights_sha256": "0" * 64,
    "weights_file_sha256": None,
    "notes": {},
}
"""What the command line adds; tests/cli/test_audit_gradients.py validates its own files."""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found = example()
    return json.loads(json.dumps({**found.numbers(), **FACTS, "gate": found.judge(psnr=20.0).to_json()}))


def test_a_real_audit_keeps_to_the_schema(told: dict[str, Any], schema_breaks: Breaks) -> None:
    breaks = schema_breaks
    assert told["schema"] == SCHEMA == json.loads(FILE.read_text())["$id"]
    assert breaks(told) == []
    assert breaks({**told, "gate": None, "notes": {"lock": "locked"}}) == []
    kinds = {(pair["status"], pair["closed_form"]) for pair in told["pairs"]}
    assert kinds == {("done", True), ("refused", True), ("done", False)}  # every form of a pair was there
    deadline = Deadline()
    deadline.interrupt()
    stopped = example(deadline=deadline)
    assert stopped.undone
    assert breaks({**stopped.numbers(), **FACTS, "gate": stopped.judge(ssim=0.5).to_json()}) == []


def test_the_worst_is_the_image_that_came_back_best(told: dict[str, Any]) -> None:
    pair = next(pair for pair in told["pairs"] if pair["status"] == "done")
    for name in ("psnr", "ssim", "order_accuracy"):
        assert pair["worst"][name] == max(image[name] for image in pair["images"])
    for name in ("mse", "fft2d"):
        assert pair["worst"][name] == min(image[name] for image in pair["images"])
    assert pair["worst"]["lpips"] is None


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("schema",), "situs-audit-gradients/1"),
        (("extra",), 1),
        (("model",), None),
        (("weights_sha256",), "abc"),
        (("weights_file_sha256",), "abc"),
        (("made",), "yesterday"),
        (("step", "batch"), 0),
        (("step", "dtype"), "int4"),
        (("partial",), "no"),
        (("pairs", 0, "images", 0, "psnr"), "high"),
        (("pairs", 0, "images", 0, "reidentified"), 0.5),
        (("pairs", 0, "images", 0, "extra"), [1]),
        (("pairs", 0, "exact"), True),
        (("pairs", 0, "status"), "refused"),
        (("pairs", 0, "mean", "psnr"), 3.0),
        (("gate", "status"), 1),
        (("gate", "passed"), "yes"),
        (("gate", "defences", 0, "outcome"), "skipped"),
        (("gate", "defences", 0, "worst"), {}),
    ],
)
def test_the_schema_refuses_what_is_none(
    told: dict[str, Any], where: tuple[Any, ...], value: Any, schema_breaks: Breaks
) -> None:
    broken: Any = copy.deepcopy(told)
    at = broken
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    assert schema_breaks(broken)


def test_a_key_that_is_gone_is_missed(told: dict[str, Any], schema_breaks: Breaks) -> None:
    for name in told:
        assert schema_breaks({key: value for key, value in told.items() if key != name}), name


def test_the_weights_hash_is_of_names_types_shapes_and_bytes() -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.5, -2.0]]))
        module.bias.fill_(0.25)
    values = {"bias": torch.tensor([0.25]).numpy(), "weight": torch.tensor([[1.5, -2.0]]).numpy()}
    plain = b"".join(
        f"{name} float32 {list(value.shape)}\n".encode() + value.astype("<f4").tobytes()
        for name, value in values.items()
    )
    assert weights_digest(module) == hashlib.sha256(plain).hexdigest()
    before = weights_digest(module)
    with torch.no_grad():
        module.bias.fill_(0.5)
    assert weights_digest(module) != before
    assert weights_digest(module.to(torch.bfloat16)) != before
    norm = nn.BatchNorm1d(2)  # buffers too, and a scalar among them
    assert "num_batches_tracked" in norm.state_dict()
    one = weights_digest(norm)
    norm(torch.randn(3, 2))
    assert weights_digest(norm) != one


def test_matching_is_no_closed_form() -> None:
    assert not Matching.closed_form and PatchEmbedding.closed_form


def test_a_file_of_weights_is_hashed_and_a_word_is_not(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # the standard's own example
    found = evidence(nn.Linear(1, 1), str(file))
    assert found["weights_file_sha256"] == known
    assert evidence(nn.Linear(1, 1), "pretrained")["weights_file_sha256"] is None
    assert evidence(nn.Linear(1, 1))["weights_file_sha256"] is None


# --- the gate as JUnit ----------------------------------------------------------------------------------------------


PAIRS = [
    outcome("patchembed", "none", scores={"psnr": [3.0, 99.5]}),
    outcome("patchembed", "noise", scores={"psnr": [3.0, 4.0]}),
    outcome("patchembed", "mjp", reason="<no> table & \x00 no rows"),
    outcome("matching", "mjp", scores={"psnr": None}),
    undone("april", "mjp"),
]
ABOUT = dict.fromkeys(["none", "noise", "mjp"], "")
MADE = {"made": "2026-11-15T20:41:02+00:00", "command": "situs audit gradients a-model", "weights_file_sha256": None}
SHOWN = (PAIRS, ["a", "b"], torch.zeros(2, 3, 4, 4), "a-model", Step(), {})
AUDIT = Audit(*SHOWN, about=ABOUT, provenance=Provenance(MADE), limit=Limit("psnr", 20.0))
RULING = Ruling(
    Limit("psnr", 20.0),
    [
        Judgement("none", "above", 'above "20"'),
        Judgement("noise", "passed", "fits"),
        Judgement("mjp", "incomplete", "no closed form\x1b applies"),
    ],
)


def file_of(audit: Audit) -> bytes:
    return junit(f"situs audit gradients {audit.model}", RULING, audit.provenance.facts, audit.lines)


def test_each_defence_is_a_test_with_its_outcome() -> None:
    root = ET.fromstring(file_of(AUDIT))
    assert root.tag == "testsuites"
    [suite] = root.findall("testsuite")
    counts = {"tests": "3", "failures": "1", "errors": "1", "skipped": "0"}
    assert {name: suite.get(name) for name in counts} == counts == {name: root.get(name) for name in counts}
    assert suite.get("name") == "situs audit gradients a-model"
    assert suite.get("timestamp") == "2026-11-15T20:41:02"
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [f"psnr=20 under {name}" for name in ("none", "noise", "mjp")]
    assert all(case.get("classname") == suite.get("name") for case in cases)
    above, passed, open_ = cases
    [failure] = above.findall("failure")
    assert (failure.get("type"), failure.get("message"), failure.text) == ("above", 'above "20"', 'above "20"')
    assert [child.tag for child in passed] == ["system-out"]
    [error] = open_.findall("error")
    assert (error.get("type"), error.get("message")) == ("inconclusive", "no closed form\ufffd applies")
    assert not root.findall(".//skipped")  # CI systems take it for no harm


def test_it_says_what_each_attack_got_and_how_it_was_made() -> None:
    root = ET.fromstring(file_of(AUDIT))
    said = [case.findtext("system-out") for case in root.iter("testcase")]
    assert said == [
        "patchembed: the most exposed of 2 images has psnr 99.5",
        "patchembed: the most exposed of 2 images has psnr 4",
        (
            "april: not run, because the audit was stopped first\n"
            "patchembed: not attacked here: <no> table & \ufffd no rows\n"
            "matching: psnr is not defined"
        ),
    ]
    assert {each.get("name"): each.get("value") for each in root.iter("property")} == {
        "limit": "psnr=20",
        "threat": "honest-but-curious",
        "made": MADE["made"],
        "command": MADE["command"],
    }
    bare = ET.fromstring(file_of(replace(AUDIT, provenance=Provenance()))).find("testsuite")
    assert bare is not None and bare.get("timestamp") is None
