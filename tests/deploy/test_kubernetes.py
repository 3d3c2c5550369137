"""The manifests, rendered by kubectl and held against Kubernetes' own schemas."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from .tools import DEPLOY, REPOSITORY, STOP_S, run, tool, yaml_documents

KUSTOMIZATIONS = sorted(path.parent for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"))


def render(folder: Path) -> str:
    result = run([tool("kubectl"), "kustomize", folder])
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def objects() -> list[dict[str, Any]]:
    return [found for folder in KUSTOMIZATIONS for found in yaml_documents(render(folder))]


def pods() -> list[dict[str, Any]]:
    return [found["spec"]["template"]["spec"] for found in objects() if "template" in found.get("spec", {})]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in [*pod.get("initContainers", []), *pod["containers"]]]


def validate(text: str, folder: Path) -> tuple[int, str]:
    manifest = folder / "rendered.yaml"
    manifest.write_text(text)
    result = run([tool("kubernetes-validate"), "--strict", "--quiet", manifest])
    return result.returncode, result.stdout + result.stderr


def test_every_manifest_is_rendered() -> None:
    manifests = [path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml"]
    kinds = ["Deployment", "Job", "Job", "Namespace", "PersistentVolumeClaim", "Service"]
    assert sorted(found["kind"] for found in objects()) == kinds
    assert len(manifests) == len(kinds)


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_the_schemas_hold(folder: Path, tmp_path: Path) -> None:
    status, output = validate(render(folder), tmp_path)
    assert status == 0, output


def test_the_schemas_bite(tmp_path: Path) -> None:
    status, output = validate(render(DEPLOY / "kubernetes").replace("readinessProbe", "readynessProbe"), tmp_path)
    assert status != 0
    assert "readynessProbe" in output


def test_one_lighthouse_at_a_time() -> None:
    (deployment,) = (found for found in objects() if found["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_the_service_leads_to_the_lighthouse() -> None:
    (service,) = (found for found in objects() if found["kind"] == "Service")
    (deployment,) = (found for found in objects() if found["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    named = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == named
    assert named == {"grpc": 29510, "http": 29511}


def test_the_journal_outlives_the_pod() -> None:
    (claim,) = (found for found in objects() if found["kind"] == "PersistentVolumeClaim")
    (pod,) = (pod for pod in pods() if pod["containers"][0]["name"] == "lighthouse")
    (volume,) = pod["volumes"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert Path(environment["LIGHTHOUSE_JOURNAL"]).is_relative_to(mount["mountPath"])
    assert mount["name"] == volume["name"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]


def test_probes_of_the_lighthouse() -> None:
    (lighthouse,) = (container for container in containers() if container["name"] == "lighthouse")
    assert lighthouse["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert lighthouse["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_pods_are_locked_down() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert pod["terminationGracePeriodSeconds"] >= STOP_S
    for container in containers():
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(container["resources"])


def test_kubernetes_adds_no_variables_that_look_like_our_options() -> None:
    assert [pod["enableServiceLinks"] for pod in pods()] == [False] * 3


def test_a_run_that_was_stopped_fails_its_job_at_once() -> None:
    for job in (found["spec"] for found in objects() if found["kind"] == "Job"):
        (rule,) = (rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
        assert (rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == ("In", [130])
        assert rule["onExitCodes"]["containerName"] in {c["name"] for c in job["template"]["spec"]["containers"]}


def test_the_images_have_the_version_of_this_tree() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    images = {container["name"]: container["image"] for container in containers()}
    assert images["lighthouse"] == f"lighthouse-ft:{version}"
    assert images["manager"] == f"lighthouse-ft:{version}-torch"
