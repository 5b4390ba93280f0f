"""Bounds of namespaces: what the file says, how fast workers register, and what a registration asks and saves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.proto.schema_message import message_of_schema
from sparserow.proto.security.quotas import Quotas
from sparserow.proto.security.security import Security, use_security
from sparserow.ps_server.coordinator.procedures.shard_calls import ShardCalls
from sparserow.ps_server.coordinator.service import CoordinatorService
from sparserow.ps_server.coordinator.state import registry as registry_module
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.registration_rates import BURST_SEC, MOST_WAIT_SEC, RegistrationRates

OPTIONS = ClusterOptions(shards=1, slot_count=64)


def table(namespace: str, number: int) -> TableSchema:
    return TableSchema(namespace, f"t{number}", 4, SGD())


class Link:
    """A connection to a shard, which has one row in each table that it is asked for."""

    instance = 5

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.calls: list[tuple[str, Any]] = []

    async def call(self, method: str, request: Any, *_: Any, **__: Any) -> Any:
        self.calls.append((method, request))
        if method != "Stats":
            return pb.FreezeJobReply()
        return pb.ShardStatsReply(tables=[pb.TableUsage(table_id=number, rows=1) for number in request.table_ids])

    async def close(self) -> None: ...


class Scene:
    """A coordinator of one shard, without processes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.link, self.now = cluster, Link(), 0.0
        calls = ShardCalls(cluster)
        cluster.shards.register(0, instance=5, control=("127.0.0.1", 7), pid=1, tables=0, now=0.0)
        cluster.shards.mark_serving(0, 5)
        calls._links[0] = self.link  # type: ignore[assignment]
        self.service = CoordinatorService(cluster, calls, save=lambda: None, clock=lambda: self.now)

    async def create(self, namespace: str, number: int) -> pb.CreateTableReply:
        schema = message_of_schema(table(namespace, number))
        return await self.service.CreateTable(pb.CreateTableRequest(schema=schema), None)

    async def register(self, namespace: str, job: str) -> pb.RegisterWorkerReply:
        class Context:
            @staticmethod
            def time_remaining() -> float:
                return 60.0

        request = pb.RegisterWorkerRequest(namespace=namespace, job=job, world_size=1)
        return await self.service.RegisterWorker(request, Context)

    async def leave(self, registered: pb.RegisterWorkerReply) -> None:
        await self.service.DeregisterWorker(pb.DeregisterWorkerRequest(**named(registered)), None)


def named(registered: pb.RegisterWorkerReply) -> dict[str, Any]:
    """What a worker shows with each call."""
    fields = ("job_id", "worker_id", "epoch", "proof")
    return {field: getattr(registered, field) for field in fields}


def run(scene: Any, quotas: dict[str, Any] | None = None, cluster: Cluster | None = None) -> None:
    async def main() -> None:
        made = Scene(cluster or Cluster.create(OPTIONS))
        try:
            await scene(made)
        finally:
            await made.service.close()

    use_security(Security(quotas=Quotas.model_validate(quotas or {})))
    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        use_security(None)


def test_what_a_namespace_does_not_say_is_as_in_default(tmp_path: Path) -> None:
    path = tmp_path / "security.yaml"
    path.write_text("quotas: {default: {tables: 7, jobs: 3}, namespaces: {ads: {tables: 9, memory_share: 0.5}}}")
    quotas = Security.load(path).quotas
    assert (quotas.of("ads").tables, quotas.of("ads").jobs, quotas.of("news").tables) == (9, 3, 7)
    assert quotas.memory_shares() == {"ads": 0.5}
    assert Security().quotas.of("any") == Quotas().default
    assert hash(Security.load(path)) == hash(Security.load(path))  # contexts of TLS are kept by it
    assert Security.load(path) != Security(path=path, files=(path,))  # a change of the file is seen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: {tables: 0}", "quotas.default.tables"),
        ("default: {rows: 1}", "rows"),
        ("default: {memory_share: 0.5}", "memory_share"),
        ("namespaces: {ads: {memory_share: 0.9}}", "memory_share"),
        ("namespaces: {a: {memory_share: 0.5}, b: {memory_share: 0.4}}", "at most 0.875"),
        ("namespaces: {a/b: {tables: 1}}", "quotas.namespaces"),
        ("default: {registrations_per_sec: .inf}", "registrations_per_sec"),
    ],
)
def test_bounds_that_are_not_allowed_name_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "security.yaml"
    path.write_text(f"quotas:\n  {text}\n")
    with pytest.raises(InvalidArgument, match=message):
        Security.load(path)


def test_a_namespace_gets_no_more_tables_than_it_may_have_and_a_dropped_one_gives_its_place_back() -> None:
    async def scene(at: Scene) -> None:
        for number in range(3):
            await at.create("ads", number)
        with pytest.raises(ResourceExhausted, match=r"namespace 'ads': 4 tables .* at most 3; .*namespaces.ads.tables"):
            await at.create("ads", 3)
        assert (await at.create("ads", 2)).created is False  # one that exists is found
        await at.create("news", 0)
        at.cluster = Cluster.from_document(json.loads(json.dumps(at.cluster.to_document())), OPTIONS, now=0.0)
        assert at.cluster.registry.table_count("ads") == 3  # after a restart of the coordinator too
        await at.service.DropTable(pb.DropTableRequest(namespace="ads", name="t0"), None)
        await at.create("ads", 3)

    run(scene, {"default": {"tables": 3}})


