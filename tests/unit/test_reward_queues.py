"""Items leave the queues oldest first, as many at once as take a few milliseconds, and none is lost or doubled."""

from hypothesis import given
from hypothesis import strategies as st

from headway.v1 import reward_pb2 as pb
from services.reward.queues import CHUNK_S, MAX_CHUNK, Job, Queue, Queues


def job(function: str) -> Job:
    return Job(function, "", b"", 1.0, lambda job, result: None)


def queues(**typical_s: float) -> Queues:
    return Queues({name: Queue(seconds) for name, seconds in typical_s.items()}, num_workers=2)


def test_tiny_items_travel_together_and_slow_ones_alone() -> None:
    waiting = queues(tiny=1e-5, slow=0.05, middle=0.001)
    waiting.push([job(name) for name in ("tiny", "slow", "middle") for _ in range(40)])
    assert [len(waiting.take(name)) for name in ("tiny", "slow", "middle")] == [40, 1, 20]


def test_a_few_items_are_shared_between_the_workers() -> None:
    waiting = queues(middle=0.001)
    waiting.push([job("middle") for _ in range(4)])
    assert [len(waiting.take("middle")), len(waiting.take("middle"))] == [2, 1]


def test_the_oldest_item_decides_whose_turn_it_is() -> None:
    waiting = queues(a=1.0, b=1.0)
    waiting.push([job("b"), job("a"), job("b")])
    assert [waiting.take(waiting.next_function() or "")[0].function for _ in range(3)] == ["b", "a", "b"]
    assert waiting.next_function() is None


def test_measured_times_replace_the_guess() -> None:
    waiting = queues(guessed=1e-5)
    for _ in range(200):
        waiting["guessed"].measured(0.1, 0.1)
    waiting.push([job("guessed") for _ in range(10)])
    assert len(waiting.take("guessed")) == 1


@given(st.lists(st.sampled_from("abc")), st.lists(st.booleans()))
def test_every_item_is_handed_out_once_in_its_functions_order(pushed: list[str], returned: list[bool]) -> None:
    waiting = queues(a=1e-5, b=0.001, c=1.0)
    jobs = [job(name) for name in pushed]
    waiting.push(jobs)
    done: list[Job] = []
    give_back = iter(returned)
    while (function := waiting.next_function()) is not None:
        taken = waiting.take(function)
        assert 0 < len(taken) <= MAX_CHUNK
        assert len(taken) == 1 or len(taken) * waiting[function].typical_s <= CHUNK_S * 1.01
        if next(give_back, False):
            waiting.push_back(taken[1:])
            taken = taken[:1]
        done += taken
    assert waiting.num_waiting == 0
    for name in "abc":
        assert [one for one in done if one.function == name] == [one for one in jobs if one.function == name]


def test_a_job_answers_through_its_callback() -> None:
    heard: list[pb.ScoreResult] = []
    one = Job("a", "7", b"", 1.0, lambda job, result: heard.append(result))
    one.done(one, pb.ScoreResult(reward=0.5))
    assert [result.reward for result in heard] == [0.5]
