"""Two ranks, by data (FSDP2) or by tensor: the same log-probs, weights and statistics as one; checkpoints move between.

All scenarios run in one pair of processes, started once; their results are compared here with those of one rank.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from train_engine_harness import VOCABULARY, experiment, make_batch, prepared, write_model

from headway.errors import InvalidInput
from services.trainer.engine import TrainEngine

ADAM = {"type": "adam", "lr": 1e-2, "eps": 1e-2, "gradient_clipping": 0.5}
"""With a large epsilon: otherwise Adam makes a full step of the rounding of a gradient that is nearly 0."""
D2, T2 = "sglang:d1+d2", "sglang:d1+t2"
FROM_BEHAVIOUR = {"use_decoupled_loss": False, "recompute_logprob": False}
SCENARIOS: dict[str, dict[str, Any]] = {
    "data": {"allocation": D2},
    "data, small micro-batches": {"allocation": D2, "mb_spec": {"max_tokens_per_mb": 40}},
    "data, four optimizer steps": {"allocation": D2, "ppo_n_minibatches": 4, "optimizer": ADAM},
    "data, sequence ratio": {"allocation": D2, "importance_sampling_level": "sequence", **FROM_BEHAVIOUR},
    "data, m2po": {"allocation": D2, "m2_threshold": 0.05},
    "data, checkpointing": {"allocation": D2, "gradient_checkpointing": True},
    "data, adapters": {"allocation": D2, "use_lora": True, "lora_rank": 4, "optimizer": ADAM},
    "data, reference": {"allocation": D2, "kl_ctl": 0.1, "ref": "llama"},
    "data, padded": {"allocation": D2, "attn_impl": "eager"},
    "tensor": {"allocation": T2, "optimizer": ADAM},
    "tensor, norms over heads": {"allocation": T2, "model": "qwen3"},
    "tensor, four optimizer steps": {"allocation": T2, "ppo_n_minibatches": 4, "optimizer": ADAM},
}
Results = dict[str, Any]


def write_models(folder: Path) -> None:
    from transformers import Qwen3Config

    write_model(folder / "llama")
    Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0,
    ).save_pretrained(folder / "qwen3")  # fmt: skip


def build(folder: Path, scenario: dict[str, Any], *, is_alone: bool) -> TrainEngine:
    options = {"model": "llama", **scenario}
    if is_alone:
        options["allocation"] = "sglang:d1+d1"
    model = folder / options.pop("model")
    if "ref" in options:
        options["ref"] = {"path": str(folder / options["ref"]), "init_from_scratch": True, "dtype": "float32"}
    return TrainEngine(experiment(model, **options), total_train_steps=10)


def one_step(engine: TrainEngine, num_groups: int = 5) -> dict[str, Any]:
    batch = prepared(engine, make_batch(num_groups=num_groups))
    logp = engine.compute_logp(batch)
    result = engine.ppo_update(batch, keeps_logp=True)
    return {
        "logp": logp,
        "kept_logp": result.logp,
        "prox_logp": result.prox_logp,
        "stats": result.stats,
        "applied": result.applied,
        "weights": engine.full_state_dict(),
    }


def broken_step(engine: TrainEngine) -> bool:
    """An advantage that is not finite, in one sample, which only one rank computes."""
    batch = prepared(engine, make_batch())
    assert batch.advantages is not None
    broken = batch.loss_mask & (batch.sample_ids == 0)
    return engine.ppo_update(batch.with_(advantages=batch.advantages.masked_fill(broken, torch.inf))).applied


def run_rank(rank: int, folder: Path) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results: Results = {name: one_step(build(folder, s, is_alone=False)) for name, s in SCENARIOS.items()}
    results["fewer samples than ranks"] = one_step(build(folder, {"allocation": D2}, is_alone=False), num_groups=1)
    engine = build(folder, {"allocation": D2, "optimizer": ADAM}, is_alone=False)
    results["broken"] = broken_step(engine), one_step(engine)
    results["supervised"] = supervised(build(folder, {"allocation": D2}, is_alone=False))
    save_and_load(folder, engine, results)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


def supervised(engine: TrainEngine) -> dict[str, Any]:
    groups = make_batch(7)
    sequences = [(s.input_ids.numpy(), s.loss_mask.numpy()) for s in (groups.select([i]) for i in range(7))]
    stats = engine.sft_step(sequences, label_smoothing=0.1).stats
    return {"stats": stats, "weights": engine.full_state_dict()}


def save_and_load(folder: Path, engine: TrainEngine, results: Results) -> None:
    """Save with two ranks; continue with two, after having loaded into a fresh pair."""
    dcp.save(engine.state_dict(), checkpoint_id=folder / "checkpoint")
    fresh = build(folder, {"allocation": D2, "optimizer": ADAM}, is_alone=False)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    fresh.load_state_dict(state)
    results["resumed"] = one_step(fresh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    write_models(found)
    return found


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Results:
    mp.spawn(run_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
    results: Results = torch.load(folder / "results.pt")
    return results


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    if expected.get("logp") is not None:
        torch.testing.assert_close(found["logp"], expected["logp"], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(found["kept_logp"], expected["kept_logp"], rtol=1e-4, atol=5e-4)
        torch.testing.assert_close(found["prox_logp"], expected["prox_logp"], rtol=1e-4, atol=5e-4)
    assert found["stats"] == pytest.approx(expected["stats"], rel=2e-3, abs=1e-4)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(two_ranks: Results, folder: Path, name: str) -> None:
    assert_same(two_ranks[name], one_step(build(folder, SCENARIOS[name], is_alone=True)))


def test_a_rank_without_samples_follows(two_ranks: Results, folder: Path) -> None:
    assert_same(two_ranks["fewer samples than ranks"], one_step(build(folder, {}, is_alone=True), num_groups=1))


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(two_ranks: Results, folder: Path) -> None:
    applied, then = two_ranks["broken"]
    assert not applied
    assert_same(then, one_step(build(folder, {"optimizer": ADAM}, is_alone=True)))


def test_supervised_steps_equal_those_of_one_rank(two_ranks: Results, folder: Path) -> None:
    assert_same(two_ranks["supervised"], supervised(build(folder, {}, is_alone=True)))


def test_a_checkpoint_of_two_ranks_continues_on_two_and_on_one(two_ranks: Results, folder: Path) -> None:
    alone = build(folder, {"optimizer": ADAM}, is_alone=True)
    state = alone.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in one process
        dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    alone.load_state_dict(state)
    expected: dict[str, Tensor] = two_ranks["broken"][1]["weights"]
    assert all(torch.equal(value, expected[name]) for name, value in alone.full_state_dict().items())
    assert_same(two_ranks["resumed"], one_step(alone))


def test_a_wrong_number_of_ranks_is_named(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="a trainer of 2 ranks, 1 are running"):
        build(folder, {"allocation": D2}, is_alone=False)
    with pytest.raises(InvalidInput, match="nearest that works: d2"):
        build(folder, {"allocation": "sglang:d1+c2"}, is_alone=False)
