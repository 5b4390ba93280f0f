"""S3 as moto's server plays it, for this process and those that it starts."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A server of its own; its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@contextlib.contextmanager
def s3_bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an empty bucket; processes that are started within find the server by the environment."""
    for variable, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(variable, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    name = f"bucket-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=name)
    yield name
    fsspec.get_filesystem_class("s3").clear_instance_cache()
