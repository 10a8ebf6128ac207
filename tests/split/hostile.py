"""A seeded generator of malformed and hostile messages to a server that generates, as the bytes of their first chunk
and what follows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from situs.split.message import Message, encode

HUGE = 1 << 62
NUMBERS = (-1, -(1 << 40), HUGE, 10**30, 0.0, 1.5, "0", "1; DROP", None, True, [0], {"at": 0}, [[[]]])
DTYPES = (torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Target:
    """What the sender knows: its own session, its sequence 1 of so many tokens, and all of another client's names."""

    session: str
    incarnation: str
    length: int
    other: str
    other_incarnation: str
    layout: str
    width: int
    most: int


def hostile(target: Target, count: int, seed: int) -> Iterator[tuple[str, list[bytes]]]:
    """(what is wrong, the chunks) of `count` messages."""
    chance, rows = random.Random(seed), torch.Generator().manual_seed(seed)
    makers = (_number, _shape, _dtype, _values, _extra, _session, _stolen, _kind, _hello, _bytes, _too_long)
    for turn in range(count):
        yield makers[turn % len(makers)](target, chance, rows)


def _z(target: Target, rows: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*(shape or (1, 1, target.width)), generator=rows)


def _facts(target: Target, **changes: Any) -> dict[str, Any]:
    session = {"session": target.session, "incarnation": target.incarnation}
    return session | {"sequence": 1, "start": target.length, "mean": False} | changes


def _message(what: str, facts: Any, kind: str = "extend", **tensors: Tensor) -> tuple[str, list[bytes]]:
    return what, list(encode(Message(kind, facts, tensors)))


def _number(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    name, value = chance.choice(("sequence", "start")), chance.choice(NUMBERS)
    if name == "start":  # a start that is a whole number but not the next one, too
        value = chance.choice((*NUMBERS, t.length + 1, t.length - 1, t.length + chance.randrange(2, 9)))
    return _message(f"{name}={value!r}", _facts(t, **{name: value}), z=_z(t, rows))


def _shape(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    d = t.width
    wrong = ((1, 0, d), (2, 1, d), (0, 1, d), (1, 1, d - 1), (1, 1, d + 1), (1, d), (d,), (1, 1, 1, d), (1, 1, 0))
    shape = chance.choice((*wrong, (1, t.most + 1, d), (64, 64, d)))
    return _message(f"shape {shape}", _facts(t), z=_z(t, rows, *shape))


def _dtype(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    dtype = chance.choice(DTYPES)
    return _message(f"{dtype}", _facts(t), z=_z(t, rows).to(dtype))


def _values(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    z, value = _z(t, rows), chance.choice((float("nan"), float("inf"), -float("inf")))
    z[..., chance.randrange(t.width)] = value
    return _message(f"{value}", _facts(t), z=z)


def _extra(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    if chance.random() < 0.2:
        return _message("no rows", _facts(t))
    if chance.random() < 0.2:
        commit = {"step": 0, "rate": 0.1, "fine": True}
        return _message("a commit", _facts(t, commit=commit), z=_z(t, rows))
    name = chance.choice(("mask", "share", "gradient", "z\n", "../z"))
    extra = torch.ones(1, 1, dtype=torch.bool) if name == "mask" else torch.ones(())
    return _message(f"the tensor {name!r}", _facts(t), z=_z(t, rows), **{name: extra})


def _session(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    name = chance.choice(("0" * 32, "../../etc", "", None, 7, t.session.upper() + "x", [t.session], t.session[:-1]))
    changes = chance.choice(({"session": name}, {"incarnation": chance.choice((None, "", "0" * 16, 3))}))
    return _message(f"{changes}", _facts(t, **changes), z=_z(t, rows))


def _stolen(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    """Another client's session, with every name right."""
    facts = _facts(t, session=t.other, incarnation=t.other_incarnation, start=chance.choice((0, t.length)))
    kind = chance.choice(("extend", "extend", "infer", "bye", "save"))
    tensors = {"z": _z(t, rows)} if kind in ("extend", "infer") else {}
    return _message(f"{kind} of another client", facts, kind, **tensors)


def _kind(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    kind = chance.choice(("forward", "backward", "commit", "save", "generate", "ok", "refused", ""))
    tensors = {"z": _z(t, rows)} if chance.random() < 0.5 else {}
    return _message(f"the kind {kind!r}", _facts(t, step=0, part=0), kind, **tensors)


def _hello(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    right = {"session": t.session, "layout": t.layout, "steps": [], "reads": True}
    wrong = (
        {"session": t.other},
        {"session": chance.choice(("", "x" * 32, None, 5, "../" + "0" * 29))},
        {"layout": chance.choice(("", None, "0" * 64, 1))},
        {"steps": chance.choice((None, [-1], ["0"], [HUGE], list(range(2000))))},
        {"reads": chance.choice((False, 1, "yes", None)), "training": {}},
    )
    changes = chance.choice(wrong)
    return _message(f"a hello with {changes!s:.60}", right | changes, "hello")


def _bytes(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    """A right message, damaged."""
    (right,) = encode(Message("extend", _facts(t), {"z": _z(t, rows)}))
    length = int.from_bytes(right[:8], "little")
    header = json.loads(right[8 : 8 + length])

    def again(changed: bytes) -> bytes:
        return len(changed).to_bytes(8, "little") + changed + right[8 + length :]

    notes = header["__metadata__"]
    deep = "[" * 5000 + "]" * 5000
    damaged = {
        "cut": right[: chance.randrange(len(right))],
        "too long": right + b"\0" * chance.randrange(1, 99),
        "a length of its own": chance.getrandbits(64).to_bytes(8, "little") + right[8:],
        "noise": chance.randbytes(chance.randrange(1, 400)),
        "no kind": again(json.dumps(header | {"__metadata__": {"situs": notes["situs"]}}).encode()),
        "facts that are a list": again(json.dumps(header | {"__metadata__": notes | {"facts": "[1]"}}).encode()),
        "deep facts": again(json.dumps(header | {"__metadata__": notes | {"facts": deep}}).encode()),
        "another version": again(json.dumps(header | {"__metadata__": notes | {"situs": "99"}}).encode()),
    }
    what = chance.choice(list(damaged))
    return what, [damaged[what]]


def _too_long(t: Target, chance: random.Random, rows: torch.Generator) -> tuple[str, list[bytes]]:
    count = t.most - t.length + chance.randrange(1, t.length)
    return _message(f"{count} more tokens", _facts(t), z=_z(t, rows, 1, count, t.width))
