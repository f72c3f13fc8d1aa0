"""The built-in engine as a process of its own, for tests: `broadcast_engine.py MODEL ROOT` prints its address."""

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

from headway.runtime.http_server import serve_http
from services.inference.builtin import BuiltinSettings, start_builtin
from services.inference.http_api import create_app


async def main(folder: Path, root: Path) -> None:
    settings = BuiltinSettings(folder=folder, weights_roots=(root,), seed=0)
    async with start_builtin(settings) as builtin, serve_http(cast(Any, create_app(builtin)), "127.0.0.1", 0) as port:
        print(f"http://127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
