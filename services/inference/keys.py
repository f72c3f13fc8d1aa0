"""The keys with which the engine beside us was started: what its agent has to show on every call."""

from headway.config import ExperimentConfig


def api_key(config: ExperimentConfig) -> str:
    """For what anybody with a key may ask; empty: the engine asks for none."""
    return _flag(config, "api_key")


def admin_key(config: ExperimentConfig) -> str:
    """For what changes the engine: its weights, its adapters."""
    return _flag(config, "admin_api_key") or api_key(config)


def _flag(config: ExperimentConfig, name: str) -> str:
    flags = {"sglang": config.sglang, "vllm": config.vllm}.get(config.engine)
    return str((flags.flags() if flags is not None else {}).get(name) or "")
