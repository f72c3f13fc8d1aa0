"""The reward service under load and in trouble: it remembers, sheds, drains, heals itself, and says what it does."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from headway.config import load_experiment
from headway.errors import Overloaded, TimedOut, Unavailable
from headway.runtime.grpc_client import connect, translating
from headway.runtime.rewards import RewardClient, scored_item
from headway.runtime.service import Placement
from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc
from headway.workflow.errors import RewardFailed
from services.reward.app import run
from services.reward.sandbox import layers

FOREIGN = '''
import os, time
from headway.reward import reward_function

@reward_function(is_pure=True)
def pure(completion, answer):
    """Dies of some completions."""
    if completion == "poison":
        os._exit(1)
    return answer

def slow(completion, seconds):
    """Waits."""
    time.sleep(seconds)
    return 1
'''


@asynccontextmanager
async def serving(folder: Path, reward: str) -> AsyncIterator[rpc.RewardStub]:
    (folder / "foreign_operation.py").write_text(FOREIGN)
    path = folder / "experiment.yaml"
    path.write_text(
        f"experiment_name: e\ntrial_name: t\nactor: {{ppo_n_minibatches: 1}}\nreward: {{num_workers: 2, {reward}}}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        async with run(load_experiment(path), Placement(run_dir=folder)) as running:
            channel = connect(f"127.0.0.1:{running.ports['grpc']}")
            yield rpc.RewardStub(channel)
            await channel.close()


PURE = "function: foreign_operation.pure"
SLOW = "function: foreign_operation.slow"


def item(name: str, completion: str = "", **data: object) -> pb.ScoreItem:
    return pb.ScoreItem(item_id=name, completion=completion, data_json=orjson.dumps(data))


async def score(stub: rpc.RewardStub, *items: pb.ScoreItem, timeout_s: float = 60) -> list[pb.ScoreResult]:
    with translating("score"):
        call = stub.Score(pb.ScoreRequest(items=items), timeout=timeout_s)
        results = [result async for reply in call for result in reply.results]
    return sorted(results, key=lambda result: result.index)


def create_task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def status_of(stub: rpc.RewardStub) -> pb.RewardStatus:
    return await stub.GetRewardStatus(pb.GetRewardStatusRequest(), timeout=5)


async def until_running(stub: rpc.RewardStub, count: int) -> None:
    async with asyncio.timeout(30):
        while (await status_of(stub)).num_running < count:  # noqa: ASYNC110 - the status is asked for, nobody tells
            await asyncio.sleep(0.01)


async def test_an_item_that_kills_three_workers_is_quarantined_and_remembered(tmp_path: Path) -> None:
    async with serving(tmp_path, PURE) as stub:
        messages = [(await score(stub, item("3/9", "poison", answer=1)))[0].message for _ in range(5)]
        [innocent] = await score(stub, item("3/9", "fine", answer=1))
        status = await status_of(stub)
    assert messages[:3] == ["the function ended its process (exit code 1)"] * 3
    assert messages[3:] == ["quarantined: this item killed three workers"] * 2
    assert innocent.reward == 1.0
    assert list(status.quarantined) == ["3/9"]
    assert dict(status.num_by_status) == {"error": 5, "ok": 1}
    assert status.num_workers_replaced == 3


async def test_duplicates_of_a_pure_function_are_answered_from_the_cache(tmp_path: Path) -> None:
    async with serving(tmp_path, PURE) as stub:
        [first] = await score(stub, item("a", "x", answer=2))
        again, other = await score(stub, item("b", "x", answer=2), item("c", "x", answer=3))
        status = await status_of(stub)
    assert (first.is_cached, again.is_cached, other.is_cached) == (False, True, False)
    assert (again.item_id, again.reward, again.worker, other.reward) == ("b", 2.0, 0, 3.0)
    assert status.num_cached == 1


async def test_functions_that_are_not_pure_are_never_cached(tmp_path: Path) -> None:
    async with serving(tmp_path, SLOW) as stub:
        results = [(await score(stub, item("a", seconds=0)))[0] for _ in range(3)]
    assert not any(result.is_cached for result in results)


async def test_slow_items_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, SLOW) as stub:
        await score(stub, *[item(f"{n}/0", seconds=0) for n in range(20)], item("7/13", seconds=0.3))
        status = await status_of(stub)
    assert (status.slowest[0].item_id, status.slowest[0].function) == ("7/13", "foreign_operation.slow")
    assert status.slowest[0].elapsed_s >= 0.3
    assert len(status.slowest) == 10


async def test_slow_items_do_not_hold_up_quick_ones(tmp_path: Path) -> None:
    """Four items that only wait, on two workers: they step aside."""
    async with serving(tmp_path, f"{SLOW}, timeout_s: 60") as stub:
        waiting = create_task(score(stub, *[item("slow", seconds=50) for _ in range(4)]))
        await until_running(stub, 2)
        quick = await score(stub, *[item("quick", seconds=0) for _ in range(100)], timeout_s=20)
        assert [result.reward for result in quick] == [1.0] * 100
        waiting.cancel()


async def test_a_full_queue_refuses_all_or_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{SLOW}, max_queued: 10, timeout_s: 60") as stub:
        with pytest.raises(Overloaded, match="0 items wait already; 11 more exceed max_queued"):
            await score(stub, *[item("x", seconds=0) for _ in range(11)])
        assert len(await score(stub, *[item("x", seconds=0) for _ in range(10)])) == 10
        status = await status_of(stub)
    assert status.num_shed == 11
    assert dict(status.num_by_status) == {"ok": 10}


async def test_what_nobody_waits_for_any_more_is_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{SLOW}, timeout_s: 600") as stub:
        with pytest.raises(TimedOut):
            await score(stub, *[item("x", seconds=500) for _ in range(20)], timeout_s=0.5)
        assert [result.reward for result in await score(stub, item("x", seconds=0))] == [1.0]
        async with asyncio.timeout(30):
            while (status := await status_of(stub)).num_running + status.num_queued:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert dict(status.num_by_status) == {"ok": 1}


async def test_a_stopping_service_answers_what_it_has_and_refuses_what_comes(tmp_path: Path) -> None:
    (tmp_path / "foreign_operation.py").write_text(FOREIGN)
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\n"
        f"reward: {{{SLOW}, num_workers: 2, timeout_s: 20}}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        service = run(load_experiment(path), Placement(run_dir=tmp_path))
        running = await service.__aenter__()
        channel = connect(f"127.0.0.1:{running.ports['grpc']}")
        stub = rpc.RewardStub(channel)
        accepted = create_task(score(stub, *[item("x", seconds=0.3) for _ in range(6)]))
        await until_running(stub, 2)
        stopping = asyncio.ensure_future(service.__aexit__(None, None, None))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="the reward service is stopping"):
            await score(stub, item("late", seconds=0))
        assert [result.reward for result in await accepted] == [1.0] * 6
        await stopping
        await channel.close()


async def test_sigterm_ends_the_process_after_its_work_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "foreign_operation.py").write_text(FOREIGN)
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\n"
        f"reward: {{{SLOW}, num_workers: 2, timeout_s: 20}}\n"
    )
    command = (sys.executable, "-m", "services.reward", "--config", str(path), "--run-dir", str(tmp_path))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert process.stdout is not None
    ready = json.loads((await process.stdout.readline()).decode().removeprefix("HEADWAY_READY "))
    channel = connect(f"127.0.0.1:{ready['ports']['grpc']}")
    stub = rpc.RewardStub(channel)
    accepted = create_task(score(stub, *[item("x", seconds=0.3) for _ in range(6)]))
    await until_running(stub, 2)
    below = descendants_of(process.pid)
    process.terminate()
    assert [result.reward for result in await accepted] == [1.0] * 6
    assert await process.wait() == 0
    await channel.close()
    assert below, "it had no process below it: nothing was shown"
    assert not any(map(is_there, below))


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descendants_of(pid: int) -> list[int]:
    children = children_of(pid)
    return [*children, *[grandchild for child in children for grandchild in descendants_of(child)]]


def children_of(pid: int) -> list[int]:
    """Those that are seen; the kernel may miss some while others come and go."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


