"""What /generate answers: ids with the log-probabilities under which they were chosen, and why it ended."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import PROMPT, Engine
from transformers import AutoModelForCausalLM

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def reference(models: Path) -> Any:
    """The same model in transformers."""
    return AutoModelForCausalLM.from_pretrained(models / "a", dtype=torch.float32).eval()


def logprobs_of(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each output token, by one forward pass over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def reported(result: Any) -> torch.Tensor:
    triples = result["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == result["output_ids"]
    assert len(triples) == result["meta_info"]["output_token_logprobs_length"] == len(result["output_ids"])
    return torch.tensor([logprob for logprob, _, _ in triples])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
async def test_logprobs_are_log_softmax_of_logits_over_temperature(
    engine: Engine, reference: Any, temperature: float
) -> None:
    sampling = {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True}
    results = await engine.generate(sampling, input_ids=[PROMPT, PROMPT[:2], PROMPT * 20])
    for prompt, result in zip([PROMPT, PROMPT[:2], PROMPT * 20], results, strict=True):
        expected = logprobs_of(reference, prompt, result["output_ids"], temperature)
        torch.testing.assert_close(reported(result), expected, atol=TOLERANCE, rtol=0)


async def test_greedy_takes_the_best_token_and_reports_its_untempered_logprob(engine: Engine, reference: Any) -> None:
    result = await engine.generate(GREEDY)
    with torch.no_grad():
        best = reference.generate(torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert result["output_ids"] == best[0, len(PROMPT) :].tolist()
    expected = logprobs_of(reference, PROMPT, result["output_ids"])
    torch.testing.assert_close(reported(result), expected, atol=TOLERANCE, rtol=0)


async def test_truncation_limits_the_choice_but_not_the_reported_logprob(engine: Engine, reference: Any) -> None:
    sampling = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "max_new_tokens": 60, "ignore_eos": True}
    result = await engine.generate(sampling)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + result["output_ids"]])).logits[0, len(PROMPT) - 1 : -1]
    rank = (logits > logits.gather(1, torch.tensor(result["output_ids"])[:, None])).sum(1)
    assert rank.max() < 5
    expected = logprobs_of(reference, PROMPT, result["output_ids"])
    torch.testing.assert_close(reported(result), expected, atol=TOLERANCE, rtol=0)


async def test_penalties_are_part_of_the_reported_logprob(engine: Engine, reference: Any) -> None:
    sampling = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "max_new_tokens": 30, "ignore_eos": True}
    result = await engine.generate(sampling | {"top_k": 4})
    output = result["output_ids"]
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    for position in range(len(output)):
        for token in set(output[:position]):
            logits[position, token] -= 0.7 * output[:position].count(token) + 0.4
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    torch.testing.assert_close(reported(result), expected, atol=TOLERANCE, rtol=0)


async def test_repetition_penalty_divides_what_is_positive_and_multiplies_the_rest(
    engine: Engine, reference: Any
) -> None:
    result = await engine.generate({"repetition_penalty": 1.6, "max_new_tokens": 30, "top_k": 4, "ignore_eos": True})
    output = result["output_ids"]
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    for position in range(len(output)):
        for token in set(output[:position]):
            value = logits[position, token]
            logits[position, token] = value * 1.6 if value < 0 else value / 1.6
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    torch.testing.assert_close(reported(result), expected, atol=TOLERANCE, rtol=0)


async def test_a_bias_forces_a_token(engine: Engine) -> None:
    result = await engine.generate({"logit_bias": {"77": 100.0}, "max_new_tokens": 3})
    assert result["output_ids"] == [77, 77, 77]
    assert reported(result).abs().max() < 1e-3


async def test_sampling_follows_the_distribution(engine: Engine, reference: Any) -> None:
    results = await engine.generate({"max_new_tokens": 1, "temperature": 0.5, "n": 64}, input_ids=[PROMPT] * 8)
    with torch.no_grad():
        probs = (reference(torch.tensor([PROMPT])).logits[0, -1] / 0.5).softmax(-1)
    token = int(probs.argmax())
    expected, count = probs[token].item(), sum(result["output_ids"] == [token] for result in results)
    spread = math.sqrt(expected * (1 - expected) / len(results))
    assert abs(count / len(results) - expected) < 5 * spread


async def test_a_length_end_names_the_length(engine: Engine) -> None:
    result = await engine.generate({"max_new_tokens": 7, "ignore_eos": True})
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    assert result["meta_info"]["completion_tokens"] == len(result["output_ids"]) == 7
    assert result["meta_info"]["prompt_tokens"] == len(PROMPT)


async def test_no_token_at_all_may_be_asked_for(engine: Engine) -> None:
    result = await engine.generate({"max_new_tokens": 0})
    assert (result["text"], result["output_ids"]) == ("", [])
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert result["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


async def test_the_stop_token_is_in_the_ids_and_not_in_the_text(engine: Engine) -> None:
    greedy = await engine.generate(GREEDY)
    token = greedy["output_ids"][5]
    result = await engine.generate({"temperature": 0, "max_new_tokens": 24, "stop_token_ids": [token]})
    first = greedy["output_ids"].index(token)
    assert result["output_ids"] == greedy["output_ids"][: first + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    kept = await engine.generate(
        {"temperature": 0, "max_new_tokens": 24, "stop_token_ids": [token], "no_stop_trim": True}
    )
    assert kept["text"].startswith(result["text"])
    assert len(kept["text"]) > len(result["text"])


async def test_ignore_eos_ignores_stop_tokens_too(engine: Engine) -> None:
    greedy = await engine.generate(GREEDY)
    result = await engine.generate(GREEDY | {"stop_token_ids": [greedy["output_ids"][5]]})
    assert result["output_ids"] == greedy["output_ids"]


async def test_the_end_of_sequence_token_ends_it(engine: Engine) -> None:
    result = await engine.generate({"logit_bias": {"2": 100.0}, "max_new_tokens": 9})
    assert result["output_ids"] == [2]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert result["text"] == ""


async def test_a_stop_string_trims_the_text_and_keeps_the_ids(engine: Engine) -> None:
    words = {"logit_bias": {"316": 100.0}, "max_new_tokens": 6}  # "hello"
    plain = await engine.generate(words)
    assert plain["text"] == "hello" * 6
    result = await engine.generate(words | {"stop": ["zzz", "ohe"]})
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ohe"}
    assert (result["text"], result["output_ids"]) == ("hell", [316, 316])
    kept = await engine.generate(words | {"stop": "ohe", "no_stop_trim": True})
    assert kept["text"] == "hellohe"


async def test_min_new_tokens_holds_the_end_back(engine: Engine) -> None:
    result = await engine.generate({"logit_bias": {"2": 50.0}, "min_new_tokens": 5, "max_new_tokens": 9})
    assert len(result["output_ids"]) == 6
    assert result["output_ids"][-1] == 2
    assert 2 not in result["output_ids"][:5]


async def test_a_batch_is_answered_in_order_with_numbered_rids(engine: Engine) -> None:
    sampling = [{"max_new_tokens": length, "ignore_eos": True} for length in (9, 1, 5)]
    results = await engine.generate(None, input_ids=[PROMPT, PROMPT[:1], PROMPT[:3]], sampling_params=sampling, rid="r")
    assert [len(result["output_ids"]) for result in results] == [9, 1, 5]
    assert [result["meta_info"]["prompt_tokens"] for result in results] == [5, 1, 3]
    assert [result["meta_info"]["id"] for result in results] == ["r_0", "r_1", "r_2"]


async def test_a_batch_of_one_is_answered_with_a_list(engine: Engine) -> None:
    results = await engine.generate({"max_new_tokens": 1}, input_ids=[PROMPT], rid=["only"])
    assert [result["meta_info"]["id"] for result in results] == ["only"]


async def test_n_samples_of_each_prompt_come_side_by_side(engine: Engine) -> None:
    results = await engine.generate({"max_new_tokens": 2, "n": 3}, input_ids=[PROMPT, PROMPT[:2]])
    assert [result["meta_info"]["prompt_tokens"] for result in results] == [5, 5, 5, 2, 2, 2]
    assert len({result["meta_info"]["id"] for result in results}) == 6


async def test_text_goes_in_and_is_echoed_as_ids(engine: Engine) -> None:
    result = await engine.generate({"max_new_tokens": 2}, input_ids=None, text="hello", return_prompt_token_ids=True)
    assert result["prompt_token_ids"] == [316]
    triples = await engine.generate({"logit_bias": {"316": 100.0}, "max_new_tokens": 1}, return_text_in_logprobs=True)
    assert triples["meta_info"]["output_token_logprobs"][0][1:] == [316, "hello"]


async def test_null_means_the_default_and_unknown_keys_beside_it_are_ignored(engine: Engine) -> None:
    sampling = {"temperature": None, "top_k": None, "stop": None, "max_new_tokens": 3, "ignore_eos": True}
    result = await engine.generate(sampling, not_a_key=1, rid=None)
    assert len(result["output_ids"]) == 3


async def test_a_prompt_seen_before_is_not_computed_again(engine: Engine) -> None:
    await engine.post("/flush_cache")
    first = await engine.generate({"max_new_tokens": 4, "temperature": 0}, input_ids=PROMPT * 8)
    again = await engine.generate({"max_new_tokens": 4, "temperature": 0}, input_ids=PROMPT * 8)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == 5 * 8 - 1
    assert again["output_ids"] == first["output_ids"]


async def test_a_stream_grows_and_ends_with_the_whole(engine: Engine) -> None:
    events = [event async for event in engine.stream({"max_new_tokens": 20, "ignore_eos": True})]
    for earlier, later in itertools.pairwise(events):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert len(reported(later)) == len(later["output_ids"])
        assert earlier["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in earlier["meta_info"]
    last = events[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": 20}
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]


async def test_a_stream_interval_makes_few_events(engine: Engine) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, "stream_interval": 16}
    lengths = [len(event["output_ids"]) async for event in engine.stream(sampling)]
    assert lengths == [1, 17, 33, 40]


async def test_the_events_of_a_batch_say_whose_they_are(engine: Engine) -> None:
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    last = {e["index"]: e async for e in engine.stream(sampling, input_ids=[PROMPT, PROMPT[:2]], rid="s")}
    assert [last[index]["meta_info"]["id"] for index in (0, 1)] == ["s_0", "s_1"]
    assert [len(last[index]["output_ids"]) for index in (0, 1)] == [6, 6]
