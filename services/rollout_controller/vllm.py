"""vLLM's dialect (0.32, 0.33): its routes for RL, switched on by VLLM_SERVER_DEV_MODE=1 and --enable-scale-out.

What differs from SGLang, and is hidden here:

    log-probs      raw unless --logprobs-mode processed_logprobs; what they mean must fit the sampling, or it is refused
    request ids    are aborted as `generate-tokens-<id>`, exactly
    streams        carry what is new; the versions come with the last event, and nothing names one before that
    a pause        ends running requests, with all their tokens; they are sent again (`keep` keeps the old cache)
    a version      is a name of its own, given after the weights were loaded
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.evidence import Span
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from services.rollout_controller.engine_api import Facts, ServerFailed, UpdateFailed
from services.rollout_controller.engine_http import EngineHttp, message_of
from services.rollout_controller.piece import Finish, Piece, Sampling, Update

ADMIN_S = 30.0
RAW = "raw_logprobs"
PROCESSED = "processed_logprobs"


class VLLM:
    """One vLLM server."""

    kind = "vllm"
    takes_batches = False
    ends_requests = False

    def __init__(self, http: EngineHttp, update_timeout_s: float) -> None:
        self._http = http
        self._update_timeout_s = update_timeout_s
        self._model = ""
        self._logprobs_mode = ""
        self._label = ""
        """Verified. A piece never spans two versions: a pause ends it."""

    def generate_call(self, pieces: Sequence[Piece]) -> tuple[str, dict[str, Any]]:
        piece = pieces[0]
        self._check_logprobs(piece.sampling)
        return "/inference/v1/generate", {
            "request_id": piece.rid,
            "model": self._model,
            "token_ids": piece.input_ids,
            "sampling_params": _sampling_params(piece.sampling),
            "stream": True,
            "output_mode": "tokens",
        }

    def _check_logprobs(self, sampling: Sampling) -> None:
        """Refuse sampling for which the server's log-probs are not those of log-softmax(logits / temperature)."""
        is_plain = sampling.temperature in (0.0, 1.0) and sampling.frequency_penalty == 0
        is_whole = sampling.top_p == 1 and sampling.top_k <= 0
        fits = {RAW: is_plain, PROCESSED: is_whole}.get(self._logprobs_mode, is_plain and is_whole)
        if not fits:
            raise InvalidInput(
                f"{self._http.url} reports {self._logprobs_mode or 'log-probs of an unknown kind'}: not those of the "
                f"policy at temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
                f"frequency_penalty {sampling.frequency_penalty:g}. Start vLLM with `logprobs_mode: {PROCESSED}`, and "
                "sample from the whole vocabulary"
            )

    def read(self, event: dict[str, Any], pieces: Sequence[Piece]) -> Update:
        if "error" in event:
            error = event["error"]
            return Update(0, (), (), error=(int(error.get("code") or 500), message_of(error)))
        choice = event["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Update(
            index=0,
            ids=choice["token_ids"] or [],
            logprobs=[token["logprob"] for token in content],
            label=self._label,
            spans=_spans(choice.get("weight_versions")),
            finish=_finish(choice),
        )

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]}, ADMIN_S)

    async def is_ready(self, timeout_s: float) -> bool:
        status, _ = await self._call("GET", "/health", None, timeout_s)
        if status != 200:
            return False
        _, reply = await self._call("GET", "/is_paused", None, timeout_s)
        return isinstance(reply, dict) and reply.get("is_paused") is False

    async def facts(self) -> Facts:
        weights = await self._get("/weight_info")
        model = (await self._get("/v1/models"))["data"][0]
        server = await self._get("/server_info?config_format=json")
        settings = server["vllm_config"]["model_config"]
        self._model, self._logprobs_mode = model["id"], settings.get("logprobs_mode") or ""
        self._label = weights["weight_version"]
        return Facts(
            label=self._label,
            context_length=model.get("max_model_len"),
            has_tokenizer=not settings.get("skip_tokenizer_init", False),
        )

    async def prepare(self, version: PolicyVersion, folder: Path) -> None:
        """Nothing: the workers read weights only when they load them."""

    async def pause(self) -> None:
        await self._do("/pause?mode=abort&clear_cache=true", None, ADMIN_S)

    async def load(self, version: PolicyVersion, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._do("/collective_rpc", body, self._update_timeout_s)
        await self._do("/update_weight_version", {"new_version": version.label}, ADMIN_S)
        served = (await self._get("/weight_info"))["weight_version"]
        self._label = served
        if served != version.label:
            raise UpdateFailed(f"{self._http.url} reports {served!r} after it was given {version.label}")

    async def resume(self) -> None:
        await self._do("/resume", None, ADMIN_S)

    async def _do(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> None:
        status, reply = await self._call("POST", path, body, timeout_s)
        if status != 200:
            raise UpdateFailed(f"{self._http.url}{path}: {status}: {message_of(reply)}")

    async def _get(self, path: str) -> dict[str, Any]:
        status, reply = await self._call("GET", path, None, ADMIN_S)
        if status != 200 or not isinstance(reply, dict):
            raise ServerFailed(f"{self._http.url}{path}: {status}: {message_of(reply)}")
        return reply

    async def _call(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, Any]:
        return await self._http.call(method, path, body, timeout_s=timeout_s)


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 1,
    }


def _spans(spans: list[dict[str, Any]] | None) -> list[Span] | None:
    return None if not spans else [Span(span["version"], span["start"], span["end"]) for span in spans]


def _finish(choice: dict[str, Any]) -> Finish | None:
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {reason!r}")
    return Finish(reason, choice.get("stop_reason"))
