"""Prove Compose with a real Docker engine: a run to its end, every part killed in turn, mistakes told in a line.

    python tools/test_compose.py [--only end|faults|mistakes]

    end        a short run: training ends, the trainer exits with 0, the report accounts for every task
    faults     SIGKILL to reward, inference, name-resolve, etcd, rollout-controller and trainer: each time new steps
               follow; at the end every step was taken once and every task is accounted for; SIGTERM ends all within ten
               seconds; `up` goes on where the run was
    mistakes   no model, a port in use, no GPU: a line and an exit code that is not 0, and nothing is started again

The images are those of `make test-images`. Skipped, with the reason, where no engine is reachable. Only the standard
library is used, and Docker's own command; nothing is asked over a published port, so the engine may be elsewhere.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = os.environ.get("COMPOSE_PROJECT_NAME", "headway-test")
PREFIX, TAG = os.environ.get("HEADWAY_IMAGE_PREFIX", "headway"), os.environ.get("HEADWAY_TAG", "0.1.0")
SMALL = {
    "train_dataset.batch_size": 16,
    "valid_dataset.batch_size": 64,
    "gconfig.n_samples": 8,
    "warm_start.steps": 40,
    "inference.max_running_requests": 128,
}
"""The quickstart, smaller: what is shown here is not how well it learns."""
VICTIMS = ("reward", "inference", "name-resolve", "etcd", "rollout-controller", "trainer")
STEPS_AFTER_FAULT = 2
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
STOP_LIMIT_S = 10.0
POLL_S = 1.0
ASK = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
STARTED_AT = time.monotonic()


class Failed(Exception):
    """What should hold does not."""


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED_AT:7.1f} s  {text}", flush=True)


def require(is_so: bool, text: str) -> None:
    if not is_so:
        raise Failed(text)


def run(*words: str, env: dict[str, str] | None = None, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """A command and all that it says."""
    environment = os.environ | (env or {})
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def docker(*words: str) -> str:
    """What a Docker command answers."""
    ended = run("docker", *words)
    require(ended.returncode == 0, f"docker {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout.strip()


@dataclass
class Stack:
    """The services of docker-compose.yml as a project of its own."""

    overrides: dict[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ("docker-compose.yml",)
    variables: dict[str, str] = field(default_factory=dict)

    def compose(self, *words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        flags = [flag for file in self.files for flag in ("-f", file)]
        overrides = " ".join(f"{key}={value}" for key, value in (SMALL | self.overrides).items())
        env = {"HEADWAY_OVERRIDES": overrides, "HEADWAY_PORT": "0", "HEADWAY_CHECKPOINT_STEPS": "2"} | self.variables
        return run("docker", "compose", "-p", PROJECT, "--progress=plain", *flags, *words, env=env, timeout_s=timeout_s)

    def up(self) -> None:
        ended = self.compose("up", "--detach", "--no-build", "--pull", "missing", timeout_s=START_TIMEOUT_S)
        require(ended.returncode == 0, f"docker compose up: exit {ended.returncode}: {ended.stderr[-2000:]}")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")

    def container(self, service: str) -> str:
        """The id of a service's first container."""
        found = self.compose("ps", "--all", "--quiet", service).stdout.split()
        require(bool(found), f"{service} has no container")
        return found[0]

    def ask(self, path: str) -> Any:
        """The controller's answer; None while it does not answer."""
        ended = self.compose(
            "exec", "-T", "rollout-controller", "python", "-c", ASK, f"http://127.0.0.1:8470{path}", timeout_s=30
        )
        return json.loads(ended.stdout) if ended.returncode == 0 else None

    def logs(self, service: str, lines: int = 30) -> str:
        return self.compose("logs", "--no-color", "--tail", str(lines), service).stdout


@contextmanager
def stack(stack: Stack) -> Iterator[Stack]:
    """A stack that is gone afterwards, its volumes too; when it failed, its logs are told."""
    stack.down()
    try:
        yield stack
    except Failed:
        print(stack.compose("ps", "--all").stdout, stack.logs("", 25), flush=True)
        raise
    finally:
        stack.down()


