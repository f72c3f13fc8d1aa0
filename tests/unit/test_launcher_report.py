"""What people are shown of a run: the live line, the status, the report."""

import json
from pathlib import Path
from typing import Any

from headway.launcher.progress import clock, progress_line, status_text, summary_text
from headway.launcher.report import summarize, trainer_seconds, write_report


def step(number: int, reward: float, **stats: float) -> dict[str, Any]:
    named = {
        "ppo_actor/task_reward/avg": reward,
        "timing/step": 2.0,
        "timing/update": 1.5,
        "timing/write": 0.5,
        **stats,
    }
    return {"step": number, "version": f"v1.{number + 1}", "stats": named}


def report() -> dict[str, Any]:
    return {
        "run": "quickstart/sort-digits",
        "published_version": "v1.2",
        "num_steps": 2,
        "history": [step(0, 0.25), step(1, 0.5), {"step": 2, "version": None, "stats": {}}],
        "last_step": step(1, 0.5),
        "evaluations": [{"step": 0, "reward": 0.3}, {"step": 2, "reward": 0.8}],
        "services": [{"name": "reward/0", "address": "127.0.0.1:4711", "metadata": {}}],
        "servers": [
            {
                "name": "0",
                "address": "http://127.0.0.1:1",
                "state": "ready",
                "served_version": "v1.2",
                "num_requests": 3,
                "detail": "",
            }
        ],
        "staleness": {
            "eta": 2,
            "policy": "mask",
            "outstanding": 96,
            "limit": 96,
            "capacity": 0,
            "holds_back": "staleness: 96 groups are not yet trained on",
        },
        "waits": [{"what": "32 ready groups for step 2", "since_s": 1.25}],
        "tokens": {"gradient": {"0": 100, "1": 50}, "masked": {"3": 7}},
        "timing": {
            "num_groups": 64,
            "pending_s": 0.1,
            "rollout_s": 0.5,
            "generate_s": 0.4,
            "reward_s": 0.05,
            "other_s": 0.05,
            "journal_s": 0.01,
        },
        "num_rollouts": {"accepted": 64},
        "discards": {
            "reward_timeout": {
                "count": 1,
                "examples": [{"task_id": "0/7", "attempt": 1, "outcome": "reward_timeout", "message": "15 s <b>"}],
            }
        },
        "tasks": {"submitted": 128, "consumed": 64, "pending": 64, "is_conserved": True},
    }


def test_the_summary_holds_only_committed_steps() -> None:
    summary = summarize(report(), wall_s=60.0)
    assert summary["reward"] == [{"step": 0, "reward": 0.25}, {"step": 1, "reward": 0.5}]
    assert (summary["held_out_before"], summary["held_out_after"]) == (0.3, 0.8)


def test_trainer_seconds_are_summed_by_phase_largest_first() -> None:
    assert list(trainer_seconds([step(0, 0.0), step(1, 0.0)]).items()) == [("update", 3.0), ("write", 1.0)]


def test_a_report_stands_alone_and_shows_what_messages_say_as_text(tmp_path: Path) -> None:
    write_report(report(), 60.0, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "15 s &lt;b&gt;" in page
    assert page.count("data:image/svg+xml;base64,") == 4
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert json.loads((tmp_path / "report.json").read_text())["staleness"]["masked_tokens"] == {"3": 7}


def test_a_run_without_evaluation_has_a_report(tmp_path: Path) -> None:
    assert write_report({**report(), "evaluations": [], "discards": {}}, 60.0, tmp_path)["held_out_after"] is None


def test_the_summary_text_says_how_it_went(tmp_path: Path) -> None:
    text = summary_text(summarize(report(), 61.0), tmp_path)
    assert "held-out reward 0.300 -> 0.800" in text
    assert "bound 2): 100 at 0, 50 at 1" in text
    assert "1 reward_timeout; tasks conserved: yes" in text


def test_the_status_names_what_holds_back_and_what_is_waited_for() -> None:
    text = status_text(report())
    assert "held back by staleness: 96 groups" in text
    assert "32 ready groups for step 2" in text
    assert "discarded 1 reward_timeout: 15 s <b>" in text


def test_before_the_first_step_the_line_shows_the_phase() -> None:
    assert progress_line({"last_step": None}, 40, None, "warm start 50%") == "step 0/40  warm start 50%"
    assert clock(3599.6) == "60:00"
