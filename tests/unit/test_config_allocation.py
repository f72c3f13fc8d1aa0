"""`allocation_mode` is read as AReaL writes it, and every mistake points at its character."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Allocation, AllocationError, Dims
from headway.config.allocation import parse_inference, parse_training

COUNTS = st.dictionaries(st.sampled_from("dtp"), st.integers(1, 64), min_size=1)


def spelt(counts: dict[str, int]) -> str:
    return "".join(f"{letter}{count}" for letter, count in counts.items())


@given(COUNTS, COUNTS, st.sampled_from(["sglang", "vllm"]), st.sampled_from(["", "fsdp:"]), st.sampled_from("+|"))
def test_what_is_written_is_read(
    inference: dict[str, int], training: dict[str, int], engine: str, backend: str, sign: str
) -> None:
    training.pop("p", None)
    training.setdefault("d", 1)
    found = Allocation.parse(f"{engine}:{spelt(inference)}{sign}{backend}{spelt(training)}")
    assert found.engine == engine
    assert found.inference == Dims(inference.get("d", 1), inference.get("t", 1), inference.get("p", 1))
    assert found.training == Dims(training.get("d", 1), training.get("t", 1))
    assert found.is_colocated == (sign == "|")


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        ("sglang:d4p1t1+d4p1t1", 8),
        ("sglang:d2t2+fsdp:d3", 7),
        ("vllm:d2p2|d4", 4),
        ("sglang:d1+d2c2", 5),
        ("sglang:d1e1+d2", 3),
    ],
)
def test_devices_are_counted_together_or_shared(mode: str, devices: int) -> None:
    assert Allocation.parse(mode).num_devices == devices


@pytest.mark.parametrize(
    ("mode", "position", "why"),
    [
        ("", 0, "training half is missing"),
        ("sglang:d4", 9, "training half is missing"),
        ("sglang:d4+", 10, "dims are missing"),
        ("sglang:+d4", 7, "dims are missing"),
        ("sglang:d4+d4+d4", 12, "one inference half and one training half"),
        ("sglang:x4+d4", 7, "'x' is no kind of parallelism"),
        ("sglang:d4+d2y2", 12, "'y' is no kind of parallelism"),
        ("sglang:d0+d4", 8, "a count of at least 1"),
        ("sglang:dt4+d4", 8, "a count of at least 1"),
        ("sglang:d4+d4d2", 12, "given twice"),
        ("d4+d4", 0, "no inference engine"),
        ("tgi:d4+d4", 0, "no inference engine"),
        ("sglang.d4+d4", 6, "write a colon"),
        ("sglang:d4c2+d4", 9, "is for training"),
        ("sglang:d4e2+d4", 9, "sglang.ep_size"),
        ("sglang:d4+d2p2t2", 12, "nearest that works: `d4t2`"),
        ("sglang:d4+d2e2", 12, "no expert parallelism"),
        ("sglang:d4+megatron:d4", 10, "nearest that works: `fsdp:`"),
        ("sglang:d4+archon:d4", 10, "nearest that works: `fsdp:`"),
        ("sglang:d4+sglang:d4", 10, "it does not train"),
        ("sglang:d4+ddp:d4", 10, "no training backend"),
        ("sglang:d4 + d4", 9, "' ' is no kind of parallelism"),
    ],
)
def test_a_mistake_points_at_its_character(mode: str, position: int, why: str) -> None:
    with pytest.raises(AllocationError) as caught:
        Allocation.parse(mode)
    assert (caught.value.position, why in caught.value.why) == (position, True)
    *_, text, arrow = str(caught.value).splitlines()
    assert (text.strip(), arrow.index("^") - 4) == (mode, position)


@given(st.text(alphabet="sglanvfdptce:+|.0123456789 ", max_size=24))
def test_no_text_ends_in_anything_but_an_allocation_or_its_error(mode: str) -> None:
    with contextlib.suppress(AllocationError):
        assert Allocation.parse(mode).num_devices >= 1


def test_the_halves_can_be_read_alone() -> None:
    assert parse_inference("vllm:d2t4") == ("vllm", Dims(2, 4))
    assert parse_training("fsdp:d8") == Dims(8)
