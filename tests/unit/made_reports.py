"""Reports of a run as the controller tells them, made to measure."""

import copy
from collections.abc import Mapping
from typing import Any

STATS = {
    "ppo_actor/task_reward/avg": 0.5,
    "ppo_actor/task_reward/std": 0.4,
    "ppo_actor/completion_len/avg": 100.0,
    "ppo_actor/no_eos_ratios/avg": 0.02,
    "ppo_actor/update/effective_sample_size": 0.97,
    "ppo_actor/update/entropy/avg": 0.8,
    "ppo_actor/update/clip_ratio/avg": 0.03,
    "ppo_actor/update/divergence/proximal_from_behaviour/avg": 0.0005,
    "ppo_actor/update/divergence/current_from_behaviour/avg": 0.001,
    "rollout/equal_groups": 0.2,
    "rollout/samples": 128.0,
    "rollout/generated_tokens": 12800.0,
    "rollout/masked_tokens": 0.0,
    "rollout/staleness/avg": 1.0,
    "rollout/staleness/max": 2.0,
    "rollout/staleness/fraction_0": 0.3,
    "timing/wait_for_batch": 1.0,
    "timing/update": 4.0,
    "timing/logprob": 1.0,
    "timing/step": 10.0,
    "throughput/samples_per_s": 400.0,
    "throughput/tokens_per_s": 50000.0,
    "total_steps": 40.0,
}
"""Of a step of a healthy run."""
SERVER = {
    "address": "http://127.0.0.1:8000",
    "state": "serving",
    "served_version": "v1.20",
    "num_requests": 12,
    "tokens_in_flight": 3456,
    "since_s": 3.0,
    "busy_s": 180.0,
    "joined_s": 200.0,
    "detail": "",
}


def step(number: int, **stats: float) -> dict[str, Any]:
    """A committed step; numbers of `stats` have `__` for `/`."""
    named = {name.replace("__", "/"): value for name, value in stats.items()}
    return {
        "step": number,
        "version": f"v1.{number + 1}",
        "is_skipped": False,
        "num_groups": 16,
        "waited_s": 2.0,
        "tokens_by_staleness": {"0": 4000, "1": 5000, "2": 3800},
        "masked_by_staleness": {},
        "committed_at": 1000.0 + 10 * number,
        "stats": STATS | named,
    }


def report(num_steps: int = 20, stats: Mapping[str, float] | None = None, **changes: Any) -> dict[str, Any]:
    """A report of a healthy run, with changes.

    Args:
        stats: Replace those of every step.
        changes: Replace parts of the report; dicts are merged.
    """
    history = [step(number) for number in range(num_steps)]
    for one in history:
        one["stats"] |= stats or {}
    made: dict[str, Any] = {
        "run": "root/quickstart/sort-digits",
        "uptime_s": 205.0,
        "published_version": f"v1.{num_steps}" if num_steps else None,
        "services": [],
        "servers": [{"name": "0", **SERVER}, {"name": "1", **SERVER}],
        "tasks": {
            "submitted": 400,
            "pending": 30,
            "running": 14,
            "saving": 0,
            "ready": 4,
            "leased": 16,
            "consumed": 336,
            "rejected": 0,
            "quarantined": 0,
            "is_conserved": True,
        },
        "discards": {},
        "num_rollouts": {"accepted": 356},
        "quarantined": {},
        "staleness": {
            "policy": "mask",
            "eta": 2,
            "batch_size": 16,
            "served_step": num_steps,
            "outstanding": 34,
            "limit": 48,
            "max_concurrent": 64,
            "capacity": 14,
            "holds_back": "",
        },
        "waits": [],
        "last_step": history[-1] if history else None,
        "num_steps": num_steps,
        "total_steps": 40 if num_steps else None,
        "has_ended": False,
        "waited_s": 40.0,
        "requests_waiting": 0,
        "tokens": {"gradient": {"0": 4000, "1": 5000, "2": 3800}, "masked": {}},
        "timing": {
            "num_groups": 356,
            "pending_s": 3.0,
            "rollout_s": 8.0,
            "generate_s": 6.0,
            "reward_s": 0.2,
            "other_s": 1.8,
            "journal_s": 0.01,
        },
        "history": history,
        "evaluations": [],
    }
    return merged(made, changes)


def merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(base)
    for key, value in changes.items():
        is_section = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = merged(made[key], value) if is_section else value
    return made
