"""A small Llama with grouped-query attention, ragged groups with shared prompts, and a plain way to score them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from headway.algorithm.batch import SampleBatch
from headway.config import ExperimentConfig
from headway.core.trajectory import Group, Trajectory
from services.trainer.engine import TrainEngine

VOCABULARY = 50


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of a model of some 20,000 parameters, and no weights."""
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True, "initializer_range": 0.2,
    }  # fmt: skip
    LlamaConfig(**(config | changes)).save_pretrained(folder)
    return folder


def experiment(folder: Path, *, allocation: str = "sglang:d1+d1", ref: Any = None, **actor: Any) -> ExperimentConfig:
    """An experiment with that model from scratch, in float32."""
    section = {
        "path": str(folder), "init_from_scratch": True, "dtype": "float32", "ppo_n_minibatches": 1,
        "use_decoupled_loss": True, "recompute_logprob": True, "eps_clip": 0.2, "max_new_tokens": 64,
        "optimizer": {"type": "sgd", "lr": 1.0, "weight_decay": 0.0, "gradient_clipping": 1e9},
    }  # fmt: skip
    sections: dict[str, Any] = {"allocation_mode": allocation, "actor": section | actor, "ref": ref}
    temperature = (section | actor).get("temperature", 1.0)
    sections["gconfig"] = {"temperature": temperature, "n_samples": 4, "max_new_tokens": 64}
    sections["cluster"] = {"n_nodes": 1, "n_gpus_per_node": 8}
    return ExperimentConfig.model_validate(sections)


def make_engine(folder: Path, **actor: Any) -> TrainEngine:
    return TrainEngine(experiment(folder, **actor), total_train_steps=10)


def make_groups(seed: int = 0, num_groups: int = 5, per_group: int = 4) -> list[Group]:
    """Prompts of 3 to 20 tokens, completions of 1 to 12; some alike, some with a masked turn, one without any loss."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(3, 20))
        samples = []
        for i in range(per_group):
            completion = rng.integers(3, VOCABULARY, rng.integers(1, 13))
            if i == 1:
                completion[: len(completion) // 2] = (
                    samples[0].input_ids[len(prompt) :][: len(completion) // 2].sum() % 40
                )
            mask = rng.random(len(completion)) < 0.8
            if g == 1 and i == 2:
                mask[:] = False
            samples.append(_trajectory(rng, prompt, completion, mask))
        if g == 2:
            samples[3] = samples[0]
        groups.append(Group(f"0/{g}", tuple(samples)))
    return groups


def _trajectory(rng: Any, prompt: Any, completion: Any, mask: Any) -> Trajectory:
    ids = np.concatenate([prompt, completion]).astype(np.int32)
    made = np.arange(len(ids)) >= len(prompt)
    logprobs = np.where(made, -4 + 0.5 * rng.standard_normal(len(ids)), 0.0)
    return Trajectory(
        input_ids=ids,
        logprobs=logprobs.astype(np.float32),
        loss_mask=np.concatenate([np.zeros(len(prompt), bool), mask]),
        versions=np.where(made, rng.integers(0, 3, len(ids)), -1).astype(np.int32),
        reward=float(rng.integers(0, 2)),
    )


def make_batch(seed: int = 0, **kwargs: Any) -> SampleBatch:
    return SampleBatch.from_groups(make_groups(seed, **kwargs))


def prepared(engine: TrainEngine, batch: SampleBatch) -> SampleBatch:
    """The batch with everything that an update wants."""
    engine.version = 3
    if engine.needs_prox_logp:
        batch = batch.with_(prox_logp=engine.compute_prox_logp(batch))
    if engine.has_ref:
        batch = batch.with_(ref_logp=engine.compute_ref_logp(batch))
    return engine.compute_advantages(batch)


def plain_logp(engine: TrainEngine, batch: SampleBatch, temperature: float = 1.0) -> Tensor:
    """[T] log-probs by transformers' own eager attention, one sample after the other, from full logits in float64."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_config(engine.hf_config, attn_implementation="eager", dtype=torch.float64)
    missing, unexpected = lm.load_state_dict({k: v.double() for k, v in engine.full_state_dict().items()}, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    lm.tie_weights()
    found = torch.zeros(batch.num_tokens)
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        ids = batch.input_ids[start : start + length]
        logits = lm(input_ids=ids[None]).logits[0] / temperature
        scores = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        found[start + 1 : start + length] = scores.detach().float()
    return found * batch.loss_mask


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


def gradient(engine: TrainEngine, batch: SampleBatch) -> dict[str, Tensor]:
    """What one update moves the weights by, under SGD with learning rate 1 and one mini-batch: the gradient."""
    before = weights(engine)
    assert engine.ppo_update(prepared(engine, batch)).applied
    after = engine.full_state_dict()
    return {name: before[name] - after[name] for name in before}
