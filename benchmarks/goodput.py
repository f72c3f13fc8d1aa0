"""What a bound on staleness costs: tokens trained on within eta, as a share of what could be made. In virtual time.

    python -m benchmarks.goodput [--steps 120] [--etas 1 2 3 4 6 8]

S rollouts run at once, B are a batch, lengths are log-normal with mean 1 (times the same for all peers), and training
takes T = B / S: generation and training are in balance, the hardest case, since whatever either waits for is lost.
Cells are `rate/lost`: batches a second as a share of the limit S / B = 1 / T, and the share of trained samples' tokens
that carry no gradient because they are older than eta.

`mask wait discard`  the real controller (`services.rollout_controller.simulated`) by `rollout.staleness_policy`. For
                     `discard`: the share of rollouts that were thrown away
`least`, `possible`  see below
`areal`              AReaL's rule, modelled: admission by (eta + version + 1) * B - (accepted + running), hand-out in
                     the order of creation, nothing checked then. `rate/older`: tokens trained on beyond eta
`one-step`, `sync`   batch s + 1 is generated while batch s trains; or generation and training take turns. Rate alone

Why something is lost at all. At full rate a step takes T. A rollout that ends is trained on by a step that begins
later, when at most eta versions, eta * T, lie between; what it made earlier is too old, whoever schedules. So of
lengths X with mean 1 at `least` E[(X - K)+], K = eta * B / S, is lost. Steps begin at whole multiples of T and a
rollout ends anywhere between two: at the first step after its end it is older by a share U of a step, uniform in
[0, 1): `possible` is E[(X - (eta - U) * B / S)+]. Less can only be lost by making fewer steps (`wait`, a small eta),
or by throwing long rollouts away (`discard`), which loses them whole and favours short ones.
"""

import argparse
import heapq
import itertools
import logging
import math
import random
import statistics
from collections.abc import Iterator, Sequence

from headway.testing.scenario import Scenario
from services.rollout_controller.simulated import simulate

BATCH = 32
TOKENS = 100.0
"""Mean length."""
TOKENS_PER_S = 25.0
LONGEST = 30.0
SIGMAS = (0.5, 0.8, 1.2)
SETTLED = 30
"""Steps before the measurement begins."""
GOAL_RATE, GOAL_LOST = 0.98, 0.05
Cell = tuple[float, float]


def least(sigma: float, reach: float) -> float:
    """E[(X - reach)+] of a log-normal X with mean 1."""
    if reach <= 0:
        return 1.0 - reach
    below = (sigma**2 / 2 - math.log(reach)) / sigma
    return _normal(below) - reach * _normal(below - sigma)


def possible(sigma: float, eta: int, slots_per_batch: int, num: int = 200) -> float:
    """The same, where each rollout is trained on at the first step after its end."""
    phases = ((number + 0.5) / num for number in range(num))
    return statistics.fmean(least(sigma, (eta - phase) / slots_per_batch) for phase in phases)


