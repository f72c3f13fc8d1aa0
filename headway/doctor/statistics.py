"""The numbers of a train step that rules read, under the names that the trainer writes."""

from enum import StrEnum

FRACTION = "rollout/staleness/fraction_"
"""Followed by an age in steps, 0 to the bound: the part of the tokens that is as old."""


class Statistic(StrEnum):
    """One number of a step."""

    WAITED = "timing/wait_for_batch"
    STEP = "timing/step"
    REWARD = "ppo_actor/task_reward/avg"
    COMPLETION = "ppo_actor/completion_len/avg"
    CUT_OFF = "ppo_actor/no_eos_ratios/avg"
    ENTROPY = "ppo_actor/update/entropy/avg"
    SAMPLE_SIZE = "ppo_actor/update/effective_sample_size"
    MISMATCH = "ppo_actor/update/engine_mismatch/avg"
    EQUAL_GROUPS = "rollout/equal_groups"
    OLDEST = "rollout/staleness/max"
    SKIPPED = "num_skipped_steps"
