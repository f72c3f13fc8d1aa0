"""What a run tells about itself: statistics, traces."""

from typing import Any, Literal

from pydantic import PositiveInt, SecretStr

from headway.config.secrets import secret
from headway.config.section import Section


class WandBConfig(Section):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """`offline` writes to the run's folder only."""
    wandb_base_url: str | None = None
    """Address of a server of one's own."""
    wandb_api_key: SecretStr | None = None
    """null: the environment variable WANDB_API_KEY, or the file that WANDB_API_KEY_FILE names."""
    entity: str | None = None
    """Team or user."""
    project: str | None = None
    """null: the experiment's name."""
    name: str | None = None
    """null: the trial's name."""
    job_type: str | None = None
    """Passed on."""
    group: str | None = None
    """Passed on; null: experiment and trial."""
    notes: str | None = None
    """Passed on."""
    tags: list[str] | None = None
    """Passed on."""
    config: dict[str, Any] | None = None
    """Passed on; null: the whole configuration, secrets masked."""
    id_suffix: str | None = "train"
    """Ends the run's id, so that a recovered trial continues its curves."""

    def key(self) -> str | None:
        """The API key, from the file or the environment."""
        return secret(self.wandb_api_key, "WANDB_API_KEY")


class TensorBoardConfig(Section):
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; null: none are written."""


class SwanLabConfig(Section):
    """SwanLab."""

    mode: Literal["cloud", "local", "offline", "disabled"] | None = "disabled"
    """`disabled` and null: nothing is sent."""
    project: str | None = None
    """null: the experiment's name."""
    name: str | None = None
    """null: the trial's name."""
    config: dict[str, Any] | None = None
    """Passed on; null: the whole configuration, secrets masked."""
    logdir: str | None = None
    """Folder of its files; null: below the run's logs."""
    api_key: SecretStr | None = None
    """null: the environment variable SWANLAB_API_KEY, or the file that SWANLAB_API_KEY_FILE names."""

    def key(self) -> str | None:
        """The API key, from the file or the environment."""
        return secret(self.api_key, "SWANLAB_API_KEY")


class StatsLoggerConfig(Section):
    """Where the statistics of each step go, beside the console and `stats.jsonl`."""

    experiment_name: str | None = None
    """Repeats the experiment's own; another one is refused."""
    trial_name: str | None = None
    """Repeats the trial's own; another one is refused."""
    fileroot: str | None = None
    """Root of the logs; null: `cluster.fileroot`."""
    wandb: WandBConfig = WandBConfig()
    """Weights & Biases."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard."""
    swanlab: SwanLabConfig = SwanLabConfig()
    """SwanLab."""


class SessionTracerConfig(Section):
    """A line of JSON for each session (episode): its phases, and their times."""

    enabled: bool = False
    """Write `sessions.jsonl`; `rollout.enable_rollout_tracing` does so too."""
    flush_threshold: PositiveInt = 256
    """Groups whose sessions are kept before they are written."""


class PerfTracerConfig(Section):
    """A Chrome trace of the phases of each step."""

    experiment_name: str | None = None
    """Repeats the experiment's own; another one is refused."""
    trial_name: str | None = None
    """Repeats the trial's own; another one is refused."""
    fileroot: str | None = None
    """Root of the traces; null: `cluster.fileroot`."""
    enabled: bool = False
    """Write traces."""
    save_interval: PositiveInt = 1
    """Steps between two writes."""
    session_tracer: SessionTracerConfig = SessionTracerConfig()
    """A line of JSON for each session."""
