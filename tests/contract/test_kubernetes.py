"""The manifests of deploy/k8s: valid by Kubernetes' schemas, and every flag, port, volume and name in them exists.

Where there is a kubectl, what tests/support/kubernetes_manifests.py puts together is compared with what it does.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_manifests import FOLDER, NAMESPACE, Manifests, kustomization, merged
from sparserow.deploy.cli import _command
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.proto.security.security import Security

kubernetes_validate = pytest.importorskip("kubernetes_validate")

SCHEMA_VERSION = "1.31"
SERVERS = ("coordinator", "ps", "serve")
FOLDERS = ("base", "small", "etcd")


@pytest.fixture(params=FOLDERS)
def made(request: pytest.FixtureRequest) -> Manifests:
    """What each folder makes that can be applied."""
    return Manifests(request.param)


BASE = Manifests("base")


def flags(container: dict[str, Any]) -> dict[str, str]:
    pairs = (argument.removeprefix("--").partition("=") for argument in container["args"] if "=" in argument)
    return {name: value for name, _, value in pairs}


def parse(arguments: list[str]) -> None:
    """Fails with click's own words for an unknown command or option, or a value of the wrong type."""
    security, name, *rest = arguments
    assert security.startswith("--security=")
    known = {option for parameter in _command(name).params for option in parameter.opts}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    assert not unknown, f"{name} has no {unknown}"
    filled = [word.replace("$(SHARD)", "0").replace("$(POD_NAME)", "ps-0") for word in rest]
    with _command(name).make_context(name, filled):
        pass


