"""Reward functions: the built-in ones, and what a user's own needs."""

from headway.reward.binding import Sample
from headway.reward.evaluate import Evaluator
from headway.reward.outcome import Abstain, Outcome, ScoreStatus
from headway.reward.registry import find_function, reward_function

__all__ = ["Abstain", "Evaluator", "Outcome", "Sample", "ScoreStatus", "find_function", "reward_function"]
