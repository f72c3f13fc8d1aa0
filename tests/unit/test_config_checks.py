"""What contradicts itself is refused at load with its numbers; what can never matter is noted."""

from pathlib import Path

import pytest

from headway.config import load_experiment, read_experiment
from headway.errors import InvalidInput

AREAL = Path(__file__).with_name("areal_files") / "gsm8k_grpo.yaml"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["experiment_name=a/b"], "no `/`"),
        (["trial_name=''"], "not empty"),
        (["saver.trial_name=other"], "'other' is not the experiment's 'trial0'"),
        (["allocation_mode=sglang:d8+d4"], "needs 8 + 4 = 12 GPUs, the cluster has 1 x 8 = 8"),
        (["allocation_mode=sglang:d9|d4"], "needs max(9, 4) = 9 GPUs, the cluster has 1 x 8 = 8"),
        (
            ["rollout.consumer_batch_size=128"],
            "batches of 256 (train_dataset.batch_size), the staleness rule counts 128",
        ),
        (["train_dataset.batch_size=1"], None),
        (["train_dataset.batch_size=1", "gconfig.n_samples=2"], "1 mini-batches on 4 ranks need at least 4 sequences"),
        (
            ["actor.ppo_n_minibatches=300"],
            "300 mini-batches on 4 ranks need at least 1200 sequences, a batch has 256 x 4",
        ),
        (["gconfig.greedy=true"], "all 4 samples of a group equal"),
        (["gconfig.temperature=0"], "all 4 samples of a group equal"),
        (["gconfig.n_samples=1", "gconfig.temperature=0", "actor.reward_norm=null"], "must be above 0 to train"),
        (["gconfig.n_samples=1"], "minus its own mean is always 0"),
        (["actor.reward_norm.group_size=8"], "is 8, gconfig.n_samples is 4"),
        (["gconfig.min_new_tokens=2000"], "2000 is above max_new_tokens 1024"),
        (
            ["gconfig.max_new_tokens=9217"],
            "has 10241 tokens (train_dataset.max_length 1024 + gconfig.max_new_tokens 9217), a micro-batch holds 10240",
        ),
        (["gconfig.max_new_tokens=9216"], None),
        (["sglang.context_length=2047"], "has 2048 tokens"),
        (["gconfig.max_tokens=1024"], "prompts of up to 1024 tokens leave nothing of gconfig.max_tokens 1024"),
        (["actor.temperature=0.5"], "is 0.5, gconfig.temperature is 1.0"),
        (["actor.max_new_tokens=7"], "is 7, gconfig.max_new_tokens is 1024"),
        (["actor.use_lora=true"], "an adapter is small and travels through the shared folder: write `disk`"),
        (["actor.use_lora=true", "actor.weight_update_mode=disk"], None),
        (
            ["actor.use_lora=true", "actor.weight_update_mode=disk", "inference.engine=vllm"],
            "served by SGLang and the built-in engine only",
        ),
        (
            ["actor.use_lora=true", "actor.weight_update_mode=disk", "allocation_mode=sglang:d4+d2t2"],
            "does not go with tensor parallel training",
        ),
        (["actor.use_sapo_loss=true"], "SAPO has no decoupled form"),
        (["actor.use_sapo_loss=true", "actor.use_cispo_loss=true", "actor.use_decoupled_loss=false"], "keep one"),
        (["actor.overlong_reward_penalty=true"], "actor.overlong_tokens: is needed by actor.overlong_reward_penalty"),
        (
            ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=2000", "actor.overlong_penalty_factor=1"],
            "a tail of 2000 tokens is longer than max_new_tokens 1024",
        ),
        (["actor.optimizer=null"], "null would never change the model"),
        (["actor.kl_ctl=0.1"], None),
        (["actor.kl_ctl=0.1", "ref=null"], "0.1 needs a reference model"),
        (["ref.scheduling_strategy.type=separation"], "lives in the trainer's processes"),
        (["ref.scheduling_strategy.target=rollout"], "only 'actor' can"),
        (["ref.scheduling_spec=[{gpu: 2}]"], "differs from actor.scheduling_spec"),
        (["rollout.scheduling_strategy.type=colocation"], "write | for +"),
        (["ref.backend=fsdp:d2"], "is 'fsdp:d2', actor.backend is None"),
        (
            ["inference.engine=builtin", "allocation_mode=sglang:d2t2+d4"],
            "runs on one device, t and p are 2 and 1: write d4",
        ),
        (["inference.engine=builtin", "inference.command=[a]"], "starts an outside engine"),
        (["sglang.model_path=other"], "engines serve the actor"),
        (["enable_offload=true", "cluster.n_gpus_per_node=0"], "cluster.n_gpus_per_node is 0"),
        (["scheduler.type=kubernetes", "cluster.name_resolve.type=etcd3"], "must name etcd"),
        (["cluster.name_resolve.type=memory", "cluster.n_nodes=2"], "one process on one machine"),
        (["cluster.name_resolve.etcd3_cert_file=a.pem"], "needs etcd3_cert_file and etcd3_key_file"),
        (["recover.mode=auto", "recover.freq_epochs=null", "recover.freq_secs=null"], "no checkpoint is ever due"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(overrides: list[str], told: str | None) -> None:
    if told is None:
        load_experiment(AREAL, overrides)
        return
    with pytest.raises(InvalidInput) as caught:
        load_experiment(AREAL, overrides)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["allocation_mode=sglang:d2+d1"], "allocation_mode: uses 2 + 1 = 3 of 1 x 8 = 8 GPUs"),
        (["rollout.max_concurrent_rollouts=1000"], "1000 can never run at once"),
        (["rollout.max_concurrent_rollouts=1000"], "staleness admits (eta + 1) x batch = (2 + 1) x 256 = 768"),
        (["rollout.queue_size=100"], "rollout.queue_size: 100 is below rollout.max_concurrent_rollouts 256"),
        (["actor.use_decoupled_loss=false"], "tokens up to 2 versions old are trained on without correction"),
        (["actor.use_decoupled_loss=false"], "actor.behave_imp_weight_cap: has no effect without"),
        (["inference.engine=builtin"], "sglang: has no effect: inference.engine is `builtin`"),
        (["valid_dataset=null"], "nothing is evaluated: there is no valid_dataset"),
        (["sglang.shiny=1"], "sglang.shiny: no flag of sglang that is known here; passed through as --shiny"),
        (["launcher.trainer_cpus_per_gpu=4"], "launcher: resources are given by actor.scheduling_spec"),
        (["actor.group_size=4"], "actor.group_size: gconfig.n_samples is the group's size"),
    ],
)
def test_what_can_never_matter_is_noted(overrides: list[str], told: str) -> None:
    assert [note for note in read_experiment(AREAL, overrides).notes if told in note]


def test_checks_of_keys_that_are_wrong_themselves_wait_until_they_are_right() -> None:
    with pytest.raises(InvalidInput) as caught:
        load_experiment(AREAL, ["train_dataset.batch_size=many", "gconfig.greedy=true"])
    told = str(caught.value)
    assert "a whole number was meant" in told
    assert "all 4 samples of a group equal" in told
    assert "the staleness rule counts" not in told