def test_kubernetes_would_take_it(made: Manifests) -> None:
    wrong = []
    for document in made.documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] == "ServiceMonitor":  # of the Prometheus operator, not of Kubernetes
            if document["apiVersion"] != "monitoring.coreos.com/v1":
                wrong.append(f"{name}: apiVersion: {document['apiVersion']}")
            if set(document["spec"]) != {"selector", "endpoints"}:
                wrong.append(f"{name}: spec: {sorted(document['spec'])}")
            continue
        try:
            kubernetes_validate.validate(document, SCHEMA_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:  # its text has the whole schema
            wrong.append(f"{name}: {error.json_path}: {error.message}")
        except Exception as error:  # of any kind: each document is told with what is wrong in it
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_schemas_refuse_what_is_wrong() -> None:
    wrong = Manifests("base").of_kind("Deployment")[0]
    wrong["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, SCHEMA_VERSION, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_files_are_named(folder: str) -> None:
    settings = kustomization(folder)
    named = {"kustomization.yaml", *settings["resources"], *(each.get("path") for each in settings.get("patches", ()))}
    named |= {file for each in settings.get("configMapGenerator", ()) for file in each["files"]}
    assert {path.name for path in (FOLDER / folder).glob("*.yaml")} == {name for name in named if name} - {"../base"}
    assert ("../base" in named) == (folder != "base")
    if "namespace" in settings:
        assert settings["namespace"] == NAMESPACE == BASE.of_kind("Namespace")[0]["metadata"]["name"]
    new = {path.name for path in FOLDER.iterdir()} - {*FOLDERS, "gpu"}
    assert not new, "test them, too"


@pytest.mark.parametrize("name", SERVERS)
def test_every_flag_of_a_server_is_one_of_its_command(made: Manifests, name: str) -> None:
    container = made.container_of(name)
    assert container["args"][1] == name
    parse(container["args"])
    with pytest.raises(AssertionError, match="has no"):
        parse([*container["args"], "--no-such-flag=1"])


def test_workers_are_started_as_torchrun_and_the_command_line_want_it(made: Manifests) -> None:
    from torch.distributed.run import get_args_parser

    container = made.container_of("train")
    assert container["command"] == ["torchrun"]
    parsed = get_args_parser().parse_args(container["args"])
    assert (parsed.module, parsed.training_script) == (True, "sparserow.deploy.cli")
    parse(parsed.training_script_args)
    job = made.of_kind("Job")[0]["spec"]
    assert int(parsed.nnodes) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    (service,) = (each for each in made.of_kind("Service") if each["metadata"]["name"] == "train")
    assert parsed.rdzv_backend == "c10d"
    assert parsed.rdzv_endpoint == f"train-0.train:{service['spec']['ports'][0]['port']}"
    assert job["template"]["spec"]["subdomain"] == "train"


def job_of(made: Manifests) -> JobConfig:
    """The training job with the settings of its command line."""
    words = (word.partition("=") for word in made.container_of("train")["args"])
    return load_config(JobConfig, FOLDER / "base" / "job.yaml", [value for name, _, value in words if name == "--set"])


def test_the_job_resumes_from_its_checkpoints_where_there_is_storage(made: Manifests) -> None:
    job = job_of(made)
    assert (job.train.checkpoint is None) == (made.folder == "small")
    assert ("--resume=auto" in made.container_of("train")["args"]) == (made.folder != "small")
    assert job.cluster.address == ",".join(made.coordinators())


def test_servers_find_each_other(made: Manifests) -> None:
    coordinators = made.coordinators()
    advertised = flags(made.container_of("coordinator"))["advertise"].replace("$(POD_NAME)", "coordinator-0")
    assert f"{advertised}:{flags(made.container_of('coordinator'))['port']}" == coordinators[0]
    addresses = ",".join(coordinators)
    assert flags(made.container_of("ps"))["coordinator"] == addresses == flags(made.container_of("serve"))["follow"]
    assert flags(made.container_of("ps"))["advertise"] == f"$(POD_NAME).ps.{NAMESPACE}.svc"
    assert flags(made.container_of("serve"))["advertise"] == f"serve.{NAMESPACE}.svc"
    assert int(flags(made.container_of("coordinator"))["shards"]) == made.replicas_of("ps")
    assert made.replicas_of("coordinator") == len(coordinators)
    assert {"SHARD", "POD_NAME"} == {each["name"] for each in made.container_of("ps")["env"]}
    for _, _, container in made.pods():
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= {each["name"] for each in container.get("env", ())}


@pytest.mark.parametrize("name", SERVERS)
def test_every_port_is_listened_on_and_probed(made: Manifests, name: str) -> None:
    given, ports = flags(made.container_of(name)), made.ports_of(name)
    control = "control-port" if name == "ps" else "port"
    listened = {"grpc": control, "health": "health-port", "metrics": "metrics-port"}
    if name != "coordinator":
        listened["data"] = "port" if name == "ps" else "data-port"
    if name == "serve":
        listened["http"] = "http-port"
    assert ports == {port: int(given[flag]) for port, flag in listened.items()}
    container = made.container_of(name)
    assert container["startupProbe"]["grpc"]["port"] == container["readinessProbe"]["grpc"]["port"] == ports["health"]
    (service,) = (each for each in made.of_kind("Service") if each["metadata"]["name"] == name)
    assert service["spec"]["selector"] == {"app.kubernetes.io/name": name}
    offered = {port["targetPort"]: port["port"] for port in service["spec"]["ports"]}
    assert offered == {port: number for port, number in ports.items() if port != "health"}


def test_rules_of_the_network_name_ports_that_a_pod_listens_on(made: Manifests) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in made.of_kind("NetworkPolicy")}
    assert policies.pop("nobody") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    pods_named = {name for name, _, _ in made.pods()}
    reached: dict[str, set[int]] = {name: set() for name in pods_named}
    for spec in policies.values():
        selector = spec["podSelector"]
        chosen = list(selector.get("matchLabels", {}).values()) or selector["matchExpressions"][0]["values"]
        assert set(chosen) <= pods_named
        for rule in spec["ingress"]:
            for name in chosen:
                reached[name] |= {port["port"] for port in rule.get("ports", ())}
    for name in pods_named - {"train"}:
        assert reached[name] == {number for port, number in made.ports_of(name).items() if port != "health"}


def test_every_pod_has_what_it_mounts_and_mounts_what_its_flags_name(made: Manifests) -> None:
    base = kustomization("base")
    secrets = {each["name"] for each in base["secretGenerator"]}
    maps = {each["name"] for each in base["configMapGenerator"]}
    claims = {each["metadata"]["name"] for each in made.of_kind("PersistentVolumeClaim")}
    templates = {
        each["metadata"]["name"]: [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())]
        for each in made.of_kind("StatefulSet")
    }
    images = {each["name"] for folder in ("base", made.folder) for each in kustomization(folder).get("images", ())}
    for name, template, container in made.pods():
        assert template["metadata"]["labels"] == {"app.kubernetes.io/name": name}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {*volumes, *templates.get(name, ())}
        for each in (container, *template["spec"].get("initContainers", ())):
            assert each["image"] in images
            assert {(mount["name"], mount["mountPath"]) for mount in each["volumeMounts"]} <= set(mounts.items())
        for volume in volumes.values():
            assert len(volume) == 2, "it has a name and a source"
            assert volume.get("secret", {"secretName": "servers"})["secretName"] in secrets
            assert volume.get("configMap", {"name": "train-job"})["name"] in maps
            assert volume.get("persistentVolumeClaim", {"claimName": "shared"})["claimName"] in {"shared"}
            assert "persistentVolumeClaim" not in volume or claims
        paths = [word.partition("=")[2] or word for word in container["args"]]
        for path in (path for path in paths if path.startswith("/")):
            assert any(path == at or path.startswith(f"{at}/") for at in mounts.values()), path


