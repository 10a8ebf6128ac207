"""What is written is whole, and for its owner alone where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

from situs.files import write_bytes


def test_a_private_file_is_for_its_owner_whatever_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"before")
    path.chmod(0o666)
    write_bytes(path, b"mine", private=True)
    assert path.read_bytes() == b"mine" and path.stat().st_mode & 0o777 == 0o600
    write_bytes(path, b"all's")
    assert path.stat().st_mode & 0o077 == 0o066 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
