"""One trainer leads. The others wait, warm: model and data are loaded, and an election is all that is missing.

Guarantee (I7): what a trainer does carries the fencing token of its leadership. Once a later leader exists, publishing
is refused by name-resolve, fetching and committing by the controller. A trainer that hears of its own end stops at
once; one that was frozen past its lease and wakes finds every door closed. Its checkpoints bear its own term and hide
no later one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from headway.errors import StaleVersion
from headway.runtime.names import NameClient
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits

OFFICE = "leader/trainer"
LEASE_S = 10.0
"""A leader that is silent for so long is succeeded."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Office:
    """A leadership that was won."""

    fencing_token: int
    term: int


@asynccontextmanager
async def leading(names: NameClient, candidate: str, waits: Waits, supervisor: Supervisor) -> AsyncIterator[Office]:
    """Wait to be elected; the block runs as the leader. Losing the office ends the supervisor with StaleVersion."""
    async with AsyncExitStack() as stack:
        with waits.waiting_for("leadership: another trainer leads"):
            campaign = names.campaign(OFFICE, candidate, ttl_s=LEASE_S)
            leadership = await stack.enter_async_context(campaign)
        log.info("leads in term %d (fencing token %d)", leadership.term, leadership.fencing_token)
        supervisor.start("leadership", _until_lost(leadership.lost, leadership.term))
        yield Office(leadership.fencing_token, leadership.term)


async def _until_lost(lost: asyncio.Event, term: int) -> None:
    await lost.wait()
    raise StaleVersion(
        f"the leadership of term {term} was lost; this trainer ends, and may stand again after a restart"
    )
