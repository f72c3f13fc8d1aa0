"""Every metric that a service shows at `/metrics`: the one place where names, types, units, labels and meaning stand.

Services make their families from this table, `docs/metrics.md` and the Grafana dashboard are generated from it, and
`tests/integration/test_metrics_of_a_stack.py` compares it with what running services show, both ways.

An inference service has two doors: its agent's, with what stands here, and its engine's, with the engine's own metrics.
Those of the built-in engine stand here too, as `inference-engine`, under SGLang's names.
"""

from dataclasses import dataclass
from enum import StrEnum

from headway.core.ledger import TaskState
from headway.core.trajectory import Outcome


class Kind(StrEnum):
    """Prometheus' type."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


CONTROLLER, TRAINER, REWARD, NAMES = "rollout-controller", "trainer", "reward", "name-resolve"
AGENT, ENGINE = "inference", "inference-engine"
SERVICES = (CONTROLLER, TRAINER, REWARD, NAMES, AGENT)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric."""

    name: str
    """As it is scraped: a counter ends with `_total`, an info with `_info`."""
    kind: Kind
    unit: str
    """`seconds`, `bytes`, `tokens`, `steps` or `requests`; "1" where it counts something else or is a ratio."""
    help: str
    services: tuple[str, ...]
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """All values of the only label, where they are known beforehand: each is shown, also at 0."""

    @property
    def family(self) -> str:
        """The name without its kind's ending."""
        return self.name.removesuffix("_total").removesuffix("_info")


def _gauge(name: str, unit: str, text: str, *services: str, **more: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name, Kind.GAUGE, unit, text, services, **more)


def _counter(name: str, unit: str, text: str, *services: str, **more: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name, Kind.COUNTER, unit, text, services, **more)


def _histogram(name: str, unit: str, text: str, *services: str, **more: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name, Kind.HISTOGRAM, unit, text, services, **more)


def _info(name: str, text: str, *services: str, **more: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name, Kind.INFO, "1", text, services, **more)


STATES = tuple(state.value for state in TaskState)
OUTCOMES = tuple(outcome.value for outcome in Outcome)
DISCARDS = tuple(outcome for outcome in OUTCOMES if outcome != Outcome.ACCEPTED)
SERVER_STATES = ("joining", "updating", "serving", "silent", "failed", "leaving")
ROLLOUT_PHASES = ("pending", "rollout", "generate", "reward", "journal")
TRAINER_PHASES = (
    "starting",
    "standby",
    "warm_start",
    "wait_for_batch",
    "logprob",
    "ref_logprob",
    "advantages",
    "update",
    "write",
    "publish",
    "commit",
    "evaluate",
    "checkpoint",
    "save",
    "log",
    "finished",
)
SCORE_STATUSES = ("ok", "timeout", "error", "killed_memory", "invalid_output", "abstain")
DIVERGENCES = ("current_from_proximal", "current_from_behaviour", "proximal_from_behaviour")
LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

COMMON = (
    _info("headway_build_info", "What runs here.", *SERVICES, labels=("version", "service", "run")),
    _gauge("headway_waits", "1", "Things that are waited for.", *SERVICES),
    _gauge("headway_oldest_wait_seconds", "seconds", "How long the oldest of them is waited for.", *SERVICES),
    _counter("headway_grpc_calls_total", "requests", "Calls answered.", *SERVICES, labels=("method", "code")),
    _counter("headway_grpc_seconds_total", "seconds", "Time in calls, streams too.", *SERVICES, labels=("method",)),
    _gauge("process_virtual_memory_bytes", "bytes", "Virtual memory size in bytes.", *SERVICES),
    _gauge("process_resident_memory_bytes", "bytes", "Resident memory size in bytes.", *SERVICES),
    _gauge("process_start_time_seconds", "seconds", "Start of the process, Unix time in seconds.", *SERVICES),
    _counter("process_cpu_seconds_total", "seconds", "Total user and system CPU time spent in seconds.", *SERVICES),
    _gauge("process_open_fds", "1", "Number of open file descriptors.", *SERVICES),
    _gauge("process_max_fds", "1", "Maximum number of open file descriptors.", *SERVICES),
)

