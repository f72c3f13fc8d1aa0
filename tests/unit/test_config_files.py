"""AReaL's files load as they are: the example whole, its fragments, newer spellings; and so do ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway.config import Dims, ExperimentConfig, load_experiment, read_experiment, require_runnable
from headway.config.show import differences
from headway.config.unread import UNREAD
from headway.errors import InvalidInput

AREAL = Path(__file__).with_name("areal_files")
CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_example_of_areal_loads_unchanged_with_its_interpolation() -> None:
    config = load_experiment(AREAL / "gsm8k_grpo.yaml")
    assert config.run_name == "gsm8k-grpo/trial0"
    assert (config.allocation.inference, config.allocation.training) == (Dims(data=4), Dims(data=4))
    assert config.tokenizer_path == config.rollout.tokenizer_path == config.actor.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (config.rollout.consumer_batch_size, config.rollout.queue_size) == (256, 16 * 256)
    assert config.actor.optimizer is not None
    assert (config.actor.optimizer.lr, config.actor.optimizer.eps) == (1.7e-5, 1e-8)
    assert config.ref is not None
    assert config.ref.scheduling_spec == config.actor.scheduling_spec


def test_what_has_no_meaning_here_is_told_once_each() -> None:
    notes = read_experiment(AREAL / "gsm8k_grpo.yaml").notes
    assert [key for note in notes if (key := note.partition(":")[0]) not in UNREAD] == [
        "actor.scheduling_spec.0.cmd",
        "train_dataset.pin_memory",
        "valid_dataset.pin_memory",
    ]


def test_our_copy_of_the_example_differs_in_its_comments_only() -> None:
    ours, theirs = load_experiment(CONFIGS / "gsm8k_grpo.yaml"), load_experiment(AREAL / "gsm8k_grpo.yaml")
    assert differences(ours, theirs) == []


def test_the_fragment_for_synchronous_debugging_loads() -> None:
    config = load_experiment(AREAL / "fragment_synchronous.yaml")
    assert (config.rollout.max_head_offpolicyness, config.rollout.max_concurrent_rollouts) == (0, 1)
    assert config.actor.recompute_logprob
    assert config.actor.behave_rejection is None


def test_the_fragment_for_high_throughput_loads() -> None:
    config = load_experiment(AREAL / "fragment_high_throughput.yaml")
    assert (config.rollout.max_head_offpolicyness, config.rollout.max_concurrent_rollouts) == (6, 128)
    assert config.rollout.consumer_batch_size == config.train_dataset.batch_size == 32
    assert config.actor.prox_logp_method == "loglinear"


def test_the_balanced_fragment_loads() -> None:
    config = load_experiment(AREAL / "fragment_balanced.yaml")
    assert (config.rollout.max_head_offpolicyness, config.rollout.max_concurrent_rollouts) == (2, 32)
    assert config.actor.use_decoupled_loss


def test_a_fragment_is_refused_where_something_is_to_be_started() -> None:
    with pytest.raises(InvalidInput, match=r"actor\.path is missing.*train_dataset\.path is missing"):
        require_runnable(load_experiment(AREAL / "fragment_balanced.yaml"))


def test_newer_spellings_mean_the_same() -> None:
    config = load_experiment(AREAL / "newer_spelling.yaml")
    older = load_experiment(AREAL / "gsm8k_grpo.yaml")
    assert config.allocation == older.allocation
    rule = config.actor.behave_rejection
    assert rule is not None
    assert (rule.level, rule.action, rule.upper) == ("sequence", "clamp", 2.0)
    assert (config.recover.mode, config.evaluator.at_start, config.actor.mb_spec.packing) == ("auto", False, "ffd")


def test_every_file_of_ours_loads_and_says_first_what_it_is_for() -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert {file.stem for file in files} >= {"quickstart", "gsm8k_grpo", "debug_sync", "balanced", "high_throughput"}
    for file in files:
        require_runnable(load_experiment(file))
        assert file.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(
    ("key", "mode"), [("off", "disabled"), ("on", "auto"), ("false", "disabled"), ("true", "auto"), ("fault", "fault")]
)
def test_recover_can_be_switched_on_and_off(key: str, mode: str) -> None:
    assert load_experiment(AREAL / "gsm8k_grpo.yaml", [f"recover.mode={key}"]).recover.mode == mode


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("token_mask", ("token", "mask")),
        ("token_truncate", ("token", "clamp")),
        ("sequence_mask", ("sequence", "mask")),
        ("sequence_truncate", ("sequence", "clamp")),
    ],
)
def test_the_old_cap_and_mode_become_rejection_sampling(mode: str, rule: tuple[str, str]) -> None:
    overrides = ["actor.behave_imp_weight_cap=3", f"actor.behave_imp_weight_mode={mode}"]
    found = load_experiment(AREAL / "gsm8k_grpo.yaml", overrides).actor.behave_rejection
    assert found is not None
    assert (found.level, found.action, found.upper) == (*rule, 3.0)


def test_rejection_is_off_where_either_spelling_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    for line in ("rejection_sampling: null", "behave_imp_weight_mode: disabled"):
        file.write_text(f"actor:\n  use_decoupled_loss: true\n  {line}\n", encoding="utf-8")
        assert load_experiment(file).actor.behave_rejection is None


def test_overrides_win_and_may_be_interpolations_lists_and_new_sections() -> None:
    config = load_experiment(
        AREAL / "gsm8k_grpo.yaml",
        [
            "actor.path=models/tiny",
            "gconfig.stop=['\\n', END]",
            "total_train_steps=${gconfig.n_samples}",
            "+reward.kwargs.tolerance=1e-3",
            "actor.scheduling_spec.0.env_vars.NCCL_DEBUG=INFO",
            "warm_start.steps=7",
        ],
    )
    assert config.sglang.model_path == "models/tiny"
    assert config.gconfig.stop == ["\\n", "END"]
    assert (config.total_train_steps, config.reward.kwargs) == (4, {"tolerance": 1e-3})
    assert config.rollout.scheduling_spec[0].env_vars == {"NCCL_DEBUG": "INFO"}
    assert config.warm_start is not None
    assert config.warm_start.steps == 7


def test_interpolation_reaches_defaults_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH", "12")
    file = tmp_path / "file.yaml"
    file.write_text(
        "total_train_steps: ${gconfig.n_samples}\ntrain_dataset: {batch_size: '${oc.env:BATCH}'}\n", "utf-8"
    )
    config = load_experiment(file)
    assert (config.total_train_steps, config.train_dataset.batch_size) == (1, 12)


def test_yaml_is_read_with_its_anchors_and_without_its_surprises(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    lines = [
        "experiment_name: 007",
        "trial_name: off",
        "actor: &model {path: models/tiny, dtype: float32}",
        "ref: {<<: *model, mb_spec: {n_mbs: 0x2}}",
        "gconfig: {max_new_tokens: 1_000, temperature: 1e0, stop: [2024-01-01, 12:30, yes]}",
    ]
    file.write_text("\n".join(lines), "utf-8")
    config = load_experiment(file)
    assert config.run_name == "007/off"
    assert config.ref is not None
    assert (config.ref.path, config.ref.dtype, config.ref.mb_spec.n_mbs) == ("models/tiny", "float32", 2)
    assert (config.gconfig.max_new_tokens, config.gconfig.temperature) == (1000, 1.0)
    assert config.gconfig.stop == ["2024-01-01", "12:30", "yes"]


def test_paths_are_kept_apart_by_kind_user_experiment_and_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_USER", "ada")
    paths = load_experiment(AREAL / "gsm8k_grpo.yaml", ["cluster.fileroot=/data", "saver.fileroot=/exports"]).paths
    assert paths.weights == Path("/data/weights/ada/gsm8k-grpo/trial0")
    assert paths.checkpoints == Path("/exports/checkpoints/ada/gsm8k-grpo/trial0")
    assert paths.rollouts == Path("/data/rollout/ada/gsm8k-grpo/trial0")


def test_importing_the_configuration_loads_no_heavy_package() -> None:
    code = "import sys, headway.config; print([m for m in ('torch', 'grpc', 'transformers') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "[]"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ExperimentConfig().seed = 2  # type: ignore[misc]
