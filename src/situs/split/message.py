"""The messages on the wire: each is a safetensors file with its kind and facts in the metadata; no pickle.

    8 bytes length · header (JSON) · bytes of the tensors

A receiver reads the header first and compares it with what it expects (`Expected`): names, dtypes and shapes, and so
the number of bytes that may follow. Before that it stores no more than one chunk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.locks.shards import Header, Spec, make_header, parse_header
from situs.split.parts import STORED, bytes_of

VERSION = 1
CHUNK = 2 << 20
LARGEST_HEADER = 1 << 18
"""Bytes; well within the first chunk."""

KINDS = ("hello", "forward", "backward", "commit", "save", "infer", "extend", "bye")
READING = ("infer", "extend", "bye")
"""Kinds that change no weights."""

ANSWERS = ("ok", "refused")
DTYPES = {name: dtype for dtype, name in STORED.items()}


class RefusedError(SitusError):
    """A message that is refused. code: one word for programs; the sentence is for people."""

    def __init__(self, sentence: str, code: str = "message") -> None:
        super().__init__(sentence)
        self.code = code


class GoneError(SitusError):
    """The server no longer answers."""


@dataclass(frozen=True)
class Message:
    """kind: of `KINDS`, or of `ANSWERS` for a reply. facts: plain JSON. tensors: by name, on the CPU."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self) -> int:
        """A checksum of facts and tensors, to recognise a repeated message."""
        checksum = zlib.crc32(json.dumps([self.kind, self.facts], sort_keys=True).encode())
        for name in sorted(self.tensors):
            checksum = zlib.crc32(bytes_of(self.tensors[name]), zlib.crc32(name.encode(), checksum))
        return checksum

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Expected:
    """What a tensor of a message may be. shape: (smallest, largest) of each axis."""

    dtypes: Collection[str]
    shape: tuple[tuple[int, int], ...]

    def why_not(self, spec: Spec) -> str | None:
        """Why a tensor is refused; None if it fits."""
        if spec.dtype not in self.dtypes:
            return f"is {spec.dtype}, must be {' or '.join(sorted(self.dtypes))}"
        fits = len(spec.shape) == len(self.shape) and all(
            low <= side <= high for side, (low, high) in zip(spec.shape, self.shape, strict=True)
        )
        wanted = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in self.shape)
        return None if fits else f"has the shape {list(spec.shape)}, must be [{wanted}]"


def encode(message: Message) -> Iterator[bytes]:
    """A message in chunks of at most `CHUNK` bytes, each copied once; the header is in the first."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in message.tensors.items()}
    specs = [Spec(name, STORED[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    notes = {"situs": str(VERSION), "kind": message.kind, "facts": json.dumps(message.facts, allow_nan=False)}
    head = make_header(specs, notes).raw
    if len(head) > LARGEST_HEADER:
        raise SitusError(
            f"a message has a header of {len(head):,} bytes, but at most {LARGEST_HEADER:,} bytes are allowed"
        )
    waiting, free = [memoryview(head)], CHUNK - len(head)
    for tensor in tensors.values():
        data = bytes_of(tensor)
        while data:
            waiting.append(data[:free])
            data, free = data[free:], free - len(waiting[-1])
            if not free:
                yield b"".join(waiting)
                waiting, free = [], CHUNK
    if waiting:
        yield b"".join(waiting)


@dataclass(frozen=True)
class Opening:
    """The unchecked header of an incoming message. rest: the bytes of the first chunk behind the header."""

    kind: str
    facts: dict[str, Any]
    header: Header
    rest: memoryview

    @property
    def size(self) -> int:
        """Bytes of tensors that it announces."""
        return sum(spec.size for spec in self.header.tensors)


def open_message(chunk: bytes, kinds: Collection[str]) -> Opening:
    """Reads a message's header out of its first chunk."""
    if len(chunk) < 8:
        raise RefusedError(f"the message has {len(chunk)} bytes, too few for a header")
    length = int.from_bytes(chunk[:8], "little")
    if length > LARGEST_HEADER or length + 8 > len(chunk):
        raise RefusedError(
            f"the header has {length:,} bytes; at most {LARGEST_HEADER:,} are allowed, and the first chunk "
            f"({len(chunk):,} bytes) must contain the whole header"
        )
    try:
        header = parse_header(bytes(chunk[: 8 + length]), "the message")
        notes = header.notes
        if (version := notes.get("situs")) != str(VERSION):
            raise RefusedError(
                f"the message has the version {version!r:.20}, but this Situs uses version {VERSION}", "version"
            )
        kind, facts = notes.get("kind"), json.loads(notes.get("facts", ""))
    except RefusedError:
        raise
    except (SitusError, ValueError, RecursionError) as error:
        reason = (
            str(error) if isinstance(error, SitusError) else "the metadata in the message's header is not valid JSON"
        )
        raise RefusedError(reason[:300]) from None
    if kind is None or kind not in kinds or not isinstance(facts, dict):
        raise RefusedError(f"the message is of the kind {kind!r:.40}, but must be {', '.join(kinds)}")
    return Opening(kind, facts, header, memoryview(chunk)[8 + length :])


