"""Every product with a weight is recorded as what it is: weight times rows of its input, whoever multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.products import Feed, Recorder, module_inputs, precise, record_products, unfold


class Ways(nn.Module):
    """The same kind of layer, called in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.weight = nn.Parameter(torch.randn((5, 2, 3, 2) if way.startswith("conv") else (5, 8)))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        ways: dict[str, Any] = {
            "conv": lambda: F.conv2d(x, w, stride=2),
            "conv padded": lambda: torch.conv2d(x, w, padding=(1, 2), stride=(1, 2), dilation=1),
            "conv same": lambda: F.conv2d(x, w, padding="same", dilation=(2, 3)),
            "conv valid": lambda: F.conv2d(x, w, padding="valid"),
            "linear": lambda: F.linear(input=x, weight=w),
            "linear twice": lambda: F.linear(F.linear(x, w)[..., :1].expand(-1, -1, -1, 8), w),
            "matmul": lambda: x.matmul(w),
        }
        return ways[self.way]()

    def product(self, rows: Tensor, kind: str) -> Tensor:
        flat = self.weight.flatten(1)
        return rows @ (flat if kind == "turned" else flat.T)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even:UserWarning")
@pytest.mark.parametrize("way", ["conv", "conv padded", "conv same", "conv valid", "linear", "linear twice", "matmul"])
def test_the_rows_times_the_weight_are_the_output(way: str) -> None:
    model = Ways(way).double()
    if way == "matmul":
        model.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.float64))
    images = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    output, products = record_products(model, images)
    assert len(products) == (2 if way == "linear twice" else 1)
    assert {product.name for product in products} == {"weight"}
    product = model.product(products[-1].rows, products[-1].kind)
    expected = output.flatten(2).mT if way.startswith("conv") else output.flatten(1, 2)
    torch.testing.assert_close(product, expected)


@pytest.mark.parametrize("multiply", [torch.matmul, torch.mm, Tensor.mm, Tensor.matmul, lambda x, w: x @ w])
def test_rows_times_a_matrix_are_a_product_and_a_vector_times_it_is_none(multiply: Any) -> None:
    weight, x = torch.randn(4, 5), torch.randn(3, 4)
    recorder = Recorder({id(weight): "w"})
    torch.testing.assert_close(recorder.run(lambda: multiply(x, weight) + x[0] @ weight), x @ weight + x[0] @ weight)
    [product] = recorder.products
    assert (product.name, product.kind) == ("w", "turned") and torch.equal(product.rows, x[:, None])


def test_other_weights_and_groups_are_no_products() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep, self.scale = nn.Conv2d(2, 2, 3, groups=2), nn.Parameter(torch.ones(2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.deep(x * self.scale), torch.ones(4, 6))

    assert record_products(Other(), torch.randn(1, 2, 8, 8))[1] == []


def test_the_model_runs_no_further_than_asked() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.two(self.one(x))
            raise AssertionError("too far")

    model = Late()
    output, products = record_products(model, torch.randn(1, 8), until=1)
    assert output is None
    assert [product.name for product in products] == ["one.weight", "two.weight"]


def test_products_of_a_derivative_are_those_of_the_whole_matrix() -> None:
    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.sin(x.flatten(2)).mT.flatten(1).view(-1, 2, 6))

    feed, image = Feed(Bent(), 0), torch.randn(1, 3, 2, 2, dtype=torch.float64)
    value, along, against = feed.derivative(image)
    matrix = torch.autograd.functional.jacobian(feed, image).view(12, 12)
    v, u = torch.randn(1, 3, 2, 2, dtype=torch.float64), torch.randn(1, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(value, feed(image))
    torch.testing.assert_close(along(v).flatten(), matrix @ v.flatten())
    torch.testing.assert_close(against(u).flatten(), u.flatten() @ matrix)


def test_what_a_model_draws_it_draws_again() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + torch.rand(4))

    feed, image = Feed(Drawing(), 0), torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    state = torch.random.get_rng_state()
    assert torch.equal(feed(image), feed(image))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"padding": (2, 1)},
        {"padding": "same"},
        {"padding": "same", "dilation": (2, 3)},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "stride": (1, 2)},
        {"dilation": (1, 2), "padding": 1},
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even:UserWarning")
def test_unfolded_rows_are_what_a_convolution_multiplies(options: dict[str, Any]) -> None:
    images, weight = torch.randn(2, 3, 9, 8, dtype=torch.float64), torch.randn(4, 3, 3, 2, dtype=torch.float64)
    rows = unfold(images, weight.shape[2:], **options)
    torch.testing.assert_close(rows @ weight.flatten(1).T, F.conv2d(images, weight, **options).flatten(2).mT)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))


