"""A reply that cannot be believed ends its sample, and no other one, as evidence_invalid, with the reason."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_harness import V1, Rig, check_evidence, rig_of, soon

from headway.core.trajectory import Outcome
from headway.workflow.errors import EvidenceInvalid, outcome_of

Edit = Callable[[dict[str, Any]], dict[str, Any] | bytes]


def meta(**changes: Any) -> Edit:
    """Change the event's meta_info."""
    return lambda event: {**event, "meta_info": {**event["meta_info"], **changes}}


def logprob(value: Any) -> Edit:
    """Change the log-prob of the first token."""

    def edit(event: dict[str, Any]) -> dict[str, Any]:
        triples = event["meta_info"]["output_token_logprobs"]
        return meta(output_token_logprobs=[[value, *triples[0][1:]], *triples[1:]])(event)

    return edit


def span(*spans: tuple[str, int, int]) -> Edit:
    return meta(weight_versions=[{"version": label, "start": start, "end": end} for label, start, end in spans])


EDITS: dict[str, tuple[Edit, str]] = {
    "no log-prob": (logprob(None), "a log-prob is no number"),
    "the log-prob that stands for none": (logprob(-9999.0), "range from -9999"),
    "a positive log-prob": (logprob(1.5), "to 1.5"),
    "not a number": (lambda event: str(event["meta_info"]).encode(), "unreadable event"),
    "NaN, which is no JSON": (
        lambda event: (
            b'{"index":0,"meta_info":{"completion_tokens":1,"output_token_logprobs":[[NaN,5,null]],'
            b'"finish_reason":{"type":"length"},"weight_versions":[{"version":"v1.0","start":0,"end":1}]}}'
        ),
        "not finite",
    ),
    "a count that does not fit": (meta(completion_tokens=7), "an event brings 10 tokens to 0"),
    "an id outside the vocabulary": (
        lambda event: meta(output_token_logprobs=[[-0.1, 512, None]] * 10)(event),
        "token ids range from 512",
    ),
    "an unknown version": (span(("v1.7", 0, 10)), r"v1\.7, a version that was never published"),
    "weights that were never named": (span(("default", 0, 10)), "'default'"),
    "a version for some of the tokens": (span(("v1.0", 0, 9)), "cover 9 of 10"),
    "versions that overlap": (span(("v1.0", 0, 9), ("v1.0", 8, 10)), "gap or overlap"),
    "no version at all": (meta(weight_versions=None, weight_version=None), "names no version"),
    "an unknown end": (meta(finish_reason={"type": "vanished"}), "unknown finish reason"),
    "no meta_info": (lambda event: {"text": ""}, "KeyError"),
    "an index of nobody": (lambda event: {**event, "index": 5}, "IndexError"),
    "no object": (lambda event: b"[]", "unreadable event"),
}


async def run(rig: Rig) -> None:
    running = rig.start()
    await soon(rig.engines["0"].model.wait_for_requests(1))
    rig.engines["0"].model.finish_all()
    check_evidence(await soon(running))


@pytest.mark.parametrize("name", EDITS)
async def test_a_reply_that_contradicts_itself_is_refused(name: str, tmp_path: Path) -> None:
    edit, reason = EDITS[name]
    async with rig_of(tmp_path, "sglang") as rig:
        rig.engines["0"].script.edit_event = edit
        with pytest.raises(EvidenceInvalid, match=reason) as caught:
            await run(rig)
        assert rig.engines["0"].url in str(caught.value)
        assert outcome_of(caught.value) is Outcome.EVIDENCE_INVALID


async def test_versions_that_fall_are_refused(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        rig.publish(V1)
        await soon(rig.fleet.move_to(V1))
        rig.engines["0"].script.edit_event = span(("v1.1", 0, 4), ("v1.0", 4, 10))
        with pytest.raises(EvidenceInvalid, match=r"fall from v1\.1 to v1\.0"):
            await run(rig)


async def test_one_bad_item_does_not_spoil_its_batch(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        engine = rig.engines["0"]
        engine.script.edit_event = lambda event: logprob(None)(event) if event["index"] == 1 else event
        running = [rig.start() for _ in range(3)]
        await soon(engine.model.wait_for_requests(3))
        engine.model.finish_all()
        results = await soon(asyncio.gather(*running, return_exceptions=True))
        assert [isinstance(result, EvidenceInvalid) for result in results] == [False, True, False]


async def test_a_server_is_believed_again_once_it_was_verified(tmp_path: Path) -> None:
    async with rig_of(tmp_path, "sglang") as rig:
        rig.engines["0"].script.edit_event = logprob(None)
        for _ in range(2):
            with pytest.raises(EvidenceInvalid):
                await run(rig)
        rig.engines["0"].script.edit_event = lambda event: event
        await run(rig)
