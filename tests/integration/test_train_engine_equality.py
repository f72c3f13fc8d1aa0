"""Packed or padded, cut into any micro-batches: the same log-probs, loss and gradients; no sample sees another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_engine_harness import (
    VOCABULARY,
    gradient,
    make_batch,
    make_engine,
    make_groups,
    plain_logp,
    prepared,
    write_model,
)

from headway.algorithm.advantages import compute_advantages
from headway.algorithm.batch import SampleBatch
from headway.algorithm.losses import PolicyTokens, policy_loss
from headway.core.trajectory import Group
from headway.errors import InvalidInput
from services.trainer.attention import PackedAttention

LAYOUTS: list[dict[str, Any]] = [
    {"attn_impl": "eager"},
    {"mb_spec": {"max_tokens_per_mb": 1000}},
    {"mb_spec": {"max_tokens_per_mb": 60}},
    {"mb_spec": {"max_tokens_per_mb": 32}},
    {"mb_spec": {"n_mbs": 3}},
    {"mb_spec": {"n_mbs": 4, "granularity": 2}},
    {"attn_impl": "eager", "mb_spec": {"max_tokens_per_mb": 70}},
    {"gradient_checkpointing": True},
]

FROM_BEHAVIOUR = {"use_decoupled_loss": False, "recompute_logprob": False}
"""Ratios against the log-probs that came with the samples: far from 1, unlike those of a first mini-batch."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_logprobs_equal_plain_transformers(model: Path, layout: dict[str, Any], temperature: float) -> None:
    engine, batch = make_engine(model, temperature=temperature, **layout), make_batch()
    expected = plain_logp(engine, batch, temperature)
    torch.testing.assert_close(engine.compute_logp(batch), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_is_kept(tmp_path: Path, attention: str) -> None:
    from transformers import MistralConfig

    MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    ).save_pretrained(tmp_path)  # fmt: skip
    engine, batch = make_engine(tmp_path, attn_impl=attention), make_batch()
    torch.testing.assert_close(engine.compute_logp(batch), plain_logp(engine, batch), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_do_not_depend_on_the_layout(model: Path, layout: dict[str, Any]) -> None:
    batch = make_batch()
    base, other = make_engine(model), make_engine(model, **layout)
    assert_same(gradient(other, batch), gradient(base, batch))


def test_the_gradient_is_that_of_the_loss_over_one_plain_padded_batch(model: Path) -> None:
    """The reference pads, takes full logits, and sums the loss over the mask by itself."""
    engine = make_engine(model)
    batch = make_batch()
    batch = engine.compute_advantages(batch.with_(prox_logp=engine.compute_logp(batch)))
    lm = make_engine(model, attn_impl="eager")._policy.lm
    samples = [batch.select([i]) for i in range(batch.num_samples)]
    ids = torch.nn.utils.rnn.pad_sequence([sample.input_ids for sample in samples], batch_first=True)
    scores = lm(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    mask = torch.nn.utils.rnn.pad_sequence([sample.loss_mask for sample in samples], batch_first=True)[:, 1:]
    where = batch.loss_mask
    assert batch.advantages is not None
    assert batch.prox_logp is not None
    tokens = PolicyTokens(
        batch.logprobs[where], batch.prox_logp[where], batch.advantages[where], batch.sample_ids[where],
        torch.ones(int(where.sum()), dtype=torch.bool),
    )  # fmt: skip
    loss = policy_loss(scores[mask], tokens, engine.config).loss.sum() / int(where.sum())
    loss.backward()
    before = engine.full_state_dict()
    result = engine.ppo_update(batch)
    assert result.stats["ppo_actor/update/actor_loss/avg"] == pytest.approx(loss.item(), rel=1e-5)
    moved = {name: before[name] - value for name, value in engine.full_state_dict().items()}
    assert_same(moved, {name: p.grad for name, p in lm.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("changes", [
    {**FROM_BEHAVIOUR, "importance_sampling_level": "sequence"},
    {**FROM_BEHAVIOUR, "use_sapo_loss": True},
    {**FROM_BEHAVIOUR, "use_cispo_loss": True},
    {**FROM_BEHAVIOUR, "c_clip": 1.1},
    {"m2_threshold": 0.05},
    {"behave_imp_weight_mode": "sequence_mask", "behave_imp_weight_cap": 1.1},
    {"prox_logp_method": "loglinear"},
    {"prox_logp_method": "metrics"},
    {"use_decoupled_loss": False},
    {"ppo_n_minibatches": 3},
])  # fmt: skip
def test_every_variant_is_independent_of_micro_batches(model: Path, changes: dict[str, Any]) -> None:
    batch = make_batch(3)
    whole, cut = make_engine(model, **changes), make_engine(model, mb_spec={"max_tokens_per_mb": 40}, **changes)
    found = gradient(cut, batch)
    assert_same(found, gradient(whole, batch))
    assert any(value.abs().max() > 0 for value in found.values())


def test_the_first_minibatch_needs_no_pass_of_its_own_for_proximal_logprobs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, adam = make_batch(), {"type": "adam", "lr": 1e-2, "eps": 1e-2}
    saved, whole = (make_engine(model, ppo_n_minibatches=3, optimizer=adam) for _ in range(2))
    first = torch.isin(batch.sample_ids, torch.tensor(saved._minibatches(batch)[0].samples))
    logp, found = saved.compute_logp(batch), saved.compute_prox_logp(batch)
    assert found[first].count_nonzero() == 0
    assert torch.equal(found[~first], logp[~first])
    monkeypatch.setattr(type(whole), "_first_is_proximal", False)
    assert torch.equal(whole.compute_prox_logp(batch), logp)
    whole.ppo_update(whole.compute_advantages(batch.with_(prox_logp=logp)))
    monkeypatch.undo()
    saved.ppo_update(prepared(saved, batch))
    assert_same(saved.full_state_dict(), whole.full_state_dict())
    assert not make_engine(model).needs_prox_logp
    assert make_engine(model, m2_threshold=0.1).needs_prox_logp


def test_an_update_without_what_it_needs_is_refused(model: Path) -> None:
    engine = make_engine(model, ppo_n_minibatches=2)
    with pytest.raises(ValueError, match="prox_logp"):
        engine.ppo_update(compute_advantages(make_batch(), engine.config))
    with pytest.raises(ValueError, match="advantages"):
        engine.ppo_update(make_batch().with_(prox_logp=engine.compute_prox_logp(make_batch())))


def test_statistics_do_not_depend_on_micro_batches(model: Path) -> None:
    stats = []
    for budget in (1000, 40):
        engine = make_engine(model, mb_spec={"max_tokens_per_mb": budget}, prox_logp_method="metrics")
        stats.append(engine.ppo_update(prepared(engine, make_batch())).stats)
    assert stats[0] == pytest.approx(stats[1], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_changing_one_sample_does_not_move_the_others(model: Path, attention: str) -> None:
    engine, groups = make_engine(model, attn_impl=attention), make_groups()
    before = engine.compute_logp(SampleBatch.from_groups(groups))
    rng = np.random.default_rng(9)
    for g, i in ((0, 0), (2, 1), (4, 3)):
        sample = groups[g].trajectories[i]
        sample.input_ids[:] = rng.integers(3, VOCABULARY, len(sample))
        changed = SampleBatch.from_groups(groups)
        after = engine.compute_logp(changed)
        others = changed.sample_ids != g * 4 + i
        if g == 2:  # its fourth sample is its first
            others &= changed.sample_ids != 2 * 4 + 1
        torch.testing.assert_close(after[others], before[others], rtol=0, atol=5e-6)
        assert (after[~others] - before[~others]).abs().max() > 1e-3
        before = after


def test_a_later_token_does_not_move_an_earlier_one(model: Path) -> None:
    engine, groups = make_engine(model), make_groups(num_groups=1)
    groups[0].trajectories[0].loss_mask[-6:] = True
    before = engine.compute_logp(SampleBatch.from_groups(groups))
    length = len(groups[0].trajectories[0])
    groups[0].trajectories[0].input_ids[length - 1] += 1
    after = engine.compute_logp(SampleBatch.from_groups(groups))
    torch.testing.assert_close(after[: length - 1], before[: length - 1], rtol=0, atol=5e-6)
    assert after[length - 1] != before[length - 1]


def test_samples_of_a_group_share_the_rows_of_their_prompt(model: Path) -> None:
    engine = make_engine(model)
    prompt = list(range(3, 33))
    groups = [Group("0/0", tuple(_sample(prompt, [40 + i, 5, 6]) for i in range(8)))]
    batch = SampleBatch.from_groups(groups)
    (minibatch,) = engine._minibatches(batch)
    assert sum(m.num_rows for m in minibatch.micro_batches) == 30 + 8 * 2
    torch.testing.assert_close(engine.compute_logp(batch), plain_logp(engine, batch), rtol=1e-5, atol=2e-5)


def test_equal_samples_are_computed_once(model: Path) -> None:
    engine = make_engine(model)
    batch = SampleBatch.from_groups([Group("0/0", tuple(_sample(list(range(3, 20)), [7, 8, 9]) for _ in range(4)))])
    (minibatch,) = engine._minibatches(batch)
    assert sum(m.num_rows for m in minibatch.micro_batches) == 19
    torch.testing.assert_close(engine.compute_logp(batch), plain_logp(engine, batch), rtol=1e-5, atol=2e-5)


def test_a_sample_above_the_token_budget_is_refused_by_name_before_anything_is_trained(model: Path) -> None:
    engine = make_engine(model, mb_spec={"max_tokens_per_mb": 12}, use_decoupled_loss=False, recompute_logprob=False)
    batch = compute_advantages(make_batch(), engine.config)
    before = engine.full_state_dict()
    with pytest.raises(InvalidInput, match=r"task 0/\d need \d+ tokens in one micro-batch, more than .* = 12"):
        engine.ppo_update(batch)
    assert all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())


def test_an_attention_that_is_not_known_is_refused() -> None:
    module = torch.nn.Module()
    from services.trainer.attention import packed_attention

    packed = PackedAttention([0], [np.arange(2)])
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(InvalidInput, match="attn_impl"):
        packed_attention(module, x, x, x, None, packed=packed, softcap=30.0)


def _sample(prompt: list[int], completion: list[int]) -> Any:
    from headway.core.trajectory import Trajectory

    ids = np.array(prompt + completion, dtype=np.int32)
    made = np.arange(len(ids)) >= len(prompt)
    return Trajectory(ids, np.where(made, -1, 0).astype(np.float32), made, np.where(made, 0, -1).astype(np.int32), 1.0)
