"""The manifests, rendered by kubectl and held against Kubernetes' own schemas."""

import contextlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.ports import free_port
from tests.processes import LOCALHOST, MANAGER_CODE, Lighthouse, Process

from .invocations import pods_in
from .tools import DEPLOY, REPOSITORY, STOP_S, run, tool, yaml_documents
from .training import Training

JOB = DEPLOY / "kubernetes" / "replica-groups.yaml"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def render() -> str:
    """All that is applied: the kustomization, and the example beside it."""
    result = run([tool("kubectl"), "kustomize", JOB.parent])
    assert (result.returncode, result.stderr) == (0, "")
    return f"{result.stdout}---\n{JOB.read_text()}"


def objects() -> list[dict[str, Any]]:
    return yaml_documents(render())


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """By name."""
    return {found["metadata"]["name"]: found for found in objects() if found["kind"] == kind}


def the(kind: str) -> dict[str, Any]:
    (found,) = of_kind(kind).values()
    return found


def job() -> dict[str, Any]:
    return the("Job")["spec"]


def templates() -> list[dict[str, Any]]:
    return [found["spec"]["template"] for found in objects() if "template" in found.get("spec", {})]


def pods() -> list[dict[str, Any]]:
    return [template["spec"] for template in templates()]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in [*pod.get("initContainers", []), *pod["containers"]]]


def validate(text: str, folder: Path) -> tuple[int, str]:
    manifest = folder / "rendered.yaml"
    manifest.write_text(text)
    result = run([tool("kubernetes-validate"), "--strict", "--quiet", manifest])
    return result.returncode, result.stdout + result.stderr


def test_every_manifest_is_rendered() -> None:
    beside = [path for path in JOB.parent.glob("*.yaml") if path.name != "kustomization.yaml"]
    kinds = ["Deployment", "Job", "Namespace", "NetworkPolicy", "NetworkPolicy", "PersistentVolumeClaim"]
    assert sorted(found["kind"] for found in objects()) == [*kinds, "PodDisruptionBudget", "Service"]
    assert sum(len(yaml_documents(path.read_text())) for path in beside) == len(objects())
    assert {found["metadata"].get("namespace", "lighthouse") for found in objects()} == {"lighthouse"}


def selects(labels: dict[str, str], template: dict[str, Any]) -> bool:
    return labels.items() <= template["metadata"]["labels"].items()


