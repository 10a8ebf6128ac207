"""Upload of an export to the Hugging Face hub, with the user's own login."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from situs.errors import SitusError


def check_login(name: str, api: Any = None) -> Any:
    """The hub's client, after checking that the user is logged in and that `name` (NAME or OWNER/NAME) is valid.

    api: another client than huggingface_hub's own.
    """
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]{1,96}", name) or ".." in name or name.strip("./-") != name:
        raise SitusError(field="push", value=name, allowed="a name on the hub, NAME or OWNER/NAME")
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        api.whoami()
    except Exception as error:  # the client raises many different classes
        reason = "you are not logged in to the Hugging Face hub here, or it cannot be reached"
        raise SitusError(f"{reason} ({type(error).__name__}): hf auth login", field="push") from error
    return api


def push_folder(folder: Path, name: str, *, public: bool = False, api: Any = None) -> str:
    """Uploads an export as the repository `name`, private if it is new and not `public`; gives its address."""
    api = check_login(name, api)
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=str(folder), commit_message="Written by situs export")
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SitusError(
            f"{name}: the export is in {folder}, but the upload to the hub failed: {reason}", field="push"
        ) from error
    return str(repository)
