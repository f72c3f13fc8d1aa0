"""Chunked log-probabilities equal a float64 log-softmax in value and gradient, and never hold all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithm import logprobs
from headway.algorithm.logprobs import token_logprobs


def problem(rows: int, vocabulary: int, width: int = 6, has_bias: bool = False) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    hidden = torch.randn(rows, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    bias = torch.randn(vocabulary, generator=generator, requires_grad=True) if has_bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden, weight, bias, targets


def reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Any:
    logits = hidden.double() @ weight.double().T
    logits = (logits + (bias.double() if bias is not None else 0.0)) / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), logp.mean(-1), entropy.detach()


@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 20])
@pytest.mark.parametrize("kept_elements", [0, 1 << 20])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_for_every_chunk_size(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, kept_elements: int, has_bias: bool, temperature: float
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", kept_elements if chunk_elements > 300 else 0)
    hidden, weight, bias, targets = problem(9, 17, has_bias=has_bias)
    found = token_logprobs(hidden, weight, bias, targets, temperature)
    expected = reference(hidden, weight, bias, targets, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)
    mix = torch.linspace(-1, 1, 9)
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    gradients = torch.autograd.grad((found.logp * mix + found.uniform_logp * mix.square()).sum(), leaves)
    wanted = torch.autograd.grad((expected[0] * mix + expected[1] * mix.square()).sum(), leaves)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


def test_no_row_gives_nothing_and_zero_gradients() -> None:
    hidden, weight, _, targets = problem(0, 5)
    found = token_logprobs(hidden, weight, None, targets, 1.0)
    assert [len(x) for x in found] == [0, 0, 0]
    assert torch.autograd.grad(found.logp.sum(), weight)[0].count_nonzero() == 0


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, _, targets = problem(3, 5)
    token_logprobs(hidden, weight.detach(), None, targets, 1.0).logp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return made


def test_no_tensor_of_rows_times_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocabulary = 600, 1000
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 50_000)
    monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", 50_000)
    hidden, weight, _, targets = problem(rows, vocabulary)
    with LargestTensor() as watch:
        token_logprobs(hidden, weight, None, targets, 1.0).logp.sum().backward()
    assert watch.largest <= 50_000