def test_policies_and_the_budget_are_about_pods_that_there_are() -> None:
    budget = the("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    wanted = [budget["selector"]]
    for found in of_kind("NetworkPolicy").values():
        policy = found["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        rules = [*policy["ingress"], *policy["egress"]]
        peers = [peer for rule in rules for peer in [*rule.get("from", []), *rule.get("to", [])]]
        wanted += [policy["podSelector"], *(peer["podSelector"] for peer in peers if "podSelector" in peer)]
    for selector in wanted:
        assert any(selects(selector["matchLabels"], template) for template in templates()), selector


def test_replica_groups_reach_the_lighthouse_and_prometheus_reaches_both() -> None:
    opened = {
        name: [[port["port"] for port in rule.get("ports", [])] for rule in policy["spec"]["ingress"]]
        for name, policy in of_kind("NetworkPolicy").items()
    }
    assert opened == {"lighthouse": [["grpc"], ["http"]], "replica-groups": [[], [29512], [29511]]}


def opened(rules: list[dict[str, Any]], side: str, peer: str) -> set[int | str]:
    """The ports that `rules` of one policy open for pods named `peer`; "all" for a rule without ports."""
    ports: set[int | str] = set()
    for rule in rules:
        selectors = [other["podSelector"]["matchLabels"] for other in rule.get(side, ()) if "podSelector" in other]
        if {"app.kubernetes.io/name": peer} in selectors:
            ports |= {port["port"] for port in rule["ports"]} if "ports" in rule else {"all"}
    return ports


@pytest.mark.parametrize(
    ("source", "target", "ports"),
    [
        ("lighthouse", "replica-groups", {29512}),
        ("replica-groups", "lighthouse", {29510}),
        ("replica-groups", "replica-groups", {"all"}),
    ],
)
def test_what_one_side_of_a_connection_may_the_other_may(source: str, target: str, ports: set[int | str]) -> None:
    policies = of_kind("NetworkPolicy")
    named = {"grpc": 29510, "http": 29511}
    assert opened(policies[source]["spec"]["egress"], "to", target) == ports
    assert {named.get(str(port), port) for port in opened(policies[target]["spec"]["ingress"], "from", source)} == ports


@pytest.mark.parametrize(("name", "more"), [("lighthouse", []), ("replica-groups", [443])])
def test_what_pods_reach_anywhere(name: str, more: list[int]) -> None:
    rules = of_kind("NetworkPolicy")[name]["spec"]["egress"]
    anywhere = [rule["ports"] for rule in rules if "to" not in rule]
    assert anywhere == [[{"port": 53, "protocol": "UDP"}, {"port": 53}], *([{"port": port}] for port in more)]


def test_the_service_monitor_finds_the_service_and_its_port() -> None:
    (monitor,) = yaml_documents((JOB.parent / "monitoring" / "service-monitor.yaml").read_text())
    service = the("Service")
    assert selects(monitor["spec"]["selector"]["matchLabels"], service)
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"] is True
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "lighthouse"  # as the alerts have it


MULTI_HOST = sorted((JOB.parent / "multi-host").glob("*.yaml"))


@pytest.mark.parametrize("path", MULTI_HOST, ids=lambda path: path.stem)
def test_the_pods_of_groups_of_several_hosts_hold_to_the_schema(path: Path, tmp_path: Path) -> None:
    """kubernetes-validate knows no JobSet and no LeaderWorkerSet, but what they make: pods."""
    (pod,) = pods_in(yaml_documents(path.read_text()))
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}
    status, output = validate(json.dumps(manifest), tmp_path)
    assert status == 0, output
    assert pod["terminationGracePeriodSeconds"] >= STOP_S
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_a_jobset_names_the_head_as_its_controller_names_the_pod() -> None:
    (jobset,) = yaml_documents((JOB.parent / "multi-host" / "jobset.yaml").read_text())
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = jobset["metadata"]["name"]
    assert environment["LIGHTHOUSE_MANAGER_HEAD"] == f"{name}-{group['name']}-$(REPLICA_GROUP_ID)-0.{name}:29512"
    assert int(environment["LIGHTHOUSE_MANAGER_NNODES"]) == job["completions"] == job["parallelism"]
    assert int(environment["NUM_REPLICA_GROUPS"]) == group["replicas"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [130]
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize("path", MULTI_HOST, ids=lambda path: path.stem)
def test_the_hosts_of_a_group_find_each_other(path: Path, tmp_path: Path) -> None:
    """Each host's supervisor as the manifest starts it, but for addresses, ports and the script."""
    (found,) = pods_in(yaml_documents(path.read_text()))
    (container,) = found["containers"]
    training, head = Training(tmp_path), f"{LOCALHOST}:{free_port()}"
    with Lighthouse() as lighthouse, contextlib.ExitStack() as stack:
        for host in range(2):
            words, environment = on_host(container, host, head, lighthouse.address, training)
            stack.enter_context(Process(MANAGER_CODE, words, env=environment))
        training.started("0", "0")  # the ranks start once all hosts of their group are there


def of_the_supervisor(container: dict[str, Any], training: Training) -> list[str]:
    """The words of its command."""
    program, *words = (str(training.script) if word == "train.py" else word for word in container["command"])
    assert program == "lighthouse-manager"
    return words


def on_host(
    container: dict[str, Any], host: int, head: str, lighthouse: str, training: Training
) -> tuple[list[str], dict[str, str]]:
    """Its command line and environment, as the controller would complete them."""
    known = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(host), "LWS_LEADER_ADDRESS": head.partition(":")[0]}
    own = {"LIGHTHOUSE_MANAGER_NODE_RANK": str(host), "REPLICA_GROUP_ID": "0", "LIGHTHOUSE_MANAGER_RUN_ID": "r"}
    own |= {"LIGHTHOUSE_ADDRESS": lighthouse}  # from a secret
    environment = {entry["name"]: entry.get("value") or own[entry["name"]] for entry in container["env"]}
    words = [
        re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word) for word in of_the_supervisor(container, training)
    ]
    return [f"--head={head}" if word.startswith("--head=") else word for word in words], {
        **environment,
        "PATH": PATH,
        "LIGHTHOUSE_MANAGER_BIND": head if host == 0 else f"{LOCALHOST}:0",
        "LIGHTHOUSE_MANAGER_STORE": f"{LOCALHOST}:1",
        "LIGHTHOUSE_MANAGER_NPROC_PER_NODE": "1",
        **({"LIGHTHOUSE_MANAGER_HEAD": head} if "LIGHTHOUSE_MANAGER_HEAD" in environment else {}),
    }


