"""Flags of the outside engines. They are passed through by name; the engine knows best what they mean.

`skip_tokenizer_init: true` becomes `--skip-tokenizer-init`; false and null become nothing; lists become several words.
"""

from typing import Any

from pydantic import ConfigDict, Field, PositiveInt

from headway.config.section import Section

FlagValue = str | int | float | bool | list[str | int | float] | None


class EngineFlags(Section):
    """A section whose unknown keys are flags too."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FlagValue] = Field(init=False)

    def flags(self) -> dict[str, Any]:
        """Every flag that has a value, by its name in the file."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def words(self) -> list[str]:
        """The flags as words of a command line.

        Example:
            >>> SGLangConfig(model_path="m", skip_tokenizer_init=True, mem_fraction_static=0.8).words()
            ['--model-path', 'm', '--skip-tokenizer-init', '--mem-fraction-static', '0.8']
        """
        words: list[str] = []
        for name, value in self.flags().items():
            if value is False or value == "":
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words += [str(item) for item in (value if isinstance(value, list) else [value])]
        return words


class SGLangConfig(EngineFlags):
    """Flags of `python -m sglang.launch_server`."""

    model_path: str | None = None
    """Model; null: `actor.path`."""
    random_seed: int | None = None
    """Seed of sampling; null: `seed` plus the number of the server."""
    skip_tokenizer_init: bool = False
    """Work on token ids only."""
    dtype: str | None = None
    """Type of the weights; null: the model's."""
    max_running_requests: PositiveInt | None = None
    """Requests that run at once; null: the engine decides."""
    context_length: PositiveInt | None = None
    """Longest sequence in tokens; null: the model's."""
    mem_fraction_static: float | None = None
    """Part of the GPU's memory for weights and KV cache together."""


class VLLMConfig(EngineFlags):
    """Flags of vLLM's server."""

    model: str | None = None
    """Model; null: `actor.path`."""
    seed: int | None = None
    """Seed of sampling; null: `seed` plus the number of the server."""
    skip_tokenizer_init: bool = False
    """Work on token ids only."""
    dtype: str | None = None
    """Type of the weights; null: the model's."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; null: the model's."""
    gpu_memory_utilization: float | None = None
    """Part of the GPU's memory that the engine takes."""
