"""Pods of deploy/k8s as processes of this machine.

Their command lines stay as they are, but for what a pod has of its own: names of the namespace are 127.0.0.1, each port
is a free one, and volumes are folders.
"""

from __future__ import annotations

import re
from pathlib import Path

from kubernetes_manifests import NAMESPACE, Manifests
from sparserow_process import free_ports

# Volumes that each pod has for itself; all share the others.
_OWN = ("state", "data")


class LocalPods:
    """The pods of a folder, with free ports and folders of this machine.

    Args:
        made: what the folder makes.
        folder: where the volumes lie; ``security`` in it is the Secret.
    """

    def __init__(self, made: Manifests, folder: Path) -> None:
        self._made, self._folder = made, folder
        wanted = [
            (pod, port["containerPort"])
            for name, _, container in made.pods()
            for pod in self.pods_of(name)
            for port in container["ports"]
        ]
        self._ports = dict(zip(wanted, free_ports(len(wanted)), strict=True))

    def pods_of(self, name: str) -> list[str]:
        """The names of the pods of a StatefulSet, or that of something else."""
        sets = {each["metadata"]["name"] for each in self._made.of_kind("StatefulSet")}
        return [f"{name}-{index}" for index in range(self._made.replicas_of(name))] if name in sets else [name]

    def address(self, target: str) -> str:
        """``127.0.0.1:PORT`` of ``POD[.SERVICE].sparserow.svc:PORT``; KeyError where that pod does not listen there."""
        host, _, port = target.partition(":")
        pod = host.partition(".")[0]
        return f"127.0.0.1:{self._ports[self.pods_of(pod)[0] if '-' not in pod else pod, int(port)]}"

    def arguments(self, pod: str) -> list[str]:
        """The command line of a pod."""
        name, _, index = pod.partition("-")
        words = (
            word.replace("$(POD_NAME)", pod).replace("$(SHARD)", index)
            for word in self._made.container_of(name)["args"]
        )
        return [self._local(pod, word) for word in words]

    def text(self, text: str) -> str:
        """A text with addresses and folders of this machine."""
        text = re.sub(rf"[\w.-]+\.{NAMESPACE}\.svc:\d+", lambda found: self.address(found[0]), text)
        return re.sub(r"(?<![\w/.])/(shared|security)\b", lambda found: f"{self._folder / found[1]}", text)

    def _local(self, pod: str, word: str) -> str:
        option, equals, value = word.partition("=")
        if option.endswith("port"):
            return f"{option}={self._ports[pod, int(value)]}"
        if option in ("--host", "--advertise"):
            return f"{option}=127.0.0.1"
        value = re.sub(r"0\.0\.0\.0:(\d+)", lambda found: f"127.0.0.1:{self._ports[pod, int(found[1])]}", value)
        for own in _OWN:
            value = re.sub(rf"^/{own}\b", str(self._folder / pod / own), value)
        return f"{option}{equals}{self.text(value)}"
