"""What is written of trained tokens is what the update used; asking for it changes nothing of the update."""

from pathlib import Path

import orjson
import pytest
import torch
from train_engine_harness import make_batch, make_engine, prepared, weights, write_model

from services.trainer.token_dump import TokenDump, lines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("minibatches", [1, 3])
def test_proximal_log_probs_are_those_of_the_policy_at_the_start_of_the_step(model: Path, minibatches: int) -> None:
    engine = make_engine(model, ppo_n_minibatches=minibatches)
    batch = prepared(engine, make_batch())
    start = engine.compute_logp(batch)
    result = engine.ppo_update(batch, keeps_logp=True)
    assert result.logp is not None
    assert result.prox_logp is not None
    mask = batch.loss_mask
    torch.testing.assert_close(result.prox_logp[mask], start[mask], atol=1e-5, rtol=0)
    if minibatches == 1:
        assert torch.equal(result.logp, result.prox_logp)
    else:
        assert not torch.allclose(result.logp[mask], start[mask], atol=1e-3)  # later mini-batches see moved weights


def test_asking_for_log_probs_changes_no_weight(model: Path) -> None:
    plain, asked = make_engine(model), make_engine(model)
    plain.ppo_update(prepared(plain, make_batch()))
    asked.ppo_update(prepared(asked, make_batch()), keeps_logp=True)
    assert all(torch.equal(value, weights(asked)[name]) for name, value in weights(plain).items())


def test_a_line_has_an_entry_for_every_token_from_the_first_generated_one(tmp_path: Path, model: Path) -> None:
    engine = make_engine(model)
    batch = prepared(engine, make_batch())
    result = engine.ppo_update(batch, keeps_logp=True)
    assert result.logp is not None
    dump = TokenDump(tmp_path)
    dump.add(3, batch.with_(prox_logp=result.prox_logp), result.logp)
    dump.close()
    found = [orjson.loads(line) for line in (tmp_path / "3" / "trained.jsonl").read_bytes().splitlines()]
    assert [(line["task_id"], line["sample"]) for line in found] == [(f"0/{g}", i) for g in range(5) for i in range(4)]
    assert batch.advantages is not None
    assert batch.final_rewards is not None
    for index, line in enumerate(found):
        one = batch.select([index])
        assert one.advantages is not None
        start = line["start"]
        assert line["step"] == 3
        assert line["reward"] == pytest.approx(float(batch.final_rewards[index]))
        assert one.versions[:start].tolist() == [-1] * start
        assert one.versions[start] >= 0
        assert line["loss_mask"] == one.loss_mask[start:].int().tolist()
        assert line["advantages"] == pytest.approx(one.advantages[start:].tolist(), abs=1e-6)
        assert len(line["prox_logp"]) == len(line["logp"]) == len(one.input_ids) - start


def test_a_step_that_is_trained_again_replaces_what_was_written(tmp_path: Path, model: Path) -> None:
    engine = make_engine(model)
    batch = prepared(engine, make_batch())
    for _ in range(2):
        dump = TokenDump(tmp_path)
        dump.add(0, batch, torch.zeros(batch.num_tokens))
        dump.close()
    expected = b"".join(lines(0, batch, torch.zeros(batch.num_tokens)))
    assert (tmp_path / "0" / "trained.jsonl").read_bytes() == expected
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["trained.jsonl"]


def test_a_disk_that_fails_is_told_once_and_stops_nothing(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    engine = make_engine(model)
    batch = prepared(engine, make_batch())
    dump = TokenDump(tmp_path / "file")
    for step in range(3):
        dump.add(step, batch, torch.zeros(batch.num_tokens))
    dump.close()
    assert len(caplog.records) == 1
    assert "is no longer written" in caplog.text