def _normal(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2


def headway(policy: str, slots_per_batch: int, sigma: float, eta: int, num_steps: int) -> Cell:
    """The real controller."""
    mean_s = TOKENS / TOKENS_PER_S
    findings = simulate(
        Scenario(
            seed=1, policy=policy, batch_size=BATCH, eta=eta, num_samples=1, max_concurrent=slots_per_batch * BATCH,
            num_steps=num_steps, mean_tokens=TOKENS, tokens_per_s=TOKENS_PER_S, max_tokens=int(LONGEST * TOKENS),
            sigma=sigma, train_s=mean_s / slots_per_batch, load_s=0, journal_s=0, reward_s=0,
        )
    )  # fmt: skip
    assert findings.oldest <= eta
    num_tokens = findings.num_masked_tokens + findings.num_used_tokens
    thrown = findings.num_discarded / (findings.num_discarded + num_steps * BATCH)
    mean = num_tokens / TOKENS / (num_steps * BATCH) if not thrown else 1.0
    rate = _rate([at / mean_s for at in findings.committed_at], slots_per_batch, mean)
    return rate, max(findings.num_masked_tokens / num_tokens, thrown)


def _rate(committed_at: Sequence[float], slots_per_batch: int, mean: float) -> float:
    """Of the limit with the mean length that this run happened to have."""
    settled = committed_at[SETTLED:]
    limit = min(slots_per_batch / mean, slots_per_batch)
    return (len(settled) - 1) / (settled[-1] - settled[0]) / limit


class AReaL:
    """Its rule, with a trainer that trains whenever a batch is there."""

    def __init__(self, slots_per_batch: int, sigma: float, eta: int) -> None:
        self.eta = eta
        self._num_slots = slots_per_batch * BATCH
        self._lengths = lengths(sigma)
        self._running: list[tuple[float, float]] = []
        """End and start of each, the first to end first."""
        self._ready: list[tuple[float, float]] = []
        """Start and end."""
        self._now = 0.0
        self._num_accepted = 0
        self._published = [0.0]
        self.num_tokens = self.num_older = 0.0

    def run(self, num_steps: int) -> list[float]:
        """Times at which steps were done."""
        now, train_s = 0.0, BATCH / self._num_slots
        for step in range(num_steps):
            while len(self._ready) < BATCH:
                now = self._advance(math.inf)
            self._consume(step)
            done_at = max(now, self._published[-1]) + train_s
            while self._advance(done_at) < done_at:
                pass
            now = done_at
            self._published.append(done_at)
        return self._published[1:]

    def _advance(self, until: float) -> float:
        """Start what may start; then the next rollout ends, unless that is after `until`. The time then."""
        now = self._now
        room = (self.eta + len(self._published)) * BATCH - self._num_accepted
        while len(self._running) < min(self._num_slots, room):
            heapq.heappush(self._running, (now + next(self._lengths), now))
        if not self._running or self._running[0][0] >= until:
            self._now = until
            return until
        end, start = heapq.heappop(self._running)
        self._ready.append((start, end))
        self._num_accepted += 1
        self._now = end
        return end

    def _consume(self, step: int) -> None:
        self._ready.sort()
        batch, self._ready = self._ready[:BATCH], self._ready[BATCH:]
        if step < SETTLED:
            return
        bound = self._published[step - self.eta] if step >= self.eta else 0.0
        self.num_tokens += sum(end - start for start, end in batch)
        self.num_older += sum(max(0.0, min(end, bound) - start) for start, end in batch)


def areal(slots_per_batch: int, sigma: float, eta: int, num_steps: int) -> Cell:
    model = AReaL(slots_per_batch, sigma, eta)
    done_at = model.run(num_steps)
    mean = model.num_tokens / ((num_steps - SETTLED) * BATCH)
    return _rate(done_at, slots_per_batch, mean), model.num_older / model.num_tokens


def lengths(sigma: float) -> Iterator[float]:
    rng = random.Random(1)
    while True:
        yield min(LONGEST, math.exp(rng.gauss(-(sigma**2) / 2, sigma)))


def in_turns(slots_per_batch: int, sigma: float, num_steps: int) -> tuple[float, float]:
    """Rates of one-step and of synchronous training: a batch is as slow as its longest rollout."""
    made = lengths(sigma)
    train_s = 1.0 / slots_per_batch
    longest = [max(itertools.islice(made, BATCH)) for _ in range(10 * num_steps)]
    one_step = statistics.fmean(max(train_s, one) for one in longest)
    synchronous = statistics.fmean(train_s + one for one in longest)
    return train_s / one_step, train_s / synchronous


def block(slots_per_batch: int, sigma: float, etas: Sequence[int], num_steps: int) -> None:
    """All figures of one distribution and one number of slots."""
    print(f"\nS/B {slots_per_batch}, sigma {sigma}" + "".join(f"{f'eta {eta}':>11}" for eta in etas))
    masked = [headway("mask", slots_per_batch, sigma, eta, num_steps) for eta in etas]
    rows = {"mask": masked}
    for policy in ("wait", "discard"):
        rows[policy] = [headway(policy, slots_per_batch, sigma, eta, num_steps) for eta in etas]
    rows["areal"] = [areal(slots_per_batch, sigma, eta, num_steps) for eta in etas]
    for name, cells in rows.items():
        print(f"{name:>18}" + "".join(f"{f'{rate:.2f}/{lost:.1%}':>11}" for rate, lost in cells), flush=True)
        if name == "mask":
            print(f"{'possible':>18}" + "".join(f"{possible(sigma, eta, slots_per_batch):>11.1%}" for eta in etas))
            print(f"{'least':>18}" + "".join(f"{least(sigma, eta / slots_per_batch):>11.1%}" for eta in etas))
    one_step, synchronous = in_turns(slots_per_batch, sigma, num_steps)
    good = [eta for eta, (rate, lost) in zip(etas, masked, strict=True) if rate >= GOAL_RATE and lost < GOAL_LOST]
    could = next(eta for eta in itertools.count(1) if possible(sigma, eta, slots_per_batch) < GOAL_LOST)
    print(f"{'one-step, sync':>18}   {one_step:.2f}, {synchronous:.2f}")
    print(f"{'below 5 % lost':>18}   from eta {min(good, default='none of these')} on; possible from {could} on")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--etas", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    for per_batch, spread in itertools.product((1, 2), SIGMAS):
        block(per_batch, spread, arguments.etas, arguments.steps)
