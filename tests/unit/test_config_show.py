"""A configuration can be shown, saved, loaded again and compared; secrets never show."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.config import load_experiment, read_experiment, save_resolved
from headway.config.cli import config_app
from headway.config.schema import json_schema
from headway.config.secrets import MASK
from headway.config.show import differences, plain, shown_config
from headway.errors import InvalidInput

AREAL = Path(__file__).with_name("areal_files")
FILES = sorted(AREAL.glob("*.yaml"))
SECRETS = [
    "stats_logger.wandb.wandb_api_key=s3cret",
    "stats_logger.swanlab.api_key=s3cret",
    "cluster.name_resolve.etcd3_password=s3cret",
    "actor.scheduling_spec.0.env_vars.HF_TOKEN=s3cret",
    "reward.kwargs.judge.api_key=s3cret",
    "sglang.api_key=s3cret",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_saved_configuration_loads_as_the_same(file: Path, tmp_path: Path) -> None:
    config = load_experiment(file)
    save_resolved(config, tmp_path / "run" / "config.yaml")
    assert load_experiment(tmp_path / "run" / "config.yaml") == config
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_secrets_are_masked_wherever_a_configuration_is_shown(tmp_path: Path) -> None:
    experiment = read_experiment(AREAL / "gsm8k_grpo.yaml", SECRETS)
    save_resolved(experiment.config, tmp_path / "config.yaml")
    texts = [shown_config(experiment.config, experiment.given).plain, (tmp_path / "config.yaml").read_text("utf-8")]
    texts += [repr(experiment.config.stats_logger), json.dumps(plain(experiment.config))]
    for text in texts:
        assert "s3cret" not in text
        assert MASK in text
    assert experiment.config.stats_logger.wandb.key() == "s3cret"
    assert experiment.config.sglang.flags()["api_key"] == "s3cret"


def test_a_masked_secret_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_resolved(load_experiment(AREAL / "gsm8k_grpo.yaml", SECRETS), tmp_path / "config.yaml")
    config = load_experiment(tmp_path / "config.yaml")
    assert config.stats_logger.wandb.key() is None
    assert config.actor.scheduling_spec[0].env_vars == {}
    monkeypatch.setenv("WANDB_API_KEY", "from the environment")
    (tmp_path / "password").write_text("from a file\n", "utf-8")
    monkeypatch.setenv("HEADWAY_ETCD_PASSWORD_FILE", str(tmp_path / "password"))
    assert config.stats_logger.wandb.key() == "from the environment"
    assert config.cluster.name_resolve.password() == "from a file"
    monkeypatch.setenv("SWANLAB_API_KEY_FILE", str(tmp_path / "absent"))
    with pytest.raises(InvalidInput, match="SWANLAB_API_KEY_FILE"):
        config.stats_logger.swanlab.key()


def test_what_the_file_does_not_set_is_dimmed() -> None:
    experiment = read_experiment(AREAL / "fragment_balanced.yaml")
    text = shown_config(experiment.config, experiment.given)
    dimmed = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == "dim")
    assert "max_concurrent_rollouts: 32" not in dimmed
    assert "max_concurrent_rollouts: 32" in text.plain
    assert "queue_size: 512" in dimmed


def test_files_are_compared_key_by_key() -> None:
    config = load_experiment(AREAL / "gsm8k_grpo.yaml")
    other = load_experiment(AREAL / "gsm8k_grpo.yaml", ["seed=2", "gconfig.stop=[a]", "reward.kwargs.x=1"])
    assert differences(config, config) == []
    assert differences(config, other) == [
        ("seed", 1, 2),
        ("gconfig.stop", None, ["a"]),
        ("sglang.random_seed", 1, 2),
        ("vllm.seed", 1, 2),
        ("reward.kwargs", {}, None),
        ("reward.kwargs.x", None, 1),
    ]


def properties_of(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The properties of a schema, through references and alternatives."""
    if "$ref" in schema:
        return properties_of(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    for part in schema.get("anyOf", []):
        if found := properties_of(part, whole):
            return found
    return dict(schema.get("properties", {}))


def unknown_in(data: Any, schema: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    known = properties_of(schema, whole)
    return [
        name
        for name, value in (data.items() if isinstance(data, dict) and known else ())
        for name in ([name] if name not in known else unknown_in(value, known[name], whole))
    ]


def test_the_schema_knows_every_key_of_areals_file_with_its_help() -> None:
    schema = json_schema()
    data = plain(load_experiment(AREAL / "gsm8k_grpo.yaml"))
    data["actor"]["behave_imp_weight_cap"] = 5.0
    assert unknown_in(data, schema, schema) == []
    assert unknown_in({"actor": {"typo": 1}}, schema, schema) == ["typo"]
    for section in (schema, *schema["$defs"].values()):
        for field in section.get("properties", {}).values():
            assert field.get("description") or properties_of(field, schema), "a value has its help, a section its own"


def test_the_schema_takes_interpolation_for_any_value_that_is_no_text() -> None:
    field = json_schema()["$defs"]["RolloutConfig"]["properties"]["queue_size"]
    assert any(part.get("pattern") == r"\$\{.+\}" for part in field["anyOf"])


def test_the_commands_show_compare_and_describe() -> None:
    runner = CliRunner()
    file, other = str(AREAL / "gsm8k_grpo.yaml"), str(AREAL / "newer_spelling.yaml")
    shown = runner.invoke(config_app, ["show", file, "seed=7"])
    assert (shown.exit_code, "seed: 7\n" in shown.output) == (0, True)
    assert runner.invoke(config_app, ["diff", file, file]).exit_code == 0
    compared = runner.invoke(config_app, ["diff", file, other])
    assert (compared.exit_code, "actor.backend:\n  - null\n  + fsdp:d4p1t1\n" in compared.output) == (1, True)
    assert json.loads(runner.invoke(config_app, ["schema"]).output)["title"] == "Headway experiment"
    checked = runner.invoke(config_app, ["check", "--only-file", file])
    assert (checked.exit_code, "fine" in checked.output, "note file: " in checked.output) == (0, True, True)
