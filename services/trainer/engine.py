"""The train engine: a model, its optimizer, and what the trainer's loop asks of them.

Every rank calls every method with the same whole batch; the engine spreads the samples over ranks and gives the same
result on all of them. Rounding apart, no result depends on the number of ranks, the token budget or the layout:
test_train_engine_equality.py, test_train_engine_ranks.py.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from headway.algorithm.advantages import compute_advantages
from headway.algorithm.batch import SampleBatch
from headway.algorithm.statistics import TokenStatistics, batch_statistics, effective_sample_size
from headway.config import ExperimentConfig
from headway.config.actor import MicroBatchSpec, OptimizerConfig
from headway.core.trajectory import Group, Trajectory
from headway.errors import InvalidInput
from services.trainer import lora
from services.trainer.distributed import Ranks, default_device, place
from services.trainer.layout import MicroBatch
from services.trainer.model import Policy, has_dropout, load_policy
from services.trainer.optimization import Optimization
from services.trainer.plan import MiniBatch, Planner
from services.trainer.update import Moved, Updater

TokenSequence = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""([L] token ids, [L] true where the supervised loss is taken)."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What became of one update."""

    stats: dict[str, float]
    applied: bool
    """False: nothing was changed, because no mini-batch had a finite loss and gradient, or none had a token."""
    logp: Tensor | None = None
    """[T] float32 log-probs of the update's own forward passes; None: not asked for."""
    prox_logp: Tensor | None = None
    """[T] float32, those of the batch, with those of the first mini-batch filled in; None: the objective has none."""


