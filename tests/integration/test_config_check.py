"""`headway config check` tries everything that a file names, before anything is started, and finds what would fail.

The file is AReaL's example, scaled down by overrides alone to a tiny model folder and a few rows of GSM8K's kind.
"""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from headway.config import load_experiment
from headway.config.cli import config_app
from headway.config.dry_run import Finding, dry_run
from headway.config.machine import Status

FILE = Path(__file__).parents[2] / "configs/gsm8k_grpo.yaml"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 160}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a character-level tokenizer, a chat template and a file of weights."""
    folder = tmp_path_factory.mktemp("model")
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(
        models.WordLevel({letter: n for n, letter in enumerate(["<unk>", *letters])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "config.json").write_text(json.dumps(MODEL), "utf-8")
    (folder / "model.safetensors").write_bytes(b"\0" * 4096)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GSM8K's columns: eight short questions, and a long one."""
    folder = tmp_path_factory.mktemp("rows")
    questions = [f"What is {number} + {number}?" for number in range(8)] + ["Why? " * 100]
    text = "".join(json.dumps({"question": q, "answer": "Think.\n#### 6"}) + "\n" for q in questions)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(text, "utf-8")
    return folder


@pytest.fixture
def scaled(model: Path, rows: Path, tmp_path: Path) -> list[str]:
    """The overrides that bring the example down to this machine."""
    return [
        f"actor.path={model}",
        f"train_dataset.path={rows}",
        f"valid_dataset.path={rows}",
        "train_dataset.batch_size=4",
        "train_dataset.max_length=100",
        "gconfig.max_new_tokens=32",
        "actor.mb_spec.max_tokens_per_mb=512",
        "allocation_mode=sglang:d1+d1",
        "inference.engine=builtin",
        f"cluster.fileroot={tmp_path}",
        "cluster.n_gpus_per_node=0",
        "services.controller_http_port=0",
    ]


def found(overrides: list[str]) -> dict[str, Finding]:
    """The findings by what was tried."""
    return {finding.what: finding for finding in dry_run(load_experiment(FILE, overrides))}


def check(overrides: list[str]) -> Result:
    return CliRunner().invoke(config_app, ["check", str(FILE), *overrides])


def test_the_example_scaled_down_by_overrides_is_fine(scaled: list[str]) -> None:
    told = check(scaled)
    assert told.exit_code == 0, told.output
    assert "train rows: " in told.output
    assert (
        "8 rows, prompts of 60 to 60 tokens; 1 left out with prompts longer than max_length 100 (up to 546)"
        in told.output
    )
    assert "longest sequence: 92 tokens (task 0/" in told.output
    assert "gsm8k: its own answer gets 1, an empty one gets 0" in told.output
    assert told.output.endswith("gsm8k_grpo.yaml: fine\n")


def test_the_longest_sequence_is_held_against_micro_batch_and_model(scaled: list[str]) -> None:
    finding = found([*scaled, "gconfig.max_new_tokens=120"])["longest sequence"]
    assert (finding.status, "the model's max_position_embeddings is 160" in finding.text) == (Status.BAD, True)
    finding = found([*scaled, "train_dataset.max_length=null", "valid_dataset=null"])["longest sequence"]
    assert (finding.status, "578 tokens (task 0/8" in finding.text) == (Status.BAD, True)


def test_what_is_missing_is_found_and_the_rest_is_tried_all_the_same(scaled: list[str], tmp_path: Path) -> None:
    findings = found([*scaled, f"actor.path={tmp_path}", "workflow.path=headway.workflow.RLVRWorkflo"])
    bad = {what for what, finding in findings.items() if finding.status is Status.BAD}
    assert bad == {"tokenizer", "model", "workflow"}
    assert "did you mean 'RLVRWorkflow'?" in findings["workflow"].text
    assert findings["reward"].status is Status.OK
    assert check([*scaled, f"actor.path={tmp_path}"]).exit_code == 2


def test_no_rows_left_is_found(scaled: list[str]) -> None:
    finding = found([*scaled, "train_dataset.max_length=10"])["train rows"]
    assert finding.status is Status.BAD
    assert "none of 9 rows is left: 9 prompts are longer than max_length 10 tokens" in finding.text


def hangs(completion: str) -> float:
    time.sleep(3600)
    return 0.0


def raises(completion: str, answer: str) -> float:
    raise KeyError(answer)


def test_a_reward_function_that_fails_or_hangs_is_found(scaled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.config.dry_run.START_S", 5.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    here = Path(__file__).stem
    finding = found([*scaled, f"reward.function={here}.raises"])["reward"]
    assert (finding.status, "KeyError" in finding.text) == (Status.BAD, True)
    finding = found([*scaled, f"reward.function={here}.hangs", "reward.timeout_s=0.01"])["reward"]
    assert (finding.status, "has not answered within" in finding.text) == (Status.BAD, True)
    assert found([*scaled, "reward.function=no_such"])["reward"].status is Status.BAD


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_and_an_etcd_that_is_silent_are_found(scaled: list[str], taken_port: int) -> None:
    port = found([*scaled, f"services.controller_http_port={taken_port}"])["ports"]
    assert (port.status, f"controller_http_port {taken_port}" in port.text) == (Status.BAD, True)
    etcd = ["cluster.name_resolve.type=etcd3", f"cluster.name_resolve.etcd3_addr=127.0.0.1:{taken_port}"]
    assert found([*scaled, *etcd])["etcd"].status is Status.OK
    silent = found([*scaled, etcd[0], "cluster.name_resolve.etcd3_addr=127.0.0.1:1"])["etcd"]
    assert silent.status is Status.BAD


def test_the_flags_of_an_outside_engine_are_shown(scaled: list[str]) -> None:
    engine = [*scaled, "inference.engine=sglang", "inference.command=[python3, -m, sglang.launch_server]"]
    finding = found(engine)["engine"]
    assert finding.status is Status.OK
    assert "python3 -m sglang.launch_server --model-path" in finding.text
    assert "--skip-tokenizer-init" in finding.text
    assert "--context-length 32768 --mem-fraction-static 0.8" in finding.text
    assert found([*engine, "inference.command=[no-such-program]"])["engine"].status is Status.BAD


def test_memory_that_is_not_there_is_noted(scaled: list[str]) -> None:
    asked = [*scaled, "rollout.scheduling_spec=[]", "ref.scheduling_spec=[]"]
    assert "memory" not in found([*asked, "actor.scheduling_spec=[]"])
    finding = found([*asked, "actor.scheduling_spec=[{mem: 1000000, gpu: 2}]"])["memory"]
    assert finding.status is Status.NOTE
    assert "asks for 2000000 GB" in finding.text
    assert found([*asked, "actor.scheduling_spec=[{mem: 1}]"])["memory"].status is Status.OK


def test_devices_that_are_not_there_are_noted(scaled: list[str]) -> None:
    finding = found([*scaled, "cluster.n_gpus_per_node=1000000"])["devices"]
    assert finding.status is Status.NOTE
