"""SGLang's dialect where versions are adapters (LoRA) of one base model.

    prepare   unload what is older than the version served; load the new adapter beside it, while requests run
    pause     end what runs: its tokens stay, and it goes on with the new adapter
    load      the base, where the server has another one; then look: the base's name, the adapter's name and folder

Requests name their adapter, and its name carries the version and is given to one content only, so that what made a
token is said by the request that the server accepted. What the server says of its weights is the base's name: a reply
by another base is refused.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.evidence import Contradiction, Span
from headway.core.version import PolicyVersion
from headway.errors import HeadwayError
from headway.runtime.published import Published, adapter_name, adapter_version, read_published
from services.rollout_controller.engine_api import Facts, UpdateFailed
from services.rollout_controller.engine_http import EngineHttp
from services.rollout_controller.piece import Piece, Update
from services.rollout_controller.sglang import ADMIN_S, SGLang


class SGLangAdapters(SGLang):
    """One SGLang server, or a built-in engine, that serves adapters.

    Args:
        lora_name: Beginning of all adapters' names.
    """

    ends_requests = True

    def __init__(self, http: EngineHttp, update_timeout_s: float, lora_name: str) -> None:
        super().__init__(http, update_timeout_s)
        self._lora_name = lora_name
        self._base = ""
        """Name of the base that the server was seen to have."""
        self._served: PolicyVersion | None = None
        """Whose adapter requests may name."""

    def generate_call(self, pieces: Sequence[Piece]) -> tuple[str, dict[str, Any]]:
        path, body = super().generate_call(pieces)
        names = [self._name(PolicyVersion.parse(piece.label)) for piece in pieces]
        body["lora_path"] = names[0] if len(set(names)) == 1 else names
        return path, body

    def read(self, event: dict[str, Any], pieces: Sequence[Piece]) -> Update:
        update = super().read(event, pieces)
        if update.error is not None:
            return update
        bases = {update.label, *(span.label for span in update.spans or ())}
        if bases != {self._base}:
            raise Contradiction(f"made by {sorted(map(str, bases))} in place of an adapter of {self._base}")
        label = pieces[update.index].label
        length = len(update.ids) if update.total is None else update.total
        spans = None if update.finish is None else [Span(label, 0, length)]
        return Update(update.index, update.ids, update.logprobs, update.total, label, spans, update.finish)

    async def facts(self) -> Facts:
        """The version is that of the newest adapter of ours."""
        facts = await super().facts()
        self._base = facts.label
        self._served = max((version for version, _ in await self._adapters()), default=None)
        label = self._served.label if self._served is not None else ""
        return Facts(label, facts.context_length, facts.has_tokenizer)

    async def prepare(self, version: PolicyVersion, folder: Path) -> None:
        published = await self._published(version, folder)
        for other, _ in await self._adapters():
            if other not in (version, self._served):
                await self._admin("/unload_lora_adapter", {"lora_name": self._name(other)}, ADMIN_S)
        if await self._has(published):
            await self._load_adapter(version, folder)

    async def pause(self) -> None:
        await self._admin("/abort_request", {"abort_all": True}, ADMIN_S)

    async def load(self, version: PolicyVersion, folder: Path) -> None:
        published = await self._published(version, folder)
        assert published.base is not None
        if not await self._has(published):
            await self._load_model(published.base, published.base.name)
        await self._load_adapter(version, folder)
        if (version, str(folder)) not in await self._adapters() or not await self._has(published):
            raise UpdateFailed(f"{self._http.url} does not report {version.label} after it was given it")
        self._base, self._served = published.base.name, version

    async def _published(self, version: PolicyVersion, folder: Path) -> Published:
        """Raises: UpdateFailed, when the version is no adapter, or its base cannot be seen."""
        try:
            published = await asyncio.to_thread(read_published, folder)
        except HeadwayError as error:
            raise UpdateFailed(f"{version.label} cannot be loaded: {error}") from error
        if published.base is None:
            raise UpdateFailed(f"{version.label} is no adapter, but actor.use_lora is set: was it published without?")
        return published

    async def _has(self, published: Published) -> bool:
        """Whether the server has the version's base."""
        info = await self._get("/model_info")
        return published.base is not None and info["weight_version"] == published.base.name

    async def _load_adapter(self, version: PolicyVersion, folder: Path) -> None:
        """Load an adapter, if it is not there: a name is never given twice."""
        if (version, str(folder)) not in await self._adapters():
            body = {"lora_name": self._name(version), "lora_path": str(folder)}
            await self._admin("/load_lora_adapter", body, self._update_timeout_s)

    async def _adapters(self) -> list[tuple[PolicyVersion, str]]:
        """(version, folder) of each adapter of ours that the server says is loaded."""
        found = []
        for card in (await self._get("/v1/models"))["data"]:
            version = adapter_version(self._lora_name, card["id"])
            if version is not None:
                found.append((version, str(card.get("root"))))
        return found

    def _name(self, version: PolicyVersion) -> str:
        return adapter_name(self._lora_name, version)
