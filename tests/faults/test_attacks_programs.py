"""Programs in a registry that another party can write: nothing of them runs before it is known to be harmless."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from crafted_programs import ATTACKS, Entries, craft, example_inputs, read_entries, replace_program, write_entries
from sparserow.deploy.launch.security_files import init_signing_key
from sparserow.proto.published.dense import check_dense, read_dense, write_dense
from sparserow.proto.published.registry import ModelRegistry
from sparserow.proto.security.security import Security
from sparserow.serving.inference.inference import ServedModel
from sparserow.serving.inference.load_program import load_program
from sparserow_process import Launcher

ROWS = "user,age\n1,0.5\n2,0.25\n"


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(100, 4)
        self.tower = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, user: Tensor, age: Tensor) -> Tensor:
        scores: Tensor = self.tower(torch.cat([self.user(user), age.unsqueeze(1)], dim=1)).squeeze(1)
        return scores


EXAMPLE = (torch.arange(4), torch.rand(4))


def load_exported(root: str, version: int, security: Security | None = None) -> torch.export.ExportedProgram:
    return torch.export.load(io.BytesIO(load_program(root, "ctr", version, security)))


class Registry:
    """A cluster and a registry with one published version."""

    def __init__(self, folder: Path, cluster: sr.LocalCluster, session: sr.Session) -> None:
        self.root = str(folder / "models")
        self.cluster, self.session = cluster, session
        self.model = session.distribute(Scorer(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        self.model(*EXAMPLE)
        self.publish(self.root)
        self.folder = folder

    def publish(self, root: str, name: str = "ctr") -> None:
        self.session.publish(name, root=root, model=self.model, example=EXAMPLE)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        yield Registry(tmp_path_factory.mktemp("registry"), cluster, session)


@pytest.fixture(scope="module")
def serving(registry: Registry) -> Iterator[sr.LocalServing]:
    """A process that serves the rows of the version; each case reads the program from a copy of the registry."""
    with sr.local_serving("ctr", root=registry.root) as serving:
        yield serving


@pytest.fixture
def root(registry: Registry, tmp_path: Path) -> str:
    """A copy of the registry, to be changed."""
    return str(shutil.copytree(registry.root, tmp_path / "models"))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_crafted_program_runs_nothing(
    serving: sr.LocalServing,
    root: str,
    tmp_path: Path,
    attack: Callable[[Entries, Path], None],
    launcher: Launcher,
) -> None:
    marker, rows = tmp_path / "marker", tmp_path / "rows.csv"
    rows.write_text(ROWS)
    craft(root, "ctr", 1, attack, marker)
    named = f"--serving={','.join(serving.addresses)}"
    predict = launcher.start("predict", f"--root={root}", named, "--model=ctr", f"--input={rows}")
    code = predict.end()
    assert not marker.exists(), "the program ran code"
    if attack is example_inputs:  # they are left out unread
        assert code == 0, predict.err
        assert len(predict.out.split()) == 2
    else:
        assert code == 1
        assert "program.pt2: " in predict.err
        assert "Traceback" not in predict.err


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_dense_publishing_runs_nothing(
    registry: Registry, root: str, tmp_path: Path, attack: Callable[[Entries, Path], None]
) -> None:
    marker = tmp_path / "marker"
    craft(root, "ctr", 1, attack, marker)
    if attack is example_inputs:
        sr.DensePublisher(registry.session, "ctr", root=root, model=registry.model).publish()
    else:
        with pytest.raises(sr.errors.DataLoss, match=r"program\.pt2: "):
            sr.DensePublisher(registry.session, "ctr", root=root, model=registry.model)
    assert not marker.exists(), "the program ran code"


def test_an_inference_service_runs_nothing(serving: sr.LocalServing, root: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    craft(root, "ctr", 1, ATTACKS[1], marker)
    command = [sys.executable, "-m", "sparserow.deploy.examples.online_service", f"--root={root}", "--port=0"]
    command.append(f"--serving={serving.addresses[0]}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "is pickled" in done.stderr
    assert not marker.exists(), "the program ran code"


def test_nothing_of_a_published_program_is_pickled(registry: Registry) -> None:
    entries = read_entries((Path(registry.root) / "ctr" / "v000001" / "program.pt2").read_bytes())
    assert entries["data/sample_inputs/model.pt"] == b""
    assert b'"use_pickle": true' not in b"".join(entries.values())


def test_example_inputs_of_torch_are_left_out(root: str) -> None:
    program = load_exported(root, 1)
    program._example_inputs = ((torch.arange(4), torch.rand(4)), {})
    out = io.BytesIO()
    torch.export.save(program, out)
    assert read_entries(out.getvalue())["data/sample_inputs/model.pt"]
    replace_program(root, "ctr", 1, out.getvalue())
    assert load_exported(root, 1).example_inputs is None


def test_archives_that_two_readers_may_see_differently_are_refused(root: str) -> None:
    path = Path(root) / "ctr" / "v000001" / "program.pt2"
    entries = read_entries(path.read_bytes())
    packed = write_entries({**entries, "data/weights/weight_0": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        for name, content in [*entries.items(), ("models/model.json", b"{}")]:
            archive.writestr(f"archive/{name}", content)
    two_roots = io.BytesIO()
    with zipfile.ZipFile(two_roots, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
        archive.writestr("other/models/model.json", b"{}")
    nested = write_entries({**entries, "models/model.json": b"[" * 200_000})
    for data, words in (
        (packed, "larger than the file"),
        (twice.getvalue(), "ambiguous"),
        (two_roots.getvalue(), "ambiguous"),
        (nested, "not a program"),
        (b"PK\x03\x04 nonsense", "not a program"),
    ):
        replace_program(root, "ctr", 1, data)
        with pytest.raises(sr.errors.DataLoss, match=words):
            load_program(root, "ctr", 1)


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[tuple[Security, Security]]:
    """Security files of a publisher and of a process that loads programs."""
    init_signing_key(tmp_path, "publisher")
    (tmp_path / "publisher.yaml").write_text("signing_key: publisher.key\nverification_key: publisher.pub\n")
    (tmp_path / "reader.yaml").write_text("verification_key: publisher.pub\n")
    try:
        yield Security.load(tmp_path / "publisher.yaml"), Security.load(tmp_path / "reader.yaml")
    finally:
        sr.use_security(None)


def test_with_a_verification_key_only_signed_programs_are_loaded(
    registry: Registry, root: str, tmp_path: Path, keys: tuple[Security, Security]
) -> None:
    publisher, reader = keys
    with pytest.raises(
        sr.errors.FailedPrecondition,
        match=r"manifest\.json: the file is not signed, and .*reader.yaml names a verification_key",
    ):
        load_program(root, "ctr", 1, reader)
    sr.use_security(publisher)
    registry.publish(root)  # ctr@2
    registry.publish(root, "other")
    sr.DensePublisher(registry.session, "ctr", root=root, model=registry.model).publish()
    sr.use_security(None)
    assert load_exported(root, 2, reader) is not None
    assert load_exported(root, 2) is not None  # a process without a key loads it too

    # Dense weights are signed under the number that they were given.
    folder = ModelRegistry(root).folder("ctr", 2)
    facts, _ = read_dense(folder, 1, check_dense("ctr", 2, reader))
    place = Path(root) / "ctr" / "v000002" / "dense"
    good = json.loads((place / "000001" / "manifest.json").read_text())
    for owner, change, words in (
        (("ctr", 1), {}, "version: is not what the publisher of the dense weights has signed"),
        (("other", 2), {}, "model: is not what"),
        (("other", 1), {"model": "ctr", "version": 2}, "model: is not what"),
        (("ctr", 2), {"step": facts.step + 1}, "step: is not what"),
        (("ctr", 2), {"weights": {**good["weights"], "sha256": "0" * 64}}, "weights: is not what"),
        (("ctr", 2), {"proof": None}, "the file is not signed"),
        (("ctr", 2), {"proof": {**good["proof"], "signature": "AAAA"}}, "proof: no key of verification_key"),
    ):
        (place / "000001" / "manifest.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(sr.errors.FailedPrecondition, match=words):
            read_dense(folder, 1, check_dense(*owner, reader))
    shutil.copytree(place / "000001", place / "000002")
    (place / "000002" / "manifest.json").write_text(json.dumps({**good, "number": 2}))
    with pytest.raises(sr.errors.FailedPrecondition, match="number: is not what"):
        read_dense(folder, 2, check_dense("ctr", 2, reader))

    # A signed program keeps its model's name and its version.
    store = ModelRegistry(root)
    signed, target = store.manifest("other", 1), store.manifest("ctr", 2)
    for stolen, where in ((signed, ("ctr", 2)), (target, ("ctr", 1))):
        source = Path(root) / stolen.model / f"v{stolen.version:06d}" / "program.pt2"
        place = Path(root) / where[0] / f"v{where[1]:06d}"
        shutil.copy(source, place / "program.pt2")
        moved = replace(store.manifest(*where), program=stolen.program, proof=stolen.proof)
        (place / "manifest.json").write_bytes(moved.to_json())
        with pytest.raises(sr.errors.FailedPrecondition, match="is not what the publisher of the version has signed"):
            load_program(root, *where, reader)

    # So do its bytes.
    craft(root, "other", 1, example_inputs, tmp_path / "marker")
    with pytest.raises(
        sr.errors.FailedPrecondition, match="program: is not what the publisher of the version has signed"
    ):
        load_program(root, "other", 1, reader)
    path = Path(root) / "other" / "v000001" / "program.pt2"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(sr.errors.DataLoss):
        load_program(root, "other", 1)


def test_a_wrong_key_is_refused_and_a_new_one_taken_beside_the_old(
    registry: Registry, root: str, tmp_path: Path, keys: tuple[Security, Security]
) -> None:
    publisher, _ = keys
    init_signing_key(tmp_path, "next")
    (tmp_path / "wrong.yaml").write_text("verification_key: next.pub\n")
    (tmp_path / "both.pub").write_text((tmp_path / "next.pub").read_text() + (tmp_path / "publisher.pub").read_text())
    (tmp_path / "both.yaml").write_text("verification_key: both.pub\n")
    sr.use_security(publisher)
    registry.publish(root)
    with pytest.raises(sr.errors.FailedPrecondition, match="no key of verification_key"):
        load_program(root, "ctr", 2, Security.load(tmp_path / "wrong.yaml"))
    assert load_program(root, "ctr", 2, Security.load(tmp_path / "both.yaml"))
    (tmp_path / "publisher.key").chmod(0o644)
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"signing_key: .*others may read or change it; allowed: mode 0600"
    ):
        Security.load(tmp_path / "publisher.yaml")
    (tmp_path / "bad.yaml").write_text("verification_key: publisher.key\n")
    with pytest.raises(sr.errors.InvalidArgument, match="verification_key: allowed: Ed25519 public keys"):
        Security.load(tmp_path / "bad.yaml")


def test_predict_refuses_an_unsigned_program_where_there_is_a_key(
    serving: sr.LocalServing, root: str, tmp_path: Path, launcher: Launcher, keys: tuple[Security, Security]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(ROWS)
    common = ("predict", f"--root={root}", f"--serving={serving.addresses[0]}", "--model=ctr", f"--input={rows}")
    assert "is not signed" in launcher.start(f"--security={tmp_path}/reader.yaml", *common).error_line()
    plain = launcher.start(*common)
    assert plain.end() == 0, plain.err
    assert plain.err.count("programs of unknown publishers") == 1
    with (
        sr.ServingClient(serving.addresses, security=tmp_path / "reader.yaml") as client,
        pytest.raises(sr.errors.FailedPrecondition, match="is not signed"),
    ):
        ServedModel(client, root)


def test_a_served_model_takes_signed_dense_weights_alone(
    registry: Registry, root: str, keys: tuple[Security, Security]
) -> None:
    publisher, reader = keys
    sr.use_security(publisher)
    registry.publish(root)
    sr.DensePublisher(registry.session, "ctr", root=root, model=registry.model).publish()
    sr.use_security(None)
    script = Path(root) / "score.py"
    script.write_text(
        "import sys, torch, sparserow as sr\nwith sr.ServingClient(sys.argv[1], security=sys.argv[2]) as c, "
        "sr.ServedModel(c, sys.argv[3]) as m:\n    print(m.predict(torch.arange(2), torch.rand(2)).dense_version)\n"
    )
    with sr.local_serving("ctr", root=root) as serving:
        command = [sys.executable, str(script), serving.addresses[0], str(reader.path), root]
        signed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert signed.stdout == "1\n", signed.stderr
        folder = ModelRegistry(root).folder("ctr", 2)
        facts, data = read_dense(folder, 1)
        write_dense(folder, [bytes(data)], facts.step)
        unsigned = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "dense/000002/manifest.json: the file is not signed" in unsigned.stderr


def test_the_command_makes_a_key_pair(tmp_path: Path, launcher: Launcher) -> None:
    made = launcher.start("security", "signing-key", str(tmp_path / "keys"), "publisher")
    assert made.end() == 0, made.err
    assert (tmp_path / "keys" / "publisher.key").stat().st_mode & 0o777 == 0o600
    assert "PUBLIC KEY" in (tmp_path / "keys" / "publisher.pub").read_text()
    again = launcher.start("security", "signing-key", str(tmp_path / "keys"), "publisher").error_line()
    assert "the file exists already" in again
