"""With LoRA only the adapter moves; merged weights and the adapter's file both are the policy that was trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from train_engine_harness import experiment, make_batch, plain_logp, prepared, weights, write_model

from services.trainer.engine import TrainEngine

ADAPTER: dict[str, Any] = {
    "use_lora": True, "lora_rank": 4, "lora_alpha": 8, "optimizer": {"type": "adam", "lr": 0.05, "weight_decay": 0.0},
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def build(model: Path, **changes: Any) -> TrainEngine:
    return TrainEngine(experiment(model, **(ADAPTER | changes)), total_train_steps=10)


def step(engine: TrainEngine, seed: int = 0) -> None:
    assert engine.ppo_update(prepared(engine, make_batch(seed))).applied


def test_an_untrained_adapter_is_the_base_model(model: Path) -> None:
    base, adapted = build(model, use_lora=False), build(model)
    assert torch.equal(adapted.compute_logp(make_batch()), base.compute_logp(make_batch()))
    assert base.full_state_dict().keys() == adapted.full_state_dict().keys()


def test_only_adapted_matrices_move_and_merged_weights_are_what_was_trained(model: Path) -> None:
    engine, batch = build(model, target_modules=["q_proj", "down_proj"]), make_batch()
    before = weights(engine)
    step(engine)
    moved = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {
        f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    torch.testing.assert_close(engine.compute_logp(batch), plain_logp(engine, batch), rtol=1e-4, atol=5e-5)


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # peft asks transformers under an older name
def test_the_adapter_file_loads_into_peft_and_is_the_trained_policy(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine, batch = build(model), make_batch()
    step(engine)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(engine.full_lora_state_dict(), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(engine.lora_config()))
    assert engine.lora_config()["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    base = AutoModelForCausalLM.from_config(engine.hf_config, attn_implementation="eager", dtype=torch.float32)
    _, unexpected = base.load_state_dict(build(model, use_lora=False).full_state_dict(), strict=False)
    assert not unexpected
    base.tie_weights()
    served = PeftModel.from_pretrained(base, folder)
    ids = batch.input_ids[: int(batch.lengths[0])]
    scores = served(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    expected = engine.compute_logp(batch)[1 : len(ids)]
    where = batch.loss_mask[1 : len(ids)]
    torch.testing.assert_close(scores[where], expected[where], rtol=1e-4, atol=5e-5)


def test_the_reference_is_the_policy_without_its_adapter(model: Path) -> None:
    ref = {"path": str(model), "init_from_scratch": True, "dtype": "float32"}
    engine, batch = build(model, kl_ctl=0.1, ref=ref), make_batch()
    base = engine.compute_logp(batch)
    step(engine)
    assert engine._ref is None
    assert torch.equal(engine.compute_ref_logp(batch), base)
    assert (engine.compute_logp(batch) - base).abs().max() > 1e-3


def test_a_checkpoint_holds_the_adapter_only_and_continues_bit_for_bit(model: Path) -> None:
    straight, first, resumed = build(model), build(model), build(model)
    step(straight)
    step(first)
    state = first.state_dict()
    assert all(".lora_" in name for name in state["model"])
    resumed.load_state_dict(state)
    step(straight, 1)
    step(resumed, 1)
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
