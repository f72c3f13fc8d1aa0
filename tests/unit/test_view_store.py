"""What is asked of a run's folder is answered from its files, whoever wrote them and whenever they came."""

import threading
import tomllib
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml
from view_dumps import append, group, trained_line

from headway.config import ExperimentConfig
from headway.errors import InvalidInput
from headway.view import store as store_module
from headway.view.app import make_app
from headway.view.finished import FinishedRun
from headway.view.folder import RunFolder
from headway.view.index import Index
from headway.view.pieces import Pieces, find_tokenizer
from headway.view.store import Store

MODEL = Path(__file__).parents[2] / "configs/models/sort_digits"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run/me/digits/one"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"rollout": {"tokenizer_path": str(MODEL)}}))
    return folder


def rollouts(run: Path) -> Path:
    return run.parents[3] / "rollout/me/digits/one"


@pytest.fixture
async def http(run: Path) -> AsyncIterator[httpx.AsyncClient]:
    folder = RunFolder.at(run)
    with Store(folder) as store:
        transport = httpx.ASGITransport(make_app(FinishedRun(folder), store))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client


async def get(http: httpx.AsyncClient, path: str) -> Any:
    reply = await http.get(path)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_trajectory_has_the_text_of_each_token_and_what_the_trainer_made_of_it(
    run: Path, http: httpx.AsyncClient
) -> None:
    ids = {"token_ids": [50, 46, 22, 2], "prompt": "so", "completion": "><eos>"}
    append(rollouts(run), 4, group("0/7", [0.0, 1.0], **ids))
    append(
        rollouts(run), 6, [trained_line("0/7", number, 6, loss_mask=[1, number]) for number in (0, 1)], "trained.jsonl"
    )
    found = await get(http, "/v1/trajectories/0/7/0")
    assert (found["pieces"], found["text"], found["prompt_len"]) == (["s", "o", ">", "<eos>"], "so><eos>", 2)
    assert found["trained"] == {
        "step": 6,
        "reward": 0.5,
        "loss_mask": [False, False, True, False],
        "advantages": [None, None, 1.0, -1.0],
        "prox_logp": [None, None, -0.25, -1.5],
        "logp": [None, None, -0.25, -2.0],
        "divergence": [None, None, 0.25, None],
    }
    (one,) = (await get(http, "/v1/groups/0/7"))["groups"]
    assert (one["consumed_step"], one["staleness"], [sample["reward"] for sample in one["samples"]]) == (
        6,
        3,
        [0.0, 1.0],
    )


async def test_an_objective_without_proximal_log_probs_has_a_divergence_too(run: Path, http: httpx.AsyncClient) -> None:
    append(rollouts(run), 4, group("0/7", [1.0]))
    append(rollouts(run), 4, [trained_line("0/7", 0, 4, prox_logp=None)], "trained.jsonl")
    trained = (await get(http, "/v1/trajectories/0/7/0"))["trained"]
    assert trained["prox_logp"] is None
    assert trained["divergence"] == [None, None, 0.25, -1.0]


async def test_attempts_and_kinds_of_a_task_are_told_apart(run: Path, http: httpx.AsyncClient) -> None:
    append(rollouts(run), 4, group("0/7", [1.0]))
    append(rollouts(run), 5, group("0/7", [2.0], attempt=2))
    append(run.parents[3] / "eval-rollout/me/digits/one", 5, group("0/7", [3.0]))
    found = (await get(http, "/v1/groups/0/7"))["groups"]
    assert sorted((one["kind"], one["attempt"]) for one in found) == [("evaluation", 1), ("train", 1), ("train", 2)]
    assert (await get(http, "/v1/trajectories/0/7/0?kind=train&attempt=1&step=4"))["reward"] == 1.0
    assert (await get(http, "/v1/trajectories/0/7/0?kind=train"))["reward"] == 2.0
    assert (await get(http, "/v1/trajectories/0/7/0?kind=evaluation"))["reward"] == 3.0


async def test_what_is_not_there_is_a_problem_that_says_so(run: Path, http: httpx.AsyncClient) -> None:
    assert "No group has been finished yet" in (await get(http, "/v1/groups"))["note"]
    append(rollouts(run), 4, group("0/7", [1.0]))
    for path in ("/v1/groups/0/8", "/v1/trajectories/0/7/9", "/v1/trajectories/0/8/0"):
        reply = await http.get(path)
        assert reply.status_code == 404
        assert reply.headers["content-type"] == "application/problem+json"
        assert "is in no dump" in reply.json()["detail"]
    assert (await http.get("/v1/groups?cursor=x")).status_code == 400


async def test_a_dump_that_was_changed_behind_the_index_is_a_problem_and_no_wrong_answer(
    run: Path, http: httpx.AsyncClient
) -> None:
    path = append(rollouts(run), 4, group("0/7", [1.0]))
    await get(http, "/v1/groups")
    path.write_bytes(b"x" * 10)
    reply = await http.get("/v1/trajectories/0/7/0")
    assert reply.status_code == 404
    assert "no longer holds" in reply.json()["detail"]


