"""The inference agent registers an engine only when it answers with the newest version, and removes it when it ends."""

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest

from headway.config import ExperimentConfig
from headway.core.version import PolicyVersion
from headway.errors import HeadwayError, InvalidInput, NotFound, Unavailable
from headway.runtime.names import NameClient, Removed
from headway.runtime.probe import probe
from headway.runtime.service import Placement
from services.inference import app
from services.inference.child import ask, free_port
from services.inference.sglang import command_of, start_sglang
from services.inference.tiny_model import save_tiny_model
from services.name_resolve import app as name_resolve

FAKE_ENGINE = """
import json, sys, http.server
port = int(sys.argv[sys.argv.index("--port") + 1])
label = [sys.argv[sys.argv.index("--weight-version") + 1]]
def key_of(flag): return "Bearer " + sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body, flag="--api-key"):
        is_allowed = self.headers["Authorization"] == key_of(flag)
        self.send_response(200 if is_allowed else 401); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        if self.path == "/die": sys.stderr.write("the last words\\n"); sys.stderr.flush(); import os; os._exit(3)
        self.answer({"weight_version": label[0]})
    def do_POST(self):
        label[0] = json.loads(self.rfile.read(int(self.headers["content-length"])))["weight_version"]
        self.answer({"success": True}, "--admin-api-key")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def experiment(root: Path, **inference: object) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "cluster": {"fileroot": str(root), "name_resolve": {"type": "memory"}},
            "inference": {"engine": "builtin", "max_running_requests": 4} | inference,
        }
    )


@asynccontextmanager
async def names_of(config: ExperimentConfig) -> AsyncIterator[tuple[str, NameClient]]:
    async with name_resolve.run(config, Placement()) as running:
        address = f"127.0.0.1:{running.ports['grpc']}"
        async with NameClient(address, config.run_name) as names:
            yield address, names


async def publish(
    config: ExperimentConfig, names: NameClient, step: int, token: int, with_weights: bool = True
) -> None:
    version = PolicyVersion(1, step)
    folder = config.paths.weights / version.label
    folder.mkdir(parents=True)
    if with_weights:
        save_tiny_model(folder, seed=step)
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in folder.glob("*.safetensors")
    ]
    manifest = orjson.dumps({"version": {"term": 1, "step": step}, "files": files})
    (folder / "manifest.json").write_bytes(manifest)
    await names.publish_version(version, hashlib.sha256(manifest).hexdigest(), token)


async def info(url: str) -> dict[str, object]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/model_info") as response:
        return orjson.loads(await response.read())


async def test_an_engine_waits_for_the_first_version_and_is_registered_with_the_newest(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    async with names_of(config) as (address, names), names.campaign("trainer", "test") as leadership:
        stack = AsyncExitStack()
        placement = Placement(name_resolve=address, instance="7", run_dir=tmp_path)
        starting = asyncio.create_task(stack.enter_async_context(app.run(config, placement)))
        await publish(config, names, 0, leadership.fencing_token)
        await publish(config, names, 1, leadership.fencing_token)
        running = await starting
        entry = await names.get("services/inference/7")
        assert entry.value == f"http://127.0.0.1:{running.ports['http']}"
        metrics = f"127.0.0.1:{running.ports['metrics']}"
        assert dict(entry.metadata) == {
            "engine": "builtin",
            "version": "v1.1",
            "pid": str(os.getpid()),
            "metrics": metrics,
        }
        assert (await info(entry.value))["weight_version"] == "v1.1"
        await stack.aclose()
        with pytest.raises(NotFound):
            await names.get("services/inference/7")


async def test_health_probes_hear_that_it_serves_only_while_it_is_registered(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    async with names_of(config) as (address, names), names.campaign("trainer", "test") as leadership:
        port = free_port("127.0.0.1")
        placement = Placement(name_resolve=address, run_dir=tmp_path, grpc_port=port)
        stack = AsyncExitStack()
        starting = asyncio.create_task(stack.enter_async_context(app.run(config, placement)))
        while "NOT_SERVING" not in (problem := await asyncio.to_thread(probe, f"127.0.0.1:{port}")):
            assert problem, "it says that it serves before there is a version"
        await publish(config, names, 0, leadership.fencing_token)
        running = await starting
        assert running.ports["grpc"] == port
        assert await asyncio.to_thread(probe, f"127.0.0.1:{port}") == ""
        await stack.aclose()
        assert "UNAVAILABLE" in await asyncio.to_thread(probe, f"127.0.0.1:{port}")


async def test_weights_that_are_not_those_published_are_refused(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    async with names_of(config) as (address, names), names.campaign("trainer", "test") as leadership:
        await publish(config, names, 0, leadership.fencing_token)
        (config.paths.weights / "v1.0" / "manifest.json").write_bytes(b"{}")
        with pytest.raises(InvalidInput, match="is not the manifest that was published"):
            async with app.run(config, Placement(name_resolve=address, run_dir=tmp_path)):
                pass


def outside(tmp_path: Path, flags: dict[str, object] | None = None) -> ExperimentConfig:
    script = tmp_path / "engine.py"
    script.write_text(FAKE_ENGINE)
    made = experiment(tmp_path, engine="sglang", command=[sys.executable, str(script)], start_timeout_s=20)
    return made if flags is None else made.model_copy(update={"sglang": made.sglang.model_validate(flags)})


async def test_an_outside_engine_is_a_child_that_ends_with_the_agent(tmp_path: Path) -> None:
    config = outside(tmp_path)
    async with names_of(config) as (address, names), names.campaign("trainer", "test") as leadership:
        await publish(config, names, 0, leadership.fencing_token, with_weights=False)
        async with app.run(config, Placement(name_resolve=address, run_dir=tmp_path)):
            entry = await names.get("services/inference/0")
            pid = int(entry.metadata["pid"])
            assert entry.metadata["engine"] == "sglang"
            assert os.getpgid(pid) == pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_sglang_streams_what_is_new_unless_told_otherwise(tmp_path: Path) -> None:
    flag = "--incremental-streaming-output"
    assert flag in command_of(outside(tmp_path), Placement(), tmp_path, "v1.0", 1)
    told = outside(tmp_path, {"incremental_streaming_output": False})
    assert flag not in command_of(told, Placement(), tmp_path, "v1.0", 1)


async def test_an_engine_that_asks_for_keys_is_shown_them(tmp_path: Path) -> None:
    config = outside(tmp_path, {"api_key": "a key", "admin_api_key": "another"})
    async with start_sglang(config, Placement(run_dir=tmp_path), tmp_path, "v1.0") as engine:
        await engine.load(tmp_path, "v1.1")
        assert await engine.served_version() == "v1.1"
        with pytest.raises(Unavailable, match="401"):
            await ask("GET", f"http://127.0.0.1:{engine.port}/model_info")


async def test_when_an_outside_engine_dies_the_agent_ends_with_its_last_words(tmp_path: Path) -> None:
    config = outside(tmp_path)
    async with names_of(config) as (address, names), names.campaign("trainer", "test") as leadership:
        await publish(config, names, 0, leadership.fencing_token, with_weights=False)
        with pytest.raises(Unavailable, match=r"(?s)sglang engine: .* code 3; .*the last words"):
            async with app.run(config, Placement(name_resolve=address, run_dir=tmp_path)) as running:
                async with aiohttp.ClientSession() as session:
                    with pytest.raises(aiohttp.ClientError):
                        await session.get(f"http://127.0.0.1:{running.ports['http']}/die")
                await running.supervisor.wait()
        async for event in names.watch("services/inference"):
            assert not isinstance(event, Removed)
            assert event.entries == ()
            break


async def test_a_program_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    config = experiment(tmp_path, engine="sglang", command=["no-such-engine"])
    async with names_of(config) as (address, names), names.campaign("trainer", "test") as leadership:
        await publish(config, names, 0, leadership.fencing_token, with_weights=False)
        with pytest.raises(HeadwayError, match=r"cannot start SGLang with no-such-engine: .* \(inference.command\)"):
            async with app.run(config, Placement(name_resolve=address, run_dir=tmp_path)):
                pass
