"""`headway top` shows what a person asks of a run, in any width of terminal, and one line when nothing answers."""

import io
from typing import Any

import pytest
from aiohttp import web
from made_reports import SERVER, report, step
from rich.console import Console
from typer.testing import CliRunner

from headway.cli import app
from headway.errors import Unavailable
from headway.launcher.top import Memory, frame, top
from headway.runtime.metrics_http import serve_app


def shown(status: dict[str, Any], width: int = 100) -> str:
    memory = Memory()
    memory.learn_history(status)
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(frame(status, memory, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_answers_what_a_person_asks() -> None:
    evaluations = [{"version": "v1.0", "step": 0, "reward": 0.25, "num_samples": 64, "num_failed": {}}]
    found = shown(
        report(
            evaluations=[*evaluations, {**evaluations[0], "version": "v1.20", "step": 20, "reward": 0.75}],
            waits=[{"what": "a batch", "since_s": 2.0}, {"what": "servers to load v1.20", "since_s": 61.0}],
            discards={"stale": {"count": 7, "examples": [{"message": "too old for step 9"}]}},
            staleness={"holds_back": "staleness: 48 groups are not yet trained on and served; the limit is 48"},
        )
    )
    for text in (
        "root/quickstart/sort-digits",
        "step 20/40",
        "reward    0.500",
        "held-out  0.750 after step 20",
        "400 samples/s  50000 tokens/s  waited 10%",
        "avg 1.00 max 2 bound 2 (mask)",
        "34 of 48 groups outstanding",
        "the limit is 48",
        "400: pending 30  running 14  ready 4  leased 16  consumed 336",
        "too old for step 9",
    ):
        assert text in found, text
    engine = next(line for line in found.splitlines() if line.startswith("0 "))
    assert engine.split() == ["0", "serving", "v1.20", "12", "3456", "90%"]
    assert found.index("servers to load v1.20") < found.index("a batch"), "the oldest wait comes first"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = "10.0.0.217 is taken out: POST /update_weights_from_disk: ClientOSError: cannot write the request's body"
    status = report(
        servers=[{**SERVER, "name": "headway-inference-6d4cf56db6-8x2vz", "detail": long}],
        waits=[{"what": long, "since_s": 3.0}],
        discards={"server_lost": {"count": 3, "examples": [{"message": long}]}},
    )
    assert max(len(line) for line in shown(status, width).splitlines()) <= width


def test_before_the_first_step_there_is_no_curve_and_no_mistake() -> None:
    found = shown(report(0, servers=[]))
    assert "step 0/?" in found
    assert "engines   none" in found
    assert "reward " not in found


def test_an_account_that_does_not_add_up_is_said() -> None:
    assert "work was lost" in shown(report(tasks={"is_conserved": False}))
    assert "work was lost" not in shown(report())


def test_a_step_is_remembered_once_and_the_held_out_reward_stays() -> None:
    memory = Memory()
    memory.learn_history(report(2))
    evaluated = step(2, eval__task_reward__avg=0.9)
    for last in (evaluated, evaluated, step(3)):
        memory.learn({"last_step": last})
    assert [number for number, _ in memory.rewards] == [0, 1, 2, 3]
    assert memory.held_out == (3, 0.9)


async def test_nothing_that_answers_is_an_error_with_the_address() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9/v1/report does not answer"):
        await top("http://127.0.0.1:9", Console(file=io.StringIO()), once=True)


def test_the_command_ends_with_that_error() -> None:
    ended = CliRunner().invoke(app, ["top", "--once", "http://127.0.0.1:9"])
    assert isinstance(ended.exception, Unavailable)


async def test_the_token_of_the_environment_is_sent_and_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get_report(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({}, status=401)
        return web.json_response(report())

    application = web.Application()
    application.add_routes([web.get("/v1/report", get_report)])
    console = Console(file=io.StringIO(), width=80)
    async with serve_app(application, "127.0.0.1", 0) as port:
        monkeypatch.delenv("HEADWAY_API_TOKEN", raising=False)
        with pytest.raises(Unavailable, match="set HEADWAY_API_TOKEN"):
            await top(f"http://127.0.0.1:{port}", console, once=True)
        monkeypatch.setenv("HEADWAY_API_TOKEN", "secret")
        await top(f"http://127.0.0.1:{port}", console, once=True)
    assert isinstance(console.file, io.StringIO)
    assert "step 20/40" in console.file.getvalue()