async def test_while_a_folder_is_read_for_the_first_time_it_says_how_much_is_left(
    run: Path, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, catch_up = threading.Event(), Index.catch_up

    def later(index: Index) -> None:
        assert may_read.wait(10)
        catch_up(index)

    monkeypatch.setattr(Index, "catch_up", later)
    monkeypatch.setattr(store_module, "PATIENCE_S", 0.0)
    path = append(rollouts(run), 4, group("0/7", [1.0]))
    page = await get(http, "/v1/groups")
    assert (page["unread_bytes"], page["total"]) == (path.stat().st_size, 0)
    may_read.set()
    while page["unread_bytes"]:
        page = await get(http, "/v1/groups")
    assert page["total"] == 1


def test_a_folder_that_can_only_be_read_has_its_index_elsewhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(rollouts(run), 4, group("0/7", [1.0]))
    monkeypatch.setattr(store_module.os, "access", lambda path, mode: False)
    monkeypatch.setattr(store_module.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    with Store(RunFolder.at(run)) as store:
        assert store.task("0/7").groups[0].reward == 1.0
    assert (tmp_path / "index.sqlite").exists()
    assert not (rollouts(run) / "index.sqlite").exists()


def test_an_index_that_fails_costs_the_run_nothing_and_is_told_once(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = append(rollouts(run), 4, group("0/7", [1.0]))
    (rollouts(run) / "index.sqlite").write_bytes(b"this is no database, however long it goes on" * 100)
    with Store(RunFolder.at(run)) as store:
        store.written([path])
        store.written([path])
    assert len(caplog.records) == 1
    assert "falls behind" in caplog.text


async def test_the_status_of_a_run_that_was_killed_is_what_its_numbers_say(run: Path) -> None:
    logs = run.parents[3] / "logs/me/digits/one"
    logs.mkdir(parents=True)
    lines = [
        {"step": step, "version": f"v1.{step}", "time": 1.0, "rollout/groups": 4.0, "ppo_actor/staleness_tokens/0": 5.0,
         "ppo_actor/staleness_tokens/2": 1.0, "total_steps": 9.0} for step in (1, 2, 3)
    ]  # fmt: skip
    torn = orjson.dumps(lines[0])[:-5]
    (logs / "stats.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + torn)
    finished = FinishedRun(RunFolder.at(run))
    status = finished.status()
    assert (status["num_steps"], status["total_steps"], status["published_version"]) == (3, 9.0, "v1.3")
    assert status["tokens"]["gradient"] == {"0": 15, "2": 3}
    assert (status["tasks"]["consumed"], status["staleness"]["eta"]) == (12, 2)
    page = finished.history(["total_steps", "rollout/groups", "nothing"], 2, 1)
    assert page["series"] == [
        {"name": "total_steps", "points": [(2, 9.0)]},
        {"name": "rollout/groups", "points": [(2, 4.0)]},
    ]
    assert page["next_step"] == 3
    assert "rollout/groups" in page["names"]


async def test_a_page_of_another_name_cannot_read(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/groups", headers={"Host": "rebound.example"})).status_code == 400


async def test_a_run_without_anything_can_be_opened(http: httpx.AsyncClient) -> None:
    assert (await get(http, "/v1/status"))["num_steps"] == 0
    assert (await get(http, "/v1/timeline"))["lanes"] == []
    assert (await http.get("/v1/events")).status_code == 204


def test_the_folders_of_a_run_are_those_of_its_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_USER", "me")
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "digits", "trial_name": "one", "cluster": {"fileroot": str(tmp_path)},
            "rollout": {"fileroot": str(tmp_path / "elsewhere"), "dump_to_file": True}, "tokenizer_path": str(MODEL),
        }
    )  # fmt: skip
    config.paths.run.mkdir(parents=True)
    (config.paths.run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert RunFolder.at(config.paths.run) == RunFolder.of(config)


@pytest.mark.parametrize("path", ["", "rollout/me/digits/one", "run/me/digits/none"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "rollout/me/digits/one").mkdir(parents=True)
    with pytest.raises(InvalidInput, match="is not a"):
        RunFolder.at(tmp_path / path)


def test_a_tokenizer_is_found_beside_the_weights_where_its_own_folder_is_gone(tmp_path: Path) -> None:
    assert find_tokenizer(str(tmp_path / "gone"), tmp_path) is None
    assert Pieces(None).of([1, 2]) is None
    (tmp_path / "v1.3").mkdir()
    (tmp_path / "v1.3/tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    found = find_tokenizer("no-such-organisation/no-such-model", tmp_path)
    assert found == tmp_path / "v1.3/tokenizer.json"
    assert Pieces(found).of([50, 46]) == ["s", "o"]


def test_every_file_of_the_page_is_part_of_the_package() -> None:
    package = files("headway.view")
    patterns = tomllib.loads((MODEL.parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "*"
    ]
    shipped = {path for pattern in patterns for path in Path(str(package)).glob(pattern)}
    assert set((Path(str(package)) / "static").iterdir()) <= shipped
    page = (package / "static" / "index.html").read_text()
    modules = {path.name for path in shipped if path.suffix == ".js"}
    assert all(f"/static/{name}" in page for name in modules), "preloaded, so that none waits for another"


def test_a_live_run_is_looked_through_once_and_then_only_for_what_is_new(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "REFRESH_S", 0.0)
    monkeypatch.setattr(store_module, "PATIENCE_S", 10.0)
    append(rollouts(run), 0, group("0/0", [1.0]))
    with Store(RunFolder.at(run)) as store:
        assert store.task("0/0")
        monkeypatch.setattr(Index, "catch_up", lambda index: pytest.fail("looked through again"))
        store.written([append(rollouts(run), 1, group("0/1", [1.0]))])
        append(rollouts(run), 0, [trained_line("0/0", 0, 0)], "trained.jsonl")
        append(rollouts(run), 1, [trained_line("0/1", 0, 1)], "trained.jsonl")
        assert store.task("0/1").groups[0].consumed_step == 1
        assert store.task("0/0").groups[0].consumed_step == 0
