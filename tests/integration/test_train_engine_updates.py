"""An update moves the weights as the optimizer says, or not at all; a checkpoint continues bit for bit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train_engine_harness import (
    VOCABULARY,
    experiment,
    make_batch,
    make_engine,
    plain_logp,
    prepared,
    weights,
    write_model,
)

from headway.algorithm.batch import SampleBatch
from headway.algorithm.losses import PolicyLoss, policy_loss
from headway.config.actor import OptimizerConfig
from headway.errors import InvalidInput
from services.trainer import update
from services.trainer.engine import TrainEngine
from services.trainer.optimization import BFloat16AdamW, Optimization, lr_factor, scale_gradients

ADAM = {"type": "adam", "lr": 1e-3, "weight_decay": 0.01, "gradient_clipping": 1.0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def state_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Weights and moments by name."""
    state = engine.state_dict()
    flat = {f"w/{name}": value.clone() for name, value in state["model"].items()}
    for name, moments in state["optimizer"].items():
        flat |= {f"{name}/{key}": value.clone() for key, value in moments.items()}
    return flat


def assert_bit_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def step(engine: TrainEngine, seed: int) -> None:
    assert engine.ppo_update(prepared(engine, make_batch(seed))).applied
    engine.step_lr_scheduler()


def test_a_loss_that_is_not_finite_changes_nothing(model: Path) -> None:
    engine = make_engine(model, optimizer=ADAM)
    step(engine, 0)
    before, batch = state_of(engine), prepared(engine, make_batch(1))
    assert batch.advantages is not None
    result = engine.ppo_update(batch.with_(advantages=batch.advantages.masked_fill(batch.loss_mask, math.nan)))
    assert not result.applied
    assert result.stats["ppo_actor/update/skipped_minibatches"] == 1
    assert_bit_equal(state_of(engine), before)
    step(engine, 1)


def test_a_loss_that_is_not_finite_changes_nothing_even_with_a_finite_gradient(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> PolicyLoss:
        found = policy_loss(*args)
        return replace(found, loss=found.loss + math.inf)

    engine = make_engine(model, optimizer=ADAM)
    before, batch = state_of(engine), prepared(engine, make_batch())
    monkeypatch.setattr(update, "policy_loss", broken)
    assert not engine.ppo_update(batch).applied
    assert_bit_equal(state_of(engine), before)


def test_a_gradient_that_is_not_finite_changes_nothing(model: Path) -> None:
    engine = make_engine(model, optimizer=ADAM)
    step(engine, 0)
    before = state_of(engine)
    parameter = next(iter(engine._policy.parameters()))
    hook = parameter.register_hook(lambda g: g * math.inf)
    assert not engine.ppo_update(prepared(engine, make_batch(1))).applied
    assert_bit_equal(state_of(engine), before)
    hook.remove()
    step(engine, 1)


def test_only_the_broken_minibatch_is_skipped(model: Path) -> None:
    engine = make_engine(model, optimizer=ADAM, ppo_n_minibatches=4)
    batch = prepared(engine, make_batch(1, num_groups=8))
    assert batch.advantages is not None
    broken = batch.loss_mask & (batch.sample_ids == 5)
    result = engine.ppo_update(batch.with_(advantages=batch.advantages.masked_fill(broken, math.inf)))
    assert result.applied
    assert result.stats["ppo_actor/update/skipped_minibatches"] == 1
    assert all(bool(value.isfinite().all()) for value in state_of(engine).values())


def test_nan_in_the_evidence_never_reaches_a_gradient(model: Path) -> None:
    from train_engine_harness import make_groups

    groups = make_groups()
    groups[0].trajectories[0].logprobs[-1] = math.nan
    groups[3].trajectories[1].logprobs[-1] = -math.inf
    engine = make_engine(model, optimizer=ADAM)
    assert engine.ppo_update(prepared(engine, SampleBatch.from_groups(groups))).applied
    assert all(bool(value.isfinite().all()) for value in state_of(engine).values())


def test_a_batch_without_a_token_in_the_loss_changes_nothing(model: Path) -> None:
    engine, batch = make_engine(model, optimizer=ADAM), make_batch()
    before = state_of(engine)
    batch = batch.with_(loss_mask=torch.zeros_like(batch.loss_mask))
    assert not engine.ppo_update(prepared(engine, batch)).applied
    assert_bit_equal(state_of(engine), before)


def test_minibatches_are_optimizer_steps_over_whole_groups(model: Path) -> None:
    engine = make_engine(model, optimizer=ADAM, ppo_n_minibatches=3)
    batch = prepared(engine, make_batch(num_groups=9))
    minibatches = engine._minibatches(batch)
    assert sorted(i for m in minibatches for i in m.samples) == [
        i for i in range(batch.num_samples) if batch.loss_mask[batch.sample_ids == i].any()
    ]
    groups = [{int(batch.group_ids[i]) for i in m.samples} for m in minibatches]
    assert sum(len(g) for g in groups) == len(set().union(*groups))
    engine.ppo_update(batch)
    assert {float(m["step"]) for m in engine.state_dict()["optimizer"].values()} == {3.0}


def test_a_resumed_engine_continues_bit_for_bit(model: Path) -> None:
    straight, first = make_engine(model, optimizer=ADAM), make_engine(model, optimizer=ADAM)
    for seed in range(4):
        step(straight, seed)
    for seed in range(2):
        step(first, seed)
    saved = {"state": first.state_dict()}
    resumed = make_engine(model, optimizer=ADAM)
    resumed.load_state_dict(saved["state"])
    for seed in range(2, 4):
        step(resumed, seed)
    assert_bit_equal(state_of(resumed), state_of(straight))


def test_a_state_can_be_filled_in_place_before_the_first_step(model: Path) -> None:
    source, target = make_engine(model, optimizer=ADAM), make_engine(model, optimizer=ADAM)
    step(source, 0)
    state, wanted = target.state_dict(), source.state_dict()
    for name, moments in state["optimizer"].items():
        for key, value in moments.items():
            value.copy_(wanted["optimizer"][name][key])
    for name, value in state["model"].items():
        value.copy_(wanted["model"][name])
    state["lr_step"].copy_(wanted["lr_step"])
    target.load_state_dict(state)
    step(source, 1)
    step(target, 1)
    assert_bit_equal(state_of(target), state_of(source))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_load_into_transformers(model: Path, tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    engine = make_engine(model, dtype=dtype)
    tensors = engine.full_state_dict()
    assert {value.dtype for value in tensors.values()} == {getattr(torch, dtype)}
    folder = tmp_path / "published"
    engine.hf_config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, dtype)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in tensors.items())