async def test_a_fork_server_that_is_killed_costs_no_result(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{SLOW}, timeout_s: 20") as stub:
        asked = create_task(score(stub, *[item("x", seconds=0.1) for _ in range(20)]))
        await until_running(stub, 2)
        [fork_server] = fork_servers()
        os.kill(fork_server, signal.SIGKILL)
        assert [result.reward for result in await asked] == [1.0] * 20
        assert fork_servers() != [fork_server]


def fork_servers() -> list[int]:
    """Children of this process that fork workers."""
    children = children_of(os.getpid())
    return [pid for pid in children if b"services.reward.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_the_status_names_the_isolation_layers(tmp_path: Path) -> None:
    async with serving(tmp_path, "function: math") as stub:
        status = await status_of(stub)
        functions = (await stub.ListFunctions(pb.ListFunctionsRequest())).functions
    assert list(status.isolation) == list(layers().active)
    assert list(status.missing_isolation) == list(layers().missing)
    known = {function.name: function for function in functions}
    assert {"math", "gsm8k", "exact", "multiple_choice", "code", "format", "length", "countdown"} <= known.keys()
    assert "judge" not in known
    assert known["math"].is_pure
    assert known["math"].summary.startswith("The final answer")
    assert not known["code"].is_pure


async def test_people_see_the_status_and_prometheus_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "foreign_operation.py").write_text(FOREIGN)
    path = tmp_path / "experiment.yaml"
    path.write_text("experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\nreward: {function: exact}\n")
    async with run(load_experiment(path), Placement(run_dir=tmp_path)) as running, ClientSession() as http:
        base = f"http://127.0.0.1:{running.ports['http']}"
        async with RewardClient(addresses=[f"127.0.0.1:{running.ports['grpc']}"]) as client:
            scored_item.set("3/17")
            assert await client.score("1", data={"answer": "1"}) == 1.0
        status = await (await http.get(f"{base}/v1/status")).json()
        metrics = await (await http.get(f"{base}/metrics")).text()
        assert (await http.get(f"{base}/health")).status == 200
    assert status["isolation"] == list(layers().active)
    assert [item["item_id"] for item in status["slowest"]] == ["3/17"]
    assert 'headway_reward_items_total{status="ok"} 1.0' in metrics
    assert "headway_reward_isolation_info" in metrics


async def test_a_judge_is_asked_through_the_service(tmp_path: Path) -> None:
    replies = web.Application()

    async def reply(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        return web.json_response({"choices": [{"message": {"content": "8" if "good" in text else "no number"}}]})

    replies.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(replies)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    kwargs = f"kwargs: {{judge: {{base_url: '{url}', model: m}}}}"
    async with serving(tmp_path, f"function: {{judge: 1.0, length: 0.5}}, {kwargs}") as stub:
        good, bad = await score(stub, item("a", "good"), item("b", "bad"))
        [again] = await score(stub, item("c", "good"))
    await runner.cleanup()
    assert (good.reward, dict(good.parts)) == (1.3, {"judge": 0.8, "length": 1.0})
    assert (bad.status, bad.message) == (
        pb.SCORE_STATUS_ABSTAIN,
        "judge: the judge replied without a number: 'no number'",
    )
    assert (again.is_cached, again.reward) == (True, 1.3)


async def test_a_client_waits_with_an_end_for_replicas() -> None:
    async with RewardClient(timeout_s=1) as client:
        with pytest.raises(TimedOut, match="0 of 2 reward services after 0 s"):
            await client.wait_for_replicas(2, timeout_s=0.01)


async def test_a_client_reports_a_refusal_as_a_failure(tmp_path: Path) -> None:
    async with serving(tmp_path, PURE) as stub:
        del stub
        async with RewardClient(timeout_s=1, queueing_s=1, addresses=["127.0.0.1:1"]) as client:
            with pytest.raises(
                (RewardFailed, TimedOut), match=r"no reward service answered within 2 s \(127\.0\.0\.1:1\)"
            ):
                await client.score("x")
