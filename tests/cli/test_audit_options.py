"""What the verbs of audits ask of the functions behind them, and the status that they end with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from situs.cli import audit as verbs
from situs.cli.audit import COUNT, OVER
from situs.cli.main import main
from situs.cli.result import INTERRUPTED
from situs.gate import ABOVE, NOT_JUDGED


class Asked:
    """Stands for every audit: keeps what each is asked for. interrupts: the one during which Ctrl-C comes."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.shown: list[Any] = []
        self.published: list[Any] = []
        self.status, self.found, self.interrupts, self.bare = 0, 1, "", False

    def named(self, name: str) -> Callable[..., Any]:
        def audited(model: Any, *given: Any, **options: Any) -> Any:
            self.calls[name] = {**options, "given": (model, *given)}
            if self.interrupts == name:
                options["deadline"].interrupted = True
            ruling = SimpleNamespace(status=self.status)
            result = SimpleNamespace(ruling=ruling, with_setting=self.found, model="m", provenance=None)
            result.without_pictures = lambda: SimpleNamespace(**vars(result), bare=True)
            return result

        return audited


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    for name in ("trace_defences", "trace_texts", "audit_gradients", "audit_settings", "audit_texts", "find_defences"):
        monkeypatch.setattr(verbs, name, found.named(name))
    monkeypatch.setattr(verbs, "Comparison", int)
    monkeypatch.setattr(verbs, "present", lambda result, out: found.shown.append((result, out)))
    monkeypatch.setattr(
        verbs, "publish", lambda result, out: found.published.append((result, out)) or Path("page.html")
    )
    monkeypatch.setattr(verbs, "replace", lambda result, **more: SimpleNamespace(**{**vars(result), **more}))
    monkeypatch.setattr(verbs, "opening_arguments", lambda model, args, device=None: {"device": "cpu"})
    return found


IMAGES = ["audit", "sweep", "m", "--data", "photos"]


def test_a_sweep_has_curves_of_four_images_by_default(asked: Asked, tmp_path: Path) -> None:
    assert main([*IMAGES, "--out", str(tmp_path)]) == 0
    options = asked.calls["trace_defences"]
    assert options["given"] == ("m", "photos") and options["over"] == OVER and options["count"] == COUNT
    assert options["attacks"] == ("patchembed", "tokens", "patchembed-prior") and "beside" not in options
    assert "fail_above" not in options and asked.shown[0][1] == tmp_path
    words = ["--over", "clip,dropout", "--count", "7", "--defences", "none,clip=1", "--attacks", "patchembed"]
    assert main([*IMAGES, *words]) == 0
    options = asked.calls["trace_defences"]
    assert (options["over"], options["count"], options["beside"]) == (("clip", "dropout"), 7, ("none", "clip=1"))
    assert options["attacks"] == ("patchembed",)
    assert options["facts"]["command"].startswith("situs audit sweep m --count 7 --data photos --over clip,dropout")
    asked.interrupts = "trace_defences"
    assert main(IMAGES) == INTERRUPTED


def test_a_sweep_of_sentences_takes_what_the_file_has(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n} of it\n" for n in range(3)))
    texts = ["audit", "sweep", "m", "--data", str(tmp_path / "a.txt")]
    assert main(texts) == 0
    options = asked.calls["trace_texts"]
    assert options["given"] == ("m", str(tmp_path / "a.txt")) and options["count"] == 3 and "over" not in options
    assert "attacks" not in options and options["device"] == "cpu" and "lpips" not in options
    assert main([*texts, "--over", "noise", "--count", "2"]) == 0
    assert (asked.calls["trace_texts"]["over"], asked.calls["trace_texts"]["count"]) == (("noise",), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "a.txt", "--attacks", "tokens"], "attacks: has no effect for curves of sentences"),
        (["--data", "a.txt", "--img-size", "32"], "img_size: has no effect for curves of sentences"),
        (["--data", "photos", "--no-pictures"], "pictures: has no effect for curves; leave it out"),
        (["--data", "photos", "--find", "psnr=20", "--over", "noise"], "curve: has no effect with --find"),
        (["--data", "photos", "--find", "psnr=20", "--defences", "none"], "defences: has no effect with --find"),
        (["--data", "photos", "--find", "nosuch=20"], "nosuch"),
        (["--data", "photos", "--attacks", "nosuch"], "nosuch"),
        (["--data", "photos", "--defences", "nosuch"], "nosuch"),
        ([], "data: give the images to attack"),
    ],
)
def test_flags_without_an_effect_are_refused(
    words: list[str], said: str, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "sweep", "m", *words]) == 2
    assert said in capsys.readouterr().err and not asked.calls


