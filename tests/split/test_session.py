"""The order of a session's messages, and its commits: every small case against the rule written out."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from situs.split.message import RefusedError
from situs.split.session import AHEAD, Session


def at(step: int, forwards: int, backwards: int) -> Session:
    """A session in the middle of a step."""
    session = object.__new__(Session)
    session.step, session.forwards, session.backwards = step, forwards, backwards
    return session


def next_of(step: int, forwards: int, backwards: int) -> set[tuple[str, int, int, bool]]:
    """The messages (kind, step, part, carries a commit) that may come next."""
    found = {("save", step, 0, False)} if forwards == 0 else set()
    if forwards - backwards < AHEAD:
        found.add(("forward", step, forwards, False))
    if backwards < forwards:
        found.add(("backward", step, backwards, False))
    if forwards and forwards == backwards:  # the step is complete: it ends with the next message
        found |= {("commit", step, 0, True), ("forward", step + 1, 0, True), ("save", step + 1, 0, True)}
    return found


@pytest.mark.parametrize(
    ("forwards", "backwards"), [(f, b) for f in range(AHEAD + 3) for b in range(f + 1) if f - b <= AHEAD]
)
def test_only_the_next_message_is_taken_and_what_came_early_may_come_again(forwards: int, backwards: int) -> None:
    session, complete = at(7, forwards, backwards), forwards == backwards > 0
    fits = next_of(7, forwards, backwards)
    kinds, steps, parts = ("forward", "backward", "commit", "save"), range(5, 10), range(2 * AHEAD + 6)
    for kind, step, part, carries in product(kinds, steps, parts, (False, True)):
        if (kind, step, part, carries) in fits:
            session._check_turn(kind, step, part, carries)
            continue
        with pytest.raises(RefusedError) as error:
            session._check_turn(kind, step, part, carries)
        due = {"forward": forwards, "backward": backwards}.get(kind)
        here = step == 7 and due is not None and 0 < part - due <= AHEAD
        waits = kind == "forward" and (step, part) == (7, forwards) and forwards - backwards >= AHEAD
        after = kind == "forward" and step == 8 and complete and 0 < part <= AHEAD  # its commit is on the way
        early = waits or (not carries and (here or after))
        assert (error.value.code == "early") == early, (kind, step, part, carries)
        assert early or error.value.code == "step"


def test_the_refusal_says_where_the_session_is() -> None:
    arrived = "the message save of step 9, part 0 with a commit is out of order: this session is at "
    with pytest.raises(RefusedError, match=f"{arrived}step 7, and 1 of its 2 parts are done"):
        at(7, 2, 1)._check_turn("save", 9, 0, True)
    with pytest.raises(RefusedError, match=f"{AHEAD} parts of step 7 already wait for their gradients"):
        at(7, AHEAD, 0)._check_turn("forward", 7, AHEAD, False)


def committing(clip: float | None, mode: str) -> tuple[Session, list[Any]]:
    session, done = at(3, 2, 2), []
    optim = SimpleNamespace(clip=clip, clip_mode=mode)
    session.blocks = SimpleNamespace(optim=optim, commit=lambda *given, **more: done.append((*given, more)))  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return session, done


@pytest.mark.parametrize("rate", [0, 0.5, 1e-4])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0, None])
def test_a_commit_ends_the_step(rate: float, share: float | None) -> None:
    session, done = committing(None if share is None else 1.0, "norm")
    factor = None if share is None else torch.tensor(share)
    session._commit({"rate": rate, "fine": True}, factor)
    assert done == [(float(rate), factor, {"fine": True})]
    assert (session.step, session.forwards, session.backwards) == (4, 0, 0)


@pytest.mark.parametrize(
    ("facts", "share", "clip", "mode", "said"),
    [
        ({"rate": -1e-9, "fine": True}, None, None, "norm", "the learning rate of a commit is"),
        ({"rate": 1e30, "fine": True}, None, None, "norm", "the learning rate of a commit is"),
        ({"rate": float("nan"), "fine": True}, None, None, "norm", "the learning rate of a commit is"),
        ({"rate": "0.1", "fine": True}, None, None, "norm", "the learning rate of a commit is"),
        ({"rate": 0.1, "fine": 1}, None, None, "norm", "the learning rate of a commit is"),
        ([0.1], None, None, "norm", "the learning rate of a commit is"),
        ({"rate": 0.1, "fine": False}, None, 1.0, "norm", "has no clipping factor"),
        ({"rate": 0.1, "fine": False}, 0.5, None, "norm", "an unexpected clipping factor"),
        ({"rate": 0.1, "fine": False}, 0.5, 1.0, "value", "an unexpected clipping factor"),
        ({"rate": 0.1, "fine": False}, 1.01, 1.0, "norm", "the clipping factor of the commit is outside"),
        ({"rate": 0.1, "fine": False}, -0.01, 1.0, "norm", "the clipping factor of the commit is outside"),
    ],
)
def test_a_commit_that_cannot_be_is_refused(
    facts: Any, share: float | None, clip: float | None, mode: str, said: str
) -> None:
    session, done = committing(clip, mode)
    with pytest.raises(RefusedError, match=said):
        session._commit(facts, None if share is None else torch.tensor(share))
    assert not done and (session.step, session.forwards) == (3, 2)
