"""What a run's folder says of the defence that it was trained under."""

from __future__ import annotations

import pytest

from situs.errors import SitusError
from situs.models.model import DEFENCE_FILE, feature_defence_of, protection
from situs.train.private import NOT_COVERED, Spent


def test_what_was_noted_is_read_and_what_is_damaged_refused(tmp_path) -> None:
    assert feature_defence_of(tmp_path) is None
    (tmp_path / DEFENCE_FILE).write_text('{"defence": "noise=0.5", "scale": 0.25, "permute": []}')
    assert feature_defence_of(tmp_path) == ("noise=0.5", 0.25)
    for damaged in ("{}", '{"defence": "none", "scale": "1"}', '{"defence": 1, "scale": 1.0}', "no"):
        (tmp_path / DEFENCE_FILE).write_text(damaged)
        with pytest.raises(SitusError, match=DEFENCE_FILE):
            feature_defence_of(tmp_path)


@pytest.mark.parametrize(
    ("epsilon", "steps", "said"),
    [
        (2.3456, 1200, "ε = 2.35 at δ = 1e-05 after 1,200 steps of DP-SGD"),
        (None, 1, "ε is not known here at δ = 1e-05 after 1 step of DP-SGD"),
    ],
)
def test_a_card_says_what_was_spent_and_what_the_server_saw(epsilon: float | None, steps: int, said: str) -> None:
    spent = Spent(epsilon, 1e-5, 1.2345, 0.5, steps)
    private = f"Differential privacy: {said}, noise 1.23 · C, C = 0.5 (PRV accountant). {NOT_COVERED}."
    split = (
        "In split learning, the server saw the tokens only after the defence noise=0.5, which does not give "
        "differential privacy (no ε)."
    )
    assert protection(None, None) == []
    assert protection(spent, None) == [private]
    assert protection(None, "noise=0.5") == [split]
    assert protection(spent, "noise=0.5") == [private, split]
