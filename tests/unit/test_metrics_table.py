"""The table of metrics is sound: names tell kind and unit, and nothing stands twice."""

from headway.core.trajectory import Outcome
from headway.runtime.metrics import Latency, bare_registry, expose, family
from headway.runtime.metrics_table import TABLE, TRAINER_PHASES, Kind
from services.rollout_controller.fleet_member import EngineState
from services.trainer.phases import Phase, Phases


def test_units_and_kinds_show_in_the_names() -> None:
    for spec in TABLE:
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER), spec.name
        assert spec.name.endswith("_info") == (spec.kind is Kind.INFO), spec.name
        if spec.unit in ("seconds", "bytes"):
            assert f"_{spec.unit}" in spec.name, spec.name
        assert spec.help.endswith("."), spec.name


def test_every_metric_stands_once() -> None:
    assert len({spec.name for spec in TABLE}) == len(TABLE)


def test_known_values_are_those_of_the_services() -> None:
    values = {spec.name: spec.values for spec in TABLE}
    assert set(values["headway_servers"]) == {state.value for state in EngineState}
    assert set(TRAINER_PHASES) == {phase.value for phase in Phase}
    assert set(values["headway_rollouts_total"]) == {outcome.value for outcome in Outcome}


def test_values_that_nothing_was_counted_for_are_shown_as_zero() -> None:
    text = expose(bare_registry(lambda: [family("headway_rollouts_total", {"accepted": 3})])).decode()
    assert 'headway_rollouts_total{outcome="accepted"} 3.0' in text
    assert 'headway_rollouts_total{outcome="reward_timeout"} 0.0' in text


def test_a_histogram_adds_up_from_bucket_to_bucket() -> None:
    latency = Latency()
    for seconds in (0.0005, 0.001, 0.02, 1000.0):
        latency.add("exact", seconds)
    samples = latency.family("headway_reward_seconds").samples
    buckets = {one.labels["le"]: one.value for one in samples if one.name.endswith("_bucket")}
    assert (buckets["0.001"], buckets["0.03"], buckets["100.0"], buckets["+Inf"]) == (2, 3, 3, 4)
    assert [one.value for one in samples if one.name.endswith("_count")] == [4]
    assert [one.value for one in samples if one.name.endswith("_sum")] == [1000.0215]


def test_seconds_of_phases_go_on_while_a_phase_lasts_and_never_fall() -> None:
    now = 0.0
    phases = Phases(clock=lambda: now)
    with phases(Phase.UPDATE):
        now = 3.0
        assert phases.total_seconds()["update"] == 3.0
    now = 5.0
    with phases(Phase.WAIT_FOR_BATCH):
        now = 9.0
        seen = phases.total_seconds()
        phases.take_seconds()
    assert (seen["update"], seen["wait_for_batch"]) == (5.0, 4.0)
    assert all(phases.total_seconds()[phase] >= seconds for phase, seconds in seen.items())
