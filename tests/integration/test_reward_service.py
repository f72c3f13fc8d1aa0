"""The reward service scores each item on its own, types every result, and neither loses nor invents one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.config import load_experiment
from headway.errors import InvalidInput
from headway.runtime.grpc_client import connect
from headway.runtime.rewards import RewardClient
from headway.runtime.service import Placement
from headway.v1 import reward_pb2 as pb
from headway.v1 import reward_pb2_grpc as rpc
from headway.workflow.errors import RewardFailed, RewardTimeout
from services.reward.app import run

FOREIGN = '''
import os, time
from headway.reward import Abstain

def by_order(prompt, completion, prompt_ids, completion_ids, **data):
    """Does what the completion says."""
    match completion:
        case "hang":
            time.sleep(3600)
        case "burn":
            while True:
                pass
        case "die":
            os._exit(7)
        case "exit":
            raise SystemExit(0)
        case "raise":
            raise ValueError("no good")
        case "crash":
            os.abort()
        case "none":
            return None
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "true":
            return True
        case "abstain":
            raise Abstain("not mine")
        case "ids":
            return sum(prompt_ids) + sum(completion_ids)
    return float(data["answer"])


async def later(completion, answer):
    import asyncio
    await asyncio.sleep(0.01)
    return answer
'''


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "foreign_rewards.py").write_text(FOREIGN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def serving(folder: Path, reward: str) -> AsyncIterator[str]:
    path = folder / "experiment.yaml"
    path.write_text(
        "experiment_name: e\ntrial_name: t\nactor: {ppo_n_minibatches: 1}\n"
        f"reward: {{{reward}, timeout_s: 1.0, num_workers: 2}}\n"
    )
    async with run(load_experiment(path), Placement(run_dir=folder)) as running:
        yield f"127.0.0.1:{running.ports['grpc']}"


@pytest.fixture
async def address(foreign: Path) -> AsyncIterator[str]:
    async for address in serving(foreign, "function: foreign_rewards.by_order"):
        yield address


@pytest.fixture
async def rewards(address: str) -> AsyncIterator[RewardClient]:
    async with RewardClient(timeout_s=1.0, addresses=[address]) as client:
        yield client


async def test_each_completion_of_a_batch_gets_its_own_reward(rewards: RewardClient) -> None:
    asked = [rewards.score(str(number), data={"answer": number}) for number in range(700)]
    assert await asyncio.gather(*asked) == [float(number) for number in range(700)]


@pytest.mark.parametrize(
    ("order", "kind", "message"),
    [
        ("hang", RewardTimeout, "timeout: ran past its limit of 1 s"),
        ("burn", RewardTimeout, "timeout: ran past its limit of 1 s"),
        ("die", RewardFailed, "error: the function ended its process (exit code 7)"),
        ("exit", RewardFailed, "error: SystemExit: 0"),
        ("raise", RewardFailed, "error: ValueError: no good (by_order, line "),
        ("crash", RewardFailed, "error: the function crashed its process (SIGABRT)"),
        ("none", RewardFailed, "invalid_output: a reward is a finite number, not NoneType None"),
        ("nan", RewardFailed, "invalid_output: a reward is a finite number, not nan"),
        ("text", RewardFailed, "invalid_output: a reward is a finite number, not str '1.0'"),
        ("abstain", RewardFailed, "abstain: not mine"),
    ],
)
async def test_a_failure_is_typed_and_costs_its_own_item_only(
    rewards: RewardClient, order: str, kind: type[Exception], message: str
) -> None:
    orders = ["ok"] * 20 + [order] + ["ok"] * 20
    results = await asyncio.gather(
        *[rewards.score(text, data={"answer": 0.5}, item_id=f"7/{text}") for text in orders], return_exceptions=True
    )
    failed = results.pop(20)
    assert type(failed) is kind
    assert str(failed).startswith(f"item 7/{order}: {message}")
    assert results == [0.5] * 40


async def test_booleans_and_integers_are_rewards(rewards: RewardClient) -> None:
    assert await rewards.score("true") == 1.0
    assert await rewards.reward_fn("p", "ids", [1, 2], [3, -1]) == 5.0


async def test_only_functions_that_the_experiment_file_names_can_be_run(rewards: RewardClient) -> None:
    assert await rewards.score("1", data={"answer": "1"}, function="exact") == 1.0
    with pytest.raises(RewardFailed, match=r"INVALID_ARGUMENT.*no reward function 'os\.system'"):
        await rewards.score("1", function="os.system")


async def test_a_function_that_cannot_be_loaded_ends_the_start(foreign: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot load the reward function 'foreign_rewards\.absent'"):
        await anext(serving(foreign, "function: foreign_rewards.absent"))


async def test_asynchronous_functions_are_awaited(foreign: Path) -> None:
    async for address in serving(foreign, "function: foreign_rewards.later"):
        async with RewardClient(timeout_s=1.0, addresses=[address]) as client:
            assert await asyncio.gather(*[client.score("", data={"answer": n}) for n in range(40)]) == list(range(40))


async def test_a_weighted_sum_names_its_parts(foreign: Path) -> None:
    async for address in serving(foreign, "function: {exact: 2, last_number: 0.5}"):
        channel = connect(address)
        item = pb.ScoreItem(item_id="a", completion="so 4", data_json=b'{"answer": "4"}')
        call = rpc.RewardStub(channel).Score(pb.ScoreRequest(items=[item]), timeout=10)
        [result] = [result async for reply in call for result in reply.results]
        await channel.close()
        assert (result.reward, dict(result.parts)) == (0.5, {"exact": 0.0, "last_number": 1.0})
