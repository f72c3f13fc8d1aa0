"""Ids over the turns are exactly the engine's: kept when a client goes on, a new branch when it edits; trained on once.

Each answer is made by a version of its own here, so a trained token says which answer it is of.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.trajectory import NO_VERSION, Trajectory
from headway.gateway.calls import Chat, message_of
from headway.gateway.errors import SessionEnded
from headway.gateway.policy import Policy
from headway.gateway.render import ChatRenderer
from headway.gateway.sampling import Asked, Rule
from headway.gateway.session import Session
from headway.testing.scripted_policy import EOS, LOGPROB, CharacterTokenizer, ScriptedPolicy
from headway.workflow import GenerationHyperparameters, ModelRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
TOKENIZER = CharacterTokenizer()
Message = dict[str, Any]


@dataclass
class Client:
    """A client that keeps its history as messages, as agents do, and may edit it."""

    texts: list[str]
    """What the model will say."""
    engine: ScriptedPolicy = field(init=False)
    session: Session = field(init=False)
    messages: list[Message] = field(default_factory=list)
    said: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Input and output ids of each answer; its index is the version that made it."""
    asked: list[Message] = field(default_factory=list)
    """The messages of the last call."""

    def __post_init__(self) -> None:
        self.engine = ScriptedPolicy(self._next, step=-1)
        gconfig = GenerationHyperparameters(max_new_tokens=10**6)
        self.session = Session(Policy(self.engine, gconfig, TOKENIZER, ChatRenderer(TOKENIZER), Rule.CLIENT))

    def _next(self, request: ModelRequest) -> str:
        text = self.texts[len(self.said) % len(self.texts)]
        self.engine.step += 1
        self.said.append((list(request.input_ids), TOKENIZER.encode(text)))
        return text

    async def ask(self, text: str, count: int = 1, chosen: int = 0) -> None:
        last = self.messages[-1] if self.messages else {}
        role = "tool" if last.get("tool_calls") else "user"
        self.messages.append({"role": role, "content": text})
        self.asked = list(self.messages)
        chat = Chat(self.asked, [TOOL])
        answers = await self.session.answer(chat, f"a{len(self.said)}", count)
        self.messages.append(message_of(answers[chosen % count]))

    def edit(self, place: int, text: str) -> None:
        """Change one message, and forget what came after it, up to the end of an answer."""
        place %= len(self.messages)
        self.messages[place] = {**self.messages[place], "content": text}
        del self.messages[place + 1 + (place + 1) % 2 :]

    def go_back(self, turns: int) -> None:
        del self.messages[2 * turns :]


TEXT = st.text("ab \n", max_size=4)
SAID = st.sampled_from(
    ["yes" + chr(EOS), "no" + chr(EOS), " no \n" + chr(EOS), "cut of", CALL + chr(EOS), "", chr(EOS)]
)


