"""Read `allocation_mode`: which engine generates, which backend trains, and on how many devices.

    sglang:d4p1t1+d4p1t1
    \\____/ \\____/ \\____/
    engine  dims   training: [fsdp:]dims            a|b instead of a+b: the same devices (colocation)

    d data, t tensor, p pipeline, c context, e expert

Every mistake is an `AllocationError` that points at its character.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from headway.errors import InvalidInput

Engine = Literal["sglang", "vllm"]
ENGINES: tuple[Engine, ...] = ("sglang", "vllm")
LETTERS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


class AllocationError(InvalidInput):
    """`allocation_mode` cannot be read or cannot run; `position` is the offending character, from 0."""

    def __init__(self, text: str, position: int, why: str) -> None:
        self.text = text
        self.position = position
        self.why = why
        super().__init__(f"{why}\n    {text}\n    {' ' * position}^")


@dataclass(frozen=True)
class Dims:
    """How many devices work in each kind of parallelism."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Allocation:
    """Who runs on what."""

    engine: Engine
    inference: Dims
    training: Dims
    is_colocated: bool = False

    @property
    def num_servers(self) -> int:
        """Inference services to start: one for each data-parallel replica."""
        return self.inference.data

    @property
    def num_devices(self) -> int:
        """Devices of inference and training together."""
        sizes = (self.inference.world_size, self.training.world_size)
        return max(sizes) if self.is_colocated else sum(sizes)

    @classmethod
    def parse(cls, text: str) -> "Allocation":
        """Read a whole allocation mode.

        Raises:
            AllocationError: With the position of the character that is wrong.

        Example:
            >>> Allocation.parse("sglang:d4p1t1+d4p1t1").num_devices
            8
        """
        cut = _cut(text)
        engine, inference = parse_inference(text[:cut], text=text)
        training = parse_training(text[cut + 1 :], text=text, start=cut + 1)
        return cls(engine, inference, training, is_colocated=text[cut] == "|")


def parse_inference(part: str, *, text: str | None = None) -> tuple[Engine, Dims]:
    """Read `sglang:d4t1`.

    Raises:
        AllocationError: With the position of the character that is wrong.
    """
    text = part if text is None else text
    name, start = _backend(part, text, 0)
    if name not in ENGINES:
        raise AllocationError(text, 0, f"{name or part!r} is no inference engine; write `sglang:` or `vllm:` first")
    counts = _counts(part[start:], text, start)
    if counts.pop("e", 1) > 1:
        raise AllocationError(text, text.index("e", start), "experts of an engine are its own flag: set sglang.ep_size")
    dims = _dims(counts)
    if dims.context > 1:
        raise AllocationError(
            text, text.index("c", start), "context parallelism is for training; engines have d, t and p"
        )
    engine: Engine = "sglang" if name == "sglang" else "vllm"
    return engine, dims


def parse_training(part: str, *, text: str | None = None, start: int = 0) -> Dims:
    """Read `d4t1` or `fsdp:d4t1`.

    Raises:
        AllocationError: With the position of the character that is wrong.
    """
    text = part if text is None else text
    name, offset = _backend(part, text, start)
    if name not in ("", "fsdp"):
        raise AllocationError(text, start, _why_not_backend(name))
    begin = start + offset
    counts = _counts(part[offset:], text, begin)
    if counts.pop("e", 1) > 1:
        why = "training has no expert parallelism; FSDP shards experts like everything else: leave out e"
        raise AllocationError(text, text.index("e", begin), why)
    dims = _dims(counts)
    if dims.pipeline > 1:
        why = f"training has no pipeline parallelism; nearest that works: `d{dims.data * dims.pipeline}t{dims.tensor}`"
        raise AllocationError(text, text.index("p", begin), why)
    return dims


def _cut(text: str) -> int:
    """Position of the one `+` or `|`."""
    cuts = [i for i, character in enumerate(text) if character in "+|"]
    if not cuts:
        raise AllocationError(text, len(text), "the training half is missing; add for example `+d1`")
    if len(cuts) > 1:
        raise AllocationError(text, cuts[1], "one inference half and one training half are meant, there are more")
    return cuts[0]


def _backend(part: str, text: str, start: int) -> tuple[str, int]:
    """The name before `:` ("" where there is none), and where the dims begin within the part."""
    if (dot := part.find(".")) >= 0 and ":" not in part:
        raise AllocationError(text, start + dot, "older files write a dot here; write a colon")
    name, colon, _ = part.partition(":")
    return (name, len(name) + 1) if colon else ("", 0)


def _why_not_backend(name: str) -> str:
    if name in ("megatron", "archon"):
        return f"{name} is not a training backend here; nearest that works: `fsdp:` with the same d and t"
    if name in ENGINES:
        return f"{name} generates, it does not train; the training half is `d4` or `fsdp:d4`"
    return f"{name!r} is no training backend; write `fsdp:`, or the dims alone"


def _dims(counts: dict[str, int]) -> Dims:
    return Dims(**{LETTERS[letter]: count for letter, count in counts.items()})


def _counts(part: str, text: str, start: int) -> dict[str, int]:
    """The count of each letter in `d4t1`."""
    if not part:
        raise AllocationError(text, start, "dims are missing; write for example `d4t1`")
    counts: dict[str, int] = {}
    position = 0
    while position < len(part):
        letter = part[position]
        where = start + position
        if letter not in LETTERS:
            raise AllocationError(text, where, f"{letter!r} is no kind of parallelism; known: d, t, p, c, e")
        if letter in counts:
            raise AllocationError(text, where, f"{letter!r} is given twice")
        digits = "".join(takewhile(str.isdecimal, part[position + 1 :]))
        if not digits or int(digits) == 0:
            raise AllocationError(text, where + 1, f"a count of at least 1 must follow {letter!r}")
        counts[letter] = int(digits)
        position += 1 + len(digits)
    return counts