def until(what: str, is_so: Callable[[], Any], timeout_s: float) -> Any:
    """The first answer that is not None or false.

    Raises:
        Failed: There was none in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answer := is_so():
            return answer
        time.sleep(POLL_S)
    raise Failed(f"{what}: not within {timeout_s:.0f} s")


def wait_for_steps(stack: Stack, wanted: int, timeout_s: float = STEP_TIMEOUT_S) -> int:
    """Wait until so many steps are committed; how many are."""

    def steps() -> int | None:
        state = json.loads(docker("inspect", "--format", "{{json .State}}", stack.container("trainer")))
        require(state["Status"] != "exited" or state["ExitCode"] != 0, "training ended before the faults were over")
        status = stack.ask("/v1/status")
        return status["num_steps"] if status and status["num_steps"] >= wanted else None

    return int(until(f"{wanted} steps", steps, timeout_s))


def check_account(report: dict[str, Any]) -> None:
    """Every task is accounted for, every step was taken once, and no token was too old."""
    tasks, history = report["tasks"], [step for step in report["history"] if step["version"]]
    require(tasks["is_conserved"], f"tasks are lost: {tasks}")
    steps = [step["step"] for step in history]
    require(steps == list(range(len(steps))), f"steps are missing or taken twice: {steps}")
    groups = sum(step["num_groups"] for step in history)
    require(groups == tasks["consumed"], f"{groups} groups in {len(steps)} steps, but {tasks['consumed']} are consumed")
    require(tasks["quarantined"] == 0, f"tasks were given up: {report['quarantined']}")
    eta, ages = report["staleness"]["eta"], report["tokens"]["gradient"]
    require(all(int(age) <= eta for age in ages), f"tokens older than {eta} carried gradient: {ages}")
    say(
        f"conserved: {tasks['submitted']} submitted = {tasks['consumed']} consumed + {tasks['leased']} leased + "
        f"{tasks['ready']} ready + {tasks['saving']} saving + {tasks['running']} running + "
        f"{tasks['pending']} pending + {tasks['rejected']} rejected + {tasks['quarantined']} quarantined; "
        f"steps 0..{len(steps) - 1} once each; gradient tokens by age {ages} (eta {eta})"
    )


def check_published_port(stack: Stack) -> None:
    """The port that people use answers where Docker runs."""
    address = stack.compose("port", "rollout-controller", "8470").stdout.strip()
    image = f"{PREFIX}/rollout-controller:{TAG}"
    words = ["--rm", "--network", "host", "--entrypoint", "python", image, "-m", "headway.runtime.probe"]
    docker("run", *words, f"http://{address}/health")
    require(address.startswith("127.0.0.1:"), f"published to {address}, which is not loopback only")
    say(f"published on {address}, loopback only, and answers there")


def check_metric_names(stack: Stack) -> None:
    """Every metric in the alerts and in the dashboard is one that a service exposes."""
    folder = ROOT / "docker" / "observability"
    text = (folder / "rules.yml").read_text() + (folder / "grafana/dashboards/headway.json").read_text()
    used = set(re.findall(r"\b(?:headway_[a-z_]+|sglang:[a-z_]+)\b", text))
    exposed = ""
    services = ("rollout-controller", "name-resolve", "reward", "inference", "trainer")
    for service, port in (*((name, 8470) for name in services), ("inference", 8000)):
        ended = stack.compose("exec", "-T", service, "python", "-c", ASK, f"http://127.0.0.1:{port}/metrics")
        exposed += ended.stdout
    missing = {name for name in used if not re.search(rf"^(?:# TYPE )?{name}[ {{]", exposed, re.MULTILINE)}
    require(not missing, f"used by alerts or dashboard, but not exposed: {sorted(missing)}")
    say(f"all {len(used)} metrics of the alerts and the dashboard are exposed")


def test_end() -> None:
    """A short run to its end."""
    with stack(Stack({"total_train_steps": 8})) as running:
        running.up()
        say("up: every container is started")
        until("the first step", lambda: (running.ask("/v1/status") or {}).get("num_steps"), START_TIMEOUT_S)
        say("first step committed")
        check_published_port(running)
        trainer = running.container("trainer")
        code = docker("wait", trainer)
        require(code == "0", f"the trainer ended with {code}:\n{running.logs('trainer')}")
        report = running.ask("/v1/report")
        require(report["num_steps"] == 8, f"{report['num_steps']} steps of 8")
        check_account(report)
        held_out = [f"{one['reward']:.3f} at {one['version']}" for one in report["evaluations"]]
        say(f"the trainer exited with 0 after 8 steps; held-out reward {', '.join(held_out)}")


def kill(container: str) -> None:
    """SIGKILL to PID 1 of a container, from outside: the engine sees a crash, not a request to stop."""
    pid = docker("inspect", "--format", "{{.State.Pid}}", container)
    words = ["--rm", "--privileged", "--pid", "host", "--user", "0", "--entrypoint", "python"]
    docker("run", *words, f"{PREFIX}/name-resolve:{TAG}", "-c", f"import os; os.kill({pid}, 9)")


def is_up_again(container: str, killed_at: str) -> bool:
    """Whether a container was started after it was killed, and says that it is healthy."""
    state = json.loads(docker("inspect", "--format", "{{json .State}}", container))
    is_new = state["StartedAt"] != killed_at
    return bool(is_new and state["Running"] and state["Health"]["Status"] == "healthy")


def fault(running: Stack, victim: str) -> None:
    """Kill a service; steps are counted from when it is back, so that none of them was made before it died."""
    wait_for_steps(running, 1)
    container = running.container(victim)
    started_at = docker("inspect", "--format", "{{.State.StartedAt}}", container)
    kill(container)
    killed = time.monotonic()
    until(f"{victim} again", lambda: is_up_again(container, started_at), STEP_TIMEOUT_S)
    back_s = time.monotonic() - killed
    back_at = wait_for_steps(running, 1)
    after = wait_for_steps(running, back_at + STEPS_AFTER_FAULT)
    version = (running.ask("/v1/status") or {}).get("published_version")
    say(
        f"SIGKILL {victim}: healthy again after {back_s:.1f} s, at step {back_at}; step {after} "
        f"after {time.monotonic() - killed:.1f} s; published {version}"
    )


def stop(running: Stack) -> None:
    """SIGTERM to everything of ours: a clean end in time."""
    for service in ("trainer", "rollout-controller", "inference", "reward", "name-resolve"):
        container = running.container(service)
        before = time.monotonic()
        docker("stop", "--time", "30", container)
        took_s = time.monotonic() - before
        code = docker("inspect", "--format", "{{.State.ExitCode}}", container)
        say(f"SIGTERM {service}: exit {code} after {took_s:.1f} s")
        require(code == "0" and took_s < STOP_LIMIT_S, f"{service} did not end cleanly:\n{running.logs(service)}")


def test_faults() -> None:
    """Everything is killed once; then the whole stack is stopped and started."""
    with stack(Stack({"total_train_steps": 1000, "evaluator.freq_steps": 1000})) as running:
        running.up()
        wait_for_steps(running, 3, START_TIMEOUT_S)
        say("training")
        check_metric_names(running)
        for victim in VICTIMS:
            fault(running, victim)
        check_account(running.ask("/v1/report"))
        steps = wait_for_steps(running, 1)
        stop(running)
        running.compose("stop")
        running.up()
        steps = wait_for_steps(running, steps + STEPS_AFTER_FAULT, START_TIMEOUT_S)
        check_account(running.ask("/v1/report"))
        say(f"`up` after a stop of everything went on to step {steps}")


def mistake(what: str, wrong: Stack, told: str) -> None:
    """`up` says what is wrong, fails, and leaves nothing that is started again and again."""
    with stack(wrong):
        ended = wrong.compose("up", "--detach", "--no-build", "--pull", "missing")
        said = ANSI.sub("", ended.stdout + ended.stderr + wrong.logs("check"))
        lines = [line.strip() for line in said.splitlines() if re.search(told, line)]
        require(ended.returncode != 0, f"{what}: exit 0")
        require(bool(lines), f"{what}: nobody says {told!r}:\n{said}")
        states = [json.loads(line) for line in wrong.compose("ps", "--all", "--format", "json").stdout.splitlines()]
        restarting = [state["Service"] for state in states if state["State"] == "restarting"]
        require(not restarting, f"{what}: {restarting} are started again and again")
        say(f"{what}: exit {ended.returncode}: {lines[-1]}")


def test_mistakes() -> None:
    """A missing model, a port in use, a machine without GPU."""
    mistake("no model", Stack({"actor.path": "models/none"}), "there is no folder models/none")
    mistake("no experiment file", Stack(variables={"HEADWAY_CONFIG": "none.yaml"}), "none.yaml")
    image = f"{PREFIX}/name-resolve:{TAG}"
    other = docker("run", "--detach", "--publish", "127.0.0.1::7000", "--entrypoint", "sleep", image, "600")
    try:
        port = docker("port", other, "7000").rpartition(":")[2]
        mistake("a port in use", Stack(variables={"HEADWAY_PORT": port}), "already (in use|allocated)")
    finally:
        docker("rm", "--force", other)
    if "nvidia" in docker("info", "--format", "{{json .Runtimes}}"):
        say("skipped: a machine without GPU, because this one has NVIDIA's runtime")
        return
    with cuda_images() as prefix:
        variables = {"HEADWAY_GPU_CONFIG": "quickstart.yaml", "HEADWAY_IMAGE_PREFIX": prefix}
        files = ("docker-compose.yml", "docker-compose.gpu.yml")
        mistake("no GPU", Stack(files=files, variables=variables), "could not select device driver")


@contextmanager
def cuda_images() -> Iterator[str]:
    """Images for CPUs under the names of those for GPUs; the prefix of their names."""
    twins = {"trainer-cuda": "trainer", "inference-sglang": "inference"}
    twins |= {name: name for name in ("name-resolve", "reward", "rollout-controller")}
    for name, twin in twins.items():
        docker("tag", f"{PREFIX}/{twin}:{TAG}", f"{PROJECT}/{name}:{TAG}")
    try:
        yield PROJECT
    finally:
        docker("rmi", *(f"{PROJECT}/{name}:{TAG}" for name in twins))


TESTS = {"end": test_end, "faults": test_faults, "mistakes": test_mistakes}


def reason_to_skip() -> str:
    if shutil.which("docker") is None:
        return "there is no docker command"
    if (ended := run("docker", "version", "--format", "{{.Server.Version}}")).returncode != 0:
        return f"no Docker engine is reachable: {ended.stderr.strip().splitlines()[-1]}"
    if (ended := run("docker", "compose", "version")).returncode != 0:
        return "docker has no compose plugin"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TESTS, action="append")
    chosen = parser.parse_args().only or list(TESTS)
    if reason := reason_to_skip():
        print(f"skipped: {reason}")
        return 0
    say(f"Docker {docker('version', '--format', '{{.Server.Version}}')}, {docker('compose', 'version', '--short')}")
    for name in chosen:
        try:
            TESTS[name]()
        except Failed as failure:
            say(f"FAILED {name}: {failure}")
            return 1
        say(f"passed: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
