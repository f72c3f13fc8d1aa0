"""Servers that have every version at once, for benchmarks of what lies behind them."""

import asyncio


class InstantFleet:
    """What the rollout controller must know of the servers; nothing generates."""

    def __init__(self) -> None:
        self.served_step: int | None = None
        self._changed = asyncio.Event()

    def publish(self, step: int) -> None:
        self.served_step = step
        self._changed.set()

    async def wait_for_step(self, step: int) -> None:
        while self.served_step is None or self.served_step < step:
            self._changed.clear()
            await self._changed.wait()

    def get_version(self) -> int:
        return self.served_step or 0

    async def agenerate(self, req: object) -> object:
        raise AssertionError(f"these workflows ask for nothing, and this was asked for: {req}")
