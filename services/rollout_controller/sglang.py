"""SGLang's dialect (0.5.23), which the built-in engine speaks too.

A weight update is pause{retract} -> update_weights_from_disk(flush_cache) -> check -> continue: retracted requests
hold no cache, so the flush cannot fail and no token after the update attends to keys and values of the old weights.
(in_place with flush_cache=false has a shorter pause, but running requests would go on with, and new ones would find,
the old weights' cache.)
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.evidence import Span
from headway.core.version import PolicyVersion
from services.rollout_controller.engine_api import Facts, ServerFailed, UpdateFailed
from services.rollout_controller.engine_http import EngineHttp, message_of
from services.rollout_controller.piece import Finish, Piece, Sampling, Update
from services.rollout_controller.weight_source import Group

LEAST_INTERVAL = 64
MOST_EVENTS = 16
"""Events of a whole budget: a cumulative stream repeats everything in each, and a lost server costs one interval."""
UPDATED_NOT_FLUSHED = "Weights were updated, but"
ADMIN_S = 30.0


class SGLang:
    """One SGLang server."""

    kind = "sglang"
    takes_batches = True
    ends_requests = False

    def __init__(self, http: EngineHttp, update_timeout_s: float) -> None:
        self._http = http
        self._update_timeout_s = update_timeout_s

    def generate_call(self, pieces: Sequence[Piece]) -> tuple[str, dict[str, Any]]:
        parameters = [_sampling_params(piece.sampling) for piece in pieces]
        is_single = len(pieces) == 1
        has_equal = all(piece.sampling == pieces[0].sampling for piece in pieces)
        return "/generate", {
            "input_ids": pieces[0].input_ids if is_single else [piece.input_ids for piece in pieces],
            "rid": pieces[0].rid if is_single else [piece.rid for piece in pieces],
            "sampling_params": parameters[0] if has_equal else parameters,
            "return_logprob": True,
            "stream": True,
        }

    def read(self, event: dict[str, Any], pieces: Sequence[Piece]) -> Update:
        if "error" in event:
            error = event["error"]
            return Update(event.get("index", 0), (), (), error=(int(error.get("code", 500)), message_of(error)))
        meta = event["meta_info"]
        triples = meta.get("output_token_logprobs") or ()
        logprobs, ids, _ = zip(*triples, strict=True) if triples else ((), (), ())
        return Update(
            index=event.get("index", 0),
            ids=ids,
            logprobs=logprobs,
            total=meta["completion_tokens"],
            label=meta.get("weight_version"),
            spans=_spans(meta.get("weight_versions")),
            finish=_finish(meta.get("finish_reason")),
        )

    async def abort(self, rid: str) -> None:
        await self._http.call("POST", "/abort_request", {"rid": rid}, timeout_s=ADMIN_S, is_admin=True)

    async def is_ready(self, timeout_s: float) -> bool:
        status, _ = await self._http.call("GET", "/ready", timeout_s=timeout_s)
        return status == 200

    async def facts(self) -> Facts:
        info = await self._get("/model_info")
        models = await self._get("/v1/models")
        server = await self._get("/server_info")
        return Facts(
            label=info["weight_version"],
            context_length=models["data"][0].get("max_model_len"),
            has_tokenizer=not server.get("skip_tokenizer_init", False),
        )

    async def _verify(self, label: str) -> None:
        served = (await self._get("/model_info"))["weight_version"]
        if served != label:
            raise UpdateFailed(f"{self._http.url} reports {served!r} after it was given {label}")

    async def prepare(self, version: PolicyVersion, folder: Path) -> None:
        """Nothing: SGLang reads weights only when it loads them."""

    async def pause(self) -> None:
        await self._admin("/pause_generation", {"mode": "retract"}, ADMIN_S)

    async def load(self, version: PolicyVersion, folder: Path) -> None:
        await self._load_model(folder, version.label)

    async def _load_model(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        status, reply = await self._http.call(
            "POST", "/update_weights_from_disk", body, timeout_s=self._update_timeout_s, is_admin=True
        )
        if status != 200 and not message_of(reply).startswith(UPDATED_NOT_FLUSHED):
            raise UpdateFailed(f"{self._http.url} did not load {label}: {status}: {message_of(reply)}")
        if status != 200:
            await self._finish_unflushed(label)
        await self._verify(label)

    async def join_group(self, group: Group, rank: int) -> None:
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._admin("/init_weights_update_group", body, self._update_timeout_s)

    async def leave_group(self, name: str) -> None:
        with suppress(UpdateFailed):  # open only if a transfer broke off
            await self._admin("/end_weight_update", {}, ADMIN_S)
        await self._admin("/destroy_weights_update_group", {"group_name": name}, ADMIN_S)

    async def receive(self, group: Group, version: PolicyVersion) -> None:
        await self._admin("/begin_weight_update", {}, ADMIN_S)
        for bucket in group.buckets:
            is_last = bucket is group.buckets[-1]
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": group.name,
                "load_format": "flattened_bucket",
                "flush_cache": is_last,
                "weight_version": version.label if is_last else None,
            }
            await self._admin("/update_weights_from_distributed", body, self._update_timeout_s)
        await self._admin("/end_weight_update", {}, ADMIN_S)
        await self._verify(version.label)

    async def _finish_unflushed(self, label: str) -> None:
        """The weights are in, but the cache of the old ones is too, and the label is the old one."""
        await self._admin("/flush_cache?timeout=10", {}, ADMIN_S)
        body = {"new_version": label, "abort_all_requests": False}
        await self._admin("/update_weight_version", body, ADMIN_S)

    async def resume(self) -> None:
        await self._admin("/continue_generation", {}, ADMIN_S)

    async def _admin(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        status, reply = await self._http.call("POST", path, body, timeout_s=timeout_s, is_admin=True)
        if status != 200:
            raise UpdateFailed(f"{self._http.url}{path}: {status}: {message_of(reply)}")

    async def _get(self, path: str) -> dict[str, Any]:
        status, reply = await self._http.call("GET", path)
        if status != 200 or not isinstance(reply, dict):
            raise ServerFailed(f"{self._http.url}{path}: {status}: {message_of(reply)}")
        return reply


class Builtin(SGLang):
    """The built-in engine: SGLang's dialect, and reading ahead of a pause."""

    kind = "builtin"

    async def prepare(self, version: PolicyVersion, folder: Path) -> None:
        await self._admin("/prepare_weights_from_disk", {"model_path": str(folder)}, self._update_timeout_s)


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stream_interval": max(LEAST_INTERVAL, -(-sampling.max_new_tokens // MOST_EVENTS)),
    }
    optional = {
        "min_new_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    parameters.update({name: value for name, value in optional.items() if value})
    if sampling.top_p < 1:
        parameters["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        parameters["top_k"] = sampling.top_k
    return parameters


def _spans(spans: list[dict[str, Any]] | None) -> list[Span] | None:
    return None if spans is None else [Span(span["version"], span["start"], span["end"]) for span in spans]


def _finish(reason: dict[str, Any] | None) -> Finish | None:
    if reason is None:
        return None
    kind = reason["type"]
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {kind!r}")
    return Finish(kind, reason.get("matched"))