def check_tensors(opening: Opening, expected: Mapping[str, Expected], optional: Collection[str] = ()) -> None:
    """Refuses a message whose tensors are not as expected, before their bytes are received."""
    specs = {spec.name: spec for spec in opening.header.tensors}
    for name in sorted(specs.keys() | expected.keys()):
        if name not in expected or (name not in specs and name not in optional):
            problem = "is not expected" if name in specs else "is missing"
            raise RefusedError(f"a message of the kind {opening.kind}: the tensor {name[:40]!r} {problem}", "tensors")
        reason = expected[name].why_not(specs[name]) if name in specs else None
        if reason is not None:
            raise RefusedError(f"a message of the kind {opening.kind}: {name} {reason}", "tensors")


class Body:
    """Receives the bytes that a header announces, and no more."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.data = bytearray(opening.size)
        self.at = 0
        self.add(opening.rest)

    def add(self, chunk: bytes | memoryview) -> None:
        end = self.at + len(chunk)
        if end > len(self.data):
            raise RefusedError(f"the message is longer than the {len(self.data):,} bytes that its header states")
        self.data[self.at : end] = chunk
        self.at = end

    def message(self) -> Message:
        """The complete message. Numbers that are not finite are refused."""
        if self.at != len(self.data):
            raise RefusedError(f"the message ends after {self.at:,} of {len(self.data):,} bytes")
        tensors, at = {}, 0
        for spec in self.opening.header.tensors:
            tensors[spec.name] = tensor = _tensor(self.data, at, spec)
            at += spec.size
            if tensor.is_floating_point() and not finite(tensor):
                raise RefusedError(
                    f"a message of the kind {self.opening.kind}: {spec.name} contains NaN or infinite numbers", "finite"
                )
            if spec.dtype == "BOOL" and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                raise RefusedError(f"a message of the kind {self.opening.kind}: {spec.name} must be true or false")
        return Message(self.opening.kind, self.opening.facts, tensors)


def finite(tensor: Tensor) -> bool:
    """Whether every number is finite, from minimum and maximum, in a seventh of the time of `isfinite`."""
    return not tensor.numel() or bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def _tensor(data: bytearray, at: int, spec: Spec) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if not spec.size:
        return torch.empty(spec.shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=torch.uint8, offset=at, count=spec.size)
    if at % dtype.itemsize:  # unaligned, behind a tensor of another width
        tensor = tensor.clone()
    return tensor.view(dtype).reshape(spec.shape)


def number(facts: Mapping[str, Any], name: str, most: int) -> int:
    """An integer of a message's facts."""
    value = facts.get(name)
    if type(value) is not int or not 0 <= value < most:
        raise RefusedError(f"{name}={value!r:.40}: must be a whole number from 0 to {most - 1}")
    return value


def unpacked(message: Message, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The features in the blocks' dtype, and the mask, if any."""
    z, mask = message.tensors["z"], message.tensors.get("mask")
    if mask is not None and (mask.shape != z.shape[:2] or not bool(mask.any(dim=1).all())):
        raise RefusedError(
            f"the mask has the shape {list(mask.shape)}; it must have the shape {list(z.shape[:2])}, and at least "
            "one token "
            "in each sample"
        )
    return (z.to(dtype) if message.facts.get("wire") is not None else z), mask


def packed(tensor: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """A tensor as it is sent: on the CPU, in the agreed dtype."""
    return tensor.detach().to("cpu", torch.bfloat16 if facts.get("wire") == "BF16" else tensor.dtype)