def test_the_schemas_hold(tmp_path: Path) -> None:
    status, output = validate(render(), tmp_path)
    assert status == 0, output


def test_the_schemas_bite(tmp_path: Path) -> None:
    status, output = validate(render().replace("readinessProbe", "readynessProbe"), tmp_path)
    assert status != 0
    assert "readynessProbe" in output


def test_one_lighthouse_at_a_time() -> None:
    deployment = the("Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})


def test_the_service_leads_to_the_lighthouse() -> None:
    service, template = the("Service"), the("Deployment")["spec"]["template"]
    assert selects(service["spec"]["selector"], template)
    named = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == named
    assert named == {"grpc": 29510, "http": 29511}


def test_the_journal_outlives_the_pod() -> None:
    claim, pod = the("PersistentVolumeClaim"), the("Deployment")["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert Path(environment["LIGHTHOUSE_JOURNAL"]).is_relative_to(mount["mountPath"])
    assert mount["name"] == volume["name"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]


def test_probes_of_the_lighthouse() -> None:
    (lighthouse,) = (container for container in containers() if container["name"] == "lighthouse")
    assert lighthouse["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http", "scheme": "HTTPS"}
    assert lighthouse["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http", "scheme": "HTTPS"}


def test_the_namespace_enforces_the_strictest_standard() -> None:
    assert the("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_pods_meet_that_standard() -> None:
    """Kubernetes' pod security standard `restricted`, control by control."""
    several_hosts = [pod for path in MULTI_HOST for pod in pods_in(yaml_documents(path.read_text()))]
    for pod in [*pods(), *several_hosts]:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        kinds = {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "hostPort" not in {key for port in container["ports"] for key in port}


def test_pods_are_locked_down() -> None:
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["terminationGracePeriodSeconds"] >= STOP_S
    for container in containers():
        assert {"requests", "limits"} <= set(container["resources"])


def test_kubernetes_adds_no_variables_that_look_like_our_options() -> None:
    assert [pod["enableServiceLinks"] for pod in pods()] == [False] * 2


def answer(container: str, status: int) -> str:
    """What the Job controller does when `container` has ended with `status`: the first rule that matches."""
    for rule in job()["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["containerName"] == container and (status in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


@contextmanager
def pod(training: Training, lighthouse: str) -> Iterator[Process]:
    """The supervisor as the manifest runs it, but for its ports, its store and the path of the script."""
    (container,) = job()["template"]["spec"]["containers"]
    environment = {
        **{entry["name"]: entry.get("value", "0") for entry in container["env"]},
        "PATH": PATH,
        "LIGHTHOUSE_ADDRESS": lighthouse,
        "LIGHTHOUSE_MANAGER_BIND": f"{LOCALHOST}:0",
        "LIGHTHOUSE_MANAGER_HTTP": f"{LOCALHOST}:0",
        "LIGHTHOUSE_MANAGER_STORE": f"{LOCALHOST}:1",
    }
    with Process(MANAGER_CODE, of_the_supervisor(container, training), env=environment) as process:
        yield process


def test_a_pod_comes_back_until_the_run_is_stopped(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with Lighthouse() as lighthouse:
        with pod(training, lighthouse.address) as first:
            training.started("0", "0")
            training.tell("0", 1)
            training.started("0", "01")
            training.tell("0", "kill")
            assert answer("supervisor", first.wait()) == "Count"
        with pod(training, lighthouse.address) as second:
            training.started("0", "010")
            training.tell("0", 130)
            assert answer("supervisor", second.wait()) == "FailJob"


def test_only_a_pod_that_is_not_restarted_in_place_has_a_policy() -> None:
    assert job()["template"]["spec"]["restartPolicy"] == "Never"
    assert (job()["completionMode"], job()["completions"]) == ("Indexed", job()["parallelism"])


def test_the_image_has_the_version_of_this_tree() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    images = {container["name"]: container["image"] for container in containers()}
    assert images["lighthouse"] == f"lighthouse-ft:{version}"
