"""The folder of a run that is over; dumps are written by the code of the controller and the trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import yaml

from headway.algorithm.batch import SampleBatch
from headway.core.trajectory import NO_VERSION, Group, Outcome, StopReason, Trajectory
from services.rollout_controller.dumps import Dump, FinishedGroup
from services.rollout_controller.workflows import load_tokenizer
from services.trainer.token_dump import lines

MODEL = Path(__file__).parents[2] / "configs/models/sort_digits"
TOKENS: dict[str, int] = orjson.loads((MODEL / "tokenizer.json").read_bytes())["model"]["vocab"]
NUM_STEPS, GROUPS_A_STEP, SAMPLES = 30, 3, 4
HOSTILE = "<b>x</b>\n<img src=x onerror=alert(1)>"
"""What the samples of task 0/0 say."""


def make_run(root: Path, with_answers: bool = True) -> Path:
    """A run of 30 steps and 90 groups; its folder."""
    run, logs, rollouts = (root / kind / "me" / "test" / "view" for kind in ("run", "logs", "rollout"))
    for folder in (run, logs, rollouts):
        folder.mkdir(parents=True)
    config = {"rollout": {"tokenizer_path": str(MODEL), "dump_to_file": True}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (logs / "stats.jsonl").write_bytes(b"".join(orjson.dumps(record(step)) + b"\n" for step in range(NUM_STEPS + 1)))
    if with_answers:
        (run / "answers.json").write_bytes(orjson.dumps(answers()))
    dump = Dump(rollouts, lambda: load_tokenizer(MODEL))
    for step in range(NUM_STEPS):
        groups = [make_group(f"0/{step * GROUPS_A_STEP + number}", step) for number in range(GROUPS_A_STEP)]
        finished = [FinishedGroup(group.task_id, 1, Outcome.ACCEPTED, group.trajectories) for group in groups]
        for path, content in dump.encode(finished).items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        (rollouts / str(step) / "trained.jsonl").write_bytes(b"".join(trained(groups, step)))
    return run


def make_group(task_id: str, step: int) -> Group:
    """Samples of one task: prompt of four tokens, completions of two versions, the rewards 0 and 1."""
    samples = []
    for number in range(SAMPLES):
        digits = "".join(str((step + number + place) % 10) for place in range(6 + number))
        text = HOSTILE if task_id == "0/0" else digits
        ids = np.array([50, 46, 49, 51, *map(TOKENS.__getitem__, text), 2], np.int32)
        versions = np.full(len(ids), max(0, step - 1), np.int32)
        versions[8:] = step
        versions[:4] = NO_VERSION
        logprobs = np.where(versions >= 0, -0.25 * np.arange(len(ids)), 0).astype(np.float32)
        reward = float(number % 2 and step % 5 > 0)
        samples.append(Trajectory(ids, logprobs, versions >= 0, versions, reward, StopReason.STOP))
    return Group(task_id, tuple(samples))


def trained(groups: Sequence[Group], step: int) -> Any:
    """What the trainer would have written of them."""
    batch = SampleBatch.from_groups(groups)
    signs = torch.where(batch.rewards[batch.sample_ids] > 0, 1.0, -1.0) * batch.loss_mask
    logp = batch.logprobs + 0.125
    batch = batch.with_(advantages=signs, final_rewards=batch.rewards * 2 - 1, prox_logp=logp)
    return lines(step, batch, logp)


def record(step: int) -> dict[str, Any]:
    """A line of the trainer's statistics."""
    held_out = {"eval/task_reward/avg": 0.2 + 0.02 * step} if step % 10 == 0 else {}
    if step == 0:
        return {"step": 0, "version": "v1.0", "time": 1.7e9, **held_out}
    return {
        "step": step, "version": f"v1.{step}", "time": 1.7e9 + step, "total_steps": float(NUM_STEPS), **held_out,
        "ppo_actor/task_reward/avg": 0.25 + 0.02 * step, "throughput/samples_per_s": 100.0 + step,
        "throughput/tokens_per_s": 1234.0, "rollout/samples": 12.0, "rollout/groups": 3.0, "timing/step": 0.5,
        "timing/update": 0.3, "timing/wait_for_batch": 0.2, "rollout/staleness/avg": 0.5, "rollout/staleness/max": 1.0,
        "ppo_actor/staleness_tokens/0": 40.0, "ppo_actor/staleness_tokens/1": 20.0, "ppo_actor/staleness_tokens/2": 0.0,
        "ppo_actor/update/entropy/avg": 1.0 / step,
    }  # fmt: skip


def answers() -> dict[str, Any]:
    """What the controller answered last, as far as the page looks at it."""
    failure = {"task_id": "0/7", "attempt": 1, "outcome": "reward_timeout", "message": "no reward <b>in</b> 15 s"}
    states = dict.fromkeys(("pending", "running", "saving", "ready", "leased", "rejected", "quarantined"), 0)
    report = {
        "run": "test/view", "uptime_s": 40.0, "published_version": f"v1.{NUM_STEPS}", "services": [], "quarantined": {},
        "servers": [{"name": "0", "address": "http://127.0.0.1:1", "state": "serving", "served_version": "v1.29",
                     "num_requests": 3, "detail": ""}],
        "tasks": {**states, "submitted": 92, "consumed": 90, "ready": 2, "is_conserved": True},
        "discards": {"reward_timeout": {"count": 2, "examples": [failure]}},
        "num_rollouts": {"accepted": 92, "reward_timeout": 2}, "waits": [], "num_steps": NUM_STEPS,
        "total_steps": NUM_STEPS, "has_ended": True, "last_step": {"step": 29, "stats": record(NUM_STEPS)},
        "tokens": {"gradient": {"0": 1200, "1": 600}, "masked": {"3": 60}},
        "staleness": {"policy": "mask", "eta": 2, "batch_size": 3, "served_step": 30, "outstanding": 2, "limit": 9,
                      "max_concurrent": 8, "capacity": 6, "holds_back": ""},
        "timing": {"num_groups": 92, "pending_s": 0.5, "rollout_s": 1.0, "generate_s": 0.7, "reward_s": 0.2,
                   "other_s": 0.1, "journal_s": 0.01},
        "history": [], "evaluations": [],
    }  # fmt: skip
    spans = [{"state": "busy", "detail": "", "begin": 0.0, "end": 20.0}, {"state": "updating", "detail": "v1.2",
             "begin": 20.0, "end": 25.0}, {"state": "idle", "detail": "", "begin": 25.0, "end": None}]  # fmt: skip
    trainer = [{"state": "wait_for_batch", "detail": "batch of step 1", "begin": 0.0, "end": 10.0},
               {"state": "update", "detail": "", "begin": 10.0, "end": 40.0}]  # fmt: skip
    lanes = [
        {"name": "engine/0", "kind": "engine", "spans": spans}, {"name": "trainer", "kind": "trainer", "spans": trainer}
    ]  # fmt: skip
    return {"/v1/report": report, "/v1/timeline": {"now": 40.0, "lanes": lanes}}
