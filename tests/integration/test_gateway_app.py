"""The gateway within a running controller: an agent's episodes become groups; a session from outside is returned."""

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from test_controller_app import submit, world

from headway.core.version import PolicyVersion
from headway.runtime.wire import group_from_bytes
from headway.v1 import rollout_controller_pb2 as pb

AGENT = ("workflow.path=headway.workflow.agent.AgentWorkflow", "workflow.kwargs.agent=test_gateway_app.agent")
TOKEN = "token-of-this-test"


async def agent(data: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    messages: Any = [{"role": "user", "content": data["prompt"]}]
    reply = await client.chat.completions.create(model="m", messages=messages, n=2)
    return len(reply.choices) / 4


async def test_an_agents_episodes_are_groups_of_its_branches(tmp_path: Path) -> None:
    async with world(tmp_path, *AGENT, "rollout.check_trajectory_format=true") as here:
        await here.publish(PolicyVersion(1, 0))
        await here.stub.Begin(pb.BeginRequest(fencing_token=1, step=0, is_fresh=True))
        await submit(here.stub, 4)
        request = pb.FetchBatchRequest(step=0, num_groups=4, fencing_token=1)
        parts = [part async for part in here.stub.FetchBatch(request, timeout=30)]
        groups = [group_from_bytes(group) for part in parts for group in part.groups]
        assert len(groups) == 4
        for group in groups:
            trajectories = group.trajectories
            assert len(trajectories) == 2 * 2, "two samples, two branches each"
            for trajectory in trajectories:
                assert trajectory.reward == 0.5
                assert trajectory.versions[trajectory.loss_mask].tolist() == [0] * 4
        assert (await here.get("/v1/status"))["timing"]["generate_s"] > 0


async def test_a_session_from_outside_is_answered_and_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_TOKEN", TOKEN)
    async with world(tmp_path) as here, aiohttp.ClientSession(f"http://{here.http}") as http:
        await here.publish(PolicyVersion(1, 0))
        async with http.post("/v1/sessions", headers={"Authorization": f"Bearer {TOKEN}"}) as reply:
            session = await reply.json()
        async with openai.AsyncOpenAI(base_url=session["openai_base_url"], api_key=session["api_key"]) as client:
            await agent({"prompt": "sort 1="}, client)
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        async with http.post(f"/v1/sessions/{session['id']}/end", headers=headers, json={"reward": 1.0}) as reply:
            state = await reply.json()
        assert [trajectory["versions"][-4:] for trajectory in state["trajectories"]] == [[0] * 4] * 2
        assert (await here.get("/v1/status"))["tasks"]["submitted"] == 0


async def test_the_document_knows_what_each_call_of_a_session_needs(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        document = await here.get("/openapi.json")
        schemes = document["components"]["securitySchemes"]
        paths = document["paths"]
        assert {path for path in paths if "session" in path} == {
            "/v1/sessions",
            "/v1/sessions/{id}",
            "/v1/sessions/{id}/reward",
            "/v1/sessions/{id}/end",
        }
        needed = [need for path in paths.values() for call in path.values() for need in call.get("security", [])]
        assert {name for need in needed for name in need} <= set(schemes)
