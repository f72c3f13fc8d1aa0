"""An agent that is a program: the row comes on its standard input, its session from its environment.

    OPENAI_BASE_URL, OPENAI_API_KEY          what the `openai` client reads
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    what the `anthropic` client reads
    HEADWAY_SESSION_URL                      POST .../reward {"reward": 1.0}, .../end

It has a process group of its own, which is killed when it ends, at the episode's time limit, when the episode is
cancelled, and when this process dies. Its environment is this process's without what looks like a secret. Exit code 0
is success; anything else fails the episode, with the end of what it wrote.
"""

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import orjson

from headway.errors import HeadwayError, InvalidInput
from headway.gateway.gateway import Access
from headway.runtime.spawn import spawn

SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)(_FILE)?$|^HEADWAY_", re.IGNORECASE)
TOLD_BYTES = 2000


class CommandFailed(HeadwayError):
    """An agent's program ended with another exit code than 0."""


class CommandAgent:
    """Runs a program for each episode.

    Args:
        command: The program and its arguments.
        env: Added to its environment.
        max_processes: How many run at once.

    Raises:
        InvalidInput: There is no such program.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], max_processes: int) -> None:
        if not command or shutil.which(command[0]) is None:
            raise InvalidInput(f"workflow.kwargs.command: there is no program {command[0] if command else ''!r}")
        self._command = list(command)
        self._env = dict(env)
        self._slots = asyncio.Semaphore(max_processes)

    async def run(self, data: dict[str, Any], access: Access) -> None:
        """Run it to its end.

        Raises:
            CommandFailed: It failed; the message has the end of its output.
        """
        async with self._slots:
            with tempfile.TemporaryFile() as row, tempfile.TemporaryFile() as output:
                row.write(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY))
                row.seek(0)
                code = await self._run(access, row, output)
                if code != 0:
                    raise CommandFailed(f"{self._command[0]} ended with {code}: {_end_of(output)}")

    async def _run(self, access: Access, row: IO[bytes], output: IO[bytes]) -> int:
        environment = {**clean_environment(os.environ), **environment_of(access), **self._env}
        program = spawn(self._command, environment, output.fileno(), stdin=row.fileno(), inherits=False)
        try:
            return await program.wait()
        finally:
            program.signal(signal.SIGKILL)
            await program.wait()


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What an agent may know of this process's environment.

    Example:
        >>> clean_environment({"PATH": "/bin", "WANDB_API_KEY": "1", "HEADWAY_API_TOKEN_FILE": "x"})
        {'PATH': '/bin'}
    """
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def environment_of(access: Access) -> dict[str, str]:
    """Where an agent's session is."""
    return {
        "OPENAI_BASE_URL": access.openai_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.anthropic_url,
        "ANTHROPIC_API_KEY": access.api_key,
        "HEADWAY_SESSION_URL": access.session_url,
    }


def _end_of(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TOLD_BYTES))
    return output.read().decode(errors="replace").strip()
