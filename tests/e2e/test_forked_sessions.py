"""A session in a forked process: each call there says that it is of before the fork, and the parent goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM = 50, 4
IDS = torch.tensor([1, 2, 2, 7])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids) + self.bag(ids[:, None]))


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("forked") as session:
        yield session


def distributed(session: sr.Session) -> Net:
    torch.manual_seed(3)
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)


def test_forked_session_is_unusable(session: sr.Session) -> None:
    model = distributed(session)
    model(IDS)
    session.discard()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model.one(torch.tensor([1]))
            os.write(writer, b"no error")
        except sr.errors.FailedPrecondition as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"before a fork" in os.read(reader, 4096)


def test_every_call_after_a_fork_says_so(session: sr.Session) -> None:
    model = distributed(session)
    table = session.table("one")
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: model(IDS),
        "eval": lambda: model.eval()(IDS),
        "step": lambda: session.step(),
        "discard": lambda: session.discard(),
        "table": lambda: session.table("one"),
        "create_table": lambda: session.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0)),
        "pull": lambda: table.pull([1]),
        "push": lambda: table.push([1], np.ones((1, DIM), np.float32)),
        "assign": lambda: table.assign([1], np.ones((1, DIM), np.float32)),
        "delete": lambda: table.delete([1]),
        "scan": lambda: next(iter(table.scan())),
    }
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for name, call in calls.items():
            try:
                call()
                os.write(writer, f"{name}: no error\n".encode())
            except sr.errors.FailedPrecondition as error:
                if "before a fork" not in str(error):
                    os.write(writer, f"{name}: {error}\n".encode())
            except BaseException as error:
                os.write(writer, f"{name}: {error!r}\n".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        assert said.read() == ""
    before = table.pull([1])
    model.train()(IDS).sum().backward()
    assert session.step()
    assert not np.array_equal(table.pull([1]), before)
