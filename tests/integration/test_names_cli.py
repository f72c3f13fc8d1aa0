"""People see what is registered and published, how old it is, and can clear what a dead run left."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner, Result

from headway.core.version import PolicyVersion
from headway.runtime.names import NameClient
from headway.runtime.names_cli import names_app, versions
from headway.runtime.service import Placement
from services.name_resolve.app import serve
from services.name_resolve.memory import MemoryStore

app = typer.Typer()
app.add_typer(names_app, name="names")
app.command()(versions)


@dataclass
class Shell:
    """A service, a client of it, and the command line."""

    names: NameClient
    address: str

    async def run(self, *words: str, stdin: str = "") -> Result:
        environment = {"HEADWAY_NAME_RESOLVE": self.address}
        return await asyncio.to_thread(CliRunner().invoke, app, words, input=stdin, env=environment)


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    async with serve(MemoryStore(), Placement()) as running:
        address = f"127.0.0.1:{running.ports['grpc']}"
        async with NameClient(address, "exp/trial") as names:
            yield Shell(names, address)


async def test_names_are_listed_with_value_age_and_life(shell: Shell) -> None:
    await shell.names.register("services/b", "10.0.0.2:1", metadata={"pid": "7"})
    await shell.names.register("services/a", "10.0.0.1:1", ttl_s=0)
    lines = (await shell.run("names", "ls", "exp/trial")).output.splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "VALUE", "AGE", "LIFE", "METADATA"],
        ["exp/trial/services/a", "10.0.0.1:1", "0s", "stays"],
        ["exp/trial/services/b", "10.0.0.2:1", "0s", "kept", "pid=7"],
    ]
    assert (await shell.run("names", "get", "exp/trial/services/b")).output == "10.0.0.2:1\n"


async def test_names_are_listed_as_json_for_scripts(shell: Shell) -> None:
    await shell.names.register("services/a", "10.0.0.1:1")
    entry = json.loads((await shell.run("names", "ls", "--json")).output)
    assert (entry["name"], entry["value"]) == ("exp/trial/services/a", "10.0.0.1:1")


async def test_clearing_asks_and_says_what_is_alive(shell: Shell) -> None:
    await shell.names.register("services/a", "x")
    await shell.names.register("services/b", "x", ttl_s=0)
    asked = await shell.run("names", "clear", "exp/trial", stdin="n\n")
    assert "Delete 2 names at exp/trial, 1 of them kept alive" in asked.output
    assert len(await shell.names.list()) == 2
    assert (await shell.run("names", "clear", "exp/trial", stdin="y\n")).output.endswith("2 deleted\n")
    assert await shell.names.list() == []


async def test_versions_are_shown_and_cleared_only_when_asked(shell: Shell) -> None:
    await shell.names.publish_version(PolicyVersion(1, 12), "a" * 64, 5)
    await shell.run("names", "clear", "exp", "--yes")
    lines = (await shell.run("versions")).output.splitlines()
    assert lines[1].split() == ["exp/trial", "v1.12", "0s", "1", "5", "a" * 12]
    assert json.loads((await shell.run("versions", "--json")).output)["version"] == "v1.12"
    await shell.run("names", "clear", "exp", "--yes", "--versions")
    assert len((await shell.run("versions")).output.splitlines()) == 1


async def test_a_watch_prints_what_is_there_and_every_change(shell: Shell) -> None:
    registration = await shell.names.register("services/a", "x")
    code = "import sys; from headway.runtime.names_cli import names_app; names_app(sys.argv[1:])"
    words = ["-c", code, "watch", "exp", "--name-resolve", shell.address]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"= exp/trial/services/a x\n"
            await registration.update(value="y")
            assert await process.stdout.readline() == b"+ exp/trial/services/a y\n"
            await registration.close()
            assert await process.stdout.readline() == b"- exp/trial/services/a\n"
    finally:
        process.kill()
        await process.wait()
