"""The manifests of deploy/k8s: valid by Kubernetes' schemas, and every flag, port, volume and name in them exists."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparserow.deploy.cli import _command
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.proto.security.security import Security

kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "k8s"
SCHEMA_VERSION = "1.31"
NAMESPACE = "sparserow"
SERVERS = ("coordinator", "ps", "serve")


def kustomization() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def documents() -> list[dict[str, Any]]:
    names = kustomization()["resources"]
    return [document for name in names for document in yaml.safe_load_all((FOLDER / name).read_text())]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents() if document["kind"] in kinds]


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, pod template and its only container."""
    for document in of_kind("StatefulSet", "Deployment", "Job"):
        template = document["spec"]["template"]
        (container,) = template["spec"]["containers"]
        yield document["metadata"]["name"], template, container


def container_of(name: str) -> dict[str, Any]:
    return next(container for pod, _, container in pods() if pod == name)


def flags(container: dict[str, Any]) -> dict[str, str]:
    pairs = (argument.removeprefix("--").partition("=") for argument in container["args"] if "=" in argument)
    return {name: value for name, _, value in pairs}


def ports_of(name: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(name)["ports"]}


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


def test_kubernetes_would_take_it() -> None:
    wrong = []
    for document in documents():
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
    wrong = of_kind("Deployment")[0]
    wrong["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, SCHEMA_VERSION, strict=True)


def test_all_files_are_named() -> None:
    assert kustomization()["namespace"] == NAMESPACE == of_kind("Namespace")[0]["metadata"]["name"]
    named = {*kustomization()["resources"], "kustomization.yaml", "job.yaml"}
    assert {path.name for path in FOLDER.glob("*.yaml")} == named


@pytest.mark.parametrize("name", SERVERS)
def test_every_flag_of_a_server_is_one_of_its_command(name: str) -> None:
    container = container_of(name)
    assert container["args"][1] == name
    parse(container["args"])
    with pytest.raises(AssertionError, match="has no"):
        parse([*container["args"], "--no-such-flag=1"])


def test_workers_are_started_as_torchrun_and_the_command_line_want_it() -> None:
    from torch.distributed.run import get_args_parser

    container = container_of("train")
    assert container["command"] == ["torchrun"]
    parsed = get_args_parser().parse_args(container["args"])
    assert (parsed.module, parsed.training_script) == (True, "sparserow.deploy.cli")
    parse(parsed.training_script_args)
    job = of_kind("Job")[0]["spec"]
    assert int(parsed.nnodes) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    (service,) = (each for each in of_kind("Service") if each["metadata"]["name"] == "train")
    assert parsed.rdzv_backend == "c10d"
    assert parsed.rdzv_endpoint == f"train-0.train:{service['spec']['ports'][0]['port']}"
    assert job["template"]["spec"]["subdomain"] == "train"


def test_the_job_is_one_that_goes_on_from_its_checkpoints() -> None:
    job = load_config(JobConfig, FOLDER / "job.yaml")
    assert job.train.checkpoint is not None
    assert job.cluster.address == f"coordinator.{NAMESPACE}.svc:{ports_of('coordinator')['grpc']}"


def test_servers_find_each_other() -> None:
    coordinator = f"coordinator.{NAMESPACE}.svc"
    assert flags(container_of("coordinator"))["advertise"] == coordinator
    address = f"{coordinator}:{flags(container_of('coordinator'))['port']}"
    assert flags(container_of("ps"))["coordinator"] == address == flags(container_of("serve"))["follow"]
    assert flags(container_of("ps"))["advertise"] == f"$(POD_NAME).ps.{NAMESPACE}.svc"
    assert flags(container_of("serve"))["advertise"] == f"serve.{NAMESPACE}.svc"
    replicas = next(each["spec"]["replicas"] for each in of_kind("StatefulSet") if each["metadata"]["name"] == "ps")
    assert int(flags(container_of("coordinator"))["shards"]) == replicas
    assert {"SHARD", "POD_NAME"} == {each["name"] for each in container_of("ps")["env"]}


@pytest.mark.parametrize("name", SERVERS)
def test_every_port_is_listened_on_and_probed(name: str) -> None:
    given, ports = flags(container_of(name)), ports_of(name)
    control = "control-port" if name == "ps" else "port"
    listened = {"grpc": control, "health": "health-port", "metrics": "metrics-port"}
    if name != "coordinator":
        listened["data"] = "port" if name == "ps" else "data-port"
    if name == "serve":
        listened["http"] = "http-port"
    assert ports == {port: int(given[flag]) for port, flag in listened.items()}
    container = container_of(name)
    assert container["startupProbe"]["grpc"]["port"] == container["readinessProbe"]["grpc"]["port"] == ports["health"]
    (service,) = (each for each in of_kind("Service") if each["metadata"]["name"] == name)
    assert service["spec"]["selector"] == {"app.kubernetes.io/name": name}
    offered = {port["targetPort"]: port["port"] for port in service["spec"]["ports"]}
    assert offered == {port: number for port, number in ports.items() if port != "health"}


def test_rules_of_the_network_name_ports_that_somebody_listens_on() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("NetworkPolicy")}
    assert policies.pop("nobody") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    pods_named = {name for name, _, _ in pods()}
    reached: dict[str, set[int]] = {name: set() for name in pods_named}
    for spec in policies.values():
        selector = spec["podSelector"]
        chosen = list(selector.get("matchLabels", {}).values()) or selector["matchExpressions"][0]["values"]
        assert set(chosen) <= pods_named
        for rule in spec["ingress"]:
            for name in chosen:
                reached[name] |= {port["port"] for port in rule.get("ports", ())}
    for name in SERVERS:
        assert reached[name] == {number for port, number in ports_of(name).items() if port != "health"}


