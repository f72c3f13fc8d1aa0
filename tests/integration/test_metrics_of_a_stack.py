"""What running services show at `/metrics` is what the table says: nothing missing or more, types and labels alike.

Every service is real and started through its door: name-resolve, reward, rollout-controller, trainer, and an inference
agent with the built-in engine. They train a step before they are asked.
"""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from trainer_harness import merged, settings

from headway.config import load_experiment
from headway.runtime.metrics_table import AGENT, CONTROLLER, ENGINE, NAMES, REWARD, TRAINER, Kind, metrics_of
from headway.runtime.names import NameClient
from headway.runtime.service import Placement
from services.inference import app as inference
from services.name_resolve import app as name_resolve
from services.reward import app as reward
from services.rollout_controller import app as rollout_controller
from services.trainer import app as trainer

CHANGES = {
    "gconfig": {"n_samples": 2, "max_new_tokens": 4},
    "inference": {"engine": "builtin", "max_running_requests": 8},
    "reward": {"function": "length", "num_workers": 1},
    "rollout": {"max_concurrent_rollouts": 8},
}
OPTIONAL = {"process_open_fds", "process_max_fds"}
"""Absent where there is no /proc."""
Shown = dict[str, Metric]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Shown]]:
    """The families of each service, by the names of the table, after a run of two steps."""
    folder = tmp_path_factory.mktemp("stack")
    file = folder / "experiment.yaml"
    file.write_text(json.dumps(merged(settings(folder, 2), CHANGES)))
    config = load_experiment(file)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        names = await enter(name_resolve.run(config, Placement()))
        placement = Placement(f"127.0.0.1:{names.ports['grpc']}", run_dir=folder)
        rewards = await enter(reward.run(config, placement))
        controller = await enter(rollout_controller.run(config, placement))
        training = await enter(trainer.run(config, placement))
        agent = await enter(inference.run(config, placement))
        async with NameClient(placement.name_resolve, config.run_name) as client:
            known = {entry.name: entry.metadata for entry in await client.list("services")}
        await training.supervisor.wait()
        addresses = {
            NAMES: f"127.0.0.1:{names.ports['http']}",
            REWARD: known["services/reward/0"]["http"],
            CONTROLLER: known["services/rollout-controller/0"]["http"],
            TRAINER: known["services/trainer/0"]["http"],
            AGENT: known["services/inference/0"]["metrics"],
            ENGINE: f"127.0.0.1:{agent.ports['http']}",
        }
        assert (rewards.ports["http"], controller.ports["http"]) == tuple(
            int(addresses[service].rpartition(":")[2]) for service in (REWARD, CONTROLLER)
        )
        yield {service: await scrape(address) for service, address in addresses.items()}


async def scrape(address: str) -> Shown:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as reply:
        assert reply.status == 200
        assert reply.content_type == "text/plain"
        return {_name(family): family for family in text_string_to_metric_families(await reply.text())}


def _name(family: Metric) -> str:
    """As the table has it: the text format tells an info as a gauge whose name ends with `_info`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


pytestmark = pytest.mark.asyncio(loop_scope="module")
EVERY = pytest.mark.parametrize("service", [NAMES, REWARD, CONTROLLER, TRAINER, AGENT, ENGINE])


@EVERY
async def test_a_service_shows_what_the_table_says_and_nothing_else(shown: dict[str, Shown], service: str) -> None:
    assert shown[service].keys() | OPTIONAL == {spec.name for spec in metrics_of(service)} | OPTIONAL


@EVERY
async def test_types_labels_and_texts_are_those_of_the_table(shown: dict[str, Shown], service: str) -> None:
    for spec in metrics_of(service):
        if spec.name in OPTIONAL - shown[service].keys():
            continue
        family = shown[service][spec.name]
        kind = "gauge" if spec.kind is Kind.INFO else spec.kind
        assert family.type == kind, spec.name
        assert family.documentation.rstrip(".") == spec.help.rstrip(".") or spec.name.startswith("process_")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(spec.labels), spec.name


@EVERY
async def test_known_values_of_a_label_are_all_shown(shown: dict[str, Shown], service: str) -> None:
    for spec in metrics_of(service):
        if spec.values:
            found = {sample.labels[spec.labels[0]] for sample in shown[service][spec.name].samples}
            assert found == set(spec.values), spec.name


async def test_metrics_with_labels_were_seen_with_a_value(shown: dict[str, Shown]) -> None:
    """Without samples their labels would not have been compared."""
    may_be_empty = {"headway_masked_tokens_total"}
    empty = {name for families in shown.values() for name, family in families.items() if not family.samples}
    assert empty <= may_be_empty


async def test_the_numbers_agree_with_each_other(shown: dict[str, Shown]) -> None:
    def value(service: str, name: str, **labels: str) -> float:
        return sum(one.value for one in shown[service][name].samples if labels.items() <= one.labels.items())

    assert value(CONTROLLER, "headway_tasks_submitted") == value(CONTROLLER, "headway_tasks") > 0
    assert value(CONTROLLER, "headway_steps_total") == value(TRAINER, "headway_trainer_step") == 2
    assert value(CONTROLLER, "headway_run_ended") == 1
    assert value(CONTROLLER, "headway_published_step") == 2
    assert 0 <= value(CONTROLLER, "headway_server_step") <= 2
    assert value(CONTROLLER, "headway_server_busy_seconds_total") > 0
    assert value(TRAINER, "headway_trainer_phase", phase="finished") == value(TRAINER, "headway_trainer_phase") == 1
    assert value(TRAINER, "headway_trainer_phase_seconds_total", phase="update") > 0
    assert value(REWARD, "headway_reward_items_total", status="ok") > 0
    assert value(AGENT, "headway_inference_registered") == 1
    assert value(ENGINE, "sglang:generation_tokens_total") > 0
