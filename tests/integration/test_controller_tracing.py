"""With `rollout.enable_rollout_tracing`, a task is one trace: through its samples, over HTTP and over gRPC."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from test_controller_app import submit, until, world

from headway.core.version import PolicyVersion
from headway.runtime.tracing import span, tracing
from headway.testing.trace_collector import CollectedSpan, TraceCollector
from services.rollout_controller.engine_http import EngineHttp, open_session

INTERNAL, SERVER, CLIENT = 1, 2, 3
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Any:
    with TraceCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


async def roll_out(folder: Path, count: int) -> None:
    async with world(folder, "rollout.enable_rollout_tracing=true") as here:
        await here.publish(PolicyVersion(1, 0))
        await submit(here.stub, count)
        await until(here, lambda status: status["tasks"]["ready"] == count)
        status = f"http://{here.http}/v1/status"
        async with aiohttp.ClientSession() as session, session.get(status, headers={"traceparent": CALLER}) as reply:
            assert reply.status == 200


async def test_a_task_is_one_trace_over_http_and_grpc(tmp_path: Path, collector: TraceCollector) -> None:
    with tracing(True, "rollout-controller"):
        await roll_out(tmp_path, count=2)
    spans = {made.span_id: made for made in collector.spans}
    by_name: dict[str, list[CollectedSpan]] = defaultdict(list)
    for made in spans.values():
        by_name[made.name].append(made)
    assert {made.service for made in spans.values()} == {"headway-rollout-controller"}
    assert sorted(made.attributes["headway.task_id"] for made in by_name["rollout"]) == ["0/0", "0/1"]
    assert all(made.attributes["headway.outcome"] == "accepted" and not made.parent_id for made in by_name["rollout"])
    for name, parent in (("episode", "rollout"), ("generate", "episode"), ("reward", "episode")):
        assert Counter(spans[made.parent_id].name for made in by_name[name]) == {parent: 4}
        assert all(made.trace_id == spans[made.parent_id].trace_id for made in by_name[name])
    for call, requests in (("POST /generate", "generate"), ("headway.v1.Reward/Score", "reward")):
        served_for = [id for made in by_name[call] for id in (made.parent_id, *made.links)]
        assert sorted(served_for) == sorted(made.span_id for made in by_name[requests])
        assert {made.kind for made in by_name[call]} == {CLIENT}
    answered = by_name["/headway.v1.Reward/Score"]
    assert {made.parent_id for made in answered} == {made.span_id for made in by_name["headway.v1.Reward/Score"]}
    assert {made.kind for made in answered} == {SERVER}
    assert all(made.attributes["headway.tokens"] == 4 for made in by_name["generate"])


async def test_an_http_call_with_a_caller_is_a_span_of_its_trace(tmp_path: Path, collector: TraceCollector) -> None:
    with tracing(True, "rollout-controller"):
        await roll_out(tmp_path, count=1)
    (made,) = (made for made in collector.spans if made.name == "GET /v1/status")
    assert (made.kind, made.trace_id.hex(), made.parent_id.hex()) == (SERVER, CALLER[3:35], CALLER[36:52])
    assert made.attributes["http.response.status_code"] == 200


async def test_a_call_of_an_engine_names_its_span(collector: TraceCollector) -> None:
    seen: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append(request.headers["traceparent"])
        return web.Response(text="data: {}\n\n")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with open_session() as session:
        with tracing(True, "rollout-controller"), span("generate"):
            stream = EngineHttp(session, f"http://127.0.0.1:{runner.addresses[0][1]}").stream("/generate", {})
            assert [payload async for payload in stream] == [b"{}"]
    await runner.cleanup()
    (made,) = collector.spans
    assert [header.split("-")[1:3] for header in seen] == [[made.trace_id.hex(), made.span_id.hex()]]
