"""An export on the Hugging Face hub, by the user's own login."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from situs.errors import SitusError


def check_login(name: str, api: Any = None) -> Any:
    """The hub's client, once it is known that the user is logged in and that `name` (NAME or OWNER/NAME) can be one.

    api: another client than huggingface_hub's own.
    """
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]{1,96}", name) or ".." in name or name.strip("./-") != name:
        raise SitusError(field="push", value=name, allowed="a name on the hub, NAME or OWNER/NAME")
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        api.whoami()
    except Exception as error:  # the client raises a different class for each way of not being let in
        said = "you are not logged in to the Hugging Face hub here, or it cannot be reached"
        raise SitusError(f"{said} ({type(error).__name__}): hf auth login", field="push") from error
    return api


def push_folder(folder: Path, name: str, *, public: bool = False, api: Any = None) -> str:
    """Uploads an export as the repository `name`, private where it is new and not `public`; gives its address."""
    api = check_login(name, api)
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=str(folder), commit_message="Written by situs export")
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise SitusError(
            f"{name}: the export is in {folder}, and the hub did not take it: {said}", field="push"
        ) from error
    return str(made)
