"""The models that are trained or kept: actor and ref, the optimizer, the loss, and the phase before the first step."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from headway.config.cluster import SchedulingSpec, SchedulingStrategy
from headway.config.section import NoMeaning, NullMeans, Section

Dtype = Literal["float32", "bfloat16", "float16"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class MicroBatchSpec(Section):
    """How a mini-batch is cut into the pieces of one forward and backward pass."""

    spellings: ClassVar[Mapping[str, str]] = {"packing_algorithm": "packing"}

    n_mbs: Annotated[PositiveInt, NullMeans("1")] = 1
    """Least number of micro-batches."""
    granularity: PositiveInt = 1
    """So many neighbouring sequences stay in one micro-batch."""
    max_tokens_per_mb: PositiveInt | None = None
    """Token budget of one micro-batch on one rank; a longer single sequence is refused. null: no budget."""
    packing: Annotated[
        Literal["ffd", "kk"], NoMeaning("one packer serves both: few micro-batches, and evenly filled")
    ] = "ffd"
    """AReaL's choice between first fit decreasing and Karmarkar-Karp. Both are served by one packer: it takes no more
    micro-batches than best fit decreasing does, and fills them as evenly as Karmarkar-Karp's differencing."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    type: Literal["adam", "adam_bf16", "sgd"] = "adam"
    """`adam` is AdamW; `adam_bf16` keeps its moments in bfloat16; `sgd` is without momentum."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate after the warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    beta1: Fraction = 0.9
    """Adam's decay of the first moment."""
    beta2: Fraction = 0.999
    """Adam's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    gradient_clipping: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps_proportion: Fraction = 0.001
    """Part of all train steps over which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a part of `lr`."""


class NormConfig(Section):
    """Normalisation y = (x - mean) / (std + eps)."""

    mean_level: Literal["batch", "group"] | None = "batch"
    """Over what the mean is taken; null: nothing is subtracted."""
    std_level: Literal["batch", "group"] | None = "batch"
    """Over what the standard deviation is taken; null: nothing is divided."""
    group_size: Annotated[PositiveInt, NullMeans("gconfig.n_samples")] = 1
    """Samples of a group. Groups are found by their ids; a size other than `gconfig.n_samples` is refused."""
    mean_leave1out: bool = False
    """Leave the sample itself out of the mean (RLOO)."""
    std_unbiased: bool = True
    """Divide by n - 1."""
    eps: PositiveFloat = 1e-5
    """Added to the standard deviation."""

    @field_validator("mean_level", "std_level", mode="before")
    @classmethod
    def _none_is_null(cls, value: Any) -> Any:
        return None if value == "none" else value


class RejectionSamplingConfig(Section):
    """What happens where the behaviour policy is far from the proximal one."""

    level: Literal["token", "sequence"] = "token"
    """Judge each token, or all tokens of a sequence together."""
    action: Literal["mask", "clamp"] = "mask"
    """Leave out of the loss, or clamp the weight into the bounds."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    """What is compared with the bounds."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """How the tokens of a sequence are put together, at level `sequence`."""
    upper: float = 5.0
    """Upper bound."""
    lower: float | None = None
    """Lower bound; null: none."""


class ModelConfig(Section):
    """A model in the trainer's processes."""

    experiment_name: str | None = None
    """Repeats the experiment's own; another one is refused."""
    trial_name: str | None = None
    """Repeats the trial's own; another one is refused."""
    path: str = ""
    """Hub id or local folder of the model."""
    init_from_scratch: bool = False
    """Random weights from the folder's `config.json`, seeded."""
    dtype: Dtype = "bfloat16"
    """Type of the parameters in the forward and backward pass."""
    attn_impl: str = "sdpa"
    """Attention of the transformers model: `sdpa`, `eager`, `flash_attention_2`, ..."""
    disable_dropout: bool = False
    """Set every dropout probability to 0."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    mb_spec: MicroBatchSpec = MicroBatchSpec()
    """How a mini-batch is cut up."""
    scheduling_spec: list[SchedulingSpec] = Field(default_factory=list)
    """Resources of the trainer's processes."""
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()
    """Whether the model shares devices with another role."""
    backend: str | None = None
    """`fsdp:d4`: the training half of `allocation_mode`, as newer files write it."""


class RefConfig(ModelConfig):
    """The frozen model of the KL penalty, in the trainer's processes."""

    optimizer: None = None
    """The reference is never trained: null."""
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy(type="colocation", target="actor")
    """Always `colocation` with `actor`: the reference lives in the trainer's processes."""


OLD_CAPS = ("behave_imp_weight_cap", "behav_imp_weight_cap")
OLD_MODES = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")


