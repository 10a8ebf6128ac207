"""What a run's folder says of the defence that it was trained under."""

from __future__ import annotations

import pytest

from situs.errors import SitusError
from situs.models.model import DEFENCE_FILE, feature_defence_of


def test_what_was_noted_is_read_and_what_is_damaged_refused(tmp_path) -> None:
    assert feature_defence_of(tmp_path) is None
    (tmp_path / DEFENCE_FILE).write_text('{"defence": "noise=0.5", "scale": 0.25, "permute": []}')
    assert feature_defence_of(tmp_path) == ("noise=0.5", 0.25)
    for damaged in ("{}", '{"defence": "none", "scale": "1"}', '{"defence": 1, "scale": 1.0}', "no"):
        (tmp_path / DEFENCE_FILE).write_text(damaged)
        with pytest.raises(SitusError, match=DEFENCE_FILE):
            feature_defence_of(tmp_path)
