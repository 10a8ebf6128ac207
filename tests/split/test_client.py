"""Split training against local training: the same weights, moments and means, to the bit where nothing is permuted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import small_hf, small_swin, small_vit
from served import on_a_socket
from torch import Tensor
from wired import OPTIM, SESSION, TRAIN, Loader, Pair, Words, farthest, method_of, train_locally, vit

from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.errors import SitusError
from situs.locks.key import Key
from situs.locks.veil import Veil, parse_veil
from situs.split.client import READ_AGAIN, Client, RemoteText, RewoundError
from situs.split.hiding import make_cut
from situs.split.message import Message, RefusedError
from situs.split.parts import Side, cut
from situs.split.transport.connect import Connection
from situs.train.optim import trains_few

CIFAR = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar100"


def test_a_call_that_cannot_wait_has_its_answer_or_refusal_at_once() -> None:
    z, refusal = torch.randn(1, 2, 4), RefusedError("no", "full")
    flight = Client(lambda *_: Message("ok", {}, {"z": 2 * z}), SESSION).forward(z, None, z.shape)
    assert flight.pending is not None and flight.pending.done()
    assert torch.equal(flight.pending.result().tensors["z"], 2 * z)

    def refuse(*_: Any) -> Message:
        raise refusal

    client = Client(refuse, SESSION)
    flight = client.forward(z, None, z.shape)
    assert flight.pending is not None and flight.pending.done()
    with pytest.raises(RefusedError) as raised:
        client.output(flight)
    assert raised.value is refusal


def test_split_training_is_local_training_to_the_bit(tmp_path) -> None:
    """AdamW with layer decay, clipping over both sides' gradients, drop path, mean and schedule; micro-batches."""
    train = replace(TRAIN, accumulate=2)
    local = train_locally(method_of(vit()), Loader(), tmp_path / "local", train)
    pair = Pair(vit, tmp_path, train=train)
    split = pair.run(Loader())
    assert farthest(local, split) == 0
    assert len(local["model"]) == len(split["model"]) and len(split["ema"]) > 50
    assert [m.kind for m in pair.seen[1:5]] == ["forward", "forward", "backward", "backward"]
    assert sum(m.kind == "commit" for m in pair.seen) == 0  # each went with the next question


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What a server sees where nothing is hidden, and what local training gives, in float64."""
    out = tmp_path_factory.mktemp("plain")
    local = train_locally(method_of(vit(torch.float64)), Loader(), out / "local")
    pair = Pair(lambda: vit(torch.float64), out)
    pair.run(Loader())
    return local, pair


@pytest.mark.thin(2)
@pytest.mark.parametrize("permute", [("rows",), ("columns",), ("rows", "columns")])
def test_permuted_training_is_local_training(tmp_path, permute, plain) -> None:
    pair = Pair(lambda: vit(torch.float64), tmp_path, permute)
    split = pair.run(Loader())
    assert farthest(plain[0], split) < 1e-9
    for own, clear in zip(pair.seen, plain[1].seen, strict=True):
        if own.kind == "forward":  # the server's view is another: no row, or no channel, where it was
            assert (own.tensors["z"] - clear.tensors["z"]).abs().max() > 0.01


class Cifar(Loader):
    """CIFAR-100, augmented, eight images per step, in float64."""

    def __init__(self) -> None:
        super().__init__(batch=8)
        data = DataConfig(path=str(CIFAR), img_size=32, batch=8, count=1000)
        self.batches = list(make_loader(data, AugmentConfig()).iterate(0, 0))
        self.steps_per_epoch = len(self.batches)

    def iterate(self, epoch, start_step):
        for batch in self.batches[start_step:]:
            yield batch._replace(inputs=batch.inputs.double())


@pytest.mark.slow
@pytest.mark.shared_data
def test_a_hundred_steps_of_cifar_over_a_socket_stay_within_1e_9(tmp_path) -> None:
    """A ViT of depth 4 in float64: as it is, and with rows and columns permuted, over TLS-less gRPC."""

    def wide():
        torch.manual_seed(11)
        return small_vit(32, width=64, depth=4, num_classes=100, drop_path=0.1).double()

    train, optim = replace(TRAIN, max_steps=100), replace(OPTIM, lr=1e-3)
    local = train_locally(method_of(wide()), Cifar(), tmp_path / "local", train, optim)
    for permute in ((), ("rows", "columns")):
        out = tmp_path / ("-".join(permute) or "plain")
        pair = Pair(wide, out, permute, train=train, optim=optim)
        with on_a_socket(pair.server) as address, Connection(address, None) as pair.client._call:
            split = pair.run(Cifar())
        print(f"100 steps, float64, {permute or 'as it is'}: the farthest number is {farthest(local, split):.1e} away")
        assert farthest(local, split) < (1e-9 if permute else 1e-30)


def test_a_parameter_clipped_by_itself_and_no_clipping_at_all(tmp_path) -> None:
    for number, fields in enumerate(({"clip": None}, {"clip_mode": "parameter", "clip": 0.05})):
        optim = replace(OPTIM, **fields)
        local = train_locally(method_of(vit()), Loader(), tmp_path / f"local{number}", optim=optim)
        assert farthest(local, Pair(vit, tmp_path / f"{number}", optim=optim).run(Loader())) == 0


def bert() -> object:
    torch.manual_seed(2)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made = small_hf(
        "BertForSequenceClassification", vocab_size=40, max_position_embeddings=12, num_labels=5, **shape, **drop
    )
    return made.double()


def test_a_bert_with_padding_trains_split_as_it_does_alone(tmp_path) -> None:
    local = train_locally(method_of(bert()), Words((9,)), tmp_path / "local")
    pair = Pair(bert, tmp_path / "pair", ("rows", "columns"))
    assert farthest(local, pair.run(Words((9,)))) < 1e-9
    moved = [m.tensors["mask"] for m in pair.seen if m.kind == "forward"]
    assert any(bool((~mask[:, 0]).any()) for mask in moved)  # padding went along


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForSequenceClassification"])
def test_causal_models_with_permuted_columns_train_split_as_they_do_alone(tmp_path, kind) -> None:
    def make():
        torch.manual_seed(2)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        shape = {"max_position_embeddings": 12, "num_key_value_heads": 1, "num_labels": 5, "pad_token_id": 0, **sizes}
        if kind.startswith("GPT2"):
            shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "bos_token_id": 1, "eos_token_id": 1}
            shape |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return small_hf(kind, vocab_size=40, **shape).double()

    local = train_locally(method_of(make()), Words((9,)), tmp_path / "local")
    pair = Pair(make, tmp_path / "pair", ("columns",))
    # transformers' RMSNorm computes in float32
    assert farthest(local, pair.run(Words((9,)))) < (1e-9 if kind.startswith("GPT2") else 1e-6)


def test_rows_that_cannot_be_permuted_are_refused_with_the_reason() -> None:
    key = Key(bytes(32))
    causal = small_hf("GPT2Model", n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    rotary = small_vit(16, name="vit_small_patch16_rope_224", depth=1)
    for backbone, reason in (
        (causal, "causal mask"),
        (small_swin(), "windows"),
        (small_vit(16, positions="relative"), "relative bias"),
        (rotary, "read the order"),
    ):
        with pytest.raises(SitusError, match=reason):
            make_cut(backbone, Veil(rows=True), key)
        make_cut(backbone, Veil(columns=True), key, run="0" * 32)
    with pytest.raises(SitusError, match="windows"):
        make_cut(small_swin(), Veil("batch-shuffle"), key)
    with pytest.raises(SitusError, match="permute='diagonals'"):
        parse_veil("none", ("diagonals",))
    with pytest.raises(SitusError, match="none is given"):
        make_cut(rotary, Veil(columns=True))


def swin():
    torch.manual_seed(1)
    return small_swin(num_classes=5).double()


def test_a_swin_and_a_rotary_model_keep_to_their_own_places(tmp_path) -> None:
    def rope():
        torch.manual_seed(1)
        return small_vit(16, name="vit_small_patch16_rope_mixed_224", depth=2, num_classes=5)

    for name, make, loader, permute in (
        ("swin", swin, Loader((3, 32, 32)), ("columns",)),
        ("rope", rope, Loader(), ()),  # in float32, for timm's mixed rotation knows no other
        ("relative", lambda: vit(torch.float64, positions="relative"), Loader(), ("columns",)),
    ):
        optim = replace(OPTIM, layer_decay=1.0)
        local = train_locally(method_of(make()), loader, tmp_path / f"{name}-local", optim=optim)
        assert farthest(local, Pair(make, tmp_path / name, permute, optim=optim).run(loader)) < 1e-9


@pytest.mark.thin(2)
@pytest.mark.parametrize("defence", [Veil("noise", 0.3), Veil("lowpass", 0.4), Veil("batch-shuffle", 4)])
def test_a_defence_changes_what_is_sent_and_training_goes_on(tmp_path, defence, plain) -> None:
    train = replace(TRAIN, max_steps=1)
    pair = Pair(lambda: vit(torch.float64), tmp_path / "defended", ("rows",), defence, train=train)
    pair.run(Loader())
    sent, clear = (next(m.tensors["z"] for m in each.seen if m.kind == "forward") for each in (pair, plain[1]))
    assert not torch.allclose(sent.sort(1).values, clear.sort(1).values, atol=1e-3)
    again = Pair(lambda: vit(torch.float64), tmp_path / "again", ("rows",), defence, train=train)
    again.run(Loader())
    assert torch.equal(sent, next(m.tensors["z"] for m in again.seen if m.kind == "forward"))


def test_a_step_that_comes_again_is_shown_as_it_was_and_other_features_never_with_the_same_noise() -> None:
    """Else a server that sends a client back and answers otherwise would subtract the noise of one from the other."""
    backbone, at = vit(torch.float64), ("run", "3", "0")
    chance = torch.Generator().manual_seed(0)
    z = torch.randn(2, 17, 16, generator=chance, dtype=torch.float64)
    moved = z + 1e-9
    for veil in (Veil(rows=True), Veil("noise", 0.5), Veil("batch-shuffle")):
        entrance = make_cut(backbone, veil, Key(bytes(32)), run="0" * 32)

        def shown(z, at=at, entrance=entrance):
            return entrance.enter(z, None, at)[0]

        assert torch.equal(shown(z), shown(z.clone()))
        for other in (shown(moved), shown(z, ("run", "4", "0")), shown(z, ("run", "3", "1"))):
            assert float((shown(z) - other).abs().max()) > 1e-3


def test_evaluation_runs_through_the_server_with_fresh_orders(tmp_path) -> None:
    pair = Pair(vit, tmp_path, ("rows", "columns"))
    split = pair.run(Loader())
    whole = method_of(vit())
    whole.load_state_dict(split["model"])
    whole.eval()
    pair.method.eval()
    images = next(Loader().iterate(7, 0)).inputs
    with torch.no_grad():
        expected = whole.backbone(images)
        first, second = pair.method.backbone(images), pair.method.backbone(images)
        whole.load_state_dict(split["model"] | split["ema"])
        mean = whole.backbone(images)
        pair.method.load_state_dict(
            pair.method.state_dict() | {k: v for k, v in split["ema"].items() if k in pair.method.state_dict()},
            strict=False,
        )
        pair.client.mean = True
        averaged = pair.method.backbone(images)
    assert torch.allclose(first, expected, atol=1e-5) and torch.allclose(second, expected, atol=1e-5)
    assert torch.allclose(averaged, mean, atol=1e-5) and not torch.allclose(mean, expected, atol=1e-4)
    a, b = (m.tensors["z"] for m in pair.seen[-3:-1])
    assert not torch.equal(a, b)
    assert torch.allclose(a.sum(1), b.sum(1), atol=1e-4)


def test_bf16_on_the_wire_halves_the_bytes_and_stays_near(tmp_path) -> None:
    full, half = Pair(vit, tmp_path / "full"), Pair(vit, tmp_path / "half", wire=torch.bfloat16)
    a, b = full.run(Loader()), half.run(Loader())
    assert 0.45 < half.client.traffic / full.client.traffic < 0.55
    assert 0 < farthest({"model": a["model"]}, {"model": b["model"]}) < 0.2


def test_a_loss_that_is_not_finite_stops_the_run_and_moves_nobody(tmp_path) -> None:
    from situs.train.loop import NotFiniteError

    class Poisoned(Loader):
        def iterate(self, epoch, start_step):
            for number, batch in enumerate(super().iterate(epoch, start_step)):
                yield batch if number != 2 else batch._replace(targets={"label": torch.full((8, 5), torch.inf)})

    pair = Pair(vit, tmp_path)
    with pytest.raises(NotFiniteError, match="step 3 was not finite"):
        pair.run(Poisoned())
    assert pair.server.sessions[next(iter(pair.server.sessions))].step == 2


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_part_has_the_rate_of_the_whole(side: Side) -> None:
    """With the other side's weights gone, a client would else count as training a few."""
    whole = method_of(vit())
    frozen = method_of(vit())
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("head" in name)
    assert trains_few(whole) == trains_few(cut(whole, side)) is False
    assert trains_few(frozen) and trains_few(cut(frozen, side))


