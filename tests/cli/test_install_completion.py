"""The shell completes verbs, flags and words: bash runs the script that the verb prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from situs.cli.main import VERBS, main

COMPLETE = """
source {script}
COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}
read -ra COMP_WORDS <<< "{line}"; [[ "{line}" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from contextlib import redirect_stdout

    path = tmp_path_factory.mktemp("completion") / "situs.bash"
    with path.open("w") as file, redirect_stdout(file):
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("situs ev", {"evaluate"}),
        ("situs evaluate kn", {"knn"}),
        ("situs pretrain --optim.warmup-e", {"--optim.warmup-epochs"}),
        ("situs pretrain --method.dal-w", {"--method.dal-weight", "--method.dal-warmup"}),
        ("situs evaluate probe --kind ", {"position", "class", "segments"}),
        ("situs pretrain --preset samp", {"samples-mp3"}),
        ("situs info --j", {"--json"}),
    ],
)
def test_bash_completes(line: str, words: set[str], script: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    text = script.read_text()
    function = text.split("complete ")[-1].split("-F ")[1].split()[0]
    code = COMPLETE.format(script=script, line=line, function=function)
    done = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == words


@pytest.mark.thin(2)
@pytest.mark.parametrize("shell", ["zsh", "fish", "powershell"])
def test_other_shells_get_a_script(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {verb: VERBS[verb] for verb in ("finetune", "evaluate position")}  # bash has them all above
    monkeypatch.setattr("situs.cli.install.VERBS", few)
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert "evaluate" in printed and "position-ratios" in printed and "optim.warmup-epochs" in printed


def test_it_installs_itself_for_the_shell_at_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("situs.cli.install.VERBS", {"doctor": VERBS["doctor"]})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert main(["--install-completion"]) == 0
    written = tmp_path / ".local/share/bash-completion/completions/situs"
    assert capsys.readouterr().out == f"{written}: completion is installed; open a new bash to use completion\n"
    assert "doctor" in written.read_text()
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["completion"]) == 2
    assert "give bash, zsh, fish or powershell" in capsys.readouterr().err
