"""The server, free of transport: who may go on with which session, and what of it lies on disk.

    OUT/sessions/ID/checkpoints/…      one run folder a client, with the blocks alone
    OUT/shared/checkpoints/…           where all clients train the same blocks

`Server.expected` says, from a message's header, which tensors may follow; `Server.answer` acts. Both raise
`RefusedError` with a reason, which is all that a client is told.
"""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from situs.config import Checked
from situs.limits import Count, Positive
from situs.methods.base import Method
from situs.split.blocks import Blocks
from situs.split.message import KINDS, Body, Expected, Message, RefusedError, check_tensors, open_message
from situs.split.parts import digest, layout, own_names
from situs.split.session import MOST_STEPS, Session
from situs.train.checkpoint import Checkpoint, RunFolder
from situs.train.checkpoint.files import read_table
from situs.train.optim import OptimConfig

AGREED = ("weight_decay", "betas", "eps", "layer_decay", "clip", "clip_mode", "ema")
"""Fields of the optimiser that both sides must have alike; the rate comes with each step."""

_SESSION = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Limits(Checked):
    """What a client may ask of a server."""

    clients: Count = 8
    """Trainings held in memory at once, each with blocks and moments of its own unless they are shared."""

    batch: Count = 1024
    """Samples in one message."""

    idle: Positive = 3600.0
    """Seconds without a word after which a training may give way to another; it goes on from its last checkpoint."""

    lease: Positive = 60.0
    """Shared blocks: seconds that a client may take over its turn."""

    kept: Count = 100
    """Trainings of one client kept on the disk; one more is refused, until old ones are taken away."""

    keep: Count = 2
    """Newest checkpoints that stay; at least 2, so that one of them is always the client's too."""


