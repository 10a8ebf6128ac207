"""Uploading an export: by whoever is logged in, to a private repository; no network here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from situs.cli.main import main
from situs.errors import SitusError
from situs.models.export import check_login, push_folder


class Address(NamedTuple):
    name: str

    @property
    def repo_id(self) -> str:
        return f"me/{self.name}"

    def __str__(self) -> str:
        return f"https://hub/{self.repo_id}"


class Hub:
    """Notes what it is asked. refusing: at which call it refuses."""

    def __init__(self, refusing: str = "") -> None:
        self.refusing, self.calls = refusing, []

    def _called(self, name: str, **given: Any) -> None:
        self.calls.append((name, given))
        if name == self.refusing:
            raise OSError("403 Forbidden\nfor you")

    def whoami(self) -> None:
        self._called("whoami")

    def create_repo(self, repo_id: str, **given: Any) -> Any:
        self._called("create_repo", repo_id=repo_id, **given)
        return Address(repo_id)

    def upload_folder(self, **given: Any) -> None:
        self._called("upload_folder", **given)


def test_a_folder_goes_up_whole_and_private(tmp_path: Path) -> None:
    hub = Hub()
    assert push_folder(tmp_path, "vit", api=hub) == "https://hub/me/vit"
    asked = dict(hub.calls)
    assert list(asked) == ["whoami", "create_repo", "upload_folder"]
    assert asked["create_repo"] == {"repo_id": "vit", "private": True, "exist_ok": True}
    assert asked["upload_folder"]["repo_id"] == "me/vit"
    assert asked["upload_folder"]["folder_path"] == str(tmp_path)
    push_folder(tmp_path, "vit", public=True, api=(open_to_all := Hub()))
    assert dict(open_to_all.calls)["create_repo"]["private"] is False


def test_whoever_is_not_let_in_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="not logged in") as error:
        check_login("vit", Hub("whoami"))
    assert "hf auth login" in str(error.value)
    with pytest.raises(SitusError, match="the upload to the hub failed: 403 Forbidden for you"):
        push_folder(tmp_path, "vit", api=Hub("create_repo"))
    for name in ("../vit", "a/b/c", "", "a b", "-x/"):
        with pytest.raises(SitusError, match="a name on the hub"):
            check_login(name, Hub())


def test_nothing_is_written_for_one_who_cannot_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub("whoami"))
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x"), "--push", "vit"]) == 2
    said = capsys.readouterr().err
    assert "not logged in" in said and said.count("\n") == 1
    assert not (tmp_path / "x").exists()