class TrainEngine:
    """The policy in training, and the frozen reference where the KL penalty needs one.

    Args:
        total_train_steps: Over which the learning rate is scheduled.
        device: None: this rank's CUDA device, or the CPU.

    Raises:
        InvalidInput: The model cannot be loaded, or the experiment asks for what this engine or machine does not have.
    """

    def __init__(self, config: ExperimentConfig, *, total_train_steps: int, device: torch.device | None = None) -> None:
        self.config = config.actor
        self.ranks = Ranks.find(config.allocation.training, device or default_device())
        self.version = 0
        """Step of the weights held; the loop sets it."""
        self._policy = self._load_policy(config)
        self._has_dropout = has_dropout(self._policy.lm)
        self._ref: Policy | None = None
        self._ref_planner: Planner | None = None
        self._ref_is_base = self.config.kl_ctl > 0 and self._shares_base(config)
        if self.config.kl_ctl > 0 and not self._ref_is_base:
            self._load_ref(config)
        self._optimization: Optimization | None = None
        if self.config.optimizer is not None:
            self._optimization = Optimization(self.config.optimizer, self._trained(), total_train_steps)
        self._planner = self._new_planner(self._policy, self.config.mb_spec)
        self._updater = Updater(self._policy, self.config, self.ranks)
        self._plan: tuple[SampleBatch, list[MiniBatch]] | None = None
        self._is_offloaded = False
        if config.enable_offload and self.ranks.device.type == "cpu":
            raise InvalidInput(
                "enable_offload moves weights from a GPU to the host; there is no GPU here: set it to false"
            )
        if self.config.m2_threshold is not None and not self.needs_prox_logp:
            raise InvalidInput("actor.m2_threshold needs recomputed log-probs: recompute_logprob, and not loglinear")

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def hf_config(self) -> PretrainedConfig:
        """A copy of the model's configuration, with the dtype in which weights are published."""
        config: PretrainedConfig = copy.deepcopy(self._policy.lm.config)
        config.dtype = getattr(torch, self.config.dtype)
        return config

    @property
    def generation_config(self) -> GenerationConfig | None:
        return self._policy.lm.generation_config

    @property
    def has_ref(self) -> bool:
        return self._ref is not None or self._ref_is_base

    @property
    def needs_prox_logp(self) -> bool:
        """Whether `ppo_update` wants a batch with `prox_logp`."""
        if not self.config.use_decoupled_loss:
            return self.config.recompute_logprob
        if self.config.prox_logp_method == "loglinear":
            return False
        return self.config.ppo_n_minibatches > 1 or not self._first_is_proximal

    @property
    def _first_is_proximal(self) -> bool:
        """Whether the first mini-batch's own forward pass says what its proximal log-probs are.

        It runs under the policy at the start of the step: a pass of its own would give the same numbers. Not so where
        they are needed earlier (M2PO, the KL penalty of plain PPO), or where dropout makes two passes differ.
        """
        return self.config.use_decoupled_loss and self.config.m2_threshold is None and not self._has_dropout

    def compute_logp(self, batch: SampleBatch) -> Tensor:
        """[T] float32 log-probs under the current policy, 0 where `loss_mask` is false. Collective."""
        return self._score(self._policy, self._minibatches(batch), batch)

    def compute_prox_logp(self, batch: SampleBatch) -> Tensor:
        """[T] float32 log-probs under the policy at the start of the step, as `ppo_update` needs them. Collective.

        Those of the first mini-batch are 0 where its own forward pass gives them.
        """
        minibatches = self._minibatches(batch)[1 if self._first_is_proximal else 0 :]
        return self._score(self._policy, minibatches, batch)

    def compute_ref_logp(self, batch: SampleBatch) -> Tensor:
        """[T] float32 log-probs under the reference model, 0 where `loss_mask` is false. Collective."""
        self.onload()
        if self._ref is not None and self._ref_planner is not None:
            return self._score(self._ref, self._ref_planner.plan(batch, 1), batch)
        if not self._ref_is_base:
            raise InvalidInput("there is no reference model: actor.kl_ctl is 0")
        with lora.adapters_off(self._policy.lm):
            return self._score(self._policy, self._minibatches(batch), batch)

    def compute_advantages(self, batch: SampleBatch) -> SampleBatch:
        """Fill in rewards, advantages and returns; see `headway.algorithm.advantages`."""
        return compute_advantages(batch, self.config)

    def ppo_update(self, batch: SampleBatch, *, keeps_logp: bool = False) -> UpdateResult:
        """Take one optimizer step per mini-batch. Collective.

        The batch has advantages, and `prox_logp` (by `compute_prox_logp`) where `needs_prox_logp` says so.

        Args:
            keeps_logp: Return the log-probs of each token too; costs a reduction over the ranks.

        Raises:
            ValueError: One of them is missing.
        """
        if batch.prox_logp is None and self.needs_prox_logp:
            raise ValueError("the batch has no prox_logp: call compute_prox_logp first")
        optimization = self._require_optimization()
        statistics, steps = TokenStatistics(), []
        logp = torch.zeros(batch.num_tokens) if keeps_logp else None
        for number, minibatch in enumerate(self._minibatches(batch)):
            known = batch.with_(prox_logp=None) if number == 0 and self._first_is_proximal else batch
            steps.append(self._updater.policy_step(minibatch, known, self.version, optimization, statistics, logp))
        logp = None if logp is None else self.ranks.reduce(logp, "sum")
        prox_logp = None if logp is None else self._whole_prox_logp(batch, logp)
        self._plan = None
        update = statistics.result(self.ranks.reduce)
        update |= effective_sample_size(update) | _step_statistics(steps) | {"lr": optimization.lr}
        before = batch_statistics(batch, self.config, self.version)
        stats = {f"ppo_actor/{name}": value for name, value in before.items()}
        stats |= {f"ppo_actor/update/{name}": value for name, value in update.items()}
        return UpdateResult(stats, any(step.applied for step in steps), logp, prox_logp)

    def _whole_prox_logp(self, batch: SampleBatch, logp: Tensor) -> Tensor | None:
        """[T] proximal log-probs; those of the first mini-batch are of its own forward pass where it gives them."""
        if self.config.prox_logp_method == "loglinear" or not self._first_is_proximal:
            return batch.prox_logp
        if batch.prox_logp is None:
            return logp
        is_first = torch.zeros(batch.num_samples, dtype=torch.bool)
        is_first[list(self._minibatches(batch)[0].samples)] = True
        return torch.where(is_first[batch.sample_ids], logp, batch.prox_logp)

    def step_lr_scheduler(self) -> None:
        """Go on to the learning rate of the next train step."""
        optimization = self._require_optimization()
        optimization.set_step(optimization.step + 1)

    @contextmanager
    def supervised(self, *, lr: float, num_steps: int) -> Iterator[None]:
        """A phase of supervised steps with an AdamW of its own; the policy's optimizer comes back after it.

        The learning rate rises over the first tenth of the steps.
        """
        before = self._optimization
        settings = OptimizerConfig(lr=lr, weight_decay=0.01, beta2=0.98, warmup_steps_proportion=0.1)
        self._optimization = Optimization(settings, self._trained(), num_steps)
        try:
            yield
        finally:
            self._optimization = before

    def sft_step(self, sequences: Sequence[TokenSequence], *, label_smoothing: float = 0.0) -> UpdateResult:
        """One step of cross-entropy on the marked tokens; goes on to the next learning rate. Collective."""
        self.onload()
        optimization = self._require_optimization()
        batch = _batch_of(sequences)
        micro_batches = _all_micro_batches(self._planner.plan(batch, 1))
        total = int(batch.loss_mask.sum())
        step = self._updater.supervised_step(micro_batches, total, label_smoothing, optimization)
        stats = {
            "sft/loss": step.loss,
            "sft/n_valid_tokens": float(total),
            "sft/grad_norm": step.grad_norm,
            "sft/lr": optimization.lr,
        }
        optimization.set_step(optimization.step + 1)
        return UpdateResult(stats, applied=step.applied)

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights, under transformers' names, on the CPU, in the published dtype; tied ones once. Collective.

        Adapters are merged into them. Rank 0 gets them, the others {}.
        """
        return self._published(lora.merged_parameters(self._policy.lm))

    def full_base_state_dict(self) -> dict[str, Tensor]:
        """The weights that the adapter changes, without it; otherwise as `full_state_dict`. Collective."""
        return self._published(lora.base_parameters(self._policy.lm))

    def full_lora_state_dict(self) -> dict[str, Tensor]:
        """The adapter alone, under the names of peft's files; otherwise as `full_state_dict`. Collective."""
        return self._published(lora.adapter_parameters(self._policy.lm))

    def lora_config(self) -> dict[str, Any]:
        """What belongs into `adapter_config.json` beside the adapter."""
        return lora.adapter_config(self._policy.lm, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run continues from, as tensors (sharded ones as DTensors): weights, moments, step, RNG.

        Frozen weights are not part of it: they are what the model's folder or seed says.
        """
        self.onload()
        trained = {name: p for name, p in self._policy.lm.named_parameters() if p.requires_grad}
        weights = {name: parameter.detach() for name, parameter in trained.items()}
        moments = self._optimization.named_state(trained) if self._optimization is not None else {}
        step = torch.tensor(self._optimization.step if self._optimization is not None else 0)
        return {"model": weights, "optimizer": moments, "lr_step": step, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, also when it was filled in place."""
        own = self.state_dict()
        for part in ("model", "optimizer"):
            _copy_into(own[part], state[part])
        if self._optimization is not None:
            self._optimization.set_step(int(state["lr_step"]))
        torch.set_rng_state(state["rng"])

    def offload(self) -> None:
        """Move weights, moments and the reference to host memory; they come back when they are next needed."""
        self._move_to(torch.device("cpu"))
        self._is_offloaded = True
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to where it computes, if it is not there."""
        if self._is_offloaded:
            self._move_to(self.ranks.device)
            self._is_offloaded = False

    def _move_to(self, device: torch.device) -> None:
        for policy in (self._policy, self._ref):
            if policy is not None:
                policy.to(device)
        if self._optimization is not None:
            self._optimization.move_to(device)

    def _published(self, parameters: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        self.onload()
        dtype, found = getattr(torch, self.config.dtype), {}
        for name, parameter in parameters:
            if self.rank == 0:
                found[name] = parameter.to("cpu", dtype, copy=True).contiguous()
        return found

    def _load_policy(self, config: ExperimentConfig) -> Policy:
        if self.config.use_lora and config.allocation.training.tensor > 1:
            raise InvalidInput("use_lora does not go with tensor parallelism: use d, not t")
        policy = load_policy(self.config, temperature=self.config.temperature, seed=config.seed)
        place(policy, self.config, self.ranks, getattr(torch, self.config.grad_reduce_dtype))
        return policy

    def _shares_base(self, config: ExperimentConfig) -> bool:
        """Whether the reference is the policy without its adapters, so that no second model is needed."""
        ref, actor = config.ref, self.config
        same = ref is not None and (ref.path, ref.init_from_scratch) == (actor.path, actor.init_from_scratch)
        return actor.use_lora and same

    def _load_ref(self, config: ExperimentConfig) -> None:
        if config.ref is None:
            raise InvalidInput("actor.kl_ctl is above 0: a `ref` section is needed")
        ref = load_policy(config.ref, temperature=self.config.temperature, seed=config.seed)
        ref.requires_grad_(False)
        place(ref, config.ref, self.ranks, torch.float32)
        self._ref, self._ref_planner = ref, self._new_planner(ref, config.ref.mb_spec)

    def _new_planner(self, policy: Policy, spec: MicroBatchSpec) -> Planner:
        return Planner(spec, rank=self.ranks.data_rank, world_size=self.ranks.data_size, is_packed=policy.is_packed)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._policy.parameters() if parameter.requires_grad]

    def _require_optimization(self) -> Optimization:
        if self._optimization is None:
            raise InvalidInput("actor.optimizer is null: this model is not trained")
        return self._optimization

    def _minibatches(self, batch: SampleBatch) -> list[MiniBatch]:
        """The plan for a batch; worked out once for all the passes of a step."""
        self.onload()
        known = self._plan
        if known is None or known[0].input_ids is not batch.input_ids or known[0].loss_mask is not batch.loss_mask:
            self._plan = known = (batch, self._planner.plan(batch, self.config.ppo_n_minibatches))
        return known[1]

    @torch.no_grad()
    def _score(self, policy: Policy, minibatches: Sequence[MiniBatch], batch: SampleBatch) -> Tensor:
        policy.eval()
        found = torch.zeros(batch.num_tokens)
        for micro_batch in _all_micro_batches(minibatches):
            found[micro_batch.tokens] = policy(micro_batch.to(self.ranks.device)).logp.cpu()
        return self.ranks.reduce(found, "sum")


def _all_micro_batches(minibatches: Sequence[MiniBatch]) -> list[MicroBatch]:
    return [micro_batch for minibatch in minibatches for micro_batch in minibatch.micro_batches]


def _step_statistics(steps: Sequence[Moved]) -> dict[str, float]:
    """Over the optimizer steps of an update; the norm is the mean of those that were applied."""
    norms = [step.grad_norm for step in steps if step.applied]
    found = {
        "update_successful": sum(step.applied for step in steps) / max(1, len(steps)),
        "skipped_minibatches": float(sum(not step.applied for step in steps)),
    }
    return found | ({"grad_norm": sum(norms) / len(norms)} if norms else {})


def _batch_of(sequences: Sequence[TokenSequence]) -> SampleBatch:
    """Sequences as samples without rewards."""
    groups = []
    for number, (ids, mask) in enumerate(sequences):
        zeros = np.zeros(len(ids), dtype=np.float32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        groups.append(Group(f"sequence {number}", (Trajectory(ids, zeros, mask, versions, 0.0),)))
    return SampleBatch.from_groups(groups)


def _copy_into(own: dict[str, Any], loaded: dict[str, Any]) -> None:
    for name, value in own.items():
        if isinstance(value, dict):
            _copy_into(value, loaded[name])
        elif value is not loaded[name]:
            value.copy_(loaded[name])