class ActorConfig(ModelConfig):
    """The policy: model, optimizer, rewards to advantages, loss."""

    spellings: ClassVar[Mapping[str, str]] = {"recompute_logprobs": "recompute_logprob"}
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = (
        (*OLD_CAPS, "rejection_sampling"),
        ("behave_imp_weight_mode", "rejection_sampling"),
    )

    optimizer: OptimizerConfig | None = OptimizerConfig()
    """Never null: `lr: 0` shows what rollouts give without an update."""
    grad_reduce_dtype: Dtype = "float32"
    """Type in which gradients are added up over ranks."""
    weight_update_mode: Literal["disk", "xccl"] = "disk"
    """How new weights reach the engines: through a shared folder, or by a broadcast (NCCL on GPUs, gloo on CPU)."""
    use_lora: bool = False
    """Train a low-rank adapter only, and publish the adapter only."""
    lora_rank: PositiveInt = 32
    """Rank of the adapter."""
    lora_alpha: PositiveInt = 16
    """The adapter is scaled by `lora_alpha / lora_rank`."""
    target_modules: list[str] = Field(default_factory=list)
    """Modules that get an adapter; empty: all linear layers."""

    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps in one update."""
    eps_clip: PositiveFloat = 0.2
    """The ratio is clipped below 1 - eps_clip and above 1 + eps_clip."""
    eps_clip_higher: PositiveFloat | None = None
    """Clip above 1 + this instead (DAPO)."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: where the advantage is negative, the loss is at most -c_clip times it."""
    temperature: Annotated[NonNegativeFloat, NullMeans("gconfig.temperature")] = 1.0
    """Logits are divided by it before log-probs are taken; must be the temperature of sampling."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio for a sequence, the geometric mean of its tokens' (GSPO)."""
    m2_threshold: PositiveFloat | None = None
    """Largest mean of (old - prox)^2; tokens above are left out, largest first (M2PO)."""
    use_sapo_loss: bool = False
    """A soft gate instead of the clip (SAPO); needs `use_decoupled_loss: false`."""
    sapo_tau_pos: PositiveFloat = 1.0
    """SAPO's tau where the advantage is positive."""
    sapo_tau_neg: PositiveFloat = 1.05
    """SAPO's tau where the advantage is negative."""
    use_cispo_loss: bool = False
    """Clip the weight and keep the gradient of every token (CISPO)."""

    reward_norm: NormConfig | None = None
    """Normalisation of the rewards; null: none."""
    reward_scaling: float = 1.0
    """Rewards are multiplied by it, after the bias."""
    reward_bias: float = 0.0
    """Added to rewards."""
    reward_clip: PositiveFloat = 20.0
    """Largest absolute reward after scaling."""
    overlong_reward_penalty: bool = False
    """Penalise completions that come near `max_new_tokens` (DAPO)."""
    overlong_tokens: PositiveInt | None = None
    """Length in tokens of the tail that is penalised."""
    overlong_penalty_factor: PositiveFloat | None = None
    """Penalty at the very end of the tail; it rises linearly to it."""
    mask_no_eos_with_zero: bool = False
    """Completions that did not end by themselves get no task reward."""
    max_new_tokens: Annotated[PositiveInt, NullMeans("gconfig.max_new_tokens")] = 16384
    """Length from which the overlong penalty counts back; must be the one of generation."""
    discount: Fraction = 1.0
    """Discount of later rewards."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalised advantage estimation."""
    adv_norm: NormConfig | None = None
    """Normalisation of the advantages; null: none."""
    kl_ctl: NonNegativeFloat = 0.0
    """Weight of the KL penalty against `ref`; 0: no reference model is built."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence."""

    recompute_logprob: bool = False
    """Take log-probs of the proximal policy from the trainer instead of from the engine."""
    use_decoupled_loss: bool = False
    """Decoupled PPO (arXiv:2505.24298): clip around the proximal policy, weigh by it against the behaviour policy."""
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"
    """Log-probs of the proximal policy: by a forward pass, by interpolation over versions, or both, to compare them."""
    rejection_sampling: RejectionSamplingConfig | None = RejectionSamplingConfig()
    """What happens to tokens far from the behaviour policy, in decoupled loss; null: nothing. The older spelling is
    `behave_imp_weight_cap` (the upper bound) and `behave_imp_weight_mode` (`token_mask`, `token_truncate`,
    `sequence_mask`, `sequence_truncate`, `disabled`)."""

    @model_validator(mode="before")
    @classmethod
    def _one_spelling_of_rejection(cls, data: Any) -> Any:
        return _with_new_rejection(data) if isinstance(data, Mapping) else data

    @property
    def behave_rejection(self) -> RejectionSamplingConfig | None:
        """The rule against far-off behaviour where one is in force: it belongs to the decoupled loss."""
        return self.rejection_sampling if self.use_decoupled_loss else None


def _with_new_rejection(data: Mapping[str, Any]) -> dict[str, Any]:
    """The older spelling of `rejection_sampling`, rewritten. An unknown mode stays where it is: there it is refused."""
    new = {key: value for key, value in data.items() if key not in (*OLD_CAPS, "behave_imp_weight_mode")}
    mode = data.get("behave_imp_weight_mode") or "token_mask"
    if len(new) == len(data):
        return new
    if mode not in OLD_MODES:
        return {**new, "behave_imp_weight_mode": mode}
    level, _, action = mode.partition("_")
    rule = {"level": level, "action": "clamp" if action == "truncate" else "mask"}
    rule |= next(({"upper": data[key]} for key in OLD_CAPS if data.get(key) is not None), {})
    return {**new, "rejection_sampling": None if mode == "disabled" else rule}


class WarmStartConfig(Section):
    """A short supervised phase before the first step."""

    steps: NonNegativeInt = 120
    """Optimizer steps."""
    batch_size: PositiveInt = 128
    """Rows of one step."""
    lr: PositiveFloat = 2e-3
    """Learning rate of AdamW."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Keeps the entropy that reinforcement learning needs."""
