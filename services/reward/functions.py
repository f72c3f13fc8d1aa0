"""Functions that exist only inside the reward service, because they need what only it has: the sandbox."""

from headway.reward.registry import register

register("code", "services.reward.code.code")
