"""What one simulated run is like: sizes, speeds, chances and faults, all of it decided by a seed."""

import random
from dataclasses import dataclass

NO_POISON = 0
RETRY_S = 2.0
"""Longest pause of a trainer between two tries of a call."""


@dataclass(frozen=True)
class Fault:
    """Something that breaks at a time, and is whole again after a while."""

    at_s: float
    kind: str
    """`server`, `controller`, `trainer`, or `zombie`: a trainer that is replaced while it goes on."""
    down_s: float
    which: int = 0


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed decides. Times are virtual seconds."""

    seed: int
    policy: str = "mask"
    batch_size: int = 4
    eta: int = 1
    num_samples: int = 2
    max_concurrent: int = 16
    num_servers: int = 2
    num_steps: int = 10
    mean_tokens: float = 40.0
    sigma: float = 0.5
    """Of the log-normal lengths; 0: all equal; below 0: uniform."""
    max_tokens: int = 400
    tokens_per_s: float = 40.0
    """Of each request."""
    train_s: float = 1.0
    load_s: float = 0.1
    """How long a server takes to load a version."""
    journal_s: float = 0.01
    """How long a write takes."""
    checkpoint_every: int = 4
    reward_s: float = 0.05
    slow_reward_s: float = 10.0
    p_slow_reward: float = 0.0
    p_reward_fails: float = 0.0
    p_rejected: float = 0.0
    """Of a group."""
    p_lost_reply: float = 0.0
    p_twice: float = 0.0
    """A call is delivered twice."""
    p_skipped_step: float = 0.0
    poison_every: int = NO_POISON
    """Every so many rows one always fails."""
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, seed: int) -> "Scenario":
        """Draw a scenario."""
        rng = random.Random(seed)
        batch = rng.randint(1, 5)
        return cls(
            seed=seed,
            policy=rng.choice(["mask", "mask", "discard", "wait", "allow"]),
            batch_size=batch,
            eta=rng.choice([0, 1, 1, 2, 3]),
            num_samples=rng.randint(1, 3),
            max_concurrent=rng.choice([batch, 2 * batch, 100]),
            num_servers=rng.randint(1, 3),
            num_steps=rng.randint(4, 8),
            sigma=rng.choice([-1.0, 0.0, 0.5, 0.8, 1.2]),
            train_s=rng.choice([0.1, 1.0, 3.0]),
            load_s=rng.choice([0.0, 0.1, 1.0]),
            journal_s=rng.choice([0.0, 0.01, 0.3]),
            checkpoint_every=rng.randint(1, 4),
            p_slow_reward=rng.choice([0.0, 0.0, 0.05]),
            p_reward_fails=rng.choice([0.0, 0.0, 0.1]),
            p_rejected=rng.choice([0.0, 0.0, 0.3]),
            p_lost_reply=rng.choice([0.0, 0.1]),
            p_twice=rng.choice([0.0, 0.1]),
            p_skipped_step=rng.choice([0.0, 0.0, 0.1]),
            poison_every=rng.choice([NO_POISON, NO_POISON, 7]),
            faults=_faults(rng),
        )

    @property
    def limit(self) -> int:
        """Groups that may be outstanding."""
        return (self.eta + 1) * self.batch_size

    @property
    def recovery_limit_s(self) -> float:
        """From the last fault to a new step: three attempts of the longest rollout, steps to replay, some retries."""
        rollout_s = self.max_tokens / self.tokens_per_s + self.slow_reward_s
        return 3 * (rollout_s + self.load_s) + 2 * self.checkpoint_every * (self.train_s + RETRY_S) + 10 * RETRY_S

    def is_poison(self, row: int) -> bool:
        return self.poison_every != NO_POISON and row % self.poison_every == self.poison_every - 1


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    kinds = rng.choices(["server", "controller", "trainer", "zombie"], k=rng.choice([0, 1, 2, 4]))
    return tuple(Fault(rng.uniform(0.0, 20.0), kind, rng.uniform(0.1, 5.0), rng.randrange(3)) for kind in kinds)
