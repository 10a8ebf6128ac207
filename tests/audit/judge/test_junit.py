"""The JUnit file, read back by the standard library's parser as a CI system would."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import torch
from outcomes import outcome, undone

from situs.audit.cases import Step
from situs.audit.gradients import Audit
from situs.audit.judge.gate import Judgement, Limit, Ruling
from situs.audit.judge.junit import junit
from situs.results import Provenance

PAIRS = [
    outcome("patchembed", "none", scores={"psnr": [3.0, 99.5]}),
    outcome("patchembed", "noise", scores={"psnr": [3.0, 4.0]}),
    outcome("patchembed", "mjp", reason="<no> table & \x00 no rows"),
    outcome("matching", "mjp", scores={"psnr": None}),
    undone("april", "mjp"),
]
ABOUT = dict.fromkeys(["none", "noise", "mjp"], "")
FACTS = {"made": "2026-11-15T20:41:02+00:00", "command": "situs audit gradients a-model", "weights_file_sha256": None}
AUDIT = Audit(PAIRS, ["a", "b"], torch.zeros(2, 3, 4, 4), "a-model", Step(), {}, ABOUT, provenance=Provenance(FACTS))
RULING = Ruling(
    Limit("psnr", 20.0),
    [
        Judgement("none", 3, 'above "20"'),
        Judgement("noise", 0, "fits"),
        Judgement("mjp", 4, "no closed form\x1b applies"),
    ],
)


def test_each_defence_is_a_test_with_its_outcome() -> None:
    root = ET.fromstring(junit(AUDIT, RULING))
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
    assert (error.get("type"), error.get("message")) == ("not judged", "no closed form\ufffd applies")
    assert not root.findall(".//skipped")  # CI systems take it for no harm


def test_it_says_what_each_attack_got_and_how_it_was_made() -> None:
    root = ET.fromstring(junit(AUDIT, RULING))
    said = [case.findtext("system-out") for case in root.iter("testcase")]
    assert said == [
        "patchembed: worst psnr 99.5 of 2 images",
        "patchembed: worst psnr 4 of 2 images",
        (
            "april: not run before the stop\npatchembed: not attacked here: <no> table & \ufffd no rows\n"
            "matching: psnr not defined"
        ),
    ]
    assert {each.get("name"): each.get("value") for each in root.iter("property")} == {
        "limit": "psnr=20",
        "made": FACTS["made"],
        "command": FACTS["command"],
    }
    bare = ET.fromstring(junit(replace(AUDIT, provenance=Provenance()), RULING)).find("testsuite")
    assert bare is not None and bare.get("timestamp") is None
