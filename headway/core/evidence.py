"""Decide whether a server's reply may be believed: what it says of each token, and of the versions that made them.

    equal lengths      as many log-probs as tokens, and the spans of versions cover exactly the tokens
    real log-probs     finite, not positive, not the -9999 that stands for "none"
    real ids           inside the vocabulary
    known versions     labels of versions that were published; never falling, neither within a reply nor over the pieces

The objective's importance weights and the staleness bound rest on behaviour log-probabilities and versions. A reply
that contradicts itself is refused whole; a guess in its place would be a silently wrong gradient.

Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from headway.core.version import PolicyVersion

MAX_LOGPROB = 1e-3
"""A log-probability is never positive; rounding in low precision is allowed for."""
MIN_LOGPROB = -1000.0
"""No sampled token is so unlikely; engines write such numbers where they have none."""


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens [start, end) were made by the version of this label."""

    label: str
    start: int
    end: int


class Contradiction(ValueError):
    """A reply cannot be believed; the message says why."""


def check_tokens(ids: Sequence[int], logprobs: Sequence[float], vocabulary: int | None) -> None:
    """Check a piece's tokens and log-probabilities.

    Raises:
        Contradiction: See the module's list.
    """
    if len(ids) != len(logprobs):
        raise Contradiction(f"{len(ids)} tokens came with {len(logprobs)} log-probs")
    if not ids:
        return
    try:
        total, highest, lowest = sum(logprobs), max(logprobs), min(logprobs)
    except TypeError:
        raise Contradiction("a log-prob is no number") from None
    if not isfinite(total):
        raise Contradiction("a log-prob is not finite")
    if highest > MAX_LOGPROB or lowest < MIN_LOGPROB:
        raise Contradiction(f"log-probs range from {lowest:.6g} to {highest:.6g}; no sampled token has such")
    if min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary):
        raise Contradiction(f"token ids range from {min(ids)} to {max(ids)}, the vocabulary has {vocabulary}")


def versions_of(
    spans: Sequence[Span],
    num_tokens: int,
    is_known: Callable[[PolicyVersion], bool],
    not_before: PolicyVersion | None = None,
) -> list[tuple[PolicyVersion, int]]:
    """The version of each token, run by run: [(version, number of tokens)], in order.

    Raises:
        Contradiction: The spans do not cover the tokens, or name versions that are unknown or fall.
    """
    runs: list[tuple[PolicyVersion, int]] = []
    at, last = 0, not_before
    for span in spans:
        if span.start != at or span.end < span.start:
            raise Contradiction(f"version spans leave a gap or overlap at token {at}")
        version = _version(span.label, is_known)
        if last is not None and version < last:
            raise Contradiction(f"versions fall from {last.label} to {version.label} within a sample")
        runs.append((version, span.end - span.start))
        at, last = span.end, version
    if at != num_tokens:
        raise Contradiction(f"version spans cover {at} of {num_tokens} tokens")
    return runs


def _version(label: str, is_known: Callable[[PolicyVersion], bool]) -> PolicyVersion:
    try:
        version = PolicyVersion.parse(label)
    except ValueError as error:
        raise Contradiction(f"a server reports weights {error}") from None
    if not is_known(version):
        raise Contradiction(f"a server reports {label}, a version that was never published")
    return version
