"""The manifests of deploy/k8s: a base and its patches, put together as Kustomize does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "k8s"
NAMESPACE = "sparserow"


def kustomization(folder: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())


def merged(base: Any, patch: Any) -> Any:
    """The result of a strategic merge of Kubernetes.

    Lists of mappings are merged by mountPath or name, other lists are replaced, and null takes a field away.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {**base, **{key: merged(base[key], value) if key in base else value for key, value in patch.items()}}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list):
        for key in ("mountPath", "name"):
            if all(isinstance(each, dict) and key in each for each in (*base, *patch)):
                left = {each[key]: each for each in base}
                for each in patch:
                    if each.get("$patch") == "delete":
                        del left[each[key]]
                    else:
                        left[each[key]] = merged(left[each[key]], each) if each[key] in left else merged({}, each)
                return list(left.values())
    return patch


def edited(document: dict[str, Any], operations: list[dict[str, Any]]) -> None:
    """Does the operations of a JSON patch to a document."""
    for operation in operations:
        *way, last = operation["path"].strip("/").split("/")
        place = functools.reduce(lambda at, key: at[int(key)] if isinstance(at, list) else at[key], way, document)
        if operation["op"] == "add":
            assert last == "-"
            place.append(operation["value"])
        elif operation["op"] == "test":
            assert place[int(last)] == operation["value"]
        else:
            assert operation["op"] == "replace"
            place[int(last)] = operation["value"]


def documents(folder: str) -> list[dict[str, Any]]:
    """What a folder makes, but for names of images, labels and generated Secrets and ConfigMaps."""
    settings, found = kustomization(folder), []
    for name in settings["resources"]:
        path = FOLDER / folder / name
        found += documents(path.resolve().name) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for patch in settings.get("patches", ()):
        text = patch["patch"] if "patch" in patch else (FOLDER / folder / patch["path"]).read_text()
        change = yaml.safe_load(text)
        target = patch["target"] if "target" in patch else {"kind": change["kind"], "name": change["metadata"]["name"]}
        (index,) = (
            index
            for index, each in enumerate(found)
            if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
        )
        if isinstance(change, list):
            edited(found[index], change)
        elif change.get("$patch") == "delete":
            del found[index]
        else:
            found[index] = merged(found[index], change)
    return found


class Manifests:
    """What one folder makes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.documents = documents(folder)

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [document for document in self.documents if document["kind"] in kinds]

    def pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Name, pod template and its only container that stays."""
        for document in self.of_kind("StatefulSet", "Deployment", "Job"):
            template = document["spec"]["template"]
            (container,) = template["spec"]["containers"]
            yield document["metadata"]["name"], template, container

    def container_of(self, name: str) -> dict[str, Any]:
        return next(container for pod, _, container in self.pods() if pod == name)

    def ports_of(self, name: str) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container_of(name)["ports"]}

    def replicas_of(self, name: str) -> int:
        sets = self.of_kind("StatefulSet")
        return next(each["spec"]["replicas"] for each in sets if each["metadata"]["name"] == name)

    def coordinators(self) -> list[str]:
        """HOST:PORT of each coordinator, as others dial it."""
        name = f"coordinator.{NAMESPACE}.svc"
        hosts = [name] if self.folder != "etcd" else [f"coordinator-{each}.{name}" for each in range(2)]
        return [f"{host}:{self.ports_of('coordinator')['grpc']}" for host in hosts]
