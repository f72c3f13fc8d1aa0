"""What the reward service remembers is bounded, and right: answers, items that kill workers, slow items."""

from headway.v1 import reward_pb2 as pb
from services.reward.memory import Account, AnswerCache, Strikes, item_key
from services.reward.scoring import weighted_sum


def test_the_cache_keeps_the_newest_answers() -> None:
    cache = AnswerCache(capacity=2)
    for number in range(3):
        cache.put(bytes([number]), pb.ScoreResult(reward=number))
        cache.get(b"\0")
    assert [cache.get(bytes([number])) is not None for number in range(3)] == [True, False, True]
    assert len(cache) == 2


def test_an_item_is_quarantined_after_three_strikes() -> None:
    strikes = Strikes(capacity=10)
    for count in range(3):
        assert not strikes.is_quarantined(b"a"), count
        strikes.add(b"a", "0/17")
    assert strikes.is_quarantined(b"a")
    assert not strikes.is_quarantined(b"b")
    assert strikes.quarantined() == ["0/17"]


def test_strikes_are_bounded() -> None:
    strikes = Strikes(capacity=10)
    for number in range(1000):
        strikes.add(str(number).encode(), "")
    strikes.add(b"999", "")
    strikes.add(b"999", "x")
    assert strikes.quarantined() == ["x"]


def test_the_key_depends_on_everything_that_the_result_depends_on() -> None:
    base = {"prompt": "p", "completion": "c", "prompt_ids": b"1", "completion_ids": b"2", "data_json": b"{}"}
    keys = {item_key("f", pb.ScoreItem(**base)), item_key("g", pb.ScoreItem(**base))}
    keys |= {item_key("f", pb.ScoreItem(**(base | {name: value + value}))) for name, value in base.items()}
    moved = base | {"prompt": "pc", "completion": ""}
    assert len(keys | {item_key("f", pb.ScoreItem(**moved))}) == 8
    assert item_key("f", pb.ScoreItem(item_id="x", **base)) in keys


def test_the_ten_slowest_are_kept_longest_first() -> None:
    account = Account()
    for number in range(100):
        result = pb.ScoreResult(item_id=str(number), status=pb.SCORE_STATUS_OK, elapsed_s=(number * 37) % 100)
        account.add("math", result)
    assert [item.elapsed_s for item in account.slowest()] == list(range(99, 89, -1))
    assert account.num_by_status == {"ok": 100}
    assert account.slowest()[0].item_id == "27"


def test_a_sum_with_a_failed_part_is_no_reward() -> None:
    good = pb.ScoreResult(status=pb.SCORE_STATUS_OK, reward=1.0, elapsed_s=1)
    bad = pb.ScoreResult(status=pb.SCORE_STATUS_TIMEOUT, message="too slow", elapsed_s=2)
    total = weighted_sum({"math": 1.0, "format": 0.25}, {"math": bad, "format": good})
    assert (total.status, total.reward, total.message) == (pb.SCORE_STATUS_TIMEOUT, 0.0, "math: too slow")
    total = weighted_sum({"math": 1.0, "format": -0.25}, {"math": good, "format": good})
    assert (total.status, total.reward, total.elapsed_s) == (pb.SCORE_STATUS_OK, 0.75, 2)
    assert dict(total.parts) == {"math": 1.0, "format": 1.0}
