"""Estimators of KL(policy, base) from the log-probabilities of sampled tokens (joschu.net/blog/kl-approx.html)."""

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
LARGEST_KL = 10.0
"""One token's penalty is clamped to +- this, as in AReaL: a single broken token must not decide a step."""


def approx_kl(logp: Tensor, base_logp: Tensor, estimator: KLEstimator, *, clamp: bool = True) -> Tensor:
    """Per-token estimate, shaped as the inputs. With d = logp - base_logp: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 is unbiased and may be negative; k2 and k3 are never negative; k3 is unbiased too.
    """
    d = logp.float() - base_logp.float()
    if estimator == "k2":
        d = d.square() / 2
    elif estimator == "k3":
        d = (-d).exp() - 1 + d
    return d.clamp(-LARGEST_KL, LARGEST_KL) if clamp else d
