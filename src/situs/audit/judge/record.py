"""An audit as a file: every image's numbers, means and intervals, what makes it evidence, and its schema.

`docs/methods/gradients.schema.json` describes gradients.json. A change that breaks a reader raises a schema's number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import torch
from torch import nn

from situs import __version__
from situs.audit.cases import Outcome
from situs.audit.defences import Step, Training
from situs.audit.judge.gate import ABOVE, NOT_JUDGED, Ruling
from situs.audit.scores.metrics import LOWER_IS_CLOSER, means_of
from situs.audit.scores.scoring import Scores
from situs.train.checkpoint.files import digest

if TYPE_CHECKING:
    from situs.audit.gradients import Audit
    from situs.audit.settings import Comparison
    from situs.audit.text.result import TextAudit

SCHEMA, SETTINGS_SCHEMA = "situs-audit-gradients/1", "situs-audit-settings/1"
"""The form of gradients.json and of settings.json."""


def evidence(model: nn.Module, weights: str | Path | None = None) -> dict[str, str | None]:
    """Facts by name: the day and time, versions, and SHA-256 of what was audited.

    model: its parameters are hashed as they are in memory. weights: where that is a file, it is hashed too.
    """
    file = None if weights is None or not Path(weights).is_file() else Path(weights)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "situs": __version__,
        "torch": torch.__version__,
        "weights_sha256": weights_digest(model),
        "weights_file_sha256": None if file is None else digest(file),
    }


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers: of each, by name, its name, type, shape and bytes (little-endian)."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}\n".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def audit_numbers(audit: Audit, verdict: str) -> dict[str, Any]:
    """Everything but the pictures: per image, then means and intervals."""
    ruling = audit.ruling
    return {
        "schema": SCHEMA,
        "model": audit.model,
        "step": _step(audit.step),
        "partial": audit.stopped is not None,
        "stopped": audit.stopped,
        "not_attacked": [{"attack": attack, "defence": defence} for attack, defence in audit.undone],
        "verdict": verdict,
        "pairs": [_pair(pair, audit.names) for pair in audit.pairs],
        "baselines": {
            name: {"mean": _means(scores), "images": _images(scores, audit.names)}
            for name, scores in audit.baselines.items()
        },
        "notes": dict(audit.notes),
        "gate": None if ruling is None else ruling.to_json(),
    }


def _step(step: Step) -> dict[str, Any]:
    """How the step was made; what is special about the training where something is."""
    made = {**asdict(step), "dtype": str(step.dtype).removeprefix("torch."), "epoch": step.when.epoch}
    left_out = ("when",) if step.training != Training() else ("when", "training")
    return {name: each for name, each in made.items() if name not in left_out}


def settings_numbers(comparison: Comparison, verdict: str) -> dict[str, Any]:
    """The same of the settings of Table 5."""
    rows = []
    for row in comparison.pairs:
        said: dict[str, Any] = {"model": row.case.name, "setting": row.case.setting, "attacker": row.case.attacker}
        said["applies"] = row.reason is None
        if row.reason is not None:
            rows.append({**said, "reason": row.reason})
        else:
            images = _images(row.scores, comparison.names, row.facts)
            rows.append(
                said | {"partial": row.partial, "exact": row.exact, "mean": _means(row.scores), "images": images}
            )
    return {
        "schema": SETTINGS_SCHEMA,
        "ratio": comparison.ratio,
        "hidden": comparison.hidden,
        "patches": comparison.patches,
        "shuffled": f"γ = {comparison.ratio:g}, {comparison.hidden} of {comparison.patches} patches",
        "partial": comparison.stopped is not None,
        "stopped": comparison.stopped,
        "verdict": verdict,
        "rows": rows,
        "baselines": [
            {"setting": setting, "name": name, "mean": _means(scores)}
            for (setting, name), scores in comparison.baselines.items()
        ],
        "notes": dict(comparison.notes),
    }


def _pair(pair: Outcome, names: Sequence[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"attack": pair.attack, "defence": pair.defence}
    if pair.reason is not None:
        return {**shown, "applies": False, "closed_form": pair.closed, "reason": pair.reason}
    return {
        **shown,
        "applies": True,
        "closed_form": pair.closed,
        "by_itself": bool(pair.case.by_itself),
        "bound": pair.is_bound,
        "caveat": pair.caveat,
        "doubt": pair.doubt,
        "lower_bound": pair.lower_bound,
        "partial": pair.partial,
        "exact": pair.exact,
        # Of the image that came back best, which is the worst for its owner and what a gate takes.
        "worst": {
            name: values and (min(values) if name in LOWER_IS_CLOSER else max(values))
            for name, values in pair.scores.items()
        },
        "mean": _means(pair.scores),
        "images": _images(pair.scores, [names[i] for i in pair.numbers] or names, pair.facts or None),
    }


def _means(scores: Scores) -> dict[str, Any]:
    return {name: None if mean is None else mean._asdict() for name, mean in means_of(scores).items()}


def _images(
    scores: Scores, names: Sequence[str], facts: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Each image's scores and facts; of an attack that was stopped, those it came to."""
    facts = [{}] * len(scores.get("psnr") or ()) if facts is None else facts
    return [
        {"image": image, **{name: None if values is None else values[i] for name, values in scores.items()}, **fact}
        for i, (image, fact) in enumerate(zip(names, facts, strict=False))
    ]


# --- the gate as JUnit ----------------------------------------------------------------------------------------------
# A test for each defence. Above the limit is a failure; inconclusive is an error and never skipped, because CI systems
# count what was skipped as no harm.


_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TAGS = {ABOVE: "failure", NOT_JUDGED: "error"}
"""What stands in a test that did not pass."""


def junit(audit: Audit | TextAudit, ruling: Ruling) -> bytes:
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
        ET.SubElement(case, "system-out").text = _text("\n".join(audit.told(each.defence, ruling.limit.metric)))
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _text(value: object) -> str:
    """What XML 1.0 can hold of a text."""
    return _NO_XML.sub("�", str(value))
