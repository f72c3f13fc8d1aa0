"""How samples are made: sampling parameters, the staleness bound, engines, rewards, workflows."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from headway.config.cluster import SchedulingSpec, SchedulingStrategy
from headway.config.section import NullMeans, Section


class GenerationHyperparameters(Section):
    """Sampling parameters of a request."""

    n_samples: PositiveInt = 1
    """Completions of each prompt: the group of GRPO."""
    min_new_tokens: NonNegativeInt = 0
    """The end-of-sequence and stop tokens are not sampled before so many tokens."""
    max_new_tokens: PositiveInt = 16384
    """Budget of an episode in generated tokens; what an interruption has already given counts."""
    max_tokens: PositiveInt = 65536
    """Longest prompt and completion together, in tokens."""
    greedy: bool = False
    """Always the likeliest token. Refused with `n_samples` above 1: all samples would be equal."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = Field(default=100_000_000, ge=-1)
    """Sample from the so many likeliest tokens; -1: all."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a completion, beside the model's own."""
    stop: list[str] | None = None
    """Texts that end a completion."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Lowers a token's logit by this for each time it was generated already."""
    ignore_eos: bool = False
    """Do not end at the end-of-sequence token."""

    def new(self, **changes: Any) -> "GenerationHyperparameters":
        """A copy with some values changed, validated."""
        return GenerationHyperparameters.model_validate({**self.model_dump(), **changes})


class RolloutConfig(Section):
    """The rollout controller: how much runs, how far ahead, and what happens to what is too old."""

    spellings: ClassVar[Mapping[str, str]] = {"routing_strategy": "schedule_policy"}

    experiment_name: str | None = None
    """Repeats the experiment's own; another one is refused."""
    trial_name: str | None = None
    """Repeats the trial's own; another one is refused."""
    fileroot: str | None = None
    """Root of the dumped rollouts; null: `cluster.fileroot`."""
    tokenizer_path: Annotated[str, NullMeans("tokenizer_path")] = ""
    """Tokenizer of workflows and dumps."""
    backend: str | None = None
    """`sglang:d4t1`: the inference half of `allocation_mode`, as newer files write it."""
    consumer_batch_size: Annotated[PositiveInt, NullMeans("train_dataset.batch_size")] = 1
    """B of the staleness rule: groups that one train step consumes."""
    max_concurrent_rollouts: Annotated[PositiveInt, NullMeans("consumer_batch_size")] = Field(
        default_factory=lambda data: data["consumer_batch_size"]
    )
    """Tasks (prompts) that run at once."""
    queue_size: Annotated[PositiveInt, NullMeans("16 * max_concurrent_rollouts")] = Field(
        default_factory=lambda data: 16 * data["max_concurrent_rollouts"]
    )
    """Bound of the runner's input and of its output queue, in tasks. A full queue blocks; nothing is lost."""
    max_head_offpolicyness: NonNegativeInt = 0
    """eta: how many versions old a token may be that is trained on. 0: synchronous."""
    staleness_policy: Literal["mask", "discard", "wait", "allow"] = "mask"
    """What happens to a group that holds tokens older than eta when it is consumed: those tokens carry no gradient
    (`mask`), the group is thrown away and its prompt queued again (`discard`), the trainer waits for the groups that
    would otherwise go stale (`wait`), or it is used as it is (`allow`)."""
    enable_rollout_tracing: bool = False
    """A span for each task and each request, over HTTP and gRPC, and the session tracer. Needs `headway[tracing]`;
    where the spans go is said by OpenTelemetry's environment variables (OTEL_EXPORTER_OTLP_ENDPOINT and so on)."""
    dump_to_file: bool = False
    """Write every sample as a line of JSON to `rollout/{step}/samples.jsonl`, those of evaluations below
    `eval-rollout/`; the step is that of the newest version that made a token of the group. The trainer adds what it
    made of each token, `rollout/{step}/trained.jsonl`. The viewer of the dashboard shows both."""
    check_trajectory_format: bool = False
    """Check the shape, length and type of everything that a workflow returns; the rollout ends as workflow_error, and
    the first fault is named."""
    setup_timeout: PositiveFloat = 300.0
    """Longest wait in seconds for the first server to be ready."""
    request_timeout: PositiveFloat = 3600.0
    """Longest time in seconds of one generation request."""
    request_retries: NonNegativeInt = 3
    """How often a failed request is tried again, on another server where there is one."""
    pause_grace_period: NonNegativeFloat = 0.0
    """Seconds given to running requests to end by themselves before a weight update pauses them."""
    max_unavailable: PositiveInt | None = None
    """Engines that may take new weights at once; the others go on with the old ones meanwhile. null: all."""
    schedule_policy: Literal["round_robin", "least_load", "prefix_affinity"] = "round_robin"
    """How a server is chosen: in turn, by tokens in flight, or where the prompt's prefix is already cached."""
    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "default_lora"
    """With `actor.use_lora`: name of the adapter in the engines; the version is added to it (`default_lora-v1.3`)."""
    scheduling_spec: list[SchedulingSpec] = Field(default_factory=list)
    """Resources of the inference services."""
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()
    """Whether the engines share devices with another role."""


class InferenceConfig(Section):
    """The inference services: one engine each. How many there are is said by `allocation_mode`."""

    engine: Literal["sglang", "vllm", "builtin"] | None = None
    """null: the one of `allocation_mode`. `builtin`: this project's own engine, which also runs on CPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the built-in engine."""
    threads: PositiveInt = 1
    """Torch threads of the built-in engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the built-in engine's weights."""
    max_running_requests: PositiveInt = 64
    """Requests that the built-in engine runs at once; more wait."""
    context_length: PositiveInt | None = None
    """Longest sequence of the built-in engine in tokens; null: the model's."""
    command: list[str] | None = None
    """How an outside engine is started, as a list of words; null: `python -m sglang.launch_server`, or vLLM's."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest time in seconds until the engine answers."""


class RewardConfig(Section):
    """The reward service."""

    function: str | dict[str, float] | None = None
    """A function by name, an import path `module.function`, or a mapping of these to weights, which are summed; null:
    the one that belongs to the dataset."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments passed to the function."""
    timeout_s: PositiveFloat = 15.0
    """Longest time of one call. A call that takes longer is a typed failure, not a reward of 0."""
    num_workers: PositiveInt = 2
    """Worker processes of one reward service."""
    memory_limit_mb: PositiveInt = 2048
    """Memory of one worker process."""
    max_queued: PositiveInt = 4096
    """Items waiting in one reward service; more are refused with RESOURCE_EXHAUSTED."""


class WorkflowConfig(Section):
    """What happens in one episode."""

    path: str = "headway.workflow.RLVRWorkflow"
    """Import path of the workflow class."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor beside the standard ones."""
    should_accept_fn: str | None = None
    """Import path of a function of a group that says whether it may be trained on; what it refuses is refilled."""
