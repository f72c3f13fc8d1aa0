"""Trainer and engine give a token the same log-probability: to 1e-4, in float32, at the temperature of sampling."""

from pathlib import Path

import numpy as np
import pytest
from engine_client import PROMPT, Engine

from headway.algorithm.batch import SampleBatch
from headway.config import ExperimentConfig
from headway.core.trajectory import Group, Trajectory
from services.trainer.engine import TrainEngine


def as_sample(prompt: list[int], output: list[int], logprobs: list[float]) -> Trajectory:
    made = np.arange(len(prompt) + len(output)) >= len(prompt)
    return Trajectory(
        input_ids=np.array(prompt + output, dtype=np.int32),
        logprobs=np.array([0.0] * len(prompt) + logprobs, dtype=np.float32),
        loss_mask=made,
        versions=np.where(made, 0, -1).astype(np.int32),
        reward=1.0,
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_of_sampled_tokens_agree(engine: Engine, models: Path, temperature: float) -> None:
    sampling = {"temperature": temperature, "max_new_tokens": 30, "ignore_eos": True}
    prompts = [PROMPT * 4, PROMPT * 4, PROMPT * 4, PROMPT[:2], PROMPT * 9]
    results = await engine.generate(sampling, input_ids=prompts)
    samples = [
        as_sample(prompt, result["output_ids"], [x for x, _, _ in result["meta_info"]["output_token_logprobs"]])
        for prompt, result in zip(prompts, results, strict=True)
    ]
    batch = SampleBatch.from_groups([Group("0/0", tuple(samples[:3])), Group("0/1", tuple(samples[3:]))])
    actor = {"path": str(models / "a"), "dtype": "float32", "temperature": temperature}
    config = ExperimentConfig.model_validate({"actor": actor, "gconfig": {"temperature": temperature}})
    trained = TrainEngine(config, total_train_steps=1).compute_logp(batch)
    assert batch.loss_mask.sum() == 150
    assert (trained - batch.logprobs).abs().max() < 1e-4
