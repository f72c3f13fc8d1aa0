"""What is wrong with a file is told all at once, with file and line, the nearest key, and what was meant."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import ExperimentConfig, load_experiment
from headway.config.keys import walk
from headway.errors import HeadwayError, InvalidInput, NotFound

AREAL = Path(__file__).with_name("areal_files") / "gsm8k_grpo.yaml"


def error_of(file: Path, *overrides: str) -> str:
    """The message of the error that loading ends in."""
    with pytest.raises(InvalidInput) as caught:
        load_experiment(file, overrides)
    return str(caught.value)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "experiment.yaml"


def test_an_unknown_key_is_told_with_its_line_and_the_nearest_one(written: Path) -> None:
    written.write_text("seed: 1\nrollout:\n  max_head_offpolicynes: 2\n", "utf-8")
    assert error_of(written) == (
        f"{written}:3: rollout.max_head_offpolicynes: unknown key; did you mean rollout.max_head_offpolicyness?"
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.eps_clip", "actor.eps_clip"),
        ("actor.lr", "actor.optimizer.lr"),
        ("n_sample", "gconfig.n_samples"),
        ("actor.scheduling_spec.0.gpus", "actor.scheduling_spec.0.gpu"),
        ("cluster.name_resolve.etcd_addr", "cluster.name_resolve.etcd3_addr"),
    ],
)
def test_the_nearest_key_is_a_neighbour_or_the_same_word_elsewhere(key: str, meant: str) -> None:
    assert f"unknown key; did you mean {meant}?" in error_of(AREAL, f"{key}=1")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=abc", "a whole number was meant, not the text 'abc'"),
        ("train_dataset.batch_size=2.5", "a whole number was meant, not 2.5"),
        ("gconfig.n_samples=true", "a number was meant, not true"),
        ("actor.optimizer.lr=fast", "a number was meant, not the text 'fast'"),
        ("actor.disable_dropout=perhaps", "true or false was meant, not the text 'perhaps'"),
        ("gconfig.stop_token_ids=7", "a list was meant, not 7"),
        ("actor=3", "a section with keys was meant, not 3"),
        ("reward.kwargs=[1]", "a mapping of keys to values was meant, not a list of 1"),
        ("reward.function=[1]", "a name, or a mapping of names to weights, was meant, not a list of 1"),
        ("actor.path=null", "a text was meant, not null"),
        ("gconfig.top_p=1.5", "must be at most 1, is 1.5"),
        ("actor.c_clip=1", "must be above 1, is 1"),
        ("actor.optimizer.type=adamw", "none of adam, adam_bf16, sgd; did you mean adam?"),
        ("rollout.staleness_policy=drop", "none of mask, discard, wait, allow"),
        ("ref.optimizer.lr=1", "the reference is never trained: write null"),
        ("actor.behave_imp_weight_mode=mask", "one of token_mask, token_truncate"),
        ("scheduler.type=ray", "use `local` on one machine, `kubernetes` with the chart"),
        ("scheduler.type=slurm", "use `local` inside a one-node job"),
        ("train_dataset.type=sft", "set `warm_start`"),
        ("actor.is_critic=true", "a critic is not trained here"),
        ("dynamic_bs=true", "refills the batch to its size"),
        ("tokenizer_path=${actor.pth}", "cannot be resolved"),
        ("actor.path=???", "needs a value"),
        ("nonsense", "an override is written `a.b=c`"),
        ("actor.path.inner=1", "is 'Qwen/Qwen2.5-1.5B-Instruct', which has no keys"),
        ("actor.scheduling_spec.3.gpu=1", "is a list of 1; there is no '3' in it"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_meant(override: str, told: str) -> None:
    message = error_of(AREAL, override)
    assert told in message
    assert message.count("\n") == 0, "one mistake is one line"
    assert message.startswith(f"override {override}: ")


def test_everything_is_told_at_once_and_in_the_order_of_the_file(written: Path) -> None:
    lines = ["sed: 1", "gconfig: {n_samples: 4, greedy: true}", "actor:", "  lrr: 1", "  eps_clip: wide", "sglang: []"]
    written.write_text("\n".join(lines), "utf-8")
    told = error_of(written, "allocation_mode=sglang:d1+p2").splitlines()
    assert told[0] == f"{written} has 6 problems:"
    assert [line.split(": ")[0].strip() for line in told if str(written) in line][1:] == [
        f"{written}:{number}" for number in (1, 2, 4, 5, 6)
    ]
    assert "override allocation_mode=sglang:d1+p2: training has no pipeline parallelism" in "\n".join(told)


def test_a_mistake_is_told_where_it_is_made_not_where_it_is_repeated() -> None:
    assert "\n" not in error_of(AREAL, "gconfig.n_samples=none")
    assert "\n" not in error_of(AREAL, "gconfig.max_new_tokens=-1")
    assert "\n" not in error_of(AREAL, "cluster.fileroot=[1]")


def test_a_key_given_twice_is_an_error(written: Path) -> None:
    written.write_text("seed: 1\nactor:\n  path: a\n  path: b\n", "utf-8")
    assert error_of(written) == f"{written}:4: actor.path: given twice, also in line 3"


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.rejection_sampling.upper=2"],
        ["actor.behav_imp_weight_cap=2"],
        ["actor.recompute_logprobs=true"],
        ["rollout.backend=sglang:d4", "actor.backend=fsdp:d4"],
    ],
)
def test_two_spellings_at_once_are_an_error(overrides: list[str]) -> None:
    assert "keep one" in error_of(AREAL, *overrides)


def test_half_of_the_newer_spelling_is_an_error(written: Path) -> None:
    written.write_text("rollout: {backend: 'sglang:d4'}\n", "utf-8")
    assert "needs actor.backend beside it" in error_of(written)


def test_a_value_that_is_wrong_is_named_as_the_file_spells_it() -> None:
    assert error_of(AREAL, "actor.behave_imp_weight_cap=0.5").startswith("override actor.behave_imp_weight_cap=0.5: ")
    assert error_of(AREAL, "evaluator.eval_before_train=7").startswith("override evaluator.eval_before_train=7: ")


@pytest.mark.parametrize("value", ["'${'", "'${nope}'", "'${oc.env:NOT_THERE}'", "'${seed:'"])
def test_interpolation_that_fails_is_told_with_its_line(written: Path, value: str) -> None:
    written.write_text(f"gconfig:\n  max_tokens: {value}\n", "utf-8")
    assert error_of(written).startswith(f"{written}:2: gconfig.max_tokens: cannot be resolved: ")


def test_interpolation_in_a_circle_is_refused(written: Path) -> None:
    for text in ("actor: {optimizer: '${actor}'}\n", "seed: ${total_train_steps}\ntotal_train_steps: ${seed}\n"):
        written.write_text(text, "utf-8")
        assert error_of(written)


def test_keys_that_are_no_words_are_unknown_keys(written: Path) -> None:
    written.write_text("1: 2\nnull: 3\nactor: {2.5: x}\n", "utf-8")
    told = error_of(written)
    assert [f"{key}: unknown key" in told for key in ("1", "null", "actor.2.5")] == [True, True, True]


def test_a_file_that_is_no_yaml_is_told_with_line_and_column(written: Path) -> None:
    written.write_text("actor:\n  path: [1, 2\nseed: 3\n", "utf-8")
    assert "is not YAML: line 3, column 5" in error_of(written)


def test_a_file_that_is_a_list_or_empty_is_refused(written: Path) -> None:
    for text in ("- 1\n", ""):
        written.write_text(text, "utf-8")
        assert "a mapping of keys was meant" in error_of(written)


def test_a_file_that_is_not_there_is_not_found(written: Path) -> None:
    with pytest.raises(NotFound, match="there is no experiment file"):
        load_experiment(written)


KEYS = [key for key, _, _ in walk(ExperimentConfig)]
ODD = [
    "null",
    "true",
    "-1",
    "1e400",
    ".nan",
    "abc",
    '""',
    "[]",
    "{}",
    "[1, a]",
    "{a: 1}",
    "${actor}",
    "${nope}",
    "${",
    "???",
]


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["", ".x", ".0", "x"]), st.sampled_from(ODD)), max_size=4)
)
def test_whatever_is_written_is_loaded_or_refused_on_purpose(changes: list[tuple[str, str, str]]) -> None:
    with contextlib.suppress(HeadwayError):
        config = load_experiment(AREAL, [f"{key}{more}={value}" for key, more, value in changes])
        assert config.allocation.num_devices >= 1
