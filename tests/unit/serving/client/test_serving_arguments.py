"""Arguments of the serving side that are not allowed: the text names the argument and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import sparserow as sr
from sparserow.serving.client.client import AsyncServingClient

ADDRESS = "HOST:PORT, such as 127.0.0.1:7000"
ADDRESSES = "HOST:PORT, several with commas, or a sequence of such texts"
FROM_1 = "integers >= 1"


@pytest.fixture
def client() -> Any:
    """A client that has reached no process, as its arguments are looked at first."""
    return object.__new__(sr.ServingClient)


@pytest.mark.parametrize(
    ("given", "words", "allowed"),
    [
        ({"version": "1"}, "version: '1'", FROM_1),
        ({"version": 0}, "version: 0", FROM_1),
        ({"version": True}, "version: True", FROM_1),
        ({"every_sec": "5"}, "every_sec: '5'", "numbers > 0"),
        ({"every_sec": 0}, "every_sec: 0", "numbers > 0"),
        ({"every_sec": float("nan")}, "every_sec: nan", "numbers > 0"),
        ({"model": None}, "model: type: 'NoneType'", "a torch.nn.Module"),
    ],
)
def test_of_a_publisher_of_dense_weights(given: dict[str, Any], words: str, allowed: str) -> None:
    session: Any = None
    with pytest.raises(sr.errors.InvalidArgument) as caught:
        sr.DensePublisher(session, "ctr", root="/none", **{"model": nn.Linear(1, 1), **given})
    assert str(caught.value) == f"DensePublisher.{words} is not allowed; allowed: {allowed}"


@pytest.mark.parametrize(
    ("given", "words", "allowed"),
    [
        ({"addresses": None}, "ServingClient.addresses: None", ADDRESSES),
        ({"addresses": 7000}, "ServingClient.addresses: 7000", ADDRESSES),
        ({"addresses": [7000]}, "ServingClient: address: 7000", ADDRESS),
        ({"connections": "2"}, "ServingClient.connections: '2'", FROM_1),
        ({"hedge_ms": -1}, "ServingClient.hedge_ms: -1", "numbers >= 0"),
        ({"refresh_sec": 0}, "ServingClient.refresh_sec: 0", "numbers > 0"),
        ({"deadline_sec": None}, "ServingClient.deadline_sec: None", "numbers > 0"),
        ({"model": 5}, "model: 5", "NAME, NAME@ALIAS or NAME@VERSION as text"),
    ],
)
def test_of_a_client(given: dict[str, Any], words: str, allowed: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument) as caught:
        sr.ServingClient(**{"addresses": "127.0.0.1:1", **given})
    assert str(caught.value) == f"{words} is not allowed; allowed: {allowed}"


@pytest.mark.parametrize(
    ("tables", "given", "words"),
    [
        ({"user": [1]}, {"routing_key": 5}, "routing_key: 5 is not allowed; allowed: text"),
        ({"user": [1]}, {"routing_key": 0}, "routing_key: 0 is not allowed; allowed: text"),
        ({"user": [1]}, {"deadline_ms": "5"}, "deadline_ms: '5' is not allowed; allowed: integers >= 1"),
        (["user"], {}, "tables: type: 'list' is not allowed; allowed: a mapping of keys by the name of a table"),
    ],
)
def test_of_a_lookup(tables: Any, given: dict[str, Any], words: str, client: Any) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=words):
        client.lookup_many(tables, **given)


def test_of_a_client_for_asyncio(client: Any) -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"AsyncServingClient.threads: 0 is not allowed; allowed: integers"
    ):
        AsyncServingClient(client, threads=0)


@pytest.mark.parametrize("field", ["capacity_bytes", "ttl_ms"])
@pytest.mark.parametrize("value", [-1, 0, 0.5, "1MiB"])
def test_of_a_cache(field: str, value: Any) -> None:
    with pytest.raises(sr.errors.InvalidArgument) as caught:
        sr.LookupCache(**{"capacity_bytes": 1 << 20, field: value})
    assert str(caught.value) == f"LookupCache.{field}: {value!r} is not allowed; allowed: {FROM_1}"


@pytest.mark.parametrize(
    ("given", "words", "allowed"),
    [
        ({"client": None}, "client: type: 'NoneType'", "sr.ServingClient"),
        ({"cache": 1 << 20}, "cache: type: 'int'", "sr.LookupCache, None"),
        ({"deadline_ms": "5"}, "deadline_ms: '5'", FROM_1),
        ({"refresh_sec": 0}, "refresh_sec: 0", "numbers > 0"),
    ],
)
def test_of_a_served_model(given: dict[str, Any], words: str, allowed: str, client: Any) -> None:
    with pytest.raises(sr.errors.InvalidArgument) as caught:
        sr.ServedModel(**{"client": client, "root": "/none", **given})
    assert str(caught.value) == f"ServedModel.{words} is not allowed; allowed: {allowed}"