def test_every_pod_has_what_it_mounts_and_mounts_what_its_flags_name() -> None:
    settings = kustomization()
    secrets = {each["name"] for each in settings["secretGenerator"]}
    maps = {each["name"] for each in settings["configMapGenerator"]}
    claims = {each["metadata"]["name"] for each in of_kind("PersistentVolumeClaim")}
    templates = {
        each["metadata"]["name"]: [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())]
        for each in of_kind("StatefulSet")
    }
    images = {each["name"] for each in settings["images"]}
    for name, template, container in pods():
        assert template["metadata"]["labels"] == {"app.kubernetes.io/name": name}
        assert container["image"] in images
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {*volumes, *templates.get(name, ())}
        for volume in volumes.values():
            assert volume.get("secret", {"secretName": "servers"})["secretName"] in secrets
            assert volume.get("configMap", {"name": "train-job"})["name"] in maps
            assert volume.get("persistentVolumeClaim", {"claimName": "shared"})["claimName"] in claims
        paths = [word.partition("=")[2] or word for word in container["args"]]
        for path in (path for path in paths if path.startswith("/")):
            assert any(path == at or path.startswith(f"{at}/") for at in mounts.values()), path


def test_disruptions_and_scaling_are_of_what_there_is() -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind("PodDisruptionBudget")}
    assert set(budgets) == {"ps", "serve"}
    for name, spec in budgets.items():
        assert spec["selector"] == {"matchLabels": {"app.kubernetes.io/name": name}}
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "serve"}
    deployment = of_kind("Deployment")[0]
    assert "replicas" not in deployment["spec"], "the autoscaler's to set"
    assert container_of("serve")["resources"]["requests"]["cpu"], "of which it takes a share"
    (monitor,) = of_kind("ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["port"] == "metrics"
    assert tuple(monitor["spec"]["selector"]["matchExpressions"][0]["values"]) == SERVERS


def test_the_files_of_the_secrets_are_those_that_the_commands_make(tmp_path: Path) -> None:
    folder = tmp_path / "security"
    init_security(folder, ["coordinator.sparserow.svc", "*.ps.sparserow.svc", "serve.sparserow.svc"], valid_sec=3600)
    add_token(folder / "tokens.yaml", "trainers", "train", (), output=folder / "trainer.token")
    (folder / "trainer.yaml").write_text("ca: ca.pem\ntoken_file: trainer.token\n")
    for secret in kustomization()["secretGenerator"]:
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


def merged(base: Any, patch: Any) -> Any:
    """The result of a strategic merge of Kubernetes: lists of mappings are merged by mountPath or name, else joined."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merged(base[key], value) if key in base else value for key, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list):
        for key in ("mountPath", "name"):
            if all(key in each for each in (*base, *patch)):
                left = {each[key]: each for each in base}
                for each in patch:
                    left[each[key]] = merged(left[each[key]], each) if each[key] in left else each
                return list(left.values())
        return base + patch
    return patch


def gpu_component() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "gpu" / "kustomization.yaml").read_text())


def job_with_gpus() -> dict[str, Any]:
    """The job as it is with the component ``gpu``."""
    (patch,) = gpu_component()["patches"]
    patched = merged(of_kind("Job")[0], yaml.safe_load((FOLDER / "gpu" / patch["path"]).read_text()))
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
    base = of_kind("Job")[0]["spec"]["template"]["spec"]["containers"][0]
    for key in ("command", "args", "securityContext", "ports", "env"):
        assert container[key] == base[key], "the component changes nothing else"


def test_the_image_for_gpus_is_one_that_the_dockerfile_makes() -> None:
    (image,) = gpu_component()["images"]
    dockerfile = (FOLDER.parent / "Dockerfile").read_text()
    assert image["newName"] == "sparserow-worker-cuda"
    assert f"-t {image['newName']}:{image['newTag']}" in dockerfile
    assert " AS worker-cuda\n" in dockerfile
    assert image["newTag"] in {each["newTag"] for each in kustomization()["images"]}


def test_all_files_of_the_component_are_named() -> None:
    assert gpu_component()["kind"] == "Component", "kustomize refuses an overlay below its base"
    named = {"kustomization.yaml", *(patch["path"] for patch in gpu_component()["patches"])}
    assert {path.name for path in (FOLDER / "gpu").iterdir()} == named


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_takes_the_component_in(tmp_path: Path) -> None:
    folder = tmp_path / "k8s"
    shutil.copytree(FOLDER, folder)
    settings = kustomization()
    for secret in settings["secretGenerator"]:
        for entry in secret["files"]:
            path = folder / entry.partition("=")[2]
            path.parent.mkdir(exist_ok=True)
            path.write_text("x")
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({**settings, "components": ["gpu"]}))
    made = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    (job,) = (each for each in yaml.safe_load_all(made.stdout) if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    expected = job_with_gpus()["spec"]["template"]["spec"]["containers"][0]
    assert container.pop("image") == f"{expected.pop('image')}:{gpu_component()['images'][0]['newTag']}"
    order = {"key": lambda mount: mount["mountPath"]}
    assert sorted(container.pop("volumeMounts"), **order) == sorted(expected.pop("volumeMounts"), **order)
    assert container == expected
