"""Trainer and engine give a token the same log-probability: to 1e-4, in float32, at the temperature of sampling."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_client import PROMPT, Engine
from safetensors.torch import save_file

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


async def sampled(engine: Engine, temperature: float, **body: object) -> SampleBatch:
    """What the engine makes of a few prompts, with its log-probs."""
    sampling = {"temperature": temperature, "max_new_tokens": 30, "ignore_eos": True}
    prompts = [PROMPT * 4, PROMPT * 4, PROMPT * 4, PROMPT[:2], PROMPT * 9]
    results = await engine.generate(sampling, input_ids=prompts, **body)
    samples = [
        as_sample(prompt, result["output_ids"], [x for x, _, _ in result["meta_info"]["output_token_logprobs"]])
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return SampleBatch.from_groups([Group("0/0", tuple(samples[:3])), Group("0/1", tuple(samples[3:]))])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_of_sampled_tokens_agree(engine: Engine, models: Path, temperature: float) -> None:
    batch = await sampled(engine, temperature)
    actor = {"path": str(models / "a"), "dtype": "float32", "temperature": temperature}
    config = ExperimentConfig.model_validate({"actor": actor, "gconfig": {"temperature": temperature}})
    trained = TrainEngine(config, total_train_steps=1).compute_logp(batch)
    assert batch.loss_mask.sum() == 150
    assert (trained - batch.logprobs).abs().max() < 1e-4


async def test_logprobs_of_a_trained_adapter_agree(lora_server: tuple[str, str], models: Path) -> None:
    """The adapter as the trainer publishes it, on the layers of its own choice."""
    actor = {"path": str(models / "a"), "dtype": "float32", "use_lora": True, "lora_rank": 4, "lora_alpha": 8}
    trained = TrainEngine(ExperimentConfig.model_validate({"actor": actor}), total_train_steps=1)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trained._policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    folder = models / "adapters" / "trained"
    folder.mkdir(parents=True)
    save_file(trained.full_lora_state_dict(), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(trained.lora_config()))
    kind, url = lora_server
    async with Engine.open(kind, url, models) as engine:
        assert (await engine.post("/load_lora_adapter", lora_name="trained", lora_path=str(folder)))[0] == 200
        batch = await sampled(engine, 1.0, lora_path="trained")
        assert (await engine.post("/unload_lora_adapter", lora_name="trained"))[0] == 200
    assert batch.loss_mask.sum() == 150
    assert (trained.compute_logp(batch) - batch.logprobs).abs().max() < 1e-4