def actions_with(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    ask = st.tuples(st.just("ask"), text, st.integers(1, 3), st.integers(0, 2))
    edit = st.tuples(st.just("edit"), st.integers(0, 20), text)
    go_back = st.tuples(st.just("go_back"), st.integers(0, 3))
    return st.lists(st.one_of(ask, edit, go_back), min_size=1, max_size=12)


async def play(client: Client, actions: list[tuple[Any, ...]]) -> None:
    await client.ask("begin")
    for name, *arguments in actions:
        if name == "ask":
            await client.ask(*arguments)
        elif client.messages:
            getattr(client, name)(*arguments)


def check_evidence(made: list[Trajectory], said: list[tuple[list[int], list[int]]]) -> None:
    """Each answer is trained on in exactly one place, after exactly the ids that the engine was given."""
    seen: dict[int, int] = {}
    for trajectory in made:
        mask = trajectory.loss_mask
        assert (trajectory.versions[~mask] == NO_VERSION).all()
        assert (trajectory.logprobs[~mask] == 0).all()
        assert (trajectory.logprobs[mask] == np.float32(LOGPROB)).all()
        for version in np.unique(trajectory.versions[mask]).tolist():
            assert version not in seen
            (places,) = np.nonzero(trajectory.versions == version)
            given_ids, made_ids = said[version]
            start = seen[version] = int(places[0])
            assert places.tolist() == list(range(start, start + len(made_ids)))
            assert trajectory.input_ids[: start + len(made_ids)].tolist() == given_ids + made_ids
    assert set(seen) == {version for version, (_, made_ids) in enumerate(said) if made_ids}


@given(st.lists(SAID, min_size=1, max_size=5), actions_with(TEXT))
@settings(max_examples=300)
def test_every_answer_is_trained_on_once_after_exactly_its_own_context(
    texts: list[str], actions: list[tuple[Any, ...]]
) -> None:
    client = Client(texts)
    asyncio.run(play(client, actions))
    check_evidence(client.session.trajectories(1.0), client.said)
    first = next(iter(client.session.transcript.turns))
    client.session.give_reward(1.0, first)
    check_evidence(client.session.trajectories(0.0), client.said)


@given(st.lists(SAID, min_size=1, max_size=5), st.lists(TEXT, min_size=1, max_size=8))
@settings(max_examples=100)
def test_a_client_that_only_goes_on_has_one_branch_without_drift(texts: list[str], questions: list[str]) -> None:
    client = Client(texts)

    async def talk() -> None:
        for question in questions:
            await client.ask(question)

    asyncio.run(talk())
    assert len(client.session.trajectories(1.0)) == 1
    assert client.session.num_drifts == 0
    for (before, made), (after, _) in zip(client.said, client.said[1:], strict=False):
        assert after[: len(before) + len(made)] == before + made


@given(
    st.lists(st.sampled_from(["yes" + chr(EOS), "cut of", CALL + chr(EOS)]), min_size=1, max_size=5),
    actions_with(st.text("ab", min_size=1, max_size=4)),
)
@settings(max_examples=100)
def test_what_is_told_is_what_the_chat_template_writes(texts: list[str], actions: list[tuple[Any, ...]]) -> None:
    """With one id a character and answers without stray white space, both ways to a prompt give the same ids."""
    client = Client(texts)
    asyncio.run(play(client, actions))
    rendered = TOKENIZER.apply_chat_template(client.asked, add_generation_prompt=True, tools=[TOOL])
    assert client.engine.requests[-1].input_ids == rendered


async def two_turns() -> Client:
    client = Client(["yes" + chr(EOS), "no" + chr(EOS), "so" + chr(EOS), "well" + chr(EOS)])
    await client.ask("one")
    await client.ask("two")
    return client


async def test_an_edited_answer_begins_a_branch_after_the_last_unedited_one() -> None:
    client = await two_turns()
    client.messages[3]["content"] = "never"
    await client.ask("three")
    newest, older = client.session.trajectories(1.0)
    assert client.session.num_drifts == 1
    assert newest.input_ids.tolist()[: len(client.said[0][0]) + 4] == client.said[0][0] + client.said[0][1]
    assert [int(t.loss_mask.sum()) for t in (newest, older)] == [4 + 3, 3], "the shared answer counts in the newest"


async def test_an_edited_question_begins_anew_and_old_answers_are_prompt() -> None:
    client = await two_turns()
    client.messages[0]["content"] = "other"
    await client.ask("three")
    newest, older = client.session.trajectories(1.0)
    assert [int(t.loss_mask.sum()) for t in (newest, older)] == [3, 4 + 3]
    assert "yes" in TOKENIZER.decode(newest.input_ids.tolist())


@pytest.mark.parametrize("change", [lambda m: {**m, "content": m["content"] + " \n"}, lambda m: {**m, "name": None}])
async def test_how_a_client_writes_an_answer_is_no_edit(change: Any) -> None:
    client = await two_turns()
    client.messages[3] = change(client.messages[3])
    await client.ask("three")
    assert len(client.session.trajectories(1.0)) == 1


async def test_other_tools_are_another_beginning() -> None:
    client = await two_turns()
    chat = Chat([*client.messages, {"role": "user", "content": "three"}], [])
    await client.session.answer(chat, "other")
    assert len(client.session.trajectories(1.0)) == 2


async def test_rewards_of_turns_become_returns() -> None:
    client = await two_turns()
    client.session.give_reward(0.5, "a0")
    client.session.give_reward(1.0, "a1")
    made = client.session.trajectories(2.0, turn_discount=0.5)
    assert [trajectory.reward for trajectory in made] == [0.5 + 0.5 * 3.0, 3.0]
    assert [int(trajectory.loss_mask.sum()) for trajectory in made] == [4, 3]


async def test_nothing_is_answered_after_the_end() -> None:
    client = await two_turns()
    client.session.end("over")
    with pytest.raises(SessionEnded, match="over"):
        await client.ask("three")
    assert len(client.session.trajectories(1.0)) == 1


async def test_completions_of_ids_continue_the_longest_known_ids() -> None:
    client = Client(["yes" + chr(EOS), "no" + chr(EOS)])
    await client.session.complete([65, 66], Asked(), "c0")
    known = [65, 66, *TOKENIZER.encode("yes"), EOS]
    await client.session.complete([*known, 67], Asked(), "c1")
    (trajectory,) = client.session.trajectories(1.0)
    assert trajectory.input_ids.tolist() == [*known, 67, *TOKENIZER.encode("no"), EOS]
    assert int(trajectory.loss_mask.sum()) == 4 + 3