class Server:
    """All trainings of one server. One thread at a time may call it."""

    def __init__(
        self,
        make: Callable[[], Method],
        optim: OptimConfig,
        out: Path,
        *,
        seed: int = 0,
        precision: str = "fp32",
        limits: Limits = Limits(),  # noqa: B008  (frozen)
        shared: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """make: the method with the weights that every training starts from."""
        self.optim, self.out, self.seed, self.precision = optim, out, seed, precision
        self.limits, self.shared, self.say = limits, shared, say
        self.first = make()
        self.layout = layout(self.first.backbone)
        self.digest = digest(self.first.state_dict(), own_names(self.first, "server"))
        self.sessions: dict[str, Session] = {}
        self.common: Blocks | None = None
        self.holder: Session | None = None
        if shared:
            self.common = self._new_blocks()
            self.common_folder = self._folder(out / "shared", {"layout": self.layout})
            if (found := self.common_folder.latest()) is not None:
                self.common.restore(found)

    def _new_blocks(self) -> Blocks:
        return Blocks(copy.deepcopy(self.first), self.optim, seed=self.seed, precision=self.precision)

    @staticmethod
    def _folder(path: Path, facts: Mapping[str, Any]) -> RunFolder:
        config = {"split": dict(facts)}
        if not (path / "config.json").exists():
            return RunFolder.create(path, config)
        return RunFolder.open(path)

    def expected(self, owner: str, kind: str, facts: Mapping[str, Any]) -> dict[str, Expected]:
        """The tensors that may follow the header of a message; the message is refused here where it can be."""
        if kind in ("hello", "bye"):
            return {}
        return self._session(owner, facts).expected(kind, facts, self.limits.batch)

    def admit(self, owner: str, chunk: bytes) -> Body:
        """Looks at the first chunk of a message; gives what takes in the rest, or refuses it before more is held."""
        opening = open_message(chunk, KINDS)
        check_tensors(opening, self.expected(owner, opening.kind, opening.facts), optional=("mask", "share"))
        return Body(opening)

    def answer(self, owner: str, message: Message) -> Message:
        """Does what a client asks. owner: who it is, as its certificate says."""
        if message.kind == "hello":
            return self._hello(owner, message.facts)
        session = self._session(owner, message.facts)
        if message.kind == "bye":
            del self.sessions[session.name]
            if self.holder is session:
                self._release()
            return Message("ok")
        if self.shared:
            self._take_turn(session, keep=message.kind != "infer")
        answer = session.answer(message)
        if self.holder is session and not session.begun:
            self.holder = None
        return answer

    def _take_turn(self, session: Session, *, keep: bool) -> None:
        """Waits for another's step: also to look at the mean, which for a moment stands where its weights are."""
        if self.holder is not None and self.holder is not session:
            if time.monotonic() - self.holder.heard < self.limits.lease:
                raise RefusedError("another client's step is under way", "busy")
            self.say(f"{self.holder.name}: its step is given up, it took longer than {self.limits.lease:g} s")
            self._release()
        if keep:
            self.holder = session

    def _release(self) -> None:
        """Gives a shared step up: its gradients go, and its client begins it again."""
        assert self.common is not None
        assert self.holder is not None
        self.common.abandon()
        self.holder.anew(self.holder.step)
        self.holder = None

    def _session(self, owner: str, facts: Mapping[str, Any]) -> Session:
        name, incarnation = facts.get("session"), facts.get("incarnation")
        session = self.sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise RefusedError(f"the session {name!r:.40} is not open here", "anew")
        if session.owner != owner:
            raise RefusedError(f"the session {name!r:.40} is another client's", "owner")
        if session.incarnation != incarnation:
            raise RefusedError(f"the session {name!r:.40} was started again since", "anew")
        return session

    def _hello(self, owner: str, facts: Mapping[str, Any]) -> Message:
        """Opens a session, or goes back to the newest checkpoint that both sides have."""
        name, steps = facts.get("session"), facts.get("steps")
        if not isinstance(name, str) or not _SESSION.fullmatch(name):
            raise RefusedError(f"session={name!r:.40}: must be 32 hexadecimal digits")
        if (
            not isinstance(steps, list)
            or len(steps) > 1000
            or not all(type(step) is int and 0 <= step < MOST_STEPS for step in steps)
        ):
            raise RefusedError("steps: must be the numbers of the client's checkpoints")
        self._check_agreed(facts)
        session = self.sessions.get(name)
        if session is not None and session.owner != owner:
            raise RefusedError(f"the session {name} is another client's", "owner")
        if session is None:
            self._make_place(owner)
            session = self._open(name, owner)
        if self.shared:
            if self.holder is session:
                self._release()
            session.anew(max(steps, default=0))
        else:
            self._go_back(session, {0, *steps})
        self.sessions[name] = session
        return Message(
            "ok",
            {"step": session.step, "incarnation": session.incarnation, "digest": self.digest, "shared": self.shared},
        )

    def _check_agreed(self, facts: Mapping[str, Any]) -> None:
        model = self.first.backbone
        if facts.get("layout") != self.layout:
            raise RefusedError(
                f"the client's model is not the one that is served here: {model.name} with {model.depth} blocks of "
                f"width {model.dim}, {model.num_tokens} tokens; give both sides the same preset and model",
                "model",
            )
        own, theirs = agreed(self.optim, self.precision), facts.get("training")
        for field, value in own.items():
            given = theirs.get(field) if isinstance(theirs, dict) else None
            if given != value:
                raise RefusedError(
                    f"{field} is {value!r} here and {given!r:.60} at the client: give both the same", "model"
                )

    def _make_place(self, owner: str) -> None:
        """A place for one more training: an idle one gives way, or one of a client that has more than its share."""
        if len(self.sessions) < self.limits.clients:
            return
        count = Counter(each.owner for each in self.sessions.values())
        idle = min(self.sessions.values(), key=lambda each: each.heard)
        greedy = min(self.sessions.values(), key=lambda each: (-count[each.owner], each.heard))
        if time.monotonic() - idle.heard >= self.limits.idle:
            self.say(f"{idle.name}: gives way to another client, for it was idle")
        elif count[owner] + 1 < count[greedy.owner]:
            self.say(f"{greedy.name}: gives way to another client, for its own has {count[greedy.owner]} places")
            idle = greedy
        else:
            raise RefusedError(f"all {self.limits.clients} places are taken; come back later", "full")
        if self.holder is idle:
            self._release()
        del self.sessions[idle.name]

    def _open(self, name: str, owner: str) -> Session:
        keep = max(2, self.limits.keep)
        if self.common is not None:
            return Session(name, owner, self.common, self.common_folder, keep=keep, shared=True)
        path = self.out / "sessions" / name
        if not path.exists() and self._kept(owner) >= self.limits.kept:
            raise RefusedError(f"{self.limits.kept} trainings are kept here already; no more are taken", "full")
        folder = self._folder(path, {"owner": owner, "layout": self.layout, "digest": self.digest})
        recorded = folder.config.get("split", {})
        if recorded.get("owner") != owner:
            raise RefusedError(f"the session {name} is another client's", "owner")
        if recorded.get("digest") != self.digest:
            raise RefusedError(f"the session {name} began with weights other than those served now", "model")
        session = Session(name, owner, self._new_blocks(), folder, keep=keep, shared=False)
        if not folder.steps():
            session.save()
        return session

    def _kept(self, owner: str) -> int:
        """Trainings of a client on the disk."""
        files = (self.out / "sessions").glob("*/config.json")
        tables = [table for path in files if not isinstance(table := read_table(path), str)]
        return sum(table.get("split", {}).get("owner") == owner for table in tables)

    @staticmethod
    def _go_back(session: Session, steps: set[int]) -> None:
        found = common_checkpoint(session.folder, steps)
        if found is None:
            have = ", ".join(map(str, sorted(session.folder.steps()))) or "none"
            raise RefusedError(
                f"no checkpoint is common: the client has those of the steps {', '.join(map(str, sorted(steps)))}, "
                f"the server {have}",
                "steps",
            )
        session.blocks.restore(found)
        session.anew(found.step)


def common_checkpoint(folder: RunFolder, steps: set[int]) -> Checkpoint | None:
    """The newest whole checkpoint of a folder that is of one of `steps`."""
    for step in sorted(steps & {*folder.steps()}, reverse=True):
        if (found := folder.whole(step)) is not None:
            return found
    return None


def agreed(optim: OptimConfig, precision: str) -> dict[str, Any]:
    """What both sides must have alike, as JSON holds it."""
    found = {f"optim.{name}": getattr(optim, name) for name in AGREED}
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return {**found, "train.precision": precision}
