"""`headway plan`: which bound, and how many requests at once, before a machine is rented."""

import logging
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from headway.config import ExperimentConfig
from services.rollout_controller.planning import Forecast, Speeds, forecast, forecasts

ETAS = (0, 1, 2, 4, 8)
CONCURRENCIES = (0.5, 2.0)
ENOUGH = 0.97
"""Of the most tokens a second that any bound gives."""


def print_plan(config: ExperimentConfig, speeds: Speeds, console: Console) -> None:
    """Foretell each bound, and other concurrencies; quiet but for the result.

    Raises:
        InvalidInput: The lengths are longer than the file allows.
    """
    logging.disable(logging.ERROR)
    by_eta = list(forecasts(config, speeds, sorted({*ETAS, config.rollout.max_head_offpolicyness})))
    console.print(_table(config, by_eta, _other_concurrencies(config, speeds)))
    console.print(advice(config, by_eta, speeds.train_s), soft_wrap=True)


def _other_concurrencies(config: ExperimentConfig, speeds: Speeds) -> Iterator[Forecast]:
    eta, at_once = config.rollout.max_head_offpolicyness, config.rollout.max_concurrent_rollouts
    return (forecast(config, speeds, eta, max(1, int(factor * at_once))) for factor in CONCURRENCIES)


def _table(config: ExperimentConfig, by_eta: Sequence[Forecast], others: Iterable[Forecast]) -> Table:
    table = Table("bound", "at once", "step every", "samples/s", "tokens lost", "speed-up", box=None)
    rollout, num_samples = config.rollout, config.rollout.consumer_batch_size * config.gconfig.n_samples
    for one in [*by_eta, *others]:
        is_file = (one.eta, one.max_concurrent) == (rollout.max_head_offpolicyness, rollout.max_concurrent_rollouts)
        table.add_row(
            f"{one.eta}{' *' * is_file}",
            f"{one.max_concurrent}",
            f"{one.step_s:.1f} s",
            f"{num_samples / one.step_s:.1f}",
            f"{one.lost:.1%}",
            f"{by_eta[0].step_s / one.step_s:.2f}",
        )
    return table


def advice(config: ExperimentConfig, by_eta: Sequence[Forecast], train_s: float) -> str:
    """The smallest bound that is nearly as good as any, and what holds back then."""
    most = max(one.useful_rate for one in by_eta)
    enough = next(one for one in by_eta if one.useful_rate >= ENOUGH * most)
    limit = "the trainer" if enough.is_bound_by_training(train_s) else "generation"
    return (
        f"* the file's, with rollout.staleness_policy {config.rollout.staleness_policy}. Speed-up: over a bound of 0.\n"
        f"rollout.max_head_offpolicyness={enough.eta} is the smallest within {1 - ENOUGH:.0%} of the best. "
        f"What holds back then is {limit}."
    )
