"""What a gate says as a JUnit file, the form in which CI systems show tests.

A test for each defence. Above the limit is a failure; not judged is an error and never skipped, because CI systems
count what was skipped as no harm.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from situs.audit.judge.gate import ABOVE, NOT_JUDGED, Ruling

if TYPE_CHECKING:
    from situs.audit.gradients import Audit

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TAGS = {ABOVE: "failure", NOT_JUDGED: "error"}
"""What stands in a test that did not pass."""


def junit(audit: Audit, ruling: Ruling) -> bytes:
    """The file. How the audit was made are the suite's properties, and `made` its time."""
    facts = audit.provenance.facts
    counts = {tag: sum(TAGS.get(each.status) == tag for each in ruling.judgements) for tag in TAGS.values()}
    total = {
        "tests": str(len(ruling.judgements)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": "0",
    }
    root = ET.Element("testsuites", total)
    name = _text(f"situs audit gradients {audit.model}")
    suite = ET.SubElement(root, "testsuite", {"name": name, **total})
    if made := facts.get("made"):
        suite.set("timestamp", str(made).split("+")[0])
    properties = ET.SubElement(suite, "properties")
    for key, value in {"limit": ruling.limit, **facts}.items():
        if value is not None:
            ET.SubElement(properties, "property", {"name": _text(key), "value": _text(value)})
    for each in ruling.judgements:
        called = {"classname": name, "name": _text(f"{ruling.limit} under {each.defence}")}
        case = ET.SubElement(suite, "testcase", called)
        if each.status in TAGS:
            told = {"message": _text(each.said), "type": each.outcome}
            ET.SubElement(case, TAGS[each.status], told).text = _text(each.said)
        ET.SubElement(case, "system-out").text = _text(_attacks(audit, each.defence, ruling.limit.metric))
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _attacks(audit: Audit, defence: str, metric: str) -> str:
    """A line for each attack: its worst image, or why there is none."""
    lines = [f"{attack}: not run before the stop" for attack, other in audit.undone if other == defence]
    for pair in audit.pairs:
        if pair.defence != defence:
            continue
        values = pair.scores.get(metric)
        found = f"worst {metric} {max(values):.4g} of {pair.count} images" if values else f"{metric} not defined"
        lines.append(f"{pair.attack}: {found if pair.reason is None else f'not attacked here: {pair.reason}'}")
    return "\n".join(lines)


def _text(value: object) -> str:
    """What XML 1.0 can hold of a text."""
    return _NO_XML.sub("�", str(value))
