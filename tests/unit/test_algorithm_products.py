"""Products are float32 products whichever library makes them; a fast layer is a linear layer, with its gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from headway.algorithm import products
from headway.algorithm.products import FastLinear, product, use_fast_products


@pytest.fixture(params=["oneDNN", "MKL"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both, on every CPU that has both."""
    if request.param == "oneDNN" and not products.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "is_onednn_faster", lambda: request.param == "oneDNN")
    return str(request.param)


SHAPES = [(3, 5, 7), (257, 384, 512), (1000, 64, 96)]
"""Small, with a packed weight, and with one that is not packed."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_product_is_the_product(shape: tuple[int, int, int], is_packed: bool) -> None:
    m, k, n = shape
    a, b, bias = torch.randn(k, m).t(), torch.randn(n, k), torch.randn(n)
    expected = (a.double() @ b.double().t() + bias.double()).float()
    torch.testing.assert_close(product(a, b, bias, is_packed=is_packed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_fast_layer_has_a_linear_layers_values_and_gradients(shape: tuple[int, int, int], has_bias: bool) -> None:
    m, k, n = shape
    layer = nn.Linear(k, n, bias=has_bias)
    values = torch.randn(1, m, k)
    exact = nn.Linear(k, n, bias=has_bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    layer.__class__ = FastLinear
    results = []
    for subject, x in ((layer, values), (exact, values.double())):
        x = x.requires_grad_()
        y = subject(x)
        (y * torch.linspace(-1, 1, n, dtype=x.dtype)).square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in subject.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-3)


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer = nn.Linear(64, 64)
    layer.__class__ = FastLinear
    layer.weight.requires_grad_(False)
    values = torch.randn(300, 64, requires_grad=True)
    layer(values).sum().backward()
    assert layer.weight.grad is None
    assert values.grad is not None


def test_only_plain_linear_layers_become_fast(library: str) -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(4, 4), Own(4, 4), nn.Embedding(4, 4)])
    names = [name for name, _ in model.named_parameters()]
    use_fast_products(model)
    assert [type(module).__name__ for module in model] == [
        "FastLinear" if library == "oneDNN" else "Linear", "Own", "Embedding"
    ]  # fmt: skip
    assert [name for name, _ in model.named_parameters()] == names


def test_other_types_are_torchs_own() -> None:
    a, b = torch.randn(300, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64)
    assert torch.equal(product(a, b), a @ b.t())