def answering(*answers: dict[str, Any]) -> tuple[Client, list[str]]:
    """A client of a server that gives these facts, the last of them from then on; and the kinds of its questions."""
    asked: list[str] = []

    def call(message: Message, _: Any) -> Message:
        asked.append(message.kind)
        return Message("ok", answers[min(len(asked), len(answers)) - 1])

    return Client(call, SESSION), asked


@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_session_begins_at_a_checkpoint_that_the_client_has(step: int) -> None:
    welcome = answering({"step": step, "incarnation": "a", "digest": "d"})[0].hello("x", {}, [2, 5])
    assert (welcome.step, welcome.digest) == (step, "d")


@pytest.mark.parametrize(
    "wrong", [{"step": 3}, {"step": True}, {"step": 2.0}, {"step": None}, {"step": "2"}, {"incarnation": None}], ids=str
)
def test_a_server_that_begins_elsewhere_is_not_followed(wrong: dict[str, Any]) -> None:
    client, _ = answering({"step": 2, "incarnation": "a"} | wrong)
    with pytest.raises(SitusError, match=r"the server wants to start at step .*, but the client has no checkpoint"):
        client.hello("x", {}, [1, 2])


def test_after_a_gradient_that_is_no_number_nothing_is_sent_until_the_next_hello(tmp_path) -> None:
    pair = Pair(vit, tmp_path)
    client, z = pair.client, torch.randn(2, 17, 16)
    client.hello(*pair.facts, [])
    client.begin(0, 0.1)
    flight = client.forward(z, None, (2, 17, 16))
    client.output(flight)
    assert not client.failed
    client.backward(flight, torch.full_like(z, math.nan), 52)
    assert client.failed
    sent = len(pair.seen)
    assert bool(client.input_gradient(flight).isnan().all()) and client.norms is None
    client.end_step(None, fine=True)
    client.begin(1, 0.1)
    lost = client.forward(z.double(), None, (2, 9, 4))
    found = client.output(lost)
    assert (found.shape, found.dtype, lost.part) == ((2, 9, 4), torch.float64, 0) and bool(found.isnan().all())
    client.backward(lost, torch.zeros(2, 9, 4), 52)
    client.end_step(torch.tensor(1.0), fine=True)
    client.flush()
    assert len(pair.seen) == sent
    client.hello(*pair.facts, [])
    assert not client.failed
    client.begin(0, 0.1)
    assert client.output(client.forward(z, None, (2, 17, 16))).isfinite().all()


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_features_that_are_no_numbers_are_not_sent(tmp_path, odd: float) -> None:
    pair = Pair(vit, tmp_path)
    pair.client.hello(*pair.facts, [])
    pair.client.begin(7, 0.1)
    z = torch.zeros(2, 17, 16)
    z[1, 3, 5] = odd
    with pytest.raises(
        SitusError, match="the features of step 7 contain NaN or infinite numbers, so they are not sent"
    ):
        pair.client.forward(z, None, (2, 17, 16))
    assert [message.kind for message in pair.seen] == ["hello"]