def test_a_model_from_a_folder_is_that_model(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source, folder, batch = make_engine(model), tmp_path / "saved", make_batch()
    source.hf_config.save_pretrained(folder)
    save_file(source.full_state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    loaded = make_engine(folder, init_from_scratch=False)
    assert torch.equal(loaded.compute_logp(batch), source.compute_logp(batch))


def test_a_folder_without_weights_is_refused_with_the_way_out(model: Path) -> None:
    with pytest.raises(InvalidInput, match="init_from_scratch"):
        make_engine(model, init_from_scratch=False)


def test_random_weights_follow_the_seed(model: Path) -> None:
    def fresh(seed: int) -> dict[str, Tensor]:
        config = experiment(model).model_copy(update={"seed": seed})
        return weights(TrainEngine(config, total_train_steps=1))

    assert_bit_equal(fresh(1), fresh(1))
    assert not torch.equal(fresh(1)["model.embed_tokens.weight"], fresh(2)["model.embed_tokens.weight"])


def test_dropout_can_be_switched_off(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "noisy", attention_dropout=0.5)
    for engine, is_noisy in ((make_engine(folder, disable_dropout=True), False), (make_engine(folder), True)):
        stats = engine.ppo_update(prepared(engine, make_batch())).stats
        assert (stats["ppo_actor/update/approx_kl/max"] > 1e-3) is is_noisy


def test_the_reference_stays_what_it_was(model: Path) -> None:
    config = experiment(
        model, kl_ctl=0.1, ref={"path": str(model), "init_from_scratch": True, "dtype": "float32"},
        optimizer={**ADAM, "lr": 0.05},
    )  # fmt: skip
    engine, batch = TrainEngine(config, total_train_steps=10), make_batch()
    before = engine.compute_ref_logp(batch)
    torch.testing.assert_close(before, engine.compute_logp(batch), rtol=0, atol=1e-6)
    step(engine, 0)
    assert torch.equal(engine.compute_ref_logp(batch), before)
    assert (engine.compute_logp(batch) - before).abs().max() > 1e-3
    found = engine.compute_advantages(prepared(engine, batch))
    assert found.kl_rewards is not None
    assert found.kl_rewards[batch.loss_mask].abs().min() > 0


def test_the_reference_may_have_a_layout_of_its_own(model: Path) -> None:
    ref = {"path": str(model), "init_from_scratch": True, "attn_impl": "eager", "mb_spec": {"max_tokens_per_mb": 40}}
    engine, batch = TrainEngine(experiment(model, kl_ctl=0.1, ref=ref), total_train_steps=1), make_batch()
    torch.testing.assert_close(engine.compute_ref_logp(batch), engine.compute_logp(batch), rtol=1e-5, atol=2e-5)


def test_without_kl_no_reference_is_built_and_with_it_one_is_needed(model: Path) -> None:
    assert not make_engine(model).has_ref
    with pytest.raises(InvalidInput, match="ref"):
        TrainEngine(experiment(model).model_copy(update={"actor": make_kl_actor(model)}), total_train_steps=1)


@pytest.mark.parametrize(
    "changes", [{"prox_logp_method": "loglinear"}, {"use_decoupled_loss": False, "recompute_logprob": False}]
)
def test_m2po_without_recomputed_logprobs_is_refused_at_the_start(model: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="m2_threshold"):
        make_engine(model, m2_threshold=0.1, **changes)


def make_kl_actor(model: Path) -> Any:
    return experiment(model).actor.model_copy(update={"kl_ctl": 0.1})


def test_a_model_without_an_optimizer_is_not_trained(model: Path) -> None:
    engine = make_engine(model, optimizer=None)
    with pytest.raises(InvalidInput, match="optimizer"):
        engine.ppo_update(prepared(engine, make_batch()))


def make_sequences(seed: int = 0, num: int = 6) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        ids = rng.integers(3, VOCABULARY, rng.integers(4, 14)).astype(np.int32)
        found.append((ids, np.arange(len(ids)) >= rng.integers(1, len(ids))))
    return found


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_supervised_loss_is_torchs_cross_entropy(model: Path, label_smoothing: float) -> None:
    engine, sequences = make_engine(model), make_sequences()
    lm = make_engine(model, attn_impl="eager")._policy.lm
    rows, targets = [], []
    for ids, mask in sequences:
        logits = lm(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
        where = np.flatnonzero(mask[1:])
        rows.append(logits[where])
        targets.append(torch.from_numpy(ids).long()[1:][where])
    loss = F.cross_entropy(torch.cat(rows), torch.cat(targets), label_smoothing=label_smoothing)
    loss.backward()
    before = engine.full_state_dict()
    stats = engine.sft_step(sequences, label_smoothing=label_smoothing).stats
    assert stats["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in lm.named_parameters():
        assert parameter.grad is not None
        moved = before[name] - engine.full_state_dict()[name]
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_supervised_phase_learns_and_leaves_the_policys_optimizer_alone(model: Path) -> None:
    engine, sequences = make_engine(model, optimizer=ADAM), make_sequences(num=16)
    losses = []
    with engine.supervised(lr=1e-2, num_steps=60):
        for _ in range(60):
            losses.append(engine.sft_step(sequences).stats["sft/loss"])
    assert losses[-1] < 0.5 * losses[0]
    assert {float(m["step"]) for m in engine.state_dict()["optimizer"].values()} == {0.0}
    assert int(engine.state_dict()["lr_step"]) == 0


@pytest.mark.parametrize(("kind", "expected"), [
    ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.55]),
    ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.55]),
])  # fmt: skip
def test_the_learning_rate_rises_then_follows_its_schedule(kind: Any, expected: list[float]) -> None:
    config = OptimizerConfig(lr_scheduler_type=kind, warmup_steps_proportion=0.2, min_lr_ratio=0.1)
    found = [lr_factor(config, s, 20) for s in (0, 1, 2, 3, 4, 12)]
    assert found == pytest.approx(expected)
    assert lr_factor(config, 100, 20) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_gradients_are_clipped_by_their_global_norm() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    optimization = Optimization(
        OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=1.0), parameters, 1
    )
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert optimization.update() == (5.0, True)
    assert [p.tolist() for p in parameters] == [pytest.approx([-0.6, 0.0]), pytest.approx([-0.8])]
    parameters[0].grad = torch.tensor([0.5, 0.0])
    scale_gradients(parameters, 0.5, 1.0)
    assert parameters[0].grad.tolist() == [0.5, 0.0]


