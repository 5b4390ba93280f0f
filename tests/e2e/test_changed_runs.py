"""A run that starts from another one's checkpoint with other inputs, tables or vocabularies: what is said and taken,
what is accepted by name, and what is refused.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from sparserow.cpp_ext.torch_arrays import tensor_of
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.accepted import as_float32, stored_as
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.worker.checkpoint.dense_state import load_optimizer_of_fitting, parameter_names
from sparserow_process import Launcher

ROWS = 1200
FEATURES = {
    "price": "{kind: dense, log1p: true}",
    "age": "{kind: dense}",
    "user": "{kind: id}",
    "item": "{kind: id, vocabulary: ITEMS}",
    "hour": "{kind: time, column: at, unit: s}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(5)
    for day in ("monday", "tuesday"):
        items = draw.integers(0, 6, ROWS)
        columns = {
            "click": (draw.random(ROWS) < np.where(items % 2, 0.9, 0.1)).astype(np.int8),
            "price": draw.exponential(9, ROWS),
            "age": draw.integers(0, 80, ROWS),
            "user": draw.integers(0, 90, ROWS),
            "item": [f"i{item}" for item in items],
            "at": draw.integers(0, 10**9, ROWS),
        }
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / f"{day}.parquet")
    (tmp_path / "items.txt").write_text("i0\ni1\ni2\n")
    return tmp_path


def words(folder: Path, name: str, day: str, names: list[str], *more: str, rows: str = "{'*': 5000}") -> list[str]:
    """The words of a command that trains on a day with some of the features."""
    features = ", ".join(f"{each}: {FEATURES[each]}" for each in names).replace("ITEMS", str(folder / "items.txt"))
    job = folder / f"{name}.yaml"
    job.write_text(
        f"name: clicks\ndata: {{format: parquet, train: {folder}/{day}.parquet, test: {folder}/tuesday.parquet, "
        f"columns: {{label: click}}, shuffle_rows: 0}}\nfeatures: {{{features}}}\n"
        f"model: {{class: DeepFM, min_rows: 1, args: {{rows: {rows}, dim: 4, hidden: [8, 4]}}}}\n"
        "train: {epochs: 1, batch_size: 100, threads: 1, row_optimizer: {kind: adagrad}, "
        f"checkpoint: {{url: {folder}/{name}, every_steps: 1000}}}}\n"
    )
    return ["train", str(job), *more]


def trained(launcher: Launcher, arguments: list[str]) -> str:
    run = launcher.start(*arguments)
    assert run.popen.wait(300) == 0, run.err
    return run.err


STILL = ("--set=train.dense_optimizer={kind: adam, lr: 0}", "--set=train.row_optimizer={kind: adagrad, lr: 0}")


def tower(folder: Path) -> dict[str, Any]:
    """The state of rank 0 in the newest checkpoint."""
    manifest = files.read_manifest(Folder(str(folder)))
    entry = manifest.workers[0]
    data = files.check_file(Folder(str(folder)) / manifest.name, entry)
    return decode_tree(data, entry.file, tensor_of)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    state = tower(folder)["model"]
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def moments(folder: Path) -> dict[str, torch.Tensor]:
    """The first moments of Adam by the name of the parameter."""
    tree = tower(folder)
    numbers = [number for group in tree["optimizer"]["param_groups"] for number in group["params"]]
    state = tree["optimizer"]["state"]
    return {name: state[at]["exp_avg"] for name, at in zip(tree["parameters"], numbers, strict=True) if at in state}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (["price", "user", "item"], ["price", "age", "user", "item", "hour"], r"the inputs \[age, hour\] are new"),
        (["price", "age", "user", "item", "hour"], ["price", "user", "item"], r"\[age, hour\] are no longer there"),
    ],
    ids=["added", "removed"],
)
def test_inputs_come_and_go(launcher: Launcher, folder: Path, first: list[str], second: list[str], said: str) -> None:
    trained(launcher, words(folder, "first", "monday", first))
    err = trained(launcher, words(folder, "second", "tuesday", second, f"--from={folder}/first", *STILL))
    assert re.search(said, err), err
    assert re.search(r"\d tensors of the tower begin anew, as their shape is another one: ", err), err
    before, after = rows_of_checkpoint(folder / "first"), rows_of_checkpoint(folder / "second")
    table = next(name for name in before if name.endswith("user.weight") or "user" in name)
    assert before[table]
    for key, row in before[table].items():
        assert after[table][key][2] == row[2]
    was, now = tensors(folder / "first"), tensors(folder / "second")
    same = [name for name in now if name in was and was[name].shape == now[name].shape]
    others = [name for name in now if name in was and was[name].shape != now[name].shape]
    assert others, "the first layer reads other inputs"
    assert any(name.endswith("weight") for name in same), "layers above it go on"
    for name in same:
        assert torch.equal(was[name], now[name]), name
    # Adam's moments go on with their parameters, and those of the others begin anew, without the other run's steps.
    then, mean = moments(folder / "first"), moments(folder / "second")
    assert any(then[name].any() for name in same if name in then)
    for name in others:
        if name in mean:
            assert mean[name].shape == now[name].shape


def test_a_run_that_learns_goes_on_with_new_inputs(launcher: Launcher, folder: Path) -> None:
    """Not with rates of zero: the run steps, saves, and goes on from its own checkpoint."""
    names = ["price", "user", "item"]
    trained(launcher, words(folder, "first", "monday", names))
    arguments = words(folder, "second", "tuesday", [*names, "hour"], f"--from={folder}/first")
    trained(launcher, [*arguments, "--workers=2", "--set=train.staleness=0"])
    assert tower(folder / "second")["extra"]["steps"]
    assert "resumed from" in trained(launcher, [*arguments, "--set=train.epochs=2", "--workers=2", "--resume=auto",
                                                "--set=train.staleness=0"])  # fmt: skip


def test_a_vocabulary_grows_and_its_rows_stay(launcher: Launcher, folder: Path) -> None:
    names = ["price", "item"]
    trained(launcher, words(folder, "first", "monday", names, rows="{item: 4}"))
    (folder / "items.txt").write_text("i0\ni1\ni2\ni3\ni4\n")
    refused = launcher.start(*words(folder, "small", "tuesday", names, f"--from={folder}/first", rows="{item: 5}"))
    assert refused.popen.wait(300) == 1
    assert "has 4 rows for the feature item, and this job 5; the row of a key is the key modulo" in refused.err
    arguments = words(folder, "second", "tuesday", names, f"--from={folder}/first", *STILL, rows="{item: 6}")
    err = trained(launcher, arguments)
    assert "features.item: the vocabulary grew from 3 to 5 lines" in err
    before, after = rows_of_checkpoint(folder / "first"), rows_of_checkpoint(folder / "second")
    (table,) = (name for name in before if before[name] and "item" in name and "wide" not in name)
    assert set(before[table]) == {0, 1, 2, 3}, "unknown tokens, and three lines"
    assert set(after[table]) == {0, 1, 2, 3, 4, 5}
    for key, row in before[table].items():
        assert after[table][key][2] == row[2]


def test_what_would_mean_something_else_is_refused_by_name(launcher: Launcher, folder: Path) -> None:
    names = ["price", "age", "user", "item"]
    trained(launcher, words(folder, "first", "monday", names))
    begin = f"--from={folder}/first"
    for number, (second, more, rows, wanted) in enumerate(
        (
            (["age", "price", "user", "item"], (), "{'*': 5000}", r"has inputs in the order .*--accept tower"),
            (["price", "user", "item", "hour"], (), "{'*': 5000}", r"\[hour\] are new.*\[age\] are no longer there"),
            (names, (), "{'*': 4000}", r"has 5000 rows for the feature \w+, and this job 4000"),
            (names, ("--set=model.args.hidden=[16, 4]",), "{'*': 5000}", r"the shapes differ: .*--accept tower"),
            (names, ("--set=model.args.dim=8",), "{'*': 5000}", r"the shapes differ: .*--accept tower"),
            ([*names, "hour"], ("--set=train.dense=ps", "--set=train.staleness=1"), "{'*': 5000}", r"train\.dense ps"),
            (names, ("--accept=user.width",), "{'*': 5000}", r"accept: 'user\.width' is not allowed; allowed: TABLE\."),
            (names, ("--accept=nosuch.dim",), "{'*': 5000}", r"accept: table 'clicks/nosuch' is not restored"),
        )
    ):
        run = launcher.start(*words(folder, f"other{number}", "tuesday", second, begin, *more, rows=rows))
        assert run.popen.wait(300) == 1, wanted
        assert re.search(wanted, run.err, re.DOTALL), run.err
    alone = launcher.start(*words(folder, "alone", "tuesday", names, "--accept=tower"))
    assert alone.popen.wait(300) == 1
    assert "accept: has no effect without start_from" in alone.err


@pytest.mark.parametrize(
    ("second", "more", "accept"),
    [
        (["age", "price", "user", "hour", "item"], (), ["tower"]),
        (["price", "user", "item"], ("--set=model.args.hidden=[16, 4]",), ["tower"]),
        (["price", "user", "item"], ("--set=model.args.dim=8",), ["*.dim"]),
        (["price", "user", "item"], ("--set=train.row_optimizer={kind: sgd, lr: 0}",), ["*.optimizer"]),
        (["price", "user", "item"], ("--set=tables={'*': {dtype: bfloat16}}",), ["*.dtype"]),
    ],
    ids=["order", "hidden", "dim", "optimizer", "dtype"],
)
def test_what_is_accepted_is_taken(
    launcher: Launcher, folder: Path, second: list[str], more: tuple[str, ...], accept: list[str]
) -> None:
    trained(launcher, words(folder, "first", "monday", ["price", "user", "item"]))
    arguments = words(folder, "second", "tuesday", second, f"--from={folder}/first", *STILL, *more)
    err = trained(launcher, [*arguments, *(f"--accept={each}" for each in accept)])
    assert ("the tower begins anew" in err) == ("tower" in accept)
    before, after = rows_of_checkpoint(folder / "first"), rows_of_checkpoint(folder / "second")
    table = next(name for name in before if before[name] and "user" in name and "wide" not in name)
    for key, row in before[table].items():
        was, stored = np.frombuffer(row[2], np.float32), after[table][key][2]
        if "*.dtype" in accept:
            was, now = as_float32(stored_as(was, "bfloat16")), as_float32(np.frombuffer(stored, np.uint16))
        else:
            now = np.frombuffer(stored, np.float32)
        np.testing.assert_array_equal(now[: len(was)], was)
    was, now = tensors(folder / "first"), tensors(folder / "second")
    goes_on = [name for name in now if name in was and was[name].shape == now[name].shape and was[name].any()]
    if "tower" in accept:
        assert any(not torch.equal(was[name], now[name]) for name in goes_on)
    else:
        assert goes_on
        assert all(torch.equal(was[name], now[name]) for name in goes_on)


def test_a_run_starts_from_a_published_version(launcher: Launcher, folder: Path) -> None:
    names = ["price", "user", "item"]
    publish = f"--set=publish={{root: {folder}/models, model: ctr, alias: live}}"
    trained(launcher, words(folder, "first", "monday", names, publish))
    err = trained(launcher, words(folder, "second", "tuesday", names, publish, "--from=ctr@live", *STILL))
    assert f"starts from {folder}/first/save-000001, step 11" in err
    assert rows_of(folder / "second") == rows_of(folder / "first")
    # The alias names the second run's version by now, and a number an earlier one.
    assert f"starts from {folder}/second/save-" in trained(
        launcher, words(folder, "third", "tuesday", names, publish, "--from=ctr@live")
    )
    assert f"starts from {folder}/first/save-" in trained(
        launcher, words(folder, "fourth", "tuesday", names, publish, "--from=ctr@1", "--set=publish.alias=null")
    )
    trained(launcher, [*words(folder, "bare", "monday", names, publish), "--set=train.checkpoint=null"])
    for number, (begin, more, wanted) in enumerate(
        (
            ("ctr@live", publish, r"ctr@live is version 5, which was published without a checkpoint"),
            ("ctr@9", publish, r"model 'ctr': has no version 9; it has: 1, 2, 3, 4, 5"),
            ("ctr@beta", publish, r"ctr.*beta"),
            ("ctr@live", "--workers=1", r"ctr@live is a published version, and the job has no publish\.root"),
        )
    ):
        run = launcher.start(*words(folder, f"wrong{number}", "tuesday", names, more, f"--from={begin}"))
        assert run.popen.wait(300) == 1
        assert re.search(wanted, run.err), run.err
    gone = folder / "third"
    shutil.rmtree(gone)
    run = launcher.start(*words(folder, "late", "tuesday", names, publish, "--from=ctr@3"))
    assert run.popen.wait(300) == 1
    assert re.search(r"NotFound: .*third", run.err), run.err


def rows_of(folder: Path) -> dict[str, dict[int, bytes]]:
    return {name: {key: row[2] for key, row in rows.items()} for name, rows in rows_of_checkpoint(folder).items()}


def test_a_parameter_that_is_not_of_the_model_begins_anew() -> None:
    model = torch.nn.Linear(2, 1)
    outside = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    saved, later = (torch.optim.Adam([outside[0], *model.parameters(), outside[1]]) for _ in range(2))
    (model(torch.ones(1, 2)).sum() + outside[0].sum() + 5 * outside[1].sum()).backward()
    saved.step()
    tree = {"optimizer": saved.state_dict(), "parameters": parameter_names(model, saved)}
    assert tree["parameters"] == ["", "weight", "bias", ""]
    load_optimizer_of_fitting(model, later, tree, ())
    assert torch.equal(later.state[model.weight]["exp_avg"], saved.state[model.weight]["exp_avg"])
    assert not any(each in later.state for each in outside), "neither has the moments of the other"


def test_strict_in_python_names_the_tensors_that_begin_anew(tmp_path: Path) -> None:
    with sr.local_cluster(shards=1) as cluster:
        small, large = (torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, 1)) for width in (3, 5))
        with sr.connect(cluster.address, "strict", staleness=None) as session:
            session.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0))
            adam = torch.optim.Adam(small.parameters())
            small(torch.ones(2, 3)).sum().backward()
            adam.step()
            session.save(str(tmp_path), model=small, optimizer=adam)
            later = torch.optim.Adam(large.parameters())
            with pytest.raises(sr.errors.FailedPrecondition, match="the shapes differ"):
                session.restore(str(tmp_path), model=large, optimizer=later)
            restored = session.restore(str(tmp_path), model=large, optimizer=later, strict=False)
            assert restored.anew == ("0.weight",)
            assert torch.equal(small[1].weight, large[1].weight)
            at = list(large.parameters())
            assert torch.equal(later.state[at[1]]["exp_avg"], adam.state[small[0].bias]["exp_avg"])
            assert at[0] not in later.state
            large(torch.ones(2, 5)).sum().backward()
            later.step()
            session.save(str(tmp_path / "alone"), optimizer=later)
            with pytest.raises(sr.errors.FailedPrecondition, match=r"restore\.strict: False needs the names"):
                session.restore(str(tmp_path / "alone"), optimizer=later, strict=False)
