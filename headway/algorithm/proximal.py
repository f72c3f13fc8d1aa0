"""The proximal policy: approximations that save its forward pass, and the rule that drops what is too far from it."""

import torch
from torch import Tensor

from headway.core.trajectory import NO_VERSION


def interpolation(versions: Tensor, current_version: int) -> Tensor:
    """[m] float32 in [0, 1]: where the proximal policy lies, from the one that made a token (0) to the current one (1).

    The proximal version is `current_version - 1`, as in AReaL. A token of the current version gives 0.
    """
    behind = (current_version - versions).float()
    alpha = ((behind - 1) / behind.clamp(min=1)).clamp(0, 1)
    return alpha.masked_fill(versions == NO_VERSION, 0.0)


def approximations(logp: Tensor, behaviour_logp: Tensor, versions: Tensor, current_version: int) -> dict[str, Tensor]:
    """Stand-ins for the proximal log-probabilities, [m] each, without gradient.

    `loglinear` interpolates log-probabilities, `linear` probabilities, `rollout` takes the behaviour policy as it is.
    """
    alpha, now = interpolation(versions, current_version), logp.detach()
    mixture = (1 - alpha) * behaviour_logp.exp() + alpha * now.exp()
    return {
        "loglinear": behaviour_logp + alpha * (now - behaviour_logp),
        "linear": (mixture + 1e-10).log(),
        "rollout": behaviour_logp,
    }


def second_moment_mask(behaviour_logp: Tensor, prox_logp: Tensor, threshold: float) -> Tensor:
    """[m] bool: all but the largest (behaviour - prox)^2, as few dropped as bring the mean below the threshold (M2PO,
    arXiv:2510.01161). Where even the smallest alone is not below it, only that one is kept, as in AReaL.

    Taken over a whole mini-batch, so that the result does not depend on micro-batches or ranks.
    """
    moments = (behaviour_logp.double() - prox_logp.double()).square()
    if len(moments) == 0:
        return torch.ones_like(moments, dtype=torch.bool)
    ordered, order = moments.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    num_kept = max(1, int((means < threshold).sum()))
    return torch.zeros_like(moments, dtype=torch.bool).index_fill(0, order[:num_kept], True)
