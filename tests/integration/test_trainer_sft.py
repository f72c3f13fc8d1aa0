"""`headway sft` lowers the held-out loss and writes a model; no held-out row is shown to it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trainer_harness import ROOT, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.config import ExperimentConfig
from headway.data import open_dataset
from headway.errors import InvalidInput
from services.trainer.fine_tuning import fine_tune
from services.trainer.warm_start import plan_warm_start, usable_rows


def experiment(folder: Path, **warm_start: object) -> ExperimentConfig:
    content = settings(folder, steps=1)
    content["warm_start"] = {"steps": 30, "batch_size": 16, "lr": 1e-2, **warm_start}
    content["valid_dataset"] = {"path": "python:examples.sort_digits.rows", "split": "test", "max_rows": 16}
    return ExperimentConfig.model_validate(content)


def test_the_held_out_loss_falls_and_the_written_model_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = experiment(tmp_path)
    folder = fine_tune(config, tmp_path / "out")
    before, after = (float(loss) for loss in re.findall(r"held-out loss ([0-9.]+)", caplog.text))
    assert after < before - 0.5
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert AutoTokenizer.from_pretrained(folder).encode("sort 1=") == AutoTokenizer.from_pretrained(
        config.actor.path
    ).encode("sort 1=")


def test_answers_carry_the_loss_and_prompts_do_not(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    train = open_dataset(config.train_dataset, tokenizer, config.seed)
    plan = plan_warm_start(config, train, None, tokenizer)
    assert plan.steps.shape == (30, 16)
    answers = {row["answer"] for row in train.rows}
    for ids, mask in plan.sequences:
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[mask][:-1]).replace(" ", "") in answers
        assert np.all(np.diff(mask.astype(int)) >= 0)


def test_every_row_is_seen_before_any_is_seen_again(tmp_path: Path) -> None:
    config = experiment(tmp_path, steps=8, batch_size=16)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    train = open_dataset(config.train_dataset, tokenizer, config.seed)
    plan = plan_warm_start(config, train, None, tokenizer)
    for first in (0, 4):
        assert len(set(plan.steps[first : first + 4].reshape(-1))) == len(train) == 64


def test_rows_whose_prompt_is_held_out_are_left_out() -> None:
    train = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c"}]
    assert usable_rows(train, [{"prompt": "b", "answer": "2"}]) == [train[0]]
    chat = [{"messages": [{"role": "user", "content": "a"}], "answer": 0}]
    assert usable_rows(chat, chat) == []


def test_without_a_usable_row_it_is_refused(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    same = {**config.valid_dataset.model_dump(), "split": "train", "max_rows": 64}
    config = ExperimentConfig.model_validate({**config.model_dump(), "valid_dataset": same})
    with pytest.raises(InvalidInput, match="no row with an `answer` that is not in valid_dataset"):
        fine_tune(config, tmp_path / "out")


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    config = experiment(tmp_path, steps=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidInput, match="choose another --output"):
        fine_tune(config, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    fine_tune(config, tmp_path / "out")
    fine_tune(config, tmp_path / "out")


def test_the_command_says_a_mistake_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "services.trainer.sft", str(tmp_path / "absent.yaml")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "absent.yaml" in ended.stderr
