"""How much a worker may still do, by what its functions have said of themselves.

    sealed     pure functions: compute and read files; no writes, no sockets, no processes, no signals
    guarded    others: files and sockets too; no processes, no signals to others
    open       functions that start processes: what the service may do, but no signals to it and to the fork server

A worker settles for one of them with its first item, for good. What holds for every worker: its own process
group, a memory limit, no core files, death with the fork server.
"""

from collections.abc import Sequence
from enum import StrEnum

from headway.reward.registry import RewardFunction
from services.reward import landlock, seccomp


class Seal(StrEnum):
    SEALED = "sealed"
    GUARDED = "guarded"
    OPEN = "open"


def seal_of(function: RewardFunction) -> Seal:
    """The narrowest seal that lets the function do what it has said it does."""
    if function.traits.starts_processes:
        return Seal.OPEN
    # An event loop needs a socket pair.
    return Seal.SEALED if function.traits.is_pure and not function.is_async else Seal.GUARDED


def close(seal: Seal, protected: Sequence[int] = ()) -> None:
    """Narrow this process for good, with the layers that the kernel has.

    Args:
        seal: How far.
        protected: Processes that it must not end: the service and the fork server.
    """
    if seal is Seal.SEALED and landlock.is_available():
        landlock.only_read()
    if not seccomp.is_available():
        return
    if seal is Seal.OPEN:
        seccomp.apply(seccomp.open_filter(protected))
    else:
        seccomp.apply(seccomp.worker_filter(is_sealed=seal is Seal.SEALED))
