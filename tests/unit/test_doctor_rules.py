"""Each rule of the doctor finds what it is there for, with its knob, and is silent about a healthy run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from made_reports import SERVER, report, step
from typer.testing import CliRunner

from headway.cli import app, main
from headway.config import ExperimentConfig
from headway.doctor import RULES, Evidence, Severity, diagnose
from headway.doctor.rules import BY_REASON
from headway.errors import InvalidInput, NotFound, Unavailable
from headway.launcher.doctor import evidence_in, evidence_of, problems_text
from headway.runtime.metrics_http import serve_app

UPDATE = "ppo_actor/update"
WAITING = {"timing/wait_for_batch": 6.0}
IDLE = [{"name": name, **SERVER, "busy_s": 60.0} for name in ("0", "1")]
Made = Callable[[], dict[str, Any]]


def drifting(name: str, first: float, last: float, **stats: float) -> dict[str, Any]:
    """A run of 20 steps in which a statistic moves from one value to another."""
    made = report()
    for number, one in enumerate(made["history"]):
        one["stats"] |= {name: first + (last - first) * number / 19} | {
            key.replace("__", "/"): value for key, value in stats.items()
        }
    return made


def evaluated(*rewards: float) -> list[dict[str, Any]]:
    return [{"version": f"v1.{n}", "step": n, "reward": one, "num_samples": 8} for n, one in enumerate(rewards)]


REWARDS_SLOW = {"reward_s": 6.0, "rollout_s": 8.0}
SICK: dict[str, Made] = {
    "generation-bound": lambda: report(stats=WAITING),
    "reward-bound": lambda: report(stats=WAITING, timing=REWARDS_SLOW),
    "concurrency-too-low": lambda: report(stats=WAITING, staleness={"max_concurrent": 16}),
    "bound-too-tight": lambda: report(stats=WAITING | {"rollout/staleness/fraction_2": 0.9}, servers=IDLE),
    "trainer-bound": lambda: report(stats={"timing/wait_for_batch": 0.1}, servers=IDLE),
    "bound-useless": lambda: report(stats={"rollout/staleness/max": 1.0}, staleness={"eta": 4}),
    "slow-rewards": lambda: report(timing=REWARDS_SLOW),
    "engine-out": lambda: report(servers=[{"name": "0", **SERVER}, {"name": "1", **SERVER, "state": "failed"}]),
    "idle-engine": lambda: report(servers=[{"name": "0", **SERVER}, {"name": "1", **SERVER, "busy_s": 3.0}]),
    "discards-high": lambda: report(discards={"reward_timeout": {"count": 40}}),
    "reward-timeouts": lambda: report(num_rollouts={"reward_timeout": 8}),
    "masked-high": lambda: report(tokens={"masked": {"3": 4000}}),
    "not-conserved": lambda: report(tasks={"is_conserved": False}),
    "sample-size-falling": lambda: drifting(f"{UPDATE}/effective_sample_size", 0.97, 0.3),
    "logp-mismatch": lambda: report(stats={f"{UPDATE}/engine_mismatch/avg": 0.2}),
    "equal-groups": lambda: report(stats={"rollout/equal_groups": 0.9}),
    "length-drift": lambda: drifting("ppo_actor/completion_len/avg", 100, 900, ppo_actor__no_eos_ratios__avg=0.4),
    "entropy-collapse": lambda: drifting(f"{UPDATE}/entropy/avg", 1.0, -0.2),
    "skipped-steps": lambda: report(stats={"num_skipped_steps": 2.0}),
    "held-out-behind": lambda: (
        drifting("ppo_actor/task_reward/avg", 0.2, 0.9) | {"evaluations": evaluated(0.4, 0.5, 0.4)}
    ),
}
"""By the finding's code, a run that has it."""


def codes(made: dict[str, Any]) -> set[str]:
    return {finding.code for finding in diagnose(Evidence(made))}


def test_a_healthy_run_has_no_findings() -> None:
    assert diagnose(Evidence(report())) == []


@pytest.mark.parametrize("code", SICK)
def test_a_sick_run_is_named_with_its_knob_and_its_numbers(code: str) -> None:
    (finding,) = [one for one in diagnose(Evidence(SICK[code]())) if one.code == code]
    assert finding.numbers
    assert all(isinstance(number, int | float) for number in finding.numbers.values())
    assert is_key(finding.knob), finding.knob


def test_a_run_that_waits_has_one_bottleneck() -> None:
    bottlenecks = {"generation-bound", "reward-bound", "concurrency-too-low", "bound-too-tight", "trainer-bound"}
    for code in bottlenecks:
        assert codes(SICK[code]()) & bottlenecks == {code}


def test_there_is_a_sick_run_for_every_rule() -> None:
    silent = {rule.__name__ for rule in RULES if not any(rule(Evidence(made())) for made in SICK.values())}
    assert silent == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_says_nothing_where_nothing_is_known(rule: Any) -> None:
    assert rule(Evidence({"history": [], "staleness": {"eta": 1}})) is None
    assert rule(Evidence(report(0, servers=[]))) is None


