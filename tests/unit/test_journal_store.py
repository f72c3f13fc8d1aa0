"""What is acknowledged is on disk; records are checked, batches keep their order, ids are never forgotten."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.core.ledger import Failure, TaskState
from headway.core.trajectory import Outcome
from services.rollout_controller.journal import PAGE_BYTES, Journal
from services.rollout_controller.journal_store import GroupRecord, JournalBroken, JournalStore


def group(task_id: str, payload: bytes = b"payload", version: int = 0) -> GroupRecord:
    return GroupRecord(task_id, 1, version, {version: 7}, b'{"row": 1}', payload)


def damage(path: Path, task_id: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(
            "UPDATE payloads SET payload = ? WHERE id = (SELECT id FROM groups WHERE task_id = ?)", (b"torn", task_id)
        )
    db.close()


class Store(RuleBasedStateMachine):
    """A store that is closed and opened again at any time, beside a plain model of what it holds."""

    @initialize()
    def begin(self) -> None:
        self.store = JournalStore(":memory:")
        self.ready: dict[str, bytes] = {}
        self.batches: dict[int, dict[str, bytes]] = {}
        self.committed: set[int] = set()
        self.ended: set[str] = set()
        self.next_row = self.next_step = 0

    @rule(payload=st.binary(max_size=20))
    def append(self, payload: bytes) -> None:
        name = f"0/{self.next_row}"
        self.next_row += 1
        with self.store.transaction():
            self.store.append(group(name, payload))
        self.ready[name] = payload

    @rule()
    def append_but_fail(self) -> None:
        with pytest.raises(ZeroDivisionError), self.store.transaction():
            self.store.append(group("never"))
            raise ZeroDivisionError

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ready)))
        with self.store.transaction():
            self.store.discard([name])
        del self.ready[name]

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        names = data.draw(st.permutations(sorted(self.ready)))[: data.draw(st.integers(0, 3))]
        with self.store.transaction():
            self.store.lease(self.next_step, names, {"num_groups": len(names)})
        self.batches[self.next_step] = {name: self.ready.pop(name) for name in names}
        self.next_step += 1

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.batches)))
        with self.store.transaction():
            self.store.commit(step, {"reward": step / 2})
        self.committed.add(step)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.batches)))
        with self.store.transaction():
            self.store.skip(step)
        self.ended |= self.batches.pop(step).keys()

    @rule(step=st.integers(0, 20))
    def forget_before(self, step: int) -> None:
        with self.store.transaction():
            self.store.forget_before(step)
        for old in [known for known in self.batches if known < step and known in self.committed]:
            self.ended |= self.batches.pop(old).keys()

    @rule()
    def end(self) -> None:
        name = f"0/{self.next_row}"
        self.next_row += 1
        with self.store.transaction():
            self.store.fail(Failure(name, 1, Outcome.SERVER_LOST, "gone"))
            assert self.store.failures([name]) == [Failure(name, 1, Outcome.SERVER_LOST, "gone")]
            self.store.end(name, TaskState.QUARANTINED, "why")
        self.ended.add(name)

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        recovered = self.store.recover()
        assert [ready.task_id for ready in recovered.ready] == [*self.ready]
        stored = {step.step: step for step in recovered.steps if step.step in self.batches}
        assert {step: [*names] for step, names in self.batches.items()} == {
            step: [*stored[step].task_ids] for step in stored
        }
        assert {step.step for step in recovered.steps if step.is_committed} >= self.committed & self.batches.keys()
        for step, names in self.batches.items():
            assert [self.store.payload(number)[0] for number in self.store.ids_of(step)] == [*names.values()]
        leased = {name for names in self.batches.values() for name in names}
        everything = [f"0/{row}" for row in range(self.next_row)]
        assert self.store.known(everything) == self.ready.keys() | leased | self.ended
        assert sum(recovered.num_ended.values()) == len(self.ended)
        assert self.store.failures(everything) == []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30)


async def test_an_awaited_write_can_be_read_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with Journal(path) as journal:
        await journal.write(lambda store: store.append(group("0/0")))
        other = JournalStore(path)
        assert other.known(["0/0"]) == {"0/0"}
        other.close()


async def test_writes_take_effect_in_order_and_many_share_a_transaction(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.sqlite") as journal:
        writes = [
            journal.write(lambda store, row=row: store.append(group(f"0/{row}", b"%d" % row))) for row in range(300)
        ]
        names = [f"0/{row}" for row in reversed(range(300))]
        writes.append(journal.write(lambda store: store.lease(0, names, {})))
        await asyncio.gather(*writes)
        found = [payload async for page in journal.pages(0) for payload, _ in page]
        assert found == [b"%d" % row for row in reversed(range(300))]


async def test_a_batch_is_read_in_pages_of_bounded_size_and_whole(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.sqlite") as journal:
        sizes = [10, PAGE_BYTES, PAGE_BYTES // 2, PAGE_BYTES // 2 - 1, 1, 7]
        for row, size in enumerate(sizes):
            journal.write(lambda store, row=row, size=size: store.append(group(f"0/{row}", bytes([row]) * size)))
        await journal.write(lambda store: store.lease(0, [f"0/{row}" for row in range(len(sizes))], {}))
        pages = [[payload[0] for payload, _ in page] async for page in journal.pages(0)]
        assert pages == [[0, 1], [2, 3, 4], [5]]


async def test_leaving_writes_what_is_queued(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with Journal(path) as journal:
        write = journal.write(lambda store: store.append(group("0/0")))
    assert write.done()
    async with Journal(path) as journal:
        assert await journal.read(lambda store: store.known(["0/0"])) == {"0/0"}


async def test_a_write_that_fails_is_raised_to_who_waits_and_changes_nothing(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.sqlite") as journal:
        await journal.write(lambda store: store.append(group("0/0")))
        with pytest.raises(JournalBroken, match="UNIQUE"):
            await journal.write(lambda store: store.append(group("0/0")))
        with pytest.raises(JournalBroken, match="ZeroDivisionError"):
            await journal.write(lambda store: 1 // 0)
        await journal.write(lambda store: store.append(group("0/1")))
        assert await journal.read(lambda store: store.known(["0/0", "0/1"])) == {"0/0", "0/1"}


async def test_a_damaged_ready_group_is_dropped_so_that_its_task_can_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with Journal(path) as journal:
        for row in range(3):
            await journal.write(lambda store, row=row: store.append(group(f"0/{row}")))
    damage(path, "0/1")
    async with Journal(path) as journal:
        recovered = await journal.write(lambda store: store.recover())
        assert recovered.damaged == ["0/1"]
        assert [ready.task_id for ready in recovered.ready] == ["0/0", "0/2"]
        assert await journal.read(lambda store: store.known(["0/1"])) == set()


async def test_a_damaged_group_of_a_batch_is_never_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with Journal(path) as journal:
        await journal.write(lambda store: store.append(group("0/0")))
        await journal.write(lambda store: store.lease(0, ["0/0"], {}))
    damage(path, "0/0")
    async with Journal(path) as journal:
        with pytest.raises(JournalBroken, match="0/0 does not match"):
            [page async for page in journal.pages(0)]


async def test_a_journal_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with Journal(path):
        with pytest.raises(JournalBroken, match="another rollout controller runs this trial"):
            async with Journal(path):
                pass
    async with Journal(path):
        pass


async def test_another_format_and_no_journal_at_all_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    store = JournalStore(path)
    store.set_meta("format", "99")
    store.close()
    with pytest.raises(JournalBroken, match="format 99"):
        JournalStore(path)
    (tmp_path / "text").write_text("no database" * 1000)
    with pytest.raises(JournalBroken, match="not a database"):
        JournalStore(tmp_path / "text")


def test_a_cleared_journal_still_knows_the_leader() -> None:
    store = JournalStore(":memory:")
    store.set_meta("fencing_token", "7")
    store.append(group("0/0"))
    store.clear()
    recovered = store.recover()
    assert (recovered.fencing_token, recovered.ready, recovered.steps) == (7, [], [])
    store.close()