OF_CONTROLLER = (
    _gauge(
        "headway_tasks", "1", "Tasks by state; they add up to submitted.", CONTROLLER, labels=("state",), values=STATES
    ),
    _gauge("headway_tasks_submitted", "1", "Tasks taken up.", CONTROLLER),
    _counter(
        "headway_rollouts_total", "1", "Rollouts by how they ended.", CONTROLLER, labels=("outcome",), values=OUTCOMES
    ),
    _counter(
        "headway_discards_total",
        "1",
        "Attempts that did not end in a consumed group, by reason; those that were finished and grew too old, too.",
        CONTROLLER,
        labels=("reason",),
        values=DISCARDS,
    ),
    _counter(
        "headway_groups_total", "1", "Accepted groups whose time is in headway_rollout_seconds_total.", CONTROLLER
    ),
    _counter(
        "headway_rollout_seconds_total",
        "seconds",
        "Time of accepted groups by phase; generate and reward are parts of rollout, as means over samples.",
        CONTROLLER,
        labels=("phase",),
        values=ROLLOUT_PHASES,
    ),
    _gauge("headway_staleness_bound", "steps", "How old a token may be that is trained on: eta.", CONTROLLER),
    _gauge("headway_staleness_outstanding", "1", "Groups started and not trained on.", CONTROLLER),
    _gauge("headway_staleness_limit", "1", "How many may be outstanding.", CONTROLLER),
    _gauge("headway_staleness_capacity", "1", "Rollouts that may start now.", CONTROLLER),
    _counter(
        "headway_trained_tokens_total",
        "tokens",
        "Tokens handed out with gradient, by staleness in steps.",
        CONTROLLER,
        labels=("staleness",),
    ),
    _counter(
        "headway_masked_tokens_total",
        "tokens",
        "Tokens handed out without gradient for being too old, by staleness in steps.",
        CONTROLLER,
        labels=("staleness",),
    ),
    _counter("headway_steps_total", "steps", "Committed train steps, over restarts.", CONTROLLER),
    _counter(
        "headway_batch_wait_seconds_total",
        "seconds",
        "Time for which batches were asked for and not ready, those fetched ahead too.",
        CONTROLLER,
    ),
    _gauge("headway_run_ended", "1", "1: the last step of the run is committed.", CONTROLLER),
    _gauge("headway_published_step", "steps", "Step of the newest published version; -1: none.", CONTROLLER),
    _gauge("headway_served_step", "steps", "Newest step that the whole fleet has served; -1: none.", CONTROLLER),
    _gauge(
        "headway_services",
        "1",
        "Registered services.",
        CONTROLLER,
        labels=("service",),
        values=(TRAINER, REWARD, AGENT),
    ),
    _gauge("headway_servers", "1", "Inference servers by state.", CONTROLLER, labels=("state",), values=SERVER_STATES),
    _gauge(
        "headway_server_step",
        "steps",
        "Step of the version that a server serves; -1: unknown.",
        CONTROLLER,
        labels=("server",),
    ),
    _gauge("headway_server_requests", "requests", "Requests that a server works on.", CONTROLLER, labels=("server",)),
    _gauge("headway_server_tokens", "tokens", "Prompts and budgets of these requests.", CONTROLLER, labels=("server",)),
    _counter(
        "headway_server_busy_seconds_total",
        "seconds",
        "Time in which a server had a request, since it joined.",
        CONTROLLER,
        labels=("server",),
    ),
    _gauge("headway_requests_waiting", "requests", "Requests that no server may take now.", CONTROLLER),
)

OF_TRAINER = (
    _gauge("headway_trainer_step", "steps", "Completed steps of the weights in training; -1: does not lead.", TRAINER),
    _gauge("headway_trainer_total_steps", "steps", "Steps of the whole run; 0: not known yet.", TRAINER),
    _gauge(
        "headway_trainer_phase",
        "1",
        "1 for the phase that it is in.",
        TRAINER,
        labels=("phase",),
        values=TRAINER_PHASES,
    ),
    _counter(
        "headway_trainer_phase_seconds_total",
        "seconds",
        "Time in each phase.",
        TRAINER,
        labels=("phase",),
        values=TRAINER_PHASES,
    ),
    _counter("headway_trainer_samples_total", "1", "Samples trained on, over restarts.", TRAINER),
    _counter("headway_trainer_skipped_steps_total", "steps", "Steps without a finite gradient.", TRAINER),
    _gauge("headway_trainer_reward", "1", "Mean reward of the last batch.", TRAINER),
    _gauge("headway_trainer_held_out_reward", "1", "Mean reward of the last evaluation.", TRAINER),
    _gauge("headway_trainer_loss", "1", "Actor loss of the last step.", TRAINER),
    _gauge("headway_trainer_grad_norm", "1", "Gradient norm of the last step, before it was clipped.", TRAINER),
    _gauge("headway_trainer_entropy", "1", "Mean entropy of the last step, nats a token.", TRAINER),
    _gauge("headway_trainer_clip_ratio", "1", "Part of the tokens that were clipped.", TRAINER),
    _gauge("headway_trainer_effective_sample_size", "1", "Part of the tokens that counts in effect, 0 to 1.", TRAINER),
    _gauge(
        "headway_trainer_divergence",
        "1",
        "k3 estimate between two of the three policies, nats a token.",
        TRAINER,
        labels=("of",),
        values=DIVERGENCES,
    ),
    _gauge("headway_trainer_staleness", "steps", "Mean staleness of the tokens that carry gradient.", TRAINER),
    _gauge("headway_trainer_completion_tokens", "tokens", "Mean length of a completion.", TRAINER),
    _gauge("headway_trainer_samples_per_second", "1", "Samples of the last step over its time.", TRAINER),
    _gauge("headway_trainer_tokens_per_second", "tokens", "Tokens of the last step over its time.", TRAINER),
)