def test_a_table_that_a_shard_refuses_takes_no_place() -> None:
    async def scene(at: Scene) -> None:
        refusing = at.link.call

        async def refuse(method: str, *arguments: Any, **_: Any) -> Any:
            if method == "CreateTable":
                raise FailedPrecondition("no")
            return await refusing(method, *arguments)

        at.link.call = refuse  # type: ignore[method-assign]
        for _ in range(5):
            with pytest.raises(FailedPrecondition):
                await at.create("ads", 0)
        at.link.call = refusing  # type: ignore[method-assign]
        await at.create("ads", 0)

    run(scene, {"default": {"tables": 1}})


def test_a_registration_asks_for_the_tables_of_its_namespace_alone() -> None:
    cluster = Cluster.create(OPTIONS)
    for number in range(600):
        cluster.registry.admit(table("ads", number))
    own = {cluster.registry.admit(table("news", number))[0].id for number in range(2)}

    async def scene(at: Scene) -> None:
        found = await at.register("news", "job")
        assert [(each.name, each.rows) for each in found.found] == [("t0", 1), ("t1", 1)]
        (asked,) = [request for method, request in at.link.calls if method == "Stats"]
        assert set(asked.table_ids) == own
        at.link.calls.clear()
        assert (await at.register("empty", "job")).found_count == 0
        assert not [method for method, _ in at.link.calls if method == "Stats"]

    run(scene, cluster=cluster)


def test_a_table_is_encoded_once_however_often_the_state_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def counted(schema: TableSchema) -> pb.TableSchema:
        encoded.append(schema.full_name)
        return message_of_schema(schema)

    monkeypatch.setattr(registry_module, "message_of_schema", counted)
    cluster = Cluster.create(OPTIONS)
    for number in range(20):
        cluster.registry.admit(table("ads", number))
        cluster.to_document()
    assert len(encoded) == 20
    before = {schema.full_name for schema in cluster.registry.tables()}
    cluster.registry.remove(cluster.registry.find("ads", "t3").id)
    cluster.registry.admit(TableSchema("ads", "t3", 8, SGD()))
    again = Cluster.from_document(cluster.to_document(), OPTIONS, now=0.0)
    assert {schema.full_name for schema in again.registry.tables()} == before
    assert again.registry.find("ads", "t3").dim == 8


def test_a_namespace_runs_no_more_jobs_than_it_may_and_those_that_run_go_on() -> None:
    async def scene(at: Scene) -> None:
        first = await at.register("ads", "a")
        await at.register("ads", "b")
        with pytest.raises(ResourceExhausted, match=r"namespace 'ads': 3 jobs .* at most 2; .*namespaces.ads.jobs"):
            await at.register("ads", "c")
        assert "ads/c" not in at.cluster.jobs.names.values()  # nothing is left of a refused one
        await at.register("news", "c")
        await at.register("ads", "b")  # a worker of a job that runs comes back
        await at.service.WorkerHeartbeat(pb.WorkerHeartbeatRequest(**named(first)), None)
        await at.leave(first)
        await at.register("ads", "c")

    run(scene, {"default": {"jobs": 2}})


def test_a_namespace_that_registers_without_end_is_refused_and_others_are_not() -> None:
    async def scene(at: Scene) -> None:
        for _ in range(20):
            await at.register("ads", "job")
        for _ in range(60):  # each waits for its turn
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(at.register("ads", "job"), 0.01)
        with pytest.raises(ResourceExhausted, match=r"registrations of workers a second .* 20 at once and 2 a second"):
            await at.register("ads", "job")
        assert (await at.register("news", "job")).worker_id
        at.now += 60.0
        assert (await at.register("ads", "job")).worker_id

    run(scene, {"default": {"registrations_per_sec": 2}})


def test_registrations_are_paced_by_namespace_and_forgotten() -> None:
    rates = RegistrationRates()
    burst = [rates.delay("ads", 10.0, 0.0) for _ in range(int(10 * BURST_SEC))]
    assert burst == [0.0] * len(burst)
    waits = [rates.delay("ads", 10.0, 0.0) for _ in range(int(10 * MOST_WAIT_SEC) - 1)]
    assert waits == pytest.approx([(number + 1) / 10 for number in range(len(waits))])
    with pytest.raises(ResourceExhausted, match=r"quotas\.namespaces\.ads\.registrations_per_sec"):
        [rates.delay("ads", 10.0, 0.0) for _ in range(2)]
    assert rates.delay("ads", 10.0, 0.2) <= MOST_WAIT_SEC  # a refused one was not counted
    with pytest.raises(ResourceExhausted):
        rates.delay("ads", 10.0, 0.2, most_sec=1.0)  # its caller would not wait as long
    assert rates.delay("slow", 0.01, 0.0) == 0.0
    for number in range(100_000):
        rates.delay(f"n{number}", 10.0, number * 0.01)
    assert len(rates) < 5000
