"""The chart is rendered by Helm and compared with Kubernetes' shapes; what it starts is run."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import helm_python
import httpx
import jsonschema
import kubernetes_validate
import pytest
import redis
import yaml

from autoscaler import Autoscaler, Query, Sample, scraped
from chart import (
    CHART,
    NAMESPACE,
    TRIAL,
    Manifest,
    Places,
    container,
    notes,
    of_kind,
    render,
    templates,
)
from penstock.compose.server import Server
from penstock.gateway.metrics.lane_metrics import LaneReport
from penstock.gateway.metrics.metrics import Metrics, Seen
from penstock.schemas.delivery import LaneStatus
from stage import LISTENS, eventually

SCALED = "qwen3-8b"
PODS_METRIC = {
    "type": "Pods",
    "pods": {
        "metric": {"name": "penstock_jobs_followed"},
        "target": {"type": "AverageValue", "averageValue": "200"},
    },
}
ALL = TRIAL | {
    "settings": {"webhook_private": ["http://a:80", "http://b:80"], "log_format": "json"},
    "gateway": {
        "apiKeys": {"existing": "words"},
        "autoscaling": {"metrics": [PODS_METRIC]},
        "annotations": {"a": "b"},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
    "models": [
        {"name": "small", "model": "penstock-5m"},
        {
            "name": SCALED,
            "model": "Qwen/Qwen3-8B",
            "servedModelNames": ["Qwen/Qwen3-8B", "qwen3.8b"],
            "settings": {"drain_s": 90.5, "max_model_len": 8192, "hf_overrides": {"a": 1}},
            "autoscaling": {"enabled": True, "max": 3},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "pod": {"nodeSelector": {"gpu": "yes"}, "priorityClassName": "high"},
            "env": [{"name": "HF_HUB_OFFLINE", "value": "0"}],
        },
    ],
    "housekeeping": {"replicas": 2, "settings": {"batch_window": 64}},
    "storage": {
        "cache": {"enabled": True, "storageClass": "nfs"},
        "models": {"existing": "checkpoints"},
        "files": {"enabled": True},
    },
    "prometheus": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "address": "http://prometheus:9090",
        "authentication": "prometheus",
    },
    "networkPolicy": {"egress": {"worker": [{"ports": [{"port": 443}]}]}},
    "ingress": {"enabled": True, "hosts": ["llm.example.org"], "className": "nginx"},
}
OWN = {"secrets": {"existing": "mine"}, "gateway": {"autoscaling": {"enabled": False}}}
EVERY = pytest.mark.parametrize("values", [TRIAL, ALL, OWN], ids=["trial", "all", "own"])
# The custom resources, as far as the chart fills them; a field that they do not have fails.
WHOLE = {"type": "integer", "minimum": 0}
CUSTOM = {
    "ScaledObject": {
        "scaleTargetRef": {"required": ["apiVersion", "kind", "name"]},
        "minReplicaCount": WHOLE,
        "maxReplicaCount": WHOLE,
        "pollingInterval": WHOLE,
        "cooldownPeriod": WHOLE,
        "initialCooldownPeriod": WHOLE,
        "advanced": {"required": ["horizontalPodAutoscalerConfig"]},
        "triggers": {
            "items": {
                "additionalProperties": False,
                "required": ["type", "metadata"],
                "properties": {
                    "type": {"const": "prometheus"},
                    "metricType": {"enum": ["AverageValue", "Value"]},
                    "metadata": {"additionalProperties": {"type": "string"}},
                    "authenticationRef": {"required": ["name"]},
                },
            }
        },
    },
    "ServiceMonitor": {
        "selector": {"required": ["matchLabels"]},
        "endpoints": {"items": {"required": ["port", "path", "interval"]}},
    },
}


@pytest.mark.parametrize("version, values", [("1.25", ALL), ("1.37", ALL), ("1.37", OWN)])
def test_every_manifest_has_the_shape_of_its_kind(version: str, values: dict) -> None:
    for manifest in render(values):
        if manifest["kind"] in CUSTOM:
            fields = CUSTOM[manifest["kind"]]
            jsonschema.validate(
                manifest["spec"],
                {"properties": fields, "required": [*fields], "additionalProperties": False},
            )
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


@EVERY
def test_helm_finds_no_fault(values: dict) -> None:
    found = helm_python.lint(CHART, values, strict=True)
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


def test_what_may_be_switched_on_is_there_and_else_is_not() -> None:
    def counted(values: dict) -> dict[str, int]:
        kinds = [manifest["kind"] for manifest in render(values)]
        return {kind: kinds.count(kind) for kind in kinds}

    pods = {"Deployment": 4, "PodDisruptionBudget": 3, "NetworkPolicy": 4, "ServiceAccount": 1}
    assert counted(OWN) == pods | {"Service": 1}
    redis = {"StatefulSet": 1, "Secret": 1, "Service": 2, "NetworkPolicy": 5}
    assert counted(TRIAL) == pods | redis | {"HorizontalPodAutoscaler": 1}
    more = dict.fromkeys(("ScaledObject", "ServiceMonitor", "Ingress"), 1)
    more |= {"PersistentVolumeClaim": 2, "Deployment": 5, "PodDisruptionBudget": 4}
    assert counted(ALL) == counted(TRIAL) | more


WRONG = {
    "secrets.existing": {},
    "prometheus.address": TRIAL | {"worker": {"autoscaling": {"enabled": True}}},
    "'bundle' not allowed": {"redis": {"bundle": True}},
    "/models/0/name": TRIAL | {"models": [{"name": "Qwen/Qwen3", "model": "Qwen/Qwen3"}]},
    "/gateway/settings/drain_s": TRIAL | {"gateway": {"settings": {"drain_s": "30"}}},
    "/worker/settings": TRIAL | {"worker": {"settings": {"drain-s": 30}}},
}


@pytest.mark.parametrize("told", WRONG)
def test_wrong_values_are_refused_by_name(told: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(told)):
        render(WRONG[told])


@EVERY
def test_every_pod_is_locked_down_and_what_it_names_is_there(values: dict) -> None:
    manifests = render(values)
    claims = {*of_kind(manifests, "PersistentVolumeClaim"), "checkpoints", "data"}
    accounts = of_kind(manifests, "ServiceAccount")
    assert not any(each["automountServiceAccountToken"] for each in accounts.values())
    for template in templates(manifests):
        pod = template["spec"]
        assert pod["serviceAccountName"] in accounts
        # A Service's variables, as PENSTOCK_GATEWAY_PORT, would be refused as settings.
        assert not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {each["name"] for each in pod.get("volumes", [])}
        for volume in pod.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {"claimName": "data"})["claimName"]
            assert claim in claims
        for each in pod["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes | {"data"}
            assert each["resources"]["requests"] and each["resources"]["limits"]


@EVERY
def test_a_role_sees_its_own_file_of_the_secret_alone(values: dict) -> None:
    secrets = of_kind(render(values), "Secret")
    for template in templates(render(values)):
        part = template["metadata"]["labels"]["app.kubernetes.io/component"]
        volume = next(each for each in template["spec"]["volumes"] if each["name"] == "secrets")
        keys = [item["key"] for item in volume["secret"]["items"]]
        assert keys == (["users.acl"] if part == "redis" else [f"{part}.yaml"])
        name = volume["secret"]["secretName"]
        assert name == "mine" or set(keys) <= set(secrets[name]["stringData"])


@EVERY
def test_every_selector_finds_the_pods_that_it_is_for(values: dict) -> None:
    manifests = render(values)
    labels = [template["metadata"]["labels"] for template in templates(manifests)]

    def found(selector: dict) -> int:
        return sum(selector.items() <= each.items() for each in labels)

    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            assert found(spec["selector"]["matchLabels"]) == 1, each["metadata"]["name"]
        elif each["kind"] == "Service":
            assert found(spec["selector"]) == 1
        elif each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = of_kind(manifests, "Deployment")[spec["scaleTargetRef"]["name"]]
            assert "replicas" not in target["spec"]  # an upgrade would set it back
        elif each["kind"] == "ServiceMonitor":
            services = of_kind(manifests, "Service").values()
            wanted = spec["selector"]["matchLabels"].items()
            watched = [one for one in services if wanted <= one["metadata"]["labels"].items()]
            assert [one["metadata"]["name"] for one in watched] == ["penstock-gateway"]


PARTS = ("gateway", "worker", "housekeeping", "operator", "redis", "stranger")


def reached(manifests: list[Manifest], port: int | str) -> set[tuple[str, str]]:
    """Who may open a connection to whom at a port, by the policies of both."""
    policies = [each["spec"] for each in of_kind(manifests, "NetworkPolicy").values()]
    labels = {
        part: {
            "app.kubernetes.io/name": "penstock",
            "app.kubernetes.io/instance": "penstock",
            "app.kubernetes.io/component": part,
        }
        for part in PARTS
    }

    def allows(way: str, peers: str, one: str, other: str) -> bool:
        of_one = [
            policy
            for policy in policies
            if policy["podSelector"]["matchLabels"].items() <= labels[one].items()
            and way in policy["policyTypes"]
        ]
        rules = [rule for policy in of_one for rule in policy.get(way.lower(), [])]
        return not of_one or any(
            port in [each["port"] for each in rule["ports"]]
            and any(
                peer["podSelector"]["matchLabels"].items() <= labels[other].items()
                for peer in rule.get(peers, [{"podSelector": {"matchLabels": {}}}])
            )
            for rule in rules
        )

    return {
        (one, other)
        for one in PARTS
        for other in PARTS
        if one != other
        and allows("Egress", "to", one, other)
        and allows("Ingress", "from", other, one)
        and other != "stranger"
    }


def test_four_parts_reach_redis_and_nobody_reaches_anything_but_the_gateway() -> None:
    manifests = render(ALL)
    four = {(part, "redis") for part in ("gateway", "worker", "housekeeping", "operator")}
    assert reached(manifests, "redis") == four
    assert reached(manifests, "http") == {("stranger", "gateway")}
    # To a Redis of one's own: its port alone, at any address unless one is named.
    for part in ("gateway", "worker", "housekeeping", "operator"):
        policy = of_kind(render(OWN), "NetworkPolicy")[f"penstock-{part}"]["spec"]
        ports = [[each["port"] for each in rule["ports"]] for rule in policy["egress"]]
        assert ports == [[53, 53], [6379]]


def test_a_pod_is_given_the_time_that_its_drain_takes() -> None:
    for template in templates(render(ALL)):
        pod = template["spec"]
        (each,) = pod["containers"]
        given = {one["name"]: one.get("value") for one in each.get("env", [])}
        if (drain_s := given.get("PENSTOCK_DRAIN_S")) is not None:
            waits = each.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            left_s = pod["terminationGracePeriodSeconds"] - (int(waits[1]) if waits else 0)
            assert left_s >= float(drain_s) + 15


def test_the_notes_say_what_a_trial_is_and_what_scales_to_zero() -> None:
    assert "FOR A TRIAL" in notes(TRIAL) and "FOR A TRIAL" not in notes(OWN)
    assert f"{SCALED} scales to zero" in notes(ALL) and "scales to zero" not in notes(TRIAL)


def scaled_object() -> Manifest:
    return of_kind(render(ALL), "ScaledObject")[f"penstock-worker-{SCALED}"]["spec"]


def published(*lanes: tuple[str, int, int], **labels: str) -> list[Sample]:
    """What a gateway publishes of lanes, each (model, jobs queued, jobs running)."""
    reports = [
        LaneReport(model, str(number), status_of(queued, running), [])
        for number, (model, queued, running) in enumerate(lanes)
    ]
    from_operator = {"namespace": NAMESPACE, "service": "penstock-gateway", "instance": "a:8000"}
    return scraped(Metrics().text(Seen(reports), "")[0].decode(), **(from_operator | labels))


def status_of(queued: int, running: int) -> LaneStatus:
    return LaneStatus(num_queued=queued, num_running=running, num_ended=0, interval_ms=0.0)


def test_the_query_counts_jobs_queued_and_running_of_its_model_once() -> None:
    query = Query(scaled_object()["triggers"][0]["metadata"]["query"])
    names = ("Qwen/Qwen3-8B", "qwen3.8b")
    lanes = ((names[0], 5, 3), (names[0], 1, 0), (names[1], 0, 2), ("qwen3x8b", 50, 50))
    one = published(*lanes)
    assert query.value(one) == 11
    assert query.value(one + published(*lanes, instance="b:8000")) == 11  # of two gateways
    assert query.value(one + published((names[0], 4, 9), instance="c:8000")) == 13
    assert query.value(one + published((names[0], 99, 9), namespace="other")) == 11
    assert query.value(published((names[0], 0, 0))) == 0
    assert query.value(published(("another", 3, 3))) is None  # no worker was ever there
    assert query.value(published()) is None  # Redis is away


def test_it_scales_by_queued_and_running_and_to_zero_only_when_both_are_none() -> None:
    scaler = Autoscaler(scaled_object(), now_s=0)
    model = "Qwen/Qwen3-8B"

    def wanted(now_s: float, current: int, *lane: int) -> int:
        return scaler.wanted(now_s, current, published((model, *lane)) if lane else [])

    assert wanted(10, 0, 0, 0) == 0
    assert wanted(20, 0, 1, 0) == 1
    assert wanted(30, 1, 1000, 64) == 3  # the most
    assert wanted(40, 3, 0, 40) == 3  # fewer jobs, for too short a time
    assert wanted(400, 3, 0, 40) == 1
    assert wanted(4000, 1, 0, 1) == 1  # a job that runs for ever holds its worker
    assert wanted(4100, 1) == 1  # no answer is no zero
    assert wanted(4200, 1, 0, 0) == 1
    assert wanted(4301, 1, 0, 0) == 0


FAKE = TRIAL | {
    "models": [
        {"name": "fake", "model": "fake", "settings": {"load_format": "fake", "drain_s": 0.5}}
    ],
    "storage": {"files": {"enabled": True}},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stack"]:
    """Redis as the StatefulSet says, and the containers of all Deployments as processes."""
    folder = tmp_path_factory.mktemp("chart")
    with ExitStack() as ends:
        stack = Stack(folder)
        ends.callback(stack.stop)
        stack.start()
        yield stack


class Stack:
    def __init__(self, folder: Path) -> None:
        self.manifests = render(FAKE)
        self.folder = folder
        words = iter(container(self.manifests, "redis")["args"])
        options = {word.removeprefix("--"): next(words) for word in words}
        options |= {"dir": str(folder / "data"), "aclfile": str(folder / "secrets" / "users.acl")}
        self.server = Server(folder / "server", options=options)
        self.places = Places(self.manifests, folder, self.server.port)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    def start(self) -> None:
        self.server.start()
        for name in ("gateway", "worker", "housekeeping"):
            env = {"PENSTOCK_PORT": "0"} if name == "gateway" else {}
            log = self.folder / f"{name}.log"
            self.processes[name] = self.places.start(self.container(name), log, **env)
        self.wait_for("gateway", LISTENS.pattern)
        found = LISTENS.search(self.logged("gateway"))
        assert found is not None
        self.url = f"http://127.0.0.1:{found[1]}"

    def container(self, name: str) -> Manifest:
        return container(self.manifests, name)

    def logged(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, pattern: str) -> None:
        """Wait for a line of a part's log."""

        def is_there() -> bool:
            assert self.processes[name].poll() is None, self.logged(name)
            return re.search(pattern, self.logged(name)) is not None

        eventually(is_there)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.stop()

    def operator(self, *words: str) -> str:
        """What the operator's pod prints when a command is run in it."""
        run = [sys.executable, "-m", "penstock.compose.cli", *words]
        env = self.places.environment(self.container("operator"))
        return subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_its_containers_serve_are_probed_and_drain(stack: Stack) -> None:
    get = {
        probe: stack.container("gateway")[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    statuses = {probe: httpx.get(stack.url + path).status_code for probe, path in get.items()}
    assert statuses == dict.fromkeys(get, 200)
    worker, here = stack.container("worker"), {"HOSTNAME": socket.gethostname()}
    assert worker["startupProbe"]["exec"] == worker["readinessProbe"]["exec"]
    stack.wait_for("worker", " started serving ")
    eventually(lambda: stack.places.probe(worker, "readinessProbe", **here) == 0)
    for host, status in ((here, 0), ({"HOSTNAME": "another"}, 1)):
        assert stack.places.probe(worker, "livenessProbe", **host) == status

    asked = {"model": "fake", "prompt": "Hi", "max_tokens": 4}
    assert httpx.post(f"{stack.url}/v1/completions", json=asked).status_code == 401
    assert stack.container("operator")["command"] == ["sleep", "infinity"]
    key = re.search(r"psk_\S+", stack.operator("keys", "create", "--tenant", "acme"))
    assert key is not None
    let_in = {"authorization": f"Bearer {key[0]}"}
    eventually(lambda: httpx.get(f"{stack.url}/v1/models", headers=let_in).status_code == 200)
    answer = httpx.post(f"{stack.url}/v1/completions", json=asked, headers=let_in)
    assert answer.status_code == 200
    assert "penstock:jobs_queued" in httpx.get(f"{stack.url}/metrics").text
    stack.wait_for("housekeeping", " started its chores")

    for name in ("worker", "gateway", "housekeeping"):
        stack.processes[name].send_signal(signal.SIGTERM)
    for name in ("worker", "gateway", "housekeeping"):
        assert stack.processes[name].wait(60) == 0, stack.logged(name)
    stack.server.kill()
    assert stack.places.probe(worker, "livenessProbe", **here) == 0
    assert stack.places.probe(worker, "readinessProbe", **here) == 1


def test_a_user_of_redis_may_what_its_role_may(stack: Stack) -> None:
    config = yaml.safe_load((stack.folder / "secrets" / "worker.yaml").read_text())
    if not stack.server.is_running:
        stack.server.start()
    with redis.Redis.from_url(config["redis_url"]) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.hgetall("penstock:api_keys")
    with (
        redis.Redis(port=stack.server.port) as nobody,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        nobody.ping()


def test_a_gateway_is_asked_under_its_services_names_and_those_of_the_ingress() -> None:
    def hosts(values: Mapping[str, object]) -> list[str]:
        env = {each["name"]: each for each in container(render(values), "gateway")["env"]}
        return env["PENSTOCK_ALLOWED_HOSTS"]["value"].split(",")

    service = "penstock-gateway"
    names = [service, f"{service}.llm", f"{service}.llm.svc", f"{service}.llm.svc.cluster.local"]
    assert hosts(ALL) == [*names, "llm.example.org"]
    given = TRIAL | {"gateway": {"settings": {"allowed_hosts": ["one", "two"]}}}
    assert hosts(given) == ["one", "two"]
