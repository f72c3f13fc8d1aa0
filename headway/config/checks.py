"""What contradicts itself in a file whose keys are all well-formed, told with the numbers before anything is started.

    problem   the run would fail, or would silently train on something else than was meant
    note      it runs, but a number can never matter, or is probably not what was meant

Each check is a function of the whole configuration. `given` are the dotted keys that the file or an override sets.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import chain

from headway.config.allocation import AllocationError
from headway.config.experiment import ExperimentConfig


@dataclass(frozen=True)
class Conflict:
    """Keys that do not go together."""

    keys: tuple[str, ...]
    """The key to change first, then the others that take part."""
    message: str
    is_note: bool = False


Check = Callable[[ExperimentConfig, Set[str]], Iterator[Conflict]]
SECTIONS_WITH_NAMES = ("rollout", "actor", "ref", "saver", "recover", "evaluator", "stats_logger", "perf_tracer")


def check_all(config: ExperimentConfig, given: Set[str]) -> list[Conflict]:
    """Everything that contradicts itself."""
    return list(chain.from_iterable(check(config, given) for check in CHECKS))


def missing(config: ExperimentConfig) -> list[Conflict]:
    """Keys without which nothing can be started, though the file can be read."""
    needed = {
        "actor.path": (config.actor.path, "names the model: a folder or a hub id"),
        "train_dataset.path": (config.train_dataset.path, "says where the rows to train on come from"),
    }
    return [Conflict((key,), f"is missing: it {what}") for key, (value, what) in needed.items() if not value]


def _names(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    for name in ("experiment_name", "trial_name"):
        value = getattr(config, name)
        if "/" in value or value in ("", ".", "..") or value != value.strip():
            yield Conflict(
                (name,), f"{value!r} names folders and entries of name-resolve: no `/`, not empty, no outer spaces"
            )
        for section in SECTIONS_WITH_NAMES:
            repeated = getattr(getattr(config, section), name, None)
            if repeated not in (None, value):
                message = f"{repeated!r} is not the experiment's {value!r}: write ${{{name}}}, or leave it out"
                yield Conflict((f"{section}.{name}", name), message)


def check_allocation(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    """Whether the allocation can be read at all: all other checks may then read it."""
    halves = [key for key in ("rollout.backend", "actor.backend") if _text_of(config, key) is not None]
    if "allocation_mode" in given and halves:
        message = "is the newer spelling of a half of allocation_mode; both are set, keep one"
        yield from (Conflict((key,), message) for key in halves)
    elif len(halves) == 1:
        other = "actor.backend" if halves == ["rollout.backend"] else "rollout.backend"
        yield Conflict((halves[0],), f"needs {other} beside it: together they are the allocation")
    else:
        try:
            config.allocation  # noqa: B018 (reading it parses it)
        except AllocationError as error:
            key = next((k for k in halves if _text_of(config, k) == error.text), "allocation_mode")
            yield Conflict((key,), str(error))


def _text_of(config: ExperimentConfig, half: str) -> str | None:
    return config.rollout.backend if half == "rollout.backend" else config.actor.backend


def _optimizer(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    if config.actor.optimizer is None:
        message = "null would never change the model: leave it out, or set lr to 0 to see what rollouts give"
        yield Conflict(("actor.optimizer",), message)


def _devices(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    keys = ("allocation_mode", "cluster.n_nodes", "cluster.n_gpus_per_node")
    have = config.cluster.n_nodes * config.cluster.n_gpus_per_node
    need = config.allocation.num_devices
    generate, train = config.allocation.inference.world_size, config.allocation.training.world_size
    how = f"max({generate}, {train})" if config.allocation.is_colocated else f"{generate} + {train}"
    machines = f"{config.cluster.n_nodes} x {config.cluster.n_gpus_per_node} = {have}"
    if have and need > have:
        yield Conflict(keys, f"needs {how} = {need} GPUs, the cluster has {machines}")
    elif have > need:
        yield Conflict(keys, f"uses {how} = {need} of {machines} GPUs", is_note=True)


def _engine(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    inference = config.allocation.inference
    if config.engine == "builtin" and inference.world_size != inference.data:
        t, p = inference.tensor, inference.pipeline
        message = f"the built-in engine runs on one device, t and p are {t} and {p}: write d{inference.world_size}"
        yield Conflict(("inference.engine", "allocation_mode"), message)
    if config.engine == "builtin" and config.inference.command is not None:
        yield Conflict(
            ("inference.command", "inference.engine"), "starts an outside engine, inference.engine is `builtin`"
        )
    unused = {"sglang", "vllm"} - {config.engine}
    for section in sorted(unused):
        if any(key.startswith(f"{section}.") for key in given) and config.engine == "builtin":
            yield Conflict((section,), "has no effect: inference.engine is `builtin`", is_note=True)
    served = {"sglang.model_path": config.sglang.model_path, "vllm.model": config.vllm.model}
    for key, path in served.items():
        if path and config.actor.path and path != config.actor.path:
            yield Conflict(
                (key, "actor.path"), f"{path!r} is not actor.path {config.actor.path!r}: engines serve the actor"
            )


def _batch(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    batch, consumed = config.train_dataset.batch_size, config.rollout.consumer_batch_size
    if batch != consumed:
        message = (
            f"the trainer consumes batches of {batch} (train_dataset.batch_size), the staleness rule counts {consumed}"
        )
        yield Conflict(("rollout.consumer_batch_size", "train_dataset.batch_size"), f"{message}: make them equal")
    ranks = config.allocation.training.data * config.allocation.training.context
    samples, pieces = batch * config.gconfig.n_samples, config.actor.ppo_n_minibatches * ranks
    if samples < pieces and not _is_fragment(config):
        yield Conflict(
            ("actor.ppo_n_minibatches", "train_dataset.batch_size", "gconfig.n_samples", "allocation_mode"),
            f"{config.actor.ppo_n_minibatches} mini-batches on {ranks} ranks need at least {pieces} sequences, "
            f"a batch has {batch} x {config.gconfig.n_samples} = {samples}",
        )


def _is_fragment(config: ExperimentConfig) -> bool:
    """Whether the file names no rows: then its batch is only a default."""
    return not config.train_dataset.path


def _group(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    n = config.gconfig.n_samples
    if n > 1 and (config.gconfig.greedy or config.gconfig.temperature == 0):
        why = "gconfig.greedy" if config.gconfig.greedy else "gconfig.temperature"
        yield Conflict(
            (why, "gconfig.n_samples"), f"greedy decoding makes all {n} samples of a group equal: there is no advantage"
        )
    elif config.gconfig.temperature == 0 and not config.gconfig.greedy:
        yield Conflict(
            ("gconfig.temperature",), "must be above 0 to train: log-probs are taken at the sampling temperature"
        )
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(config.actor, name)
        if norm is None:
            continue
        key = f"actor.{name}"
        if norm.group_size != n and "group" in (norm.mean_level, norm.std_level):
            yield Conflict(
                (f"{key}.group_size", "gconfig.n_samples"), f"is {norm.group_size}, gconfig.n_samples is {n}"
            )
        if norm.mean_level == "group" and n == 1:
            message = "a group of gconfig.n_samples 1 minus its own mean is always 0: nothing would be learned"
            yield Conflict((f"{key}.mean_level", "gconfig.n_samples"), message)


def _lengths(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    g = config.gconfig
    if g.min_new_tokens > g.max_new_tokens:
        yield Conflict(
            ("gconfig.min_new_tokens", "gconfig.max_new_tokens"),
            f"{g.min_new_tokens} is above max_new_tokens {g.max_new_tokens}",
        )
    prompt = config.train_dataset.max_length
    longest = min((prompt or 1) + g.max_new_tokens, g.max_tokens)
    how = f"train_dataset.max_length {prompt} + gconfig.max_new_tokens {g.max_new_tokens}"
    if prompt is None:
        how = f"a prompt + gconfig.max_new_tokens {g.max_new_tokens}"
    keys = ("gconfig.max_new_tokens", "train_dataset.max_length", "gconfig.max_tokens")
    for role, model in (("actor", config.actor), ("ref", config.ref if config.actor.kl_ctl > 0 else None)):
        budget = model.mb_spec.max_tokens_per_mb if model is not None else None
        if budget is not None and longest > budget:
            message = f"the longest sequence has {longest} tokens ({how}), a micro-batch holds {budget}"
            yield Conflict((f"{role}.mb_spec.max_tokens_per_mb", *keys), message)
    context_key, context = engine_context(config)
    if context is not None and longest > context:
        yield Conflict(
            (context_key, *keys), f"the longest sequence has {longest} tokens ({how}), the engine holds {context}"
        )
    if prompt is not None and prompt >= g.max_tokens:
        message = f"prompts of up to {prompt} tokens leave nothing of gconfig.max_tokens {g.max_tokens} to generate"
        yield Conflict(("gconfig.max_tokens", "train_dataset.max_length"), message)


def engine_context(config: ExperimentConfig) -> tuple[str, int | None]:
    """The key that bounds sequences in the engine, and the bound in tokens."""
    contexts = {
        "builtin": ("inference.context_length", config.inference.context_length),
        "sglang": ("sglang.context_length", config.sglang.context_length),
        "vllm": ("vllm.max_model_len", config.vllm.max_model_len),
    }
    return contexts[config.engine]


def _staleness(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    rollout = config.rollout
    eta, batch = rollout.max_head_offpolicyness, rollout.consumer_batch_size
    bound = (eta + 1) * batch
    how = f"({eta} + 1) x {batch} = {bound}"
    key = "rollout.max_concurrent_rollouts"
    if rollout.max_concurrent_rollouts > bound and not _is_fragment(config):
        message = f"{rollout.max_concurrent_rollouts} can never run at once: staleness admits (eta + 1) x batch = {how}"
        yield Conflict((key, "rollout.max_head_offpolicyness"), message, is_note=True)
    if rollout.queue_size < rollout.max_concurrent_rollouts:
        message = f"{rollout.queue_size} is below {key} {rollout.max_concurrent_rollouts}: the queue holds work back"
        yield Conflict(("rollout.queue_size", key), message, is_note=True)
    if eta > 0 and not config.actor.use_decoupled_loss:
        message = (
            f"tokens up to {eta} versions old are trained on without correction; set actor.use_decoupled_loss: true"
        )
        yield Conflict(("actor.use_decoupled_loss", "rollout.max_head_offpolicyness"), message, is_note=True)


def _loss(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    actor = config.actor
    if actor.use_sapo_loss and actor.use_decoupled_loss:
        yield Conflict(
            ("actor.use_sapo_loss", "actor.use_decoupled_loss"), "SAPO has no decoupled form; set one of them to false"
        )
    if actor.use_sapo_loss and actor.use_cispo_loss:
        yield Conflict(("actor.use_sapo_loss", "actor.use_cispo_loss"), "SAPO and CISPO are two losses; keep one")
    for name, value in (("temperature", config.gconfig.temperature), ("max_new_tokens", config.gconfig.max_new_tokens)):
        mine = getattr(actor, name)
        if mine != value and value > 0:
            message = (
                f"is {mine}, gconfig.{name} is {value}: they are one number; write ${{gconfig.{name}}}, or leave it out"
            )
            yield Conflict((f"actor.{name}", f"gconfig.{name}"), message)
    if actor.overlong_reward_penalty:
        yield from _overlong(config)
    if (rule := actor.rejection_sampling) is not None:
        key = "actor.rejection_sampling"
        if rule.metric == "ratio" and rule.upper <= 1:
            yield Conflict((f"{key}.upper", key), f"a cap on the ratio must be above 1, is {rule.upper:g}")
        if rule.lower is not None and (rule.lower >= rule.upper or (rule.metric == "ratio" and rule.lower <= 0)):
            yield Conflict((f"{key}.lower", key), f"must be between 0 and upper {rule.upper:g}, is {rule.lower:g}")
    if not actor.use_decoupled_loss:
        unused = [
            k
            for k in ("actor.rejection_sampling", "actor.behave_imp_weight_cap", "actor.prox_logp_method")
            if k in given
        ]
        for key in unused:
            yield Conflict((key,), "has no effect without actor.use_decoupled_loss", is_note=True)


def _overlong(config: ExperimentConfig) -> Iterator[Conflict]:
    actor = config.actor
    for name in ("overlong_tokens", "overlong_penalty_factor"):
        if getattr(actor, name) is None:
            yield Conflict(
                (f"actor.{name}", "actor.overlong_reward_penalty"), "is needed by actor.overlong_reward_penalty"
            )
    if actor.overlong_tokens is not None and actor.overlong_tokens > actor.max_new_tokens:
        message = f"a tail of {actor.overlong_tokens} tokens is longer than max_new_tokens {actor.max_new_tokens}"
        yield Conflict(("actor.overlong_tokens", "actor.max_new_tokens"), message)


def _reference(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    if config.actor.kl_ctl > 0 and config.ref is None:
        message = f"{config.actor.kl_ctl} needs a reference model: add `ref: {{path: ${{actor.path}}}}`, or set 0"
        yield Conflict(("actor.kl_ctl", "ref"), message)
    if config.ref is None:
        return
    if config.ref.backend not in (None, config.actor.backend):
        message = f"is {config.ref.backend!r}, actor.backend is {config.actor.backend!r}"
        yield Conflict(("ref.backend", "actor.backend"), message)
    if config.ref.scheduling_spec not in ([], config.actor.scheduling_spec):
        message = "differs from actor.scheduling_spec, but the reference lives in the trainer's processes"
        yield Conflict(("ref.scheduling_spec", "actor.scheduling_spec"), message)


def _colocation(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    """Who may share devices with whom: the reference with the actor, always; engines and actor, where asked for."""
    strategies = {
        "rollout": (config.rollout.scheduling_strategy, "actor"),
        "actor": (config.actor.scheduling_strategy, "rollout"),
        "ref": (config.ref.scheduling_strategy if config.ref is not None else None, "actor"),
    }
    for section, (strategy, partner) in strategies.items():
        key = f"{section}.scheduling_strategy"
        if strategy is None:
            continue
        if strategy.type == "colocation" and strategy.target not in (None, partner):
            yield Conflict((f"{key}.target", key), f"{strategy.target!r} cannot be shared with; only {partner!r} can")
        if section == "ref" and strategy.type != "colocation":
            message = "the reference lives in the trainer's processes: write `type: colocation`, `target: actor`"
            yield Conflict((f"{key}.type", key), message)
        if section != "ref" and strategy.type == "colocation" and not config.allocation.is_colocated:
            message = (
                f"shares devices, but allocation_mode {config.allocation_mode!r} gives each its own: write | for +"
            )
            yield Conflict((f"{key}.type", "allocation_mode"), message)


def _placement(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    if config.enable_offload and config.cluster.n_gpus_per_node == 0:
        message = "moves parameters between GPU and CPU, and cluster.n_gpus_per_node is 0: set false"
        yield Conflict(("enable_offload", "cluster.n_gpus_per_node"), message)
    names = config.cluster.name_resolve
    if config.scheduler.type == "kubernetes" and names.type == "etcd3" and names.etcd3_addr is None:
        message = "must name etcd where scheduler.type is `kubernetes`; only `headway up` starts one itself"
        yield Conflict(("cluster.name_resolve.etcd3_addr", "scheduler.type"), message)
    if names.type == "memory" and config.cluster.n_nodes > 1:
        message = f"`memory` is one process on one machine, cluster.n_nodes is {config.cluster.n_nodes}: use etcd3"
        yield Conflict(("cluster.name_resolve.type", "cluster.n_nodes"), message)
    tls = (names.etcd3_cert_file, names.etcd3_key_file)
    if (tls[0] is None) != (tls[1] is None):
        yield Conflict(
            ("cluster.name_resolve.etcd3_cert_file",), "a client certificate needs etcd3_cert_file and etcd3_key_file"
        )


def _schedules(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    recover = config.recover
    if recover.mode != "disabled" and not (recover.freq_epochs or recover.freq_steps or recover.freq_secs):
        message = f"is `{recover.mode}`, but no checkpoint is ever due: set freq_steps, freq_epochs or freq_secs"
        yield Conflict(("recover.mode",), message)
    evaluator = config.evaluator
    is_asked = any(key.startswith("evaluator.freq_") for key in given)
    if (
        config.valid_dataset is None
        and is_asked
        and (evaluator.freq_epochs or evaluator.freq_steps or evaluator.freq_secs)
    ):
        yield Conflict(("evaluator", "valid_dataset"), "nothing is evaluated: there is no valid_dataset", is_note=True)


def _adapter(config: ExperimentConfig, given: Set[str]) -> Iterator[Conflict]:
    actor = config.actor
    if not actor.use_lora:
        return
    if config.engine == "vllm":
        message = "is set, and adapters are served by SGLang and the built-in engine only: set inference.engine"
        yield Conflict(("actor.use_lora", "inference.engine", "allocation_mode"), message)
    if actor.weight_update_mode == "xccl":
        message = "broadcasts whole weights; an adapter is small and travels through the shared folder: write `disk`"
        yield Conflict(("actor.weight_update_mode", "actor.use_lora"), message)
    if config.allocation.training.tensor > 1:
        message = "does not go with tensor parallel training: write d for t in the training half of allocation_mode"
        yield Conflict(("actor.use_lora", "allocation_mode"), message)


CHECKS: tuple[Check, ...] = (
    _optimizer,
    _adapter,
    _names,
    _devices,
    _engine,
    _batch,
    _group,
    _lengths,
    _staleness,
    _loss,
    _reference,
    _colocation,
    _placement,
    _schedules,
)
