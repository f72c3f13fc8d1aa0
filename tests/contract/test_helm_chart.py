"""The chart holds its promises whatever the profile: sealed pods, named flows, the experiment word for word."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, MAJORS, PROFILES, ROOT, container, helm, helm_of, named, of_kind, pods, profile, rendered

from headway.config import load_experiment

KUBERNETES = ("1.27", "1.37")
OURS = ("name-resolve", "reward", "rollout-controller", "inference", "trainer")
ALL_ON = (
    "--set=serviceMonitor.enabled=true,ingress.enabled=true,ingress.host=headway.example,ingress.tlsSecret=tls,api.tokenSecret.name=token",
    "--set=inference.autoscaling.enabled=true,image.pullSecrets={registry}",
    "--api-versions=monitoring.coreos.com/v1",
)
each_profile = pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)


@pytest.mark.parametrize("major", MAJORS)
@each_profile
def test_the_chart_has_no_lint(path: Path, major: str) -> None:
    helm("lint", "--strict", str(CHART), "--values", str(path), major=major)


@pytest.mark.parametrize("major", MAJORS)
def test_the_rendered_examples_are_what_the_chart_renders(major: str) -> None:
    check = [sys.executable, "tools/helm_render.py", "--check", helm_of(major)]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
@each_profile
def test_kubernetes_knows_every_field(path: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make test-helm` installs it")
    for found in [*profile(path), *rendered(*ALL_ON)]:
        if found["kind"] != "ServiceMonitor":  # not Kubernetes' own
            kubernetes_validate.validate(found, version, strict=True)


def test_what_is_asked_for_is_there() -> None:
    kinds = {found["kind"] for found in rendered(*ALL_ON)}
    assert {"ServiceMonitor", "Ingress", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert "replicas" not in named(rendered(*ALL_ON), "Deployment", "inference")["spec"]


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(
    ("wrong", "path", "why"),
    [
        ("inference.replica=3", "/inference", "replica"),
        ("inference.replicas=three", "/inference/replicas", "integer"),
        ("rolloutController.replicas=2", "/rolloutController/replicas", "1"),
        ("etcd.replicas=2", "/etcd/replicas", "1, 3"),
        ("trainer.autoscaling.enabled=true", "/trainer/autoscaling", "null"),
        ("persistence.weights.sizee=1Gi", "/persistence/weights", "sizee"),
        ("trainer.secretEnv.HF_TOKEN=abc", "/trainer/secretEnv/HF_TOKEN", "object"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(wrong: str, path: str, why: str, major: str) -> None:
    done = helm("template", "headway", str(CHART), "--set", wrong, major=major, check=False)
    told = next(line for line in done.stderr.splitlines() if path in line)
    assert done.returncode != 0
    assert re.search(rf"'{path}'.*{why}", told)


@each_profile
def test_the_experiment_file_is_mounted_word_for_word(path: Path) -> None:
    given = yaml.safe_load(path.read_text()).get("experiment", {}).get("file", "quickstart.yaml")
    config_map = named(profile(path), "ConfigMap", "experiment")
    assert config_map["data"]["experiment.yaml"] == (ROOT / "configs" / given).read_text()


def test_an_experiment_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    text = "# {{ not a template }}\nexperiment_name: 'mine'\t\nseed:   1\n\n\n"
    (tmp_path / "mine.yaml").write_text(text)
    objects = rendered(f"--set-file=experiment.content={tmp_path}/mine.yaml")
    assert named(objects, "ConfigMap", "experiment")["data"]["experiment.yaml"] == text


@each_profile
def test_every_service_can_read_the_experiment_as_the_chart_changes_it(path: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(named(profile(path), "ConfigMap", "experiment")["data"]["experiment.yaml"])
    values = yaml.safe_load(path.read_text())
    for component in OURS:
        words = [word for word in container(profile(path), component)["args"] if "=" in word]
        config = load_experiment(experiment, words)
        assert config.recover.mode == "auto"
        assert config.allocation.num_servers == values.get("inference", {}).get("replicas", 2)
        ranks = values.get("trainer", {}).get("replicas", 1) * values.get("torchrun", {}).get("processesPerNode", 1)
        assert config.allocation.training.world_size == ranks


@each_profile
def test_what_a_service_writes_lies_on_a_claim(path: Path) -> None:
    config = load_experiment(ROOT / "configs" / "quickstart.yaml", ["cluster.fileroot=/headway/runs"])
    writes = {
        "trainer": [config.paths.weights, config.paths.recover, config.paths.checkpoints, config.paths.logs],
        "rollout-controller": [config.paths.journal, config.paths.rollouts, config.paths.eval_rollouts],
    }
    for component, folders in writes.items():
        spec = dict(pods(profile(path)))[component]["spec"]
        claims = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
        mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] in claims]
        for folder in folders:
            above = [mount for mount in mounts if folder.is_relative_to(mount["mountPath"])]
            assert len(above) == 1, folder
            assert not above[0].get("readOnly", False), folder


@each_profile
def test_every_pod_is_sealed(path: Path) -> None:
    for component, pod in pods([*profile(path), *rendered(*ALL_ON)]):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, component
        assert spec["enableServiceLinks"] is False, component
        assert spec["securityContext"]["runAsNonRoot"] is True, component
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", component
        for one in spec["containers"]:
            context = one["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}, component
            assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False), component
            assert one["resources"]["limits"]["memory"], component
    assert not of_kind(profile(path), "Secret", "Role", "ClusterRole")


def test_secrets_are_only_named() -> None:
    secret = "trainer.secretEnv.HF_TOKEN.secret=hub,trainer.secretEnv.HF_TOKEN.key=token"
    found = container(rendered("--set", secret), "trainer")["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in found


@each_profile
def test_a_selector_finds_the_pods_of_its_own_component_only(path: Path) -> None:
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(profile(path))}
    for found in of_kind(profile(path), "Service", "PodDisruptionBudget", "Deployment", "StatefulSet"):
        wanted = found["spec"]["selector"]
        wanted = wanted.get("matchLabels", wanted)
        chosen = [component for component, given in labels.items() if wanted.items() <= given.items()]
        assert chosen == [found["metadata"]["labels"]["app.kubernetes.io/component"]]


def component_of(peer: Any) -> str:
    label: str = peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
    return label


@each_profile
def test_every_named_flow_is_open_at_both_ends_and_nothing_else_is(path: Path) -> None:
    allowed: dict[str, set[tuple[str, str, str]]] = {"ingress": set(), "egress": set()}
    for policy in of_kind(profile(path), "NetworkPolicy"):
        here = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        if here == "default-deny":
            assert {"ingress", "egress"}.isdisjoint(policy["spec"])
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            continue
        for rule in policy["spec"].get("ingress") or []:
            for peer in rule["from"]:
                if peer["podSelector"]:
                    allowed["ingress"].add((component_of(peer), here, str(rule.get("ports"))))
        for rule in policy["spec"]["egress"]:
            for peer in [peer for peer in rule.get("to", []) if "podSelector" in peer]:
                allowed["egress"].add((here, component_of(peer), str(rule.get("ports"))))
    assert allowed["ingress"] == allowed["egress"]
    pairs = {(one, other) for one, other, _ in allowed["ingress"]}
    assert ("trainer", "etcd") not in pairs
    assert ("name-resolve", "etcd") in pairs
    assert ("rollout-controller", "inference") in pairs
    assert not {one for one, other in pairs if other == "reward"} - {"rollout-controller"}


def test_an_engine_takes_commands_from_the_controller_and_who_is_named_only() -> None:
    prometheus = "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring"
    broadcast = "networkPolicy.broadcast=false"
    for values, expected in ((broadcast, 1), (f"{broadcast},{prometheus}", 2)):
        policy = named(rendered("--set", values), "NetworkPolicy", "inference")["spec"]
        commanding = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] in (8000, "http")]
        assert component_of(commanding[0]["from"][0]) == "rollout-controller"
        assert len(commanding) == expected


@each_profile
def test_every_pod_shows_its_metrics_to_prometheus_and_to_nobody_else_who_may_not_command_it(path: Path) -> None:
    objects = rendered(
        "--values", str(path), "--set=networkPolicy.metricsFrom[0].podSelector.matchLabels.app=prometheus"
    )
    for component, pod in pods(objects):
        if component == "test":
            continue
        names = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        policy = named(objects, "NetworkPolicy", component)["spec"]
        peer = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
        opened = {rule["ports"][0]["port"] for rule in policy["ingress"] if rule["from"] == peer}
        assert opened == {"http", "metrics"} & set(names), component
        assert opened, component


def test_rest_is_for_those_who_have_the_token_or_the_port_forward() -> None:
    def access(*arguments: str) -> dict[str, Any]:
        environment = container(rendered(*arguments), "rollout-controller")["env"]
        return {one["name"]: one for one in environment if one["name"].startswith("HEADWAY_API")}

    assert access() == {"HEADWAY_API_PUBLISHED_ON": {"name": "HEADWAY_API_PUBLISHED_ON", "value": "127.0.0.1"}}
    found = access("--set=api.tokenSecret.name=headway-api")
    assert list(found) == ["HEADWAY_API_TOKEN"]
    assert found["HEADWAY_API_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "headway-api", "key": "token"}}


def test_an_ingress_without_a_token_is_refused() -> None:
    ingress = ("--set=ingress.enabled=true,ingress.host=headway.example",)
    done = helm("template", "headway", str(CHART), *ingress, check=False)
    assert "api.tokenSecret.name: what an ingress opens to others needs a token" in done.stderr


def test_ports_and_commands_are_those_of_the_images() -> None:
    stages = re.split(r"\nFROM ", (ROOT / "docker" / "Dockerfile").read_text())
    for component in OURS:
        stage = next(stage for stage in stages if re.match(rf"\S+ AS {component}\n", stage))
        exposed = re.search(r"EXPOSE (.*)", stage)
        assert exposed is not None
        ports = {str(port["containerPort"]) for port in container(rendered(), component)["ports"]}
        assert set(exposed[1].split()) <= ports
        assert "command" not in container(rendered(), component)


def test_etcd_from_elsewhere_is_reached_with_tls_and_a_password() -> None:
    objects = rendered(
        "--set=externalEtcd.endpoints={a.example:2379,b.example:2380},externalEtcd.user=headway",
        "--set=externalEtcd.passwordSecret.name=login,externalEtcd.tlsSecret=tls,externalEtcd.clientCertificate=true",
    )
    assert "etcd" not in dict(pods(objects))
    spec = container(objects, "name-resolve")
    config = load_experiment(ROOT / "configs" / "quickstart.yaml", spec["args"])
    names = config.cluster.name_resolve
    assert (names.etcd3_addr, names.etcd3_user) == ("a.example:2379,b.example:2380", "headway")
    (folder,) = [mount["mountPath"] for mount in spec["volumeMounts"] if mount["name"] == "etcd-tls"]
    files = (names.etcd3_ca_file, names.etcd3_cert_file, names.etcd3_key_file)
    assert files == tuple(f"{folder}/{name}" for name in ("ca.crt", "tls.crt", "tls.key"))
    password = {"secretKeyRef": {"name": "login", "key": "password"}}
    assert {"name": "HEADWAY_ETCD_PASSWORD", "valueFrom": password} in spec["env"]
    policy = named(objects, "NetworkPolicy", "name-resolve")
    assert {"ports": [{"port": port, "protocol": "TCP"} for port in (2379, 2380)]} in policy["spec"]["egress"]


def test_clusters_that_cannot_ask_over_grpc_let_the_image_ask_itself() -> None:
    probe = container(rendered("--kube-version=1.20.2"), "inference")["readinessProbe"]
    assert probe["exec"]["command"][1:] == ["-m", "headway.runtime.probe", "127.0.0.1:7000"]
    assert container(rendered("--kube-version=1.34.0"), "inference")["readinessProbe"]["grpc"] == {"port": 7000}


def trainer_sets(*arguments: str) -> list[str]:
    several = CHART / "profiles" / "gpu-multi-node.yaml"
    sets = of_kind(rendered("--values", str(several), *arguments), "StatefulSet")
    return [found["metadata"]["name"] for found in sets if "trainer" in found["metadata"]["name"]]


def test_nodes_of_different_experiments_or_images_never_meet() -> None:
    """A set of several nodes is replaced as a whole where that changes, and only there."""
    (as_it_is,) = trainer_sets()
    assert trainer_sets("--set=trainer.resources.requests.cpu=3") == [as_it_is]
    assert trainer_sets("--set=reward.replicas=9") == [as_it_is]
    for change in ("experiment.overrides.seed=7", "image.tag=0.2.0", "experiment.file=quickstart.yaml"):
        (other,) = trainer_sets(f"--set={change}")
        assert other != as_it_is, change


def test_torchrun_has_a_node_for_each_pod_and_a_process_for_each_gpu() -> None:
    objects = profile(CHART / "profiles" / "gpu-multi-node.yaml")
    trainer = container(objects, "trainer")
    assert "--nnodes=2 --nproc-per-node=8" in " ".join(trainer["command"])
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == 8
    (name,) = trainer_sets()
    assert f"--rdzv-endpoint={name}-0.headway-trainer.test.svc:29400" in " ".join(trainer["command"])
    service = named(objects, "Service", "trainer")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_an_experiment_that_is_not_there_is_one_line() -> None:
    done = helm("template", "headway", str(CHART), "--set=experiment.file=mine.yaml", check=False)
    assert "the chart has no configs/mine.yaml; give your own with --set-file experiment.content=FILE" in done.stderr