EARLY = {"timing": {"num_groups": 9}, "num_rollouts": {"accepted": 9}}
AT_ONCE = {"engine-out", "not-conserved", "skipped-steps"}
"""Wrong from the first moment on, whatever follows."""


@pytest.mark.parametrize("code", sorted(set(SICK) - AT_ONCE))
def test_a_few_steps_and_rollouts_are_too_little_to_judge_by(code: str) -> None:
    made = SICK[code]() | {"num_rollouts": EARLY["num_rollouts"]}
    made |= {"timing": made["timing"] | EARLY["timing"], "history": made["history"][:5]}
    assert code not in codes(made)


def test_what_a_filter_refuses_is_no_discard() -> None:
    assert codes(report(discards={"rejected": {"count": 400}})) == set()


def test_knobs_of_discards_are_keys() -> None:
    for knob, _ in BY_REASON.values():
        assert is_key(knob), knob


def test_engines_that_are_never_idle_make_a_run_generation_bound_whatever_the_bound() -> None:
    busy = [{"name": "0", **SERVER, "busy_s": 199.0}]
    assert "generation-bound" in codes(report(stats=WAITING | {"rollout/staleness/fraction_2": 0.9}, servers=busy))


@pytest.mark.parametrize(("busy_s", "severity"), [(90.0, Severity.ADVICE), (40.0, Severity.PROBLEM)])
def test_a_slower_trainer_is_a_problem_where_a_quarter_of_the_engines_would_do(
    busy_s: float, severity: Severity
) -> None:
    servers = [{"name": "0", **SERVER, "busy_s": busy_s}]
    (found,) = diagnose(Evidence(report(stats={"timing/wait_for_batch": 0.1}, servers=servers)))
    assert (found.code, found.severity) == ("trainer-bound", severity)


def test_problems_come_first() -> None:
    found = diagnose(Evidence(report(stats={"rollout/equal_groups": 0.6}, tasks={"is_conserved": False})))
    assert [one.severity for one in found] == [Severity.PROBLEM, Severity.ADVICE]


def is_key(knob: str) -> bool:
    """Whether a key of the experiment file has this name."""
    section: Any = ExperimentConfig
    for part in knob.split("."):
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return False
        section = fields[part].annotation
        section = next((one for one in getattr(section, "__args__", ()) if hasattr(one, "model_fields")), section)
    return True


def test_a_folder_of_a_run_is_read_from_the_last_report(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(json.dumps({"/v1/report": SICK["equal-groups"]()}))
    ended = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert ended.exit_code == 1
    assert "problem  equal-groups" in ended.stdout
    assert "gconfig.n_samples" in ended.stdout
    for_programs = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path)])
    assert [one["code"] for one in json.loads(for_programs.stdout)] == ["equal-groups"]


def test_a_healthy_run_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(json.dumps({"/v1/report": report()}))
    ended = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert (ended.exit_code, ended.stdout) == (0, "nothing is found to be wrong\n")


def test_a_run_that_was_cut_off_is_judged_by_its_statistics(tmp_path: Path) -> None:
    config: dict[str, Any] = {"experiment_name": "e", "trial_name": "t", "cluster": {"fileroot": str(tmp_path)}}
    config["rollout"] = {"max_head_offpolicyness": 2}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    logs = ExperimentConfig.model_validate(config).paths.logs
    logs.mkdir(parents=True)
    records = [{"step": n + 1, "version": f"v1.{n + 1}", **step(n)["stats"], **WAITING} for n in range(20)]
    (logs / "stats.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 21, "ver')
    assert [one.code for one in diagnose(evidence_in(tmp_path))] == ["generation-bound"]


@pytest.mark.parametrize("text", ["{", "{}", '{"/v1/report": {"run": "a/b"}}'])
def test_a_damaged_folder_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"answers\.json"):
        evidence_in(tmp_path)


def test_a_mistake_is_one_line_and_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["headway", "doctor", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def controller(answer: Any, token: str = "") -> web.Application:
    """Answers at /v1/report, to those who have the token."""

    async def tell(request: web.Request) -> web.Response:
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        return web.json_response(answer)

    made = web.Application()
    made.router.add_get("/v1/report", tell)
    return made


async def test_a_running_controller_is_asked_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_app(controller(SICK["equal-groups"](), "secret"), "127.0.0.1", 0) as port:
        with pytest.raises(Unavailable, match="HEADWAY_API_TOKEN"):
            await evidence_of(f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HEADWAY_API_TOKEN", "secret")
        evidence = await evidence_of(f"http://127.0.0.1:{port}/")
    assert [one.code for one in diagnose(evidence)] == ["equal-groups"]


async def test_what_answers_and_is_no_controller_is_said() -> None:
    async with serve_app(controller({"hello": 1}), "127.0.0.1", 0) as port:
        with pytest.raises(InvalidInput, match="no report"):
            await evidence_of(f"http://127.0.0.1:{port}")


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither the URL of a controller nor the folder of a run"):
        evidence_in(tmp_path)


def test_a_launch_ends_with_the_problems_only() -> None:
    assert problems_text(report()) == ""
    assert problems_text(SICK["bound-useless"]()) == ""
    assert problems_text(SICK["not-conserved"]()).startswith("doctor: not-conserved: ")