def test_inputs_and_outputs_of_products_are_exchanged_by_number() -> None:
    model, x, other = Stack(), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    names = {id(p): name for name, p in model.named_parameters()}
    recorder = Recorder(names, inputs={1: other})
    out = recorder.run(lambda: model(x))
    torch.testing.assert_close(out, model.three(torch.tanh(model.two(other))))
    assert [product.name for product in recorder.products] == ["one.weight", "two.weight", "three.weight"]
    assert recorder.products[1].inputs is other
    recorder = Recorder(names, outputs={1: other})
    torch.testing.assert_close(recorder.run(lambda: model(x)), model.three(torch.tanh(other)))
    torch.testing.assert_close(recorder.products[2].rows, torch.tanh(other))
    first = {id(model.one.weight): "one", id(model.two.weight): "two"}
    recorder = Recorder(first, fused=True)
    assert recorder.run(lambda: model(x)) is None and [each.name for each in recorder.products] == ["one", "two"]
    recorder = Recorder(first)
    torch.testing.assert_close(recorder.run(lambda: model(x)), model(x))
    assert len(recorder.products) == 2


@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_embedding_gives_other_tokens_plus_its_bias(bias: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(2, 6, 5)
    linear, conv = nn.Linear(8, 5, bias=bias), nn.Conv2d(3, 5, 2, 2, bias=bias)
    added = linear.bias if bias else torch.zeros(5)
    run = Recorder({}, embedded=(id(linear.weight), tokens))
    torch.testing.assert_close(run.run(lambda: linear(torch.zeros(1, 6, 8))), tokens + added)
    added = conv.bias if bias else torch.zeros(5)
    run = Recorder({}, embedded=(id(conv.weight), tokens))
    first, second = run.run(lambda: (conv(torch.zeros(1, 3, 4, 6)), conv(torch.zeros(1, 3, 4, 6))))
    torch.testing.assert_close(first.flatten(2).mT, tokens + added)
    torch.testing.assert_close(second, conv(torch.zeros(1, 3, 4, 6)))  # only its first product


@pytest.mark.parametrize("odd", ["", "mask", "padding", "others"])
def test_torchs_own_attention_is_made_of_products_that_are_recorded(odd: str) -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).double().eval(), torch.randn(3, 5, 8).double()
    with torch.no_grad():
        attention.in_proj_bias.normal_()
        attention.out_proj.bias.normal_()
    masks: dict[str, Any] = {
        "mask": {"attn_mask": torch.ones(5, 5).tril() == 0},
        "padding": {"key_padding_mask": torch.arange(15).view(3, 5) == 4},
    }

    def forward() -> Tensor:
        return attention(x, 2 * x if odd == "others" else x, x, need_weights=False, **masks.get(odd, {}))[0]

    expected = forward()
    names = {id(attention.in_proj_weight): "in", id(attention.out_proj.weight): "out", 0: "never"}
    recorder = Recorder(names, fused=True)
    torch.testing.assert_close(recorder.run(forward), expected)
    if not odd:
        assert [product.name for product in recorder.products] == ["in", "out"]
        torch.testing.assert_close(recorder.products[0].rows, x)
        torch.testing.assert_close(attention.out_proj(recorder.products[1].rows), expected)


def test_calls_of_a_module_are_recorded_until_the_last_that_is_asked_for() -> None:
    model, x = Stack(), torch.randn(2, 4)
    model.three = model.one
    with module_inputs(model.one) as every:
        out = model(x)
    assert len(every) == 2 and torch.equal(every[0], x) and torch.equal(model.one(every[1]), out)
    for last in (0, 1):
        reached = []
        with module_inputs(model.one, last) as inputs:
            reached.append(model(x))
        assert len(inputs) == last + 1 and reached == []
    assert not model.one._forward_pre_hooks
    with pytest.raises(RuntimeError), module_inputs(model.one):
        model(torch.randn(2, 5))
    assert not model.one._forward_pre_hooks


def test_a_precise_copy_leaves_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    copy = precise(model)
    assert copy[0].weight.dtype == torch.float64 and not copy.training and not copy[1].training
    assert model[0].weight.dtype == torch.float32 and model.training and copy[0].weight is not model[0].weight