def test_bfloat16_moments_follow_adamw() -> None:
    torch.manual_seed(0)
    start, target = torch.randn(40), torch.randn(40)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    few_bits = BFloat16AdamW([ours], 0.05, (0.9, 0.95), 1e-8, 0.01)
    adamw = torch.optim.AdamW([theirs], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for optimizer, x in ((few_bits, ours), (adamw, theirs)):
        for _ in range(50):
            optimizer.zero_grad()
            (x - target).square().sum().backward()
            optimizer.step()
    assert few_bits.state[ours]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


def test_logprobs_of_published_weights_are_those_of_the_update(model: Path) -> None:
    engine, batch = make_engine(model, optimizer=ADAM), make_batch()
    step(engine, 0)
    torch.testing.assert_close(engine.compute_logp(batch), plain_logp(engine, batch), rtol=1e-5, atol=2e-5)


def test_offloading_without_a_gpu_is_refused(model: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no GPU here"):
        TrainEngine(experiment(model).model_copy(update={"enable_offload": True}), total_train_steps=1)


def test_what_was_offloaded_comes_back_when_it_is_needed(model: Path) -> None:
    offloaded, stayed = make_engine(model, optimizer=ADAM), make_engine(model, optimizer=ADAM)
    for seed in range(2):
        step(stayed, seed)
        step(offloaded, seed)
        offloaded.offload()
    assert_bit_equal(weights(offloaded), weights(stayed))
    offloaded.offload()
    step(stayed, 2)
    step(offloaded, 2)
    assert_bit_equal(state_of(offloaded), state_of(stayed))
