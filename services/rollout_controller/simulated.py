"""The service's own controller in a simulation: the adapter that `headway.testing.simulation` asks for.

Example:
    findings = simulate(Scenario.of(seed=4711))
"""

from headway.core.selection import StalenessPolicy
from headway.runtime.supervisor import Supervisor
from headway.runtime.waits import Waits
from headway.testing.invariants import Findings
from headway.testing.scenario import Scenario
from headway.testing.simulated_disk import SimulatedDisk
from headway.testing.simulation import Simulation
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.journal_store import JournalStore
from services.rollout_controller.records import Settings
from services.rollout_controller.rollouts import GroupRunner, TaskInput


def simulate(scenario: Scenario) -> Findings:
    """Run a scenario with the real controller.

    Raises:
        Broken: An invariant does not hold; the message names the seed.
    """
    return Simulation(scenario, RealController()).run()


class RealController:
    """Makes what a simulation runs."""

    def make_disk(self, simulation: Simulation) -> SimulatedDisk[JournalStore]:
        return SimulatedDisk(JournalStore(":memory:"), simulation.scenario.journal_s)

    def make_controller(self, simulation: Simulation, supervisor: Supervisor) -> RolloutController:
        scenario, fleet = simulation.scenario, simulation.fleet
        settings = Settings(
            scenario.batch_size,
            scenario.eta,
            scenario.max_concurrent,
            queue_size=16 * scenario.max_concurrent,
            policy=StalenessPolicy(scenario.policy),
        )
        runner = GroupRunner(simulation.workflow, fleet, scenario.num_samples)
        waits, journal = Waits(simulation.now), simulation.disk.open()
        return RolloutController(settings, journal, fleet, runner, lambda _: runner, supervisor, waits, simulation.now)

    def make_task(self, task_id: str, data_json: bytes) -> TaskInput:
        return TaskInput(task_id, data_json)
