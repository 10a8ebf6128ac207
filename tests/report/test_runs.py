"""One panel a metric, one line a run, the same look in every panel."""

from __future__ import annotations

from situs.report.figures import png
from situs.report.runs import curve_panels


def test_a_run_looks_the_same_in_every_panel() -> None:
    metrics = {
        "loss": {"a": ([1, 2], [3.0, 2.0]), "b": ([1, 2], [4.0, 3.0])},
        "top1": {"b": ([2], [0.5])},
        "rate": {"a": ([1, 2], [0.1, 0.2]), "b": ([1, 2], [0.1, 0.3])},
    }
    figure = curve_panels(metrics, "epoch")
    png(figure)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_ylabel() for axis in shown] == ["loss", "top1", "rate"]
    assert {axis.get_xlabel() for axis in shown} == {"epoch"}
    looks = [[(line.get_color(), line.get_linestyle()) for line in axis.lines] for axis in shown]
    assert looks[0] == looks[2]
    assert looks[1] == [looks[0][1]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert shown[1].lines[0].get_ydata().tolist() == [0.5]


def test_one_run_needs_no_legend() -> None:
    assert not curve_panels({"loss": {"a": ([1], [2.0])}}, "step").legends
