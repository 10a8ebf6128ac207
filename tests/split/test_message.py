"""Messages: what is sent comes back bit for bit, and what is not a message is refused before it is held."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from situs.errors import SitusError
from situs.split import message
from situs.split.message import (
    CHUNK,
    KINDS,
    LARGEST_HEADER,
    Body,
    Expected,
    Message,
    RefusedError,
    check_tensors,
    encode,
    finite,
    number,
    open_message,
    packed,
    unpacked,
)


def received(chunks: list[bytes]) -> Message:
    body = Body(open_message(chunks[0], KINDS))
    for chunk in chunks[1:]:
        body.add(chunk)
    return body.message()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=4),
    step=st.integers(0, 2**40),
    rate=st.floats(0, 1),
)
def test_a_message_comes_back_as_it_was_sent(shapes, step, rate) -> None:
    tensors = {f"t{n}": (torch.randn(shape) * 3).to(dtype) for n, (dtype, shape) in enumerate(shapes)}
    sent = Message("forward", {"step": step, "rate": rate, "word": "é"}, tensors)
    found = received([bytes(chunk) for chunk in encode(sent)])
    assert (found.kind, found.facts) == (sent.kind, sent.facts)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert found.check() == sent.check()


def test_a_message_is_a_safetensors_file_in_chunks(tmp_path) -> None:
    tensors = {"z": torch.randn(300, 5000), "mask": torch.ones(3, dtype=torch.bool)}
    chunks = [bytes(chunk) for chunk in encode(Message("forward", {"step": 1}, tensors))]
    assert len(chunks) == 3 and max(map(len, chunks)) == CHUNK
    file = tmp_path / "message.safetensors"
    file.write_bytes(b"".join(chunks))
    assert all(torch.equal(load(file.read_bytes())[name], value) for name, value in tensors.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["kind"] == "forward" and json.loads(opened.metadata()["facts"]) == {"step": 1}


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_chunk_but_the_last_is_full_and_none_is_empty(monkeypatch, chunks: int, more: int) -> None:
    monkeypatch.setattr(message, "CHUNK", 1 << 10)

    def sent(count: int) -> list[bytes]:
        tensors = {"a": torch.ones(100, dtype=torch.uint8), "b": torch.ones(count, dtype=torch.uint8)}
        return [bytes(chunk) for chunk in encode(Message("forward", {"step": 1}, tensors))]

    room = chunks * (1 << 10) - len(sent(400)[0]) + 400  # until the last chunk is full
    sizes = [len(chunk) for chunk in sent(room + more)]
    assert sizes == [1 << 10] * chunks + [1] if more > 0 else [1 << 10] * (chunks - 1) + [(1 << 10) + more]


@pytest.mark.parametrize(
    ("value", "fits"),
    [(0, True), (4, True), (5, False), (-1, False), (True, False), (2.0, False), ("1", False), (None, False)],
)
def test_a_number_is_whole_and_below_its_bound(value: object, fits: bool) -> None:
    if fits:
        assert number({"x": value}, "x", 5) == value
        return
    with pytest.raises(RefusedError, match=re.escape(f"x={value!r}: must be a whole number from 0 to 4")):
        number({"x": value}, "x", 5)


def test_an_answer_is_rounded_only_where_that_was_agreed() -> None:
    z = torch.full((2,), 1 / 3, dtype=torch.float64, requires_grad=True)
    for facts, dtype in (({}, torch.float64), ({"wire": "F64"}, torch.float64), ({"wire": "BF16"}, torch.bfloat16)):
        out = packed(z, facts)
        assert out.dtype == dtype and not out.requires_grad and torch.equal(out, z.detach().to(dtype))


def test_one_number_that_is_not_finite_is_seen_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        largest = torch.finfo(dtype).max
        whole = torch.full((3, 40), largest, dtype=dtype)
        whole[1, 7] = -largest
        assert finite(whole) and finite(whole[:0]) and finite(whole[0, 0])
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = whole.clone()
            spoiled[2, 39] = value
            assert not finite(spoiled)


def test_a_change_of_one_bit_changes_the_checksum() -> None:
    one = Message("forward", {"step": 1}, {"z": torch.zeros(4)})
    others = (
        Message("backward", {"step": 1}, one.tensors),
        Message("forward", {"step": 2}, one.tensors),
        Message("forward", {"step": 1}, {"y": torch.zeros(4)}),
        Message("forward", {"step": 1}, {"z": torch.tensor([0, 0, 0, -0.0])}),
    )
    assert len({one.check(), *(other.check() for other in others)}) == 5


def chunk_of(facts="{}", kind="forward", version="1", **tensors) -> bytes:
    return save(tensors, {"situs": version, "kind": kind, "facts": facts})


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (b"", "too few"),
        (b"\xff" * 8, "must contain the whole header"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "must contain the whole header"),
        ((2).to_bytes(8, "little") + b"[]", "JSON object"),
        ((4).to_bytes(8, "little") + b"\x80\x03}.", "is not valid JSON"),  # a pickle is no header
        (chunk_of(version="2"), "version '2'"),
        (chunk_of(kind="delete"), "the kind 'delete'"),
        (chunk_of(kind="ok"), "the kind 'ok'"),
        (chunk_of(facts="[1]"), "the kind"),
        (chunk_of(facts="{"), "not valid JSON"),
        (chunk_of(facts="[" * 50000), "not valid JSON"),
        (save({"z": torch.zeros(2)}), "version None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_message_is_refused(chunk, reason) -> None:
    with pytest.raises(RefusedError, match=reason):
        open_message(chunk, KINDS)


def test_tensors_are_held_against_what_is_expected_before_they_are_taken_in() -> None:
    expected = {"z": Expected({"F32"}, ((1, 8), (17, 17), (16, 16)))}

    def judge(**tensors):
        check_tensors(open_message(chunk_of(**tensors), KINDS), expected)

    judge(z=torch.zeros(8, 17, 16))
    for tensors, reason in (
        ({"z": torch.zeros(9, 17, 16)}, "1 to 8, 17, 16"),
        ({"z": torch.zeros(8, 17)}, "has the shape"),
        ({"z": torch.zeros(8, 17, 16, dtype=torch.float64)}, "is F64"),
        ({}, "'z' is missing"),
        ({"z": torch.zeros(8, 17, 16), "more": torch.zeros(1)}, "'more' is not expected"),
    ):
        with pytest.raises(RefusedError, match=reason):
            judge(**tensors)


def test_bytes_beyond_or_short_of_the_header_and_numbers_that_are_none_are_refused() -> None:
    whole = chunk_of(z=torch.ones(4))
    with pytest.raises(RefusedError, match="longer than the 16 bytes"):
        Body(open_message(whole + b"x", KINDS))
    with pytest.raises(RefusedError, match="ends after 15 of 16"):
        Body(open_message(whole[:-1], KINDS)).message()
    for value in (torch.nan, torch.inf):
        with pytest.raises(RefusedError, match="z contains NaN"):
            Body(open_message(chunk_of(z=torch.tensor([0.0, value])), KINDS)).message()
    truth = bytearray(chunk_of(mask=torch.ones(4, dtype=torch.bool)))
    truth[-1] = 7
    with pytest.raises(RefusedError, match="must be true or false"):
        Body(open_message(bytes(truth), KINDS)).message()


def test_a_header_has_a_size_limit_at_the_sender_too() -> None:
    least = len(next(iter(encode(Message("hello", {"x": ""})))))
    room = LARGEST_HEADER - least
    (fits,) = encode(Message("hello", {"x": "a" * room}))
    assert len(fits) == LARGEST_HEADER and open_message(fits, KINDS).facts == {"x": "a" * room}
    with pytest.raises(SitusError, match=r"a header of 262,15\d bytes, but at most 262,144 bytes are allowed"):
        next(iter(encode(Message("hello", {"x": "a" * (room + 8)}))))


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (2, 5, 1), (10,)])
def test_a_mask_has_a_place_for_each_token(shape: tuple[int, ...]) -> None:
    z = torch.ones(2, 5, 3, dtype=torch.float64)
    mask = torch.tensor([[True, False, False, False, False], [True] * 5])
    found = unpacked(Message("infer", {}, {"z": z, "mask": mask}), torch.float32)
    assert found[0] is z and found[1] is mask
    assert unpacked(Message("infer", {"wire": "F64"}, {"z": z}), torch.float32)[0].dtype == torch.float32
    for wrong in (torch.ones(shape, dtype=torch.bool), mask & torch.tensor([[False], [True]])):
        said = f"the mask has the shape {list(wrong.shape)}; it must have the shape [2, 5], and at least one token"
        with pytest.raises(RefusedError, match=re.escape(said)):
            unpacked(Message("infer", {}, {"z": z, "mask": wrong}), torch.float32)
