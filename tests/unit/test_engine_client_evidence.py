"""A reply that contradicts itself is refused, with the reason; one that does not keeps each token's version."""

from math import inf, nan

import pytest

from headway.core.evidence import Contradiction, Span, check_tokens, versions_of
from headway.core.version import PolicyVersion

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))


def is_known(version: PolicyVersion) -> bool:
    return version in (V1, V2, V3)


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason"),
    [
        ([5, 6], [-0.1], "2 tokens came with 1 log-probs"),
        ([5], [nan], "not finite"),
        ([5], [-inf], "not finite"),
        ([5, 6], [inf, -inf], "not finite"),
        ([5], [None], "no number"),
        ([5], [-9999.0], "range from -9999"),
        ([5], [0.5], "to 0.5"),
        ([512], [-0.1], "the vocabulary has 512"),
        ([-1], [-0.1], "token ids range from -1"),
    ],
)
def test_tokens_that_cannot_be_are_refused(ids: list[int], logprobs: list[float], reason: str) -> None:
    with pytest.raises(Contradiction, match=reason):
        check_tokens(ids, logprobs, vocabulary=512)


def test_certain_and_unlikely_tokens_are_believed() -> None:
    check_tokens([0, 511, 3], [0.0, -40.0, 1e-6], vocabulary=512)
    check_tokens([], [], vocabulary=512)


def test_each_run_of_tokens_keeps_its_version() -> None:
    spans = [Span("v1.1", 0, 3), Span("v1.2", 3, 3), Span("v1.3", 3, 5)]
    assert versions_of(spans, 5, is_known) == [(V1, 3), (V2, 0), (V3, 2)]


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([Span("v1.1", 0, 2)], "cover 2 of 5"),
        ([Span("v1.1", 0, 2), Span("v1.2", 3, 5)], "gap or overlap at token 2"),
        ([Span("v1.1", 0, 3), Span("v1.2", 2, 5)], "gap or overlap at token 3"),
        ([Span("v1.2", 0, 2), Span("v1.1", 2, 5)], "fall from v1.2 to v1.1"),
        ([Span("default", 0, 5)], "'default'"),
        ([Span("v1.9", 0, 5)], "v1.9, a version that was never published"),
        ([], "cover 0 of 5"),
    ],
)
def test_spans_that_cannot_be_are_refused(spans: list[Span], reason: str) -> None:
    with pytest.raises(Contradiction, match=reason):
        versions_of(spans, 5, is_known)


def test_versions_never_fall_from_piece_to_piece() -> None:
    with pytest.raises(Contradiction, match=r"fall from v1\.3 to v1\.2"):
        versions_of([Span("v1.2", 0, 1)], 1, is_known, not_before=V3)
