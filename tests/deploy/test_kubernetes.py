"""The manifests against Kubernetes' own schemas, and against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OLDEST = "1.29.0"
"""The first with sidecar containers switched on; README.md says so."""
NEWEST = kubernetes_validate.utils.all_versions()[-1]
NOT_MANIFESTS = {"kustomization.yaml", "prometheus-adapter.yaml"}


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path.name, document)
        for path in sorted(FOLDER.glob("*.yaml"))
        if path.name not in NOT_MANIFESTS
        for document in yaml.safe_load_all(path.read_text())
    ]


def only(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        document
        for _, document in documents()
        if document["kind"] == kind and document["metadata"]["name"] == name
    ]
    return found


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_valid(version: str) -> None:
    for _, document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_an_unknown_field_would_be_seen() -> None:
    document = only("Deployment", "bucket-lora-replica")
    document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, NEWEST, strict=True)


def test_kustomize_applies_all_but_the_example() -> None:
    resources = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(resources) == {name for name, _ in documents()} - {"secret.example.yaml"}


def test_what_is_mounted_and_read_exists() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    made = {(item["kind"], item["metadata"]["name"]) for _, item in documents()}
    made |= {("ConfigMap", item["name"]) for item in kustomization["configMapGenerator"]}
    for owner in (only("Deployment", "bucket-lora-replica"), only("Job", "bucket-lora-trainer")):
        pod = owner["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            for source in container["envFrom"]:
                kind = "ConfigMap" if "configMapRef" in source else "Secret"
                (reference,) = source.values()
                assert (kind, reference["name"]) in made


def test_selectors_find_the_replicas() -> None:
    replicas = only("Deployment", "bucket-lora-replica")
    labels = replicas["spec"]["template"]["metadata"]["labels"]
    assert replicas["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selector = only(kind, "bucket-lora-replica")["spec"][key]["matchLabels"]
        assert selector.items() <= labels.items()
    target = only("HorizontalPodAutoscaler", "bucket-lora-replica")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", replicas["metadata"]["name"])


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_makes() -> None:
    scaler = only("HorizontalPodAutoscaler", "bucket-lora-replica")["spec"]
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]


def test_the_trainer_has_longer_than_its_grace_to_end() -> None:
    from trl_async_bucket.config import BucketSyncFields

    pod = only("Job", "bucket-lora-trainer")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > BucketSyncFields.bucket_grace_s


def test_the_mounted_script_is_the_one_of_the_other_launchers() -> None:
    assert (FOLDER / "train.py").read_text() == (FOLDER.parent / "hf-jobs" / "train.py").read_text()
