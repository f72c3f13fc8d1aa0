"""Where a run lives: machines, folders, name-resolve, the scheduler, and the addresses of the services."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, SecretStr

from headway.config.secrets import secret
from headway.config.section import NoMeaning, NullMeans, Section


class NameResolveConfig(Section):
    """The store behind the name-resolve service."""

    type: Literal["etcd3", "nfs", "ray", "memory"] = "etcd3"
    """`etcd3` (the production store), `nfs` (files in a shared folder), `ray` (an actor of a Ray cluster), or `memory`
    (inside the one name-resolve process; everything is forgotten when it ends)."""
    nfs_record_root: Annotated[str, NullMeans("{cluster.fileroot}/name_resolve")] = "runs/name_resolve"
    """Folder of the `nfs` store, visible to every machine."""
    etcd3_addr: str | None = None
    """`host:port[,host:port]` of etcd; null: `headway up` starts one."""
    etcd3_user: str | None = None
    """User name, where etcd asks for one."""
    etcd3_password: SecretStr | None = None
    """Password of that user; null: the environment variable HEADWAY_ETCD_PASSWORD, or the file that
    HEADWAY_ETCD_PASSWORD_FILE names."""
    etcd3_ca_file: str | None = None
    """Certificate authority of etcd's TLS; null: no TLS."""
    etcd3_cert_file: str | None = None
    """Client certificate, where etcd asks for one."""
    etcd3_key_file: str | None = None
    """Private key of the client certificate."""
    ray_actor_name: str = "ray_kv_store"
    """Name of the actor that holds the names in the `ray` store."""

    def password(self) -> str | None:
        """etcd's password, from the file or the environment."""
        return secret(self.etcd3_password, "HEADWAY_ETCD_PASSWORD")


class ClusterConfig(Section):
    """The machines, and the folder that they share."""

    n_nodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: NonNegativeInt = 0
    """GPUs in each machine; `allocation_mode` may not ask for more than `n_nodes * n_gpus_per_node`. 0: no GPUs,
    everything runs on CPUs and nothing is checked."""
    fileroot: str = "runs"
    """Root of everything a run writes, as `{fileroot}/{kind}/{user}/{experiment_name}/{trial_name}`; shared by all
    machines."""
    name_resolve: NameResolveConfig = NameResolveConfig()
    """Service discovery and published versions."""


class SchedulerConfig(Section):
    """Who places the processes."""

    type: Literal["local", "kubernetes"] | None = None
    """null or `local`: `headway up` on this machine. `kubernetes`: the Helm chart has placed them."""


class SchedulingSpec(Section):
    """Resources of one process of a service on this machine; the chart has them in its values."""

    task_type: Annotated[str, NoMeaning("every service knows what it is")] = "worker"
    """AReaL's kind of task."""
    cpu: PositiveInt = 8
    """CPU cores for each GPU, or for the process where there is no GPU."""
    gpu: NonNegativeInt = 0
    """GPUs of the process."""
    mem: PositiveInt = 32
    """Memory in GB for each GPU, or for the process where there is no GPU. A machine that has less is told in a note;
    the chart's limits stand in its values."""
    port_count: Annotated[NonNegativeInt, NoMeaning("services bind free ports and register them")] = 2
    """AReaL's number of ports."""
    image: Annotated[
        str | None, NoMeaning("the chart's values name the images: `trainer.image`, `inference.image`")
    ] = None
    """AReaL's container image of a worker."""
    cmd: Annotated[str | None, NoMeaning("it names AReaL's own RPC server; every service knows its command")] = None
    """AReaL's command of a worker."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables set in the process."""

    @property
    def memory_gb(self) -> int:
        """Memory of the process."""
        return self.mem * max(1, self.gpu)


class SchedulingStrategy(Section):
    """Which processes share devices."""

    type: Literal["separation", "colocation"] = "separation"
    """`colocation`: in the processes of `target`."""
    target: str | None = None
    """The role whose processes are shared."""


class ServicesConfig(Section):
    """Addresses of the services under `headway up`."""

    host: str = "127.0.0.1"
    """Address that the services bind. Anything but loopback needs a token for the control API."""
    controller_http_port: Annotated[int, Field(ge=0, le=65535)] = 8470
    """Port of the dashboard and the REST API; 0: any free port."""