def test_a_server_that_comes_back_with_other_weights_is_left() -> None:
    first = {"step": 0, "incarnation": "a", "digest": "one"}
    client, asked = answering(first, first | {"incarnation": "b"}, first | {"digest": "two"})
    client.hello_reading("x")
    client.reopen()
    assert client._incarnation == "b"
    with pytest.raises(SitusError, match="its weights have changed \\(they are now of step 0\\)") as told:
        client.reopen()
    assert told.value.field == "server" and asked == ["hello"] * 3


@pytest.mark.parametrize("again", [False, True], ids=["forgotten", "restarted"])
def test_a_text_that_is_lost_every_time_is_given_up(again: bool) -> None:
    asked, opened = [], []

    def extend(number: int, start: int, z: Tensor) -> Tensor:
        asked.append((number, start, z.shape[1]))
        if len(asked) == 1:
            return z[:, -1:]
        raise RewoundError("anew") if again else RefusedError("unknown", "length")

    text = RemoteText(cast(Client, SimpleNamespace(extend=extend, reopen=lambda: opened.append(True))), 4)
    text.extend(torch.zeros(1, 3, 2))
    with pytest.raises(SitusError, match=f"lost the state of this text {READ_AGAIN} times in a row") as told:
        text.extend(torch.zeros(1, 1, 2))
    assert told.value.field == "server"
    assert asked == [(4, 0, 3), (4, 3, 1), *[(4, 0, 4)] * (READ_AGAIN - 1)]  # all of it, after the first time
    assert len(opened) == (READ_AGAIN if again else 0)


def test_a_text_that_is_refused_is_not_sent_again() -> None:
    asked = []

    def extend(*given: Any) -> Tensor:
        asked.append(given)
        raise RefusedError("no", "full")

    with pytest.raises(RefusedError, match="no"):
        RemoteText(cast(Client, SimpleNamespace(extend=extend)), 1).extend(torch.zeros(1, 1, 2))
    assert len(asked) == 1
