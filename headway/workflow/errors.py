"""Why a rollout failed, and the one Outcome that each failure counts as.

    RewardTimeout     reward_timeout      a reward call ran past its limit
    RewardFailed      reward_error        a reward call raised, died, or gave no finite number
    ServerLost        server_lost         no server could continue a request
    EvidenceInvalid   evidence_invalid    a reply's lengths, log-probs or versions contradict each other
    CancelledError    cancelled           withdrawn
    anything else     workflow_error      the workflow, or the data that it was given; PromptTooLong is one of them

None of them ever becomes a reward.
"""

import asyncio

from headway.core.trajectory import Outcome
from headway.errors import HeadwayError, InvalidInput, TimedOut, Unavailable


class RewardTimeout(TimedOut):
    """A reward call ran past its limit."""


class RewardFailed(HeadwayError):
    """A reward call raised, lost its worker, or returned something that is no finite number."""


class ServerLost(Unavailable):
    """No server could continue a request: those that were tried failed, or made no progress."""


class PromptTooLong(InvalidInput):
    """A prompt leaves no room in the context for a single token."""


class EvidenceInvalid(HeadwayError):
    """A server's reply contradicts itself or what is known; nothing of it may be trained on."""

    grpc_code = "DATA_LOSS"
    http_status = 502


def outcome_of(error: BaseException) -> Outcome:
    """The reason in which a rollout that raised `error` ends.

    Example:
        >>> outcome_of(RewardTimeout("answer_matches took longer than 15 s"))
        <Outcome.REWARD_TIMEOUT: 'reward_timeout'>
    """
    kinds: tuple[tuple[type[BaseException], Outcome], ...] = (
        (RewardTimeout, Outcome.REWARD_TIMEOUT),
        (RewardFailed, Outcome.REWARD_ERROR),
        (ServerLost, Outcome.SERVER_LOST),
        (EvidenceInvalid, Outcome.EVIDENCE_INVALID),
        (asyncio.CancelledError, Outcome.CANCELLED),
    )
    return next((outcome for kind, outcome in kinds if isinstance(error, kind)), Outcome.WORKFLOW_ERROR)
