"""Keys of AReaL that mean nothing here: told in a note where nothing is lost by it, else refused with the reason.

A section stands for all that is in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.config.problems import Problem, shown


@dataclass(frozen=True)
class Foreign:
    """What AReaL means by a key, and why it is not here."""

    why: str
    """The reason, and what to use instead."""
    harmless: tuple[Any, ...] | None = (None, False)
    """Values that ask for what is done here anyway; None: the key has no effect, whatever its value."""


_ENGINE_DEFAULTS: dict[str, Foreign] = {
    "is_critic": Foreign("a critic is not trained here: GRPO and its variants take advantages from the group"),
    "offload": Foreign("set enable_offload instead"),
    "pad_to_maximum": Foreign("sequences are packed, nothing is padded"),
    "use_kernels": Foreign("set attn_impl instead"),
    "enable_tree_training": Foreign("sequences are trained on one by one; shared prefixes are not merged"),
    "megatron": Foreign("training is FSDP2, there is no Megatron here", None),
    "archon": Foreign("training is FSDP2, there is no Archon here", None),
    "fsdp": Foreign("FSDP2 wraps the transformer's blocks by itself; for offloading set enable_offload", None),
    "optimizer_dtype": Foreign("set optimizer.type: adam_bf16 for moments in bfloat16", (None, "float32")),
    "peft_type": Foreign("LoRA is the only kind of adapter", (None, "lora")),
    "_version": Foreign("there is one kind of training service", None),
    "admin_api_key": Foreign("the control API takes its token from HEADWAY_TOKEN", None),
    "log_level": Foreign("set the environment variable HEADWAY_LOG_LEVEL instead", None),
    "request_timeout": Foreign("calls to the trainer have their own deadlines", None),
    "setup_timeout": Foreign("`headway up` waits for the trainer as long as it lives", None),
    "init_critic_from_actor": Foreign("a critic is not trained here"),
}

FOREIGN: dict[str, Foreign] = {
    "launcher": Foreign("resources are given by actor.scheduling_spec and rollout.scheduling_spec", None),
    "async_training": Foreign("set rollout.max_head_offpolicyness: 0 for synchronous training", (None, True)),
    "dynamic_bs": Foreign("a filter (workflow.should_accept_fn) refills the batch to its size"),
    "critic": Foreign("a critic is not trained here: GRPO and its variants take advantages from the group", (None,)),
    "teacher": Foreign("there is no distillation here", (None,)),
    "memory_profiler": Foreign("use torch.cuda.memory's snapshot in a script of your own", (None,)),
    "weight_update_mode": Foreign("write actor.weight_update_mode", (None,)),
    "cluster.cluster_name": Foreign("nothing here depends on the cluster's name", None),
    "scheduler.endpoint": Foreign("the services find each other through name-resolve", None),
    "scheduler.deploy_mode": Foreign("allocation_mode says who shares devices", None),
    "scheduler.functioncall_service_domain": Foreign("rewards are computed by the reward service", None),
    "scheduler.reward_functioncall_config": Foreign("rewards are computed by the reward service", None),
    "scheduler.reward_model_path": Foreign("use the reward function `judge`, or one of your own", (None, "")),
    "scheduler.reward_model_service_url": Foreign("use the reward function `judge`, or one of your own", None),
    "gconfig.use_beam_search": Foreign("training needs sampling"),
    "gconfig.lora_name": Foreign("rollout.lora_name says it", None),
    "gconfig.skip_special_tokens": Foreign("completions travel as token ids; text is decoded for rewards only", None),
    "gconfig.max_workers": Foreign("set reward.num_workers instead", None),
    "gconfig.interruptable_processpool": Foreign("every reward call can be ended; set reward.timeout_s", None),
    "rollout.use_lora": Foreign("actor.use_lora says it for both", None),
    "rollout.agent": Foreign("agents train through workflow.path", None),
    "rollout.openai": Foreign("agents train through workflow.path", None),
    "rollout.return_routed_experts": Foreign("routed experts are not replayed"),
    "rollout._version": Foreign("there is one kind of rollout service", None),
    "rollout.model": Foreign("the engines serve the published policy", None),
    "rollout.poll_interval": Foreign("nothing polls", None),
    "rollout.admin_api_key": Foreign("the control API takes its token from HEADWAY_TOKEN", None),
    "rollout.api_url": Foreign("engines register themselves", (None,)),
    "rollout.provider_api_key": Foreign("engines register themselves", (None,)),
    "actor.group_size": Foreign("gconfig.n_samples is the group's size; groups are found by their ids", None),
    "actor.group_adv_norm": Foreign("write adv_norm: {mean_level: group, std_level: group}"),
    "actor.group_reward_norm": Foreign("write reward_norm: {mean_level: group, std_level: group}"),
    "actor.dynamic_sampling": Foreign("write workflow.should_accept_fn: headway.workflow.rewards_differ"),
    "actor.log_agent_stats": Foreign("every number that a workflow returns as a metric is logged", None),
    "actor.log_agent_stats_keys": Foreign("every number that a workflow returns as a metric is logged", None),
    "actor.optimizer.initial_loss_scale": Foreign("losses are not scaled: bfloat16 and float32 do not need it", None),
    "actor.optimizer.min_loss_scale": Foreign("losses are not scaled", None),
    "actor.optimizer.loss_scale_window": Foreign("losses are not scaled", None),
    "actor.optimizer.hysteresis": Foreign("losses are not scaled", None),
    "actor.optimizer.offload": Foreign("set enable_offload instead"),
    "saver.mode": Foreign("exports are written by all ranks together", None),
    "recover.no_save_optim": Foreign("a checkpoint always holds the optimizer: training continues exactly"),
    "recover.no_load_optim": Foreign("a checkpoint always holds the optimizer: training continues exactly"),
    "stats_logger.trackio": Foreign("use tensorboard, wandb or swanlab", None),
    "perf_tracer.profile_steps": Foreign("a trace is written every perf_tracer.save_interval steps", (None,)),
    **{f"{role}.{key}": foreign for role in ("actor", "ref") for key, foreign in _ENGINE_DEFAULTS.items()},
    **{
        f"{which}.{key}": foreign
        for which in ("train_dataset", "valid_dataset")
        for key, foreign in {
            "num_dataset_workers": Foreign("rows are read once, by the trainer", None),
            "scheduling_spec": Foreign("rows are read by the trainer; there is no data service", None),
            "setup_timeout": Foreign("rows are read by the trainer; there is no data service", None),
            "reward_fn": Foreign("write reward.function", (None,)),
        }.items()
    },
}

IN_SPECS: dict[str, Foreign] = {
    name: Foreign("for Slurm and Ray only; use scheduler.type local or kubernetes", None)
    for name in (
        "srun_additional_args",
        "additional_bash_cmds",
        "container_type",
        "mount",
        "nodelist",
        "exclude",
        "ray_placement_strategy",
    )
}
"""Keys of a `scheduling_spec` entry; `fork` of a `scheduling_strategy` is one more."""
IN_STRATEGY = {"fork": Foreign("colocated models share one process here", None)}


def take_out(data: dict[str, Any]) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Remove AReaL's foreign keys from the data. Returns notes (key, why) and refusals."""
    notes: list[tuple[str, str]] = []
    problems: list[Problem] = []
    for holder, name, key, foreign in list(_found(data, "")):
        value = holder.pop(name)
        if foreign.harmless is None:
            notes.append((key, foreign.why))
        elif value not in foreign.harmless:
            problems.append(Problem(key, f"{shown(value)} cannot be followed here: {foreign.why}"))
    return notes, problems


def _found(here: Any, prefix: str) -> list[tuple[dict[str, Any], str, str, Foreign]]:
    """(mapping, key in it, dotted key, entry) of every foreign key."""
    found = []
    items: list[tuple[Any, Any]] = list(here.items()) if isinstance(here, dict) else []
    for name, value in items:
        key = f"{prefix}{name}"
        if (foreign := FOREIGN.get(key) or _inside(prefix, name)) is not None:
            found.append((here, name, key, foreign))
        else:
            found += _found(value, f"{key}.")
    if isinstance(here, list):
        for index, item in enumerate(here):
            found += _found(item, f"{prefix}{index}.")
    return found


def _inside(prefix: str, name: str) -> Foreign | None:
    section = [part for part in prefix.split(".") if part and not part.isdigit()]
    inside: Mapping[str, Mapping[str, Foreign]] = {"scheduling_spec": IN_SPECS, "scheduling_strategy": IN_STRATEGY}
    return inside.get(section[-1], {}).get(name) if section else None
