"""Sampling: each row by its own parameters and its own random numbers, whoever runs beside it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.inference.parameters import SamplingParams, read_sampling_params
from services.inference.rows import Request, SlotTable
from services.inference.sampler import sample, uniforms

VOCAB = 32


def table_of(params: Sequence[SamplingParams], seeds: Sequence[int], prompts: Sequence[list[int]]) -> SlotTable:
    """A table in which every row has its whole prompt computed."""
    table = SlotTable(len(params))
    for index, (item, seed, prompt) in enumerate(zip(params, seeds, prompts, strict=True)):
        stops = frozenset({1})
        table.enter(Request(str(index), prompt, item, stops, stops, seed, False, lambda _: None), computed=0)
    return table


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], lengths: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    prompts = [[3] * length for length in lengths or [4] * len(params)]
    with torch.inference_mode():
        return sample(logits.clone(), table_of(params, seeds, prompts), np.arange(len(params)))


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5, top_p=0.8),
    SamplingParams(min_p=0.1, temperature=1.5),
    SamplingParams(logit_bias={7: 3.0}),
    SamplingParams(min_new_tokens=3),
]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**64 - 1)), min_size=2, max_size=8), st.integers(0, 99)
)
def test_a_row_gets_the_same_token_alone_and_in_company(rows: list[tuple[SamplingParams, int]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    tokens, logprobs = draw(logits, [item for item, _ in rows], [number for _, number in rows])
    for index, (item, number) in enumerate(rows):
        alone, logprob = draw(logits[index : index + 1], [item], [number])
        assert alone[0] == tokens[index]
        assert logprob[0] == pytest.approx(logprobs[index].item(), abs=1e-6)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_random_numbers_lie_in_the_unit_interval_and_differ_by_position(seed: int, position: int) -> None:
    values = uniforms(np.full(4, seed, dtype=np.uint64), position + np.arange(4))
    assert ((values >= 0) & (values < 1)).all()
    assert len(set(values.tolist())) == 4


def test_random_numbers_are_uniform() -> None:
    values = uniforms(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.int64))
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    assert abs(counts - 2000).max() < 5 * 2000**0.5


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_k=4, top_p=0.9, min_p=0.02)]
)
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    count = 20_000
    logits = random_logits(1).expand(count, -1)
    tokens, _ = draw(logits, [params] * count, range(count))
    expected = reference_probs(logits[0], params)
    found = torch.bincount(tokens, minlength=VOCAB) / count
    assert (found - expected).abs().max() < 5 * (0.25 / count) ** 0.5
    assert (found[expected == 0] == 0).all()


def reference_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that SGLang's rules give, written for one row."""
    probs = (logits / params.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    kept, above = [], 0.0
    for rank, token in enumerate(order):
        is_in = rank < (params.top_k if params.top_k > 0 else VOCAB) and above <= params.top_p
        if is_in and probs[token] >= probs[order[0]] * params.min_p:
            kept.append(token)
        above += probs[token].item()
    mask = torch.zeros(VOCAB)
    mask[kept] = 1
    return probs * mask / (probs * mask).sum()


def test_the_stream_of_a_seed_goes_on_after_an_interruption() -> None:
    logits = random_logits(1).expand(6, -1)
    whole, _ = draw(logits, [SamplingParams()] * 6, [42] * 6, lengths=range(4, 10))
    rest, _ = draw(logits[:3], [SamplingParams()] * 3, [42] * 3, lengths=range(7, 10))
    assert whole[3:].tolist() == rest.tolist()


def test_a_forced_token_has_logprob_zero_and_a_forbidden_one_never_comes() -> None:
    params = [SamplingParams(logit_bias={5: 1000.0}), SamplingParams(logit_bias={1: 1000.0}, min_new_tokens=2)]
    tokens, logprobs = draw(random_logits(2), params, [0, 0])
    assert (tokens[0], logprobs[0]) == (5, 0)
    assert tokens[1] != 1


@pytest.mark.parametrize("raw", [None, {}, {"temperature": None, "stop": None, "logit_bias": None}])
def test_what_is_left_out_or_null_is_the_default(raw: Any) -> None:
    assert read_sampling_params(raw, VOCAB) == SamplingParams()


def test_temperature_zero_is_greedy() -> None:
    params = read_sampling_params({"temperature": 0, "top_k": 7}, VOCAB)
    assert (params.temperature, params.top_k) == (1.0, 1)
