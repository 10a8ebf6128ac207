"""The pytest fixture `leak_gate`: a test fails where gradients give samples away, and where nothing is proven.

    def test_the_gradients_of_our_model_are_private(leak_gate):
        leak_gate(build_model(), "photos", fail_above="psnr=20", defences=["noise=0.1"])

pytest loads this module wherever situs is installed, so it imports torch only when the fixture is called. The log has
counts, names of samples and scores; it never has a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.gate import Report

RULING = "situs gate"
"""The property of a test that holds the gate's sentence; JUnit files show it too."""


@pytest.fixture
def leak_gate(record_property: Callable[[str, object], None]) -> Callable[..., Report]:
    """A function that audits a model on data, and fails the test unless the gate is passed.

    leak_gate(model, data, fail_above="psnr=20", defences=["noise=0.1"]) takes what `situs.audit_gradients` takes; with
    a .txt file as data, what `situs.audit_texts` takes, where the gate needs a limit such as fail_above="tokens=0.2".
    Without fail_above, blind guesses are the limit of images. leak_gate(report) judges an audit that is there already.
    It returns the audit. Inconclusive fails like a leak: not attacked, stopped or too few samples is no pass.
    """

    def check(model: Any, data: Any = None, **options: Any) -> Report:
        report = audit(model, data, **options)
        ruling = report.ruling or report.judge()
        record_property(RULING, ruling.sentence)
        if not ruling.passed or report.stopped is not None:
            lines = [f"{judged.defence}: {line}" for judged in ruling.judgements for line in lines_of(report, judged)]
            stopped = [] if report.stopped is None else [f"stopped: {report.stopped}"]
            pytest.fail("\n".join([ruling.sentence, *stopped, *lines]), pytrace=False)
        return report

    return check


def audit(model: Any, data: Any, **options: Any) -> Report:
    """The audit of images, of sentences, or the report itself; a mistake fails the test in one sentence."""
    from situs.gate import Report

    try:
        if isinstance(model, Report):
            if data is not None or options:
                raise SitusError(
                    "this audit is already finished; give it as the only argument, without data or options"
                )
            return model
        if isinstance(data, str | Path) and Path(data).suffix == ".txt":
            from situs.audit.text.audit import audit_texts

            if options.get("fail_above") is None:
                raise SitusError(
                    "fail_above: an audit of sentences needs a limit, such as tokens=0.2", field="fail_above"
                )
            return audit_texts(model, data, **options)
        from situs.audit import audit_gradients

        return audit_gradients(model, data, **{"fail_above": "blind", **options})
    except SitusError as error:
        pytest.fail(f"leak_gate: {error}", pytrace=False)


def lines_of(report: Any, judged: Any) -> list[str]:
    """What each attack on a defence recovered, where the report has such lines."""
    return report.lines(judged.defence) if hasattr(report, "lines") else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each gate at the end of the log, also of those that passed."""
    lines = [
        f"{report.nodeid}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == RULING and getattr(report, "when", "") == "call"
    ]
    if lines:
        terminalreporter.section("situs: what gradients reveal")
        for line in lines:
            terminalreporter.write_line(line)
