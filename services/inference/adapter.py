"""What the agent needs of an engine, whichever it is."""

from pathlib import Path
from typing import Protocol


class RunningEngine(Protocol):
    """An engine that answers."""

    kind: str
    """`builtin`, `sglang` or `vllm`."""
    pid: int
    port: int
    """Of its HTTP API."""

    async def load(self, folder: Path, label: str) -> None:
        """Replace the weights by those of a folder, and report `label` from then on.

        Raises:
            HeadwayError: It could not; the message is the engine's.
        """

    async def served_version(self) -> str:
        """The label that the engine reports."""

    async def wait(self) -> None:
        """Wait until the engine ends.

        Raises:
            Unavailable: It ended by itself; with the last lines of its log.
        """