OF_REWARD = (
    _counter(
        "headway_reward_items_total", "1", "Scored items by result.", REWARD, labels=("status",), values=SCORE_STATUSES
    ),
    _histogram(
        "headway_reward_seconds", "seconds", "Time of items in a worker, by function.", REWARD, labels=("function",)
    ),
    _counter("headway_reward_cached_total", "1", "Items answered from the cache.", REWARD),
    _counter("headway_reward_shed_total", "1", "Items refused: the queue was full.", REWARD),
    _counter("headway_reward_workers_replaced_total", "1", "Workers that were ended or died.", REWARD),
    _gauge("headway_reward_workers", "1", "Workers that the service is to have.", REWARD),
    _gauge("headway_reward_queued", "1", "Items that wait.", REWARD),
    _gauge("headway_reward_running", "1", "Items that workers hold.", REWARD),
    _gauge("headway_reward_aside", "1", "Workers with a slow item, beside the others.", REWARD),
    _gauge("headway_reward_quarantined", "1", "Items not run any more.", REWARD),
    _info("headway_reward_isolation_info", "Isolation layers in force.", REWARD, labels=("active", "missing")),
)

OF_NAMES = (
    _gauge("headway_names_revision", "1", "Newest revision of the store that this replica has seen.", NAMES),
    _gauge("headway_names_sessions", "1", "Open sessions of clients.", NAMES),
    _gauge("headway_names_campaigns", "1", "Candidates that lead or stand by here.", NAMES),
    _counter("headway_names_store_replaced_total", "1", "How often the store turned out to be another one.", NAMES),
)

OF_AGENT = (
    _gauge("headway_inference_registered", "1", "1: the engine may be given requests.", AGENT),
    _gauge(
        "headway_inference_start_seconds", "seconds", "From the agent's start until the engine was registered.", AGENT
    ),
    _info("headway_inference_engine_info", "The engine.", AGENT, labels=("engine", "url")),
)

OF_MODEL = ("model_name",)
OF_ENGINE = (
    _gauge("sglang:num_running_reqs", "requests", "Requests in a slot.", ENGINE, labels=OF_MODEL),
    _gauge("sglang:num_queue_reqs", "requests", "Requests that wait for a slot.", ENGINE, labels=OF_MODEL),
    _gauge("sglang:is_paused", "1", "1 while generation is paused.", ENGINE, labels=OF_MODEL),
    _counter("sglang:prompt_tokens_total", "tokens", "Prompt tokens received.", ENGINE, labels=OF_MODEL),
    _counter(
        "sglang:cached_tokens_total",
        "tokens",
        "Prompt tokens whose keys and values were reused.",
        ENGINE,
        labels=("model_name",),
    ),
    _counter("sglang:generation_tokens_total", "tokens", "Tokens generated.", ENGINE, labels=OF_MODEL),
    _counter("sglang:num_requests_total", "requests", "Requests finished.", ENGINE, labels=OF_MODEL),
    _counter("sglang:num_aborted_requests_total", "requests", "Requests aborted.", ENGINE, labels=OF_MODEL),
    _counter(
        "sglang:num_retracted_requests_total",
        "requests",
        "Requests put back into the queue by a pause.",
        ENGINE,
        labels=("model_name",),
    ),
    _counter("sglang:num_steps_total", "1", "Forward passes.", ENGINE, labels=OF_MODEL),
    _counter("sglang:num_weight_updates_total", "1", "Weight updates applied.", ENGINE, labels=OF_MODEL),
    _counter(
        "sglang:weight_load_duration_seconds_total",
        "seconds",
        "Time spent on weight updates.",
        ENGINE,
        labels=("model_name",),
    ),
)

TABLE = (*COMMON, *OF_CONTROLLER, *OF_TRAINER, *OF_REWARD, *OF_NAMES, *OF_AGENT, *OF_ENGINE)
BY_NAME = {spec.name: spec for spec in TABLE}


def metrics_of(service: str) -> tuple[MetricSpec, ...]:
    """What a service shows.

    Example:
        >>> [spec.name for spec in metrics_of("name-resolve") if spec.name.startswith("headway_names")][:2]
        ['headway_names_revision', 'headway_names_sessions']
    """
    return tuple(spec for spec in TABLE if service in spec.services)
