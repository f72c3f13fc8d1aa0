"""Decide what the body of a /generate request asks for, or refuse it in SGLang's words.

Unknown keys are ignored, as SGLang does; known ones that would change the answer and that this engine does not do are
refused. Token ids outside of the vocabulary and prompts longer than the context never reach the model.

Pure: no tensor, no I/O.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.inference.parameters import BadBody, BadRequest, SamplingParams, read_sampling_params

UNSUPPORTED = (
    "input_embeds",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "return_sampling_mask",
    "return_entropy",
    "custom_logit_processor",
    "session_params",
    "image_data",
    "video_data",
    "audio_data",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take."""

    vocab_size: int
    context_length: int
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to generate."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    adapter: str | None
    """Name of a loaded adapter."""


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A request that is acceptable."""

    items: list[Item]
    is_batch: bool
    """The answer is a list."""
    stream: bool
    return_logprob: bool
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool


def read_generate_body(raw: Any, limits: Limits) -> GenerateBody:
    """Read a body that was parsed from JSON.

    Raises:
        BadBody, BadSchema, BadRequest: It is refused.
    """
    if not isinstance(raw, dict):
        raise BadBody("Input should be a dictionary or an instance of GenerateReqInput")
    for key in UNSUPPORTED:
        if raw.get(key):
            raise BadRequest(f"{key} is not supported by the built-in engine; use SGLang for it.")
    start = raw.get("logprob_start_len")
    if start is not None and start >= 0:
        raise BadRequest("logprob_start_len is not supported by the built-in engine; use SGLang for it.")
    prompts, is_batch = _prompts(raw, limits)
    params = _params(raw.get("sampling_params"), len(prompts), limits.vocab_size)
    copies = max(1, params[0].n)
    is_batch = is_batch or copies > 1
    rids = _rids(raw.get("rid"), len(prompts), copies, is_batch)
    for prompt, item in zip(prompts, params, strict=True):
        _check_prompt(prompt, item.max_new_tokens, limits)
    rows = zip(prompts, params, _adapters(raw.get("lora_path"), len(prompts)), strict=True)
    each = [row for row in rows for _ in range(copies)]
    return GenerateBody(
        items=[Item(rid, *row) for rid, row in zip(rids, each, strict=True)],
        is_batch=is_batch,
        stream=_flag(raw, "stream"),
        return_logprob=_flag(raw, "return_logprob"),
        return_text_in_logprobs=_flag(raw, "return_text_in_logprobs"),
        return_prompt_token_ids=_flag(raw, "return_prompt_token_ids"),
    )


def _prompts(raw: dict[str, Any], limits: Limits) -> tuple[list[list[int]], bool]:
    """The prompts, and whether they came as a list of them."""
    text, ids = raw.get("text"), raw.get("input_ids")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise BadBody("text: Input should be a valid string or a list of strings")
        return [limits.encode(item) for item in texts], not isinstance(text, str)
    if ids is None:
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list):
        raise BadBody(f"input_ids: must be list or null; got {type(ids).__name__}")
    if not ids:
        raise BadRequest("input_ids cannot be empty.")
    is_batch = isinstance(ids[0], list)
    prompts = ids if is_batch else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
            raise BadBody("input_ids: elements must be int or list of int")
    return prompts, is_batch


def _params(raw: Any, count: int, vocab_size: int) -> list[SamplingParams]:
    if not isinstance(raw, list):
        return [read_sampling_params(raw, vocab_size)] * count
    if len(raw) != count:
        raise BadRequest("The length of sampling_params should be equal to the batch size.")
    params = [read_sampling_params(item, vocab_size) for item in raw]
    if len({item.n for item in params}) > 1:
        raise BadRequest("The parallel_sample_num should be the same for all samples in sample params.")
    return params


def _adapters(raw: Any, count: int) -> list[str | None]:
    """Name of the adapter of each prompt."""
    names = raw if isinstance(raw, list) else [raw] * count
    if not all(name is None or isinstance(name, str) for name in names):
        raise BadBody("lora_path: Input should be a valid string or a list of strings")
    if len(names) != count:
        raise BadRequest("The length of lora_path should be equal to the batch size.")
    return names


def _rids(raw: Any, num_prompts: int, copies: int, is_batch: bool) -> list[str]:
    """A rid for each sequence: given, made from the given one, or new (always new where a prompt has several)."""
    count = num_prompts * copies
    if isinstance(raw, list) and all(isinstance(rid, str) for rid in raw):
        if len(raw) != num_prompts:
            raise BadRequest("The specified rids length mismatch with the batch_size for batch processing.")
    elif raw is not None and not isinstance(raw, str):
        raise BadBody("rid: Input should be a valid string or a list of strings")
    if raw is None or copies > 1:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(raw, str):
        return [f"{raw}_{index}" for index in range(count)] if is_batch else [raw]
    return list(raw)


def _check_prompt(prompt: list[int], max_new_tokens: int, limits: Limits) -> None:
    size, context = len(prompt), limits.context_length
    if not prompt:
        raise BadRequest("input_ids cannot be empty.")
    if size >= context:
        raise BadRequest(f"The input ({size} tokens) is longer than the model's context length ({context} tokens).")
    if size + max_new_tokens > context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {size + max_new_tokens} tokens: {size} tokens from the input messages and {max_new_tokens} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion "
            "to fit within the limit."
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise BadRequest(f"Token id {wrong} is out of vocabulary: the model has ids 0 to {limits.vocab_size - 1}.")


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadBody(f"{key}: Input should be a valid boolean")
    return bool(value)
