"""Every block of Python on the pages runs as it stands, against a cluster of its own.

A page leaves the user's own things out: the model, the batches, the loss. ``user_things`` brings them. Addresses and
folders of the pages stand for those of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import sparserow as sr
from doc_blocks import DocBlock, doc_blocks
from long_form import FULL
from sparserow_process import free_port

ROWS = 12_000  # more than the min_rows of the pages
BLOCKS = [block for block in doc_blocks() if block.language == "python"]
ELSEWHERE = {
    "README.md: import torch": "tests/e2e/test_first_block.py runs it as it stands",
    'docs/features.md: client = sr.ServingClient("host:7100")': "tests/e2e/test_featured_models.py serves such a model",
    "docs/ray.md: import ray": "tests/e2e/test_ray.py runs it on a Ray cluster",
    "docs/parallel-towers.md: import sparserow as sr": "tests/e2e/test_tensor_groups.py runs its calls on 4 processes",
    "docs/device-tables.md: whole = session.gather_tables(model)": "tests/e2e/test_device_tables.py does it",
    "docs/device-tables.md: session.gather_tables(model, into=whole)": "tests/e2e/test_device_tables.py does it",
    "docs/parallel-towers.md: from torch.distributed.checkpoint.state_dict import StateDictOptions, "
    "get_model_state_dict": "tests/e2e/test_tensor_groups.py publishes a whole copy on every rank",
}
LONG = {"docs/serving.md: import io"}  # AOTInductor compiles for about a minute
PUBLISHED = ("sr.ServingClient(", "sr.load_program(", "sr.DensePublisher(")  # what needs a published model
# What a page says, and what stands for it in the test.
HERE = {
    "rank=rank, world_size=2": "rank=rank, world_size=1",  # the test is one worker
    "rows=1_000_000": "rows=1_000",
    '.to("cuda")': "",  # where torch has no CUDA
    'device="cuda", on_host=lambda batch: [batch[0]]': 'device="cpu"',
    'lookup("user",': 'lookup("user_id",',  # a table of the test's model
    "model(user_ids, tag_ids, ages)": "model(*batch)",
    "    ...\n    session.step(optimizer)": "    loss_fn(model(x), y).backward()\n    session.step(optimizer)",
}


class MyModel(nn.Module):
    """Two tables of a size that the pages distribute, and a dense tower."""

    def __init__(self) -> None:
        super().__init__()
        self.user_id = nn.Embedding(ROWS, 4)
        self.ad_id = nn.Embedding(ROWS, 4)
        self.tower = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(torch.cat([self.user_id(ids[:, 0]), self.ad_id(ids[:, 1])], dim=1)).squeeze(1)


class Trainer:
    """A loop of a library."""

    def fit(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()


loss_fn = nn.BCEWithLogitsLoss()


def user_things() -> dict[str, Any]:
    """What a page leaves to its reader."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(ROWS, (64, 2), generator=draw)
    labels = torch.randint(2, (64,), generator=draw).float()
    loader = StatefulDataLoader(TensorDataset(ids, labels), batch_size=16)
    return {
        "sr": sr,
        "torch": torch,
        "nn": nn,
        "MyModel": MyModel,
        "model": MyModel(),
        "loss_fn": loss_fn,
        "loader": loader,
        "batches": loader,
        "batch": (ids[:16],),
        "example_inputs": (ids[:16],),
        "trainer": Trainer(),
        "rank": 0,
        "keys": np.arange(20),
        "grads": np.ones((20, 4), np.float32),
    }


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as opened:
        yield opened


def trained(names: dict[str, Any], session: sr.Session) -> None:
    """A distributed model after some steps, as a page in mid-text assumes."""
    model = session.distribute(names["model"], optimizer=sr.optim.Adagrad(lr=0.05), min_rows=10_000)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in names["loader"]:
        dense.zero_grad()
        loss_fn(model(x), y).backward()
        session.step(dense)
    schedule = torch.optim.lr_scheduler.StepLR(dense, 1)
    names.update(model=model, ddp_model=model, dense=dense, optimizer=dense, schedule=schedule, session=session)


def prepare(block: DocBlock, names: dict[str, Any], address: str, stack: ExitStack) -> str:
    """Brings what the block assumes; returns its text with what is true here."""
    root = str(Path("models").resolve())
    text = block.text.replace('"host:7000"', repr(address)).replace('"/ckpt"', repr(str(Path("ckpt").resolve())))
    text = text.replace('"s3://models"', repr(root)).replace(
        "deadline_ms=10)", "deadline_ms=60_000)"
    )  # a slow machine's
    for there, here in HERE.items():
        text = text.replace(there, here)
    if "session" in text and "sr.connect" not in text:
        session = stack.enter_context(sr.connect(address, namespace="ads"))
        if "session.distribute(" in text or "session.lift_embeddings(" in text:
            names["session"] = session
        else:
            trained(names, session)
    if any(word in text for word in PUBLISHED):
        serve(block, names, root, address, stack)
        text = text.replace('"host:7100"', repr(names.get("serving", "")))
    if "ranker.pt2" in text:
        size = torch.export.Dim("size", min=2, max=1024)
        program = torch.export.export(MyModel(), names["example_inputs"], dynamic_shapes=({0: size},))
        torch.export.save(program, "ranker.pt2")
    if "Join(" in text:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        names["ddp_model"] = nn.parallel.DistributedDataParallel(names["model"])
    return text


def serve(block: DocBlock, names: dict[str, Any], root: str, address: str, stack: ExitStack) -> None:
    """A published version of the model; serving processes of it where the block looks rows up."""
    if "session" not in names:
        trained(names, stack.enter_context(sr.connect(address, namespace="ads")))
    example = names["batch"]
    names["session"].publish("ctr", root=root, model=names["model"], example=example, alias="live")
    names.update(root=root, version=1)
    if "host:7100" in block.text:
        running = stack.enter_context(sr.local_serving("ctr@live", root=root))
        names["serving"] = running.addresses[0]
        names.pop("session").close()  # a served model binds the tables of its namespace, which another process trains


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.name not in ELSEWHERE], ids=lambda block: block.name)
def test_a_block_of_python_runs(block: DocBlock, stack: ExitStack) -> None:
    if block.name in LONG and not FULL:
        pytest.skip("SPARSEROW_TEST_FULL=1 runs it")
    names = user_things()
    cluster = stack.enter_context(sr.local_cluster(shards=1))
    text = prepare(block, names, cluster.address, stack)
    exec(compile(text, f"{block.page}:{block.line}", "exec"), names)
    if isinstance(session := names.get("session"), sr.Session):
        session.close()


def test_what_stands_for_a_text_is_of_a_page() -> None:
    """A page that changes leaves no substitute behind, and no exception."""
    text = "".join(block.text for block in BLOCKS)
    assert [there for there in HERE if there not in text] == []
    assert {*ELSEWHERE, *LONG} <= {block.name for block in BLOCKS}
