"""The token sequence of an episode, grown turn by turn. Tokens are appended as ids and never encoded again.

add_prompt    prompts, tool output:  mask 0, version NO_VERSION, log-prob 0
add_response  generated tokens:      mask 1, the server's versions and log-probs
"""

import numpy as np

from headway.core.trajectory import NO_VERSION, StopReason, Trajectory
from headway.workflow.api import ModelResponse


class TokenSequence:
    """Collects an episode's tokens.

    Example:
        >>> sequence = TokenSequence()
        >>> sequence.add_prompt([5, 6])
        >>> sequence.add_response(ModelResponse([5, 6], [7], [-0.5], [3]))
        >>> sequence.trajectory(reward=1.0).versions.tolist()
        [-1, -1, 3]
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._versions: list[int] = []
        self._stop_reason = StopReason.ABORT
        self.num_generated = 0

    def add_prompt(self, ids: list[int]) -> None:
        """Append tokens that no policy generated."""
        self.ids += ids
        self._logprobs += [0.0] * len(ids)
        self._mask += [False] * len(ids)
        self._versions += [NO_VERSION] * len(ids)

    def add_response(self, response: ModelResponse) -> None:
        """Append what was generated after the tokens so far.

        Raises:
            ValueError: The response continues another sequence.
        """
        if response.input_tokens != self.ids:
            raise ValueError(
                "the response does not continue this sequence: its input tokens differ from those collected"
            )
        self.add_output(response)

    def add_output(self, response: ModelResponse) -> None:
        """Append what was generated, for callers that know that it continues this sequence."""
        self.ids += response.output_tokens
        self._logprobs += response.output_logprobs
        self._mask += [True] * response.output_len
        self._versions += response.output_versions
        self._stop_reason = response.stop_reason
        self.num_generated += response.output_len

    def trajectory(self, reward: float, metrics: dict[str, float] | None = None) -> Trajectory:
        """The sequence as it will be trained on."""
        return Trajectory(
            input_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            loss_mask=np.array(self._mask, np.bool_),
            versions=np.array(self._versions, np.int32),
            reward=reward,
            stop_reason=self._stop_reason,
            metrics=metrics or {},
        )