@pytest.mark.parametrize("folder", ["base", "etcd"])
def test_disruptions_and_scaling_are_of_what_exists(folder: str) -> None:
    made = Manifests(folder)
    budgets = {each["metadata"]["name"]: each["spec"] for each in made.of_kind("PodDisruptionBudget")}
    assert set(budgets) == {"ps", "serve", *(("coordinator", "etcd") if folder == "etcd" else ())}
    for name, spec in budgets.items():
        assert spec["selector"] == {"matchLabels": {"app.kubernetes.io/name": name}}
    (scaler,) = made.of_kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "serve"}
    deployment = made.of_kind("Deployment")[0]
    assert "replicas" not in deployment["spec"], "the autoscaler's to set"
    assert made.container_of("serve")["resources"]["requests"]["cpu"], "of which it takes a share"
    (monitor,) = made.of_kind("ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["port"] == "metrics"
    assert tuple(monitor["spec"]["selector"]["matchExpressions"][0]["values"]) == SERVERS


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([MG])iB?", text).groups()  # type: ignore[union-attr]
    return int(number) << (20 if unit == "M" else 30)


def cores_of(text: str) -> float:
    return int(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def test_the_trial_keeps_nothing_and_fits_on_one_machine() -> None:
    made = Manifests("small")
    assert {each["kind"] for each in made.documents} == {
        *("Namespace", "Service", "StatefulSet", "Deployment", "Job", "NetworkPolicy"),
    }
    assert not any("volumeClaimTemplates" in each["spec"] for each in made.of_kind("StatefulSet"))
    asked = [
        (container["resources"]["requests"], each["spec"].get("replicas", 1))
        for each, (_, _, container) in zip(made.of_kind("StatefulSet", "Deployment", "Job"), made.pods(), strict=True)
    ]
    assert sum(cores_of(requests["cpu"]) * replicas for requests, replicas in asked) <= 2
    assert sum(bytes_of(requests["memory"]) * replicas for requests, replicas in asked) <= 4 << 30
    shard = made.container_of("ps")
    assert bytes_of(flags(shard)["memory-budget"]) < bytes_of(shard["resources"]["requests"]["memory"])
    served = flags(made.container_of("serve"))
    assert (served["namespace"], "root" in served) == (job_of(made).name, False)


def test_the_trial_writes_the_data_that_its_job_reads(tmp_path: Path) -> None:
    made = Manifests("small")
    (writer,) = made.of_kind("Job")[0]["spec"]["template"]["spec"]["initContainers"]
    (script,) = writer["args"]
    assert writer["command"] == ["python", "-c"]
    exec(script.replace("/shared", str(tmp_path)).replace("200_000", "1_000"), {})
    data = job_of(made).data
    assert (*data.train, *data.test) == ("/shared/data/train.tsv", "/shared/data/test.tsv")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["test.tsv", "train.tsv"]


def test_several_coordinators_find_every_member_of_etcd_by_tls() -> None:
    made = Manifests("etcd")
    given, ports = flags(made.container_of("etcd")), made.ports_of("etcd")
    hosts = [f"etcd-{index}.etcd.{NAMESPACE}.svc" for index in range(made.replicas_of("etcd"))]
    assert len(hosts) == 3, "two of which can elect"
    endpoints = ",".join(f"{host}:{ports['client']}" for host in hosts)
    assert flags(made.container_of("coordinator"))["state"] == f"etcds://{endpoints}/sparserow"
    members = [f"{host.partition('.')[0]}=https://{host}:{ports['peer']}" for host in hosts]
    assert given["initial-cluster"] == ",".join(members)
    for what, port in (("client", "client"), ("peer", "peer")):
        assert given[f"listen-{what}-urls"] == f"https://0.0.0.0:{ports[port]}"
        initial = "initial-" if what == "peer" else ""
        assert given[f"{initial}advertise-{what}-urls"] == f"https://$(POD_NAME).etcd.{NAMESPACE}.svc:{ports[port]}"
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(made.container_of("etcd")["args"])
    assert given["listen-metrics-urls"].endswith(f":{ports['health']}")
    (service,) = (each for each in made.of_kind("Service") if each["metadata"]["name"] == "etcd")
    assert {port["port"] for port in service["spec"]["ports"]} == {ports["client"], ports["peer"]}
    assert " AS etcd\n" in (FOLDER.parent / "Dockerfile").read_text()


def test_the_certificate_of_the_page_has_each_name_that_is_dialled() -> None:
    made = Manifests("etcd")
    page = (FOLDER.parents[1] / "docs" / "kubernetes.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^sparserow security init .*$", page, re.MULTILINE)
    words = shlex.split(line)
    named = [words[index + 1] for index, word in enumerate(words) if word == "--host"]
    dialled = {re.sub(r":\d+$", "", each) for folder in FOLDERS for each in Manifests(folder).coordinators()}
    dialled |= {flags(made.container_of(name))["advertise"] for name in ("ps", "serve")}
    dialled |= set(re.findall(r"[\w.-]*etcd\.sparserow\.svc", flags(made.container_of("etcd"))["initial-cluster"]))
    dialled.add(f"etcd.{NAMESPACE}.svc")  # by which a member looks up the addresses of its peers
    for host in dialled:
        assert any(fnmatchcase(host.replace("$(POD_NAME)", "pod-0"), each) for each in named), host


def test_the_files_of_the_secrets_are_those_that_the_commands_make(tmp_path: Path) -> None:
    folder = tmp_path / "security"
    init_security(folder, ["coordinator.sparserow.svc", "*.ps.sparserow.svc", "serve.sparserow.svc"], valid_sec=3600)
    add_token(folder / "tokens.yaml", "trainers", "train", (), output=folder / "trainer.token")
    (folder / "trainer.yaml").write_text("ca: ca.pem\ntoken_file: trainer.token\n")
    for secret in kustomization("base")["secretGenerator"]:
        mounted = tmp_path / secret["name"]
        mounted.mkdir()
        for entry in secret["files"]:
            name, _, path = entry.partition("=")
            (mounted / name).write_bytes((tmp_path / path).read_bytes())
            (mounted / name).chmod(0o440)  # the defaultMode of the volumes
        assert "ca.key" not in {path.name for path in mounted.iterdir()}
        security = Security.load(mounted / "security.yaml")
        assert security.token
        assert bool(security.certificate) == (secret["name"] == "servers")


def gpu_component() -> dict[str, Any]:
    return kustomization("gpu")


def job_with_gpus() -> dict[str, Any]:
    """The job as it is with the component ``gpu``."""
    (patch,) = gpu_component()["patches"]
    patched = merged(BASE.of_kind("Job")[0], yaml.safe_load((FOLDER / "gpu" / patch["path"]).read_text()))
    (container,) = patched["spec"]["template"]["spec"]["containers"]
    (image,) = gpu_component()["images"]
    assert image["name"] == container["image"], "else the image is not replaced"
    container["image"] = image["newName"]
    return patched


def test_a_pod_of_the_job_asks_for_a_gpu_for_each_process() -> None:
    from torch.distributed.run import get_args_parser

    job = job_with_gpus()
    kubernetes_validate.validate(job, SCHEMA_VERSION, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert get_args_parser().parse_args(container["args"]).nproc_per_node == gpus
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["shm"] == "/dev/shm"
    base = BASE.of_kind("Job")[0]["spec"]["template"]["spec"]["containers"][0]
    for key in ("command", "args", "securityContext", "ports", "env"):
        assert container[key] == base[key], "the component changes nothing else"


def test_the_image_for_gpus_is_one_that_the_dockerfile_makes() -> None:
    (image,) = gpu_component()["images"]
    dockerfile = (FOLDER.parent / "Dockerfile").read_text()
    assert image["newName"] == "sparserow-worker-cuda"
    assert f"-t {image['newName']}:{image['newTag']}" in dockerfile
    assert " AS worker-cuda\n" in dockerfile
    assert image["newTag"] in {each["newTag"] for each in kustomization("base")["images"]}


def test_all_files_of_the_component_are_named() -> None:
    assert gpu_component()["kind"] == "Component", "kustomize refuses an overlay below its base"
    named = {"kustomization.yaml", *(patch["path"] for patch in gpu_component()["patches"])}
    assert {path.name for path in (FOLDER / "gpu").iterdir()} == named


def kubectl_documents(tmp_path: Path, folder: str, *components: str) -> list[dict[str, Any]]:
    """What kubectl makes of a folder, with files in place of the secrets."""
    shutil.copytree(FOLDER, tmp_path / "k8s")
    for secret in kustomization("base")["secretGenerator"]:
        for entry in secret["files"]:
            path = tmp_path / "k8s" / "base" / entry.partition("=")[2]
            path.parent.mkdir(exist_ok=True)
            path.write_text("x")
    settings = {**kustomization(folder), "components": list(components)}
    (tmp_path / "k8s" / folder / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    command = ["kubectl", "kustomize", str(tmp_path / "k8s" / folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def in_order(value: Any) -> Any:
    """The value with lists of mappings in one order, which a merge may change."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items()}
    if isinstance(value, list):
        is_sorted = all(isinstance(each, dict) for each in value)
        return sorted(map(in_order, value), key=functools.partial(json.dumps, sort_keys=True)) if is_sorted else value
    return value


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@needs_kubectl
def test_kubectl_makes_the_same_of_a_folder(made: Manifests, tmp_path: Path) -> None:
    """With the namespace, the label and a version of each image."""
    by_kubectl = {}
    for document in kubectl_documents(tmp_path, made.folder):
        kind, metadata = document["kind"], document["metadata"]
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "sparserow"
        assert kind == "Namespace" or metadata["namespace"] == NAMESPACE
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("containers", ()), *pod.get("initContainers", ())):
            container["image"], _, version = container["image"].partition(":")
            assert version == kustomization("base")["images"][0]["newTag"]
        by_kubectl[kind, metadata["name"]] = in_order(document.get("spec"))
    generated = {("Secret", "servers"), ("Secret", "trainers"), ("ConfigMap", "train-job")}
    own = {(each["kind"], each["metadata"]["name"]): in_order(each.get("spec")) for each in made.documents}
    assert set(by_kubectl) == {*own, *generated}
    for name, spec in own.items():
        assert by_kubectl[name] == spec, name


@needs_kubectl
@pytest.mark.parametrize("folder", ["base", "etcd"])
def test_kustomize_takes_the_component_in(tmp_path: Path, folder: str) -> None:
    (job,) = (each for each in kubectl_documents(tmp_path, folder, "../gpu") if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (image,) = gpu_component()["images"]
    assert container["image"] == f"{image['newName']}:{image['newTag']}"
    expected = job_with_gpus()["spec"]["template"]["spec"]["containers"][0]
    for key in ("volumeMounts", "resources"):
        assert in_order(container[key]) == in_order(expected[key])
