"""Every product with a weight is recorded as what it is: weight times rows of its input, whoever multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.products import Feed, record_products


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