def test_a_search_first_audits_what_is_sent_today_in_a_tenth_of_the_time(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*IMAGES, "--find", "psnr=20", "--time-limit", "50", "--out", str(tmp_path)]
    assert main(words) == 0
    today, search = asked.calls["audit_gradients"], asked.calls["find_defences"]
    assert (today["deadline"].seconds, search["deadline"].seconds) == (5.0, 50.0)
    assert today["deadline"]._whole is search["deadline"]
    assert today["fail_above"] == "psnr=20" and "fail_above" not in search
    assert search["given"] == ("m", "photos", "psnr=20")
    assert len(asked.published) == 2 and len(asked.shown) == 1 and capsys.readouterr().out == "page.html\n"
    assert search["deadline"].closed and not hasattr(asked.published[0][0], "bare")
    asked.found = 0
    assert main(words) == NOT_JUDGED
    asked.interrupts = "find_defences"
    assert main(words) == INTERRUPTED
    asked.interrupts, asked.published, asked.shown = "", [], []
    assert main([*IMAGES, "--find", "psnr=20", "--out", "none", "--no-pictures"]) == NOT_JUDGED
    assert not asked.published and len(asked.shown) == 1 and capsys.readouterr().out.count("page.html") == 2


GRADIENTS = ["audit", "gradients", "m", "--data", "photos"]


def test_gradients_are_attacked_as_the_flags_say(asked: Asked) -> None:
    assert main(GRADIENTS) == 0
    options = asked.calls["audit_gradients"]
    assert options["given"] == ("m", "photos") and options["attacks"] is None and options["defences"] == ("auto",)
    assert options["upload"] is None and options["sent"] is None and not hasattr(asked.shown[0][0], "bare")
    assert main([*GRADIENTS, "--upload", "a.pt,b.pt", "--sent", "weights", "--no-pictures"]) == 0
    options = asked.calls["audit_gradients"]
    assert (options["upload"], options["sent"]) == ((Path("a.pt"), Path("b.pt")), "weights")
    assert asked.shown[1][0].bare
    assert main([*GRADIENTS, "--settings", "a,c"]) == 0
    options = asked.calls["audit_settings"]
    assert options["given"] == ("m", "photos", ("a", "c")) and options["attacks"] == verbs.TABLE_ATTACKED
    assert main([*GRADIENTS, "--settings", "a", "--attacks", "tokens"]) == 0
    assert asked.calls["audit_settings"]["attacks"] == ("tokens",)


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["--data", "photos"], "gradients"),
        (["--data", "photos", "--upload", "a.pt"], "gradients"),
        (["--upload", "a.pt"], "upload"),  # without images nothing is attacked, and what was sent is described
        (["--data", "photos", "--settings", "a"], "settings"),
    ],
)
def test_only_the_result_that_will_be_replaced_is_named(
    words: list[str], result: str, asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("gradients", "upload", "settings"):
        (tmp_path / f"{name}.json").touch()
    assert main(["audit", "gradients", "m", *words, "--out", str(tmp_path)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "will be replaced" in line]
    assert said == [f"situs: {tmp_path / result}.html and .json exist and will be replaced"]


@pytest.mark.parametrize(
    ("status", "interrupted", "ends"),
    [(0, False, 0), (ABOVE, False, ABOVE), (NOT_JUDGED, False, NOT_JUDGED), (0, True, INTERRUPTED),
     (NOT_JUDGED, True, INTERRUPTED), (ABOVE, True, ABOVE)],
)  # fmt: skip
def test_what_is_above_stays_above_after_ctrl_c(status: int, interrupted: bool, ends: int, asked: Asked) -> None:
    asked.status, asked.interrupts = status, "audit_gradients" * interrupted
    assert main([*GRADIENTS, "--fail-above", "psnr=20"]) == ends


@pytest.mark.parametrize(
    ("words", "told"),
    [([], False), (["--fail-above", "psnr=20"], True), (["--settings", "a"], True), (["--attacks", "matching"], True),
     (["--attacks", "patchembed"], False)],
)  # fmt: skip
def test_only_what_takes_long_says_how_far_it_is(
    words: list[str], told: bool, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(verbs, "remark", lines.append)
    assert main([*GRADIENTS, *words]) == 0
    (options,) = asked.calls.values()
    options["deadline"].say("going on")
    assert lines == ["going on"] * told


def test_a_verdict_as_junit_needs_a_gate_and_a_file(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = ["--fail-above", "psnr=20"]
    assert main([*GRADIENTS, "--junit", "x.xml"]) == 2
    assert "junit=x.xml: applies only with a gate; set a gate with fail_above" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "x.xml"):
        assert main([*GRADIENTS, *gate, "--junit", str(path)]) == 2
        assert "must be a file that can be written (--junit)" in capsys.readouterr().err
    assert not asked.calls


def test_texts_are_attacked_as_the_flags_say(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line\n")
    words = ["audit", "texts", "m", "--data", str(tmp_path / "a.txt")]
    assert main([*words, "--defences", "clip=1,none", "--count", "3"]) == 0
    options = asked.calls["audit_texts"]
    assert options["given"] == ("m", tmp_path / "a.txt") and options["defences"] == ("clip=1", "none")
    assert options["count"] == 3 and "upload" not in options and "sent" not in options
