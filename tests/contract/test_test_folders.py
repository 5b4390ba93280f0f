"""tests/README.md says what is in which folder: ``tests/unit`` starts no process, and every folder has its row."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from rooms import ROOT

TESTS = ROOT / "tests"
# Functions and classes whose call starts or forks a process, by their full names.
STARTS = re.compile(
    r"sparserow\.(?:[\w.]+\.)?local_(?:cluster|serving)"
    r"|(?:[\w.]+\.)?Popen"
    r"|subprocess\.(?:run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|asyncio\.(?:subprocess\.)?create_subprocess_(?:exec|shell)"
    r"|os\.(?:fork|forkpty|system|popen|posix_spawnp?|spawn\w+)"
    r"|pty\.(?:fork|spawn)"
    r"|(?:torch\.)?multiprocessing\.(?:\w+\.)*(?:Process|Pool|Manager|get_context|spawn|start_processes)"
    r"|concurrent\.futures\.(?:process\.)?ProcessPoolExecutor"
)

# Test files that start a process, each in a way of its own.
STARTING = [
    "import sparserow as sr\nwith sr.local_cluster(shards=1) as cluster: pass",
    "from sparserow.deploy.launch.local_serving import local_serving as serve\nserve('ctr')",
    "import subprocess\nsubprocess.run(['true'])",
    "from subprocess import Popen as start\nstart(['true'])",
    "import subprocess as sub\nsub.check_output(['true'])",
    "import os\ndef test():\n    if os.fork() == 0: os._exit(0)",
    "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "import multiprocessing\nmultiprocessing.get_context('spawn').Pool(2)",
    "from torch import multiprocessing as mp\nmp.spawn(print)",
    "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
    "import asyncio\nasync def test(): await asyncio.create_subprocess_exec('true')",
    "from torch.utils.data import DataLoader\nDataLoader([1], num_workers=2)",
    "def test(launcher): pass",
    "from sparserow_process import run_ranks\nrun_ranks(__file__, 2)",
    "import sparserow_process\nsparserow_process.Launcher(None)",
]
# Test files that look as if they did.
INNOCENT = [
    "import sparserow as sr\nsr.InProcessCluster(shards=1)",
    "import subprocess\ndef refused() -> subprocess.Popen[str]: raise OSError\n"
    "def test(monkeypatch): monkeypatch.setattr(subprocess, 'Popen', refused)",
    "from sparserow.proto.worker_faults import Process\nProcess(0, 1, 'host', 5)",
    "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(2)",
    "from torch.utils.data import DataLoader\nDataLoader([1], num_workers=0)",
    "from sparserow_process import free_port, wait_until\nwait_until(free_port, 'a port')",
]


def imported(tree: ast.Module) -> dict[str, str]:
    """The full name of what each name stands for that a file imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def calls(node: ast.AST, names: dict[str, str], module: str) -> Iterator[tuple[ast.Call, str]]:
    """Each call, and the full name of what is called; a name that is not imported is one of ``module``."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            first, dot, rest = ast.unparse(each.func).partition(".")
            yield each, names.get(first, f"{module}.{first}") + dot + rest


@functools.cache
def starters() -> frozenset[str]:
    """Functions and classes of tests/support that start a process, also by way of another one."""
    called: dict[str, set[str]] = {}
    for path in (TESTS / "support").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = imported(tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                called[f"{path.stem}.{node.name}"] = {name for _, name in calls(node, names, path.stem)}
    found: set[str] = set()
    while more := {
        name
        for name, others in called.items()
        if name not in found and (others & found or any(STARTS.fullmatch(other) for other in others))
    }:
        found |= more
    return frozenset(found)


def starts(source: str) -> list[tuple[int, str]]:
    """(line, what it is) of everything in a test file that starts or forks a process."""
    tree = ast.parse(source)
    found = []
    for call, name in calls(tree, imported(tree), "here"):
        if STARTS.fullmatch(name) or name in starters():
            found.append((call.lineno, f"calls {name}"))
        for keyword in call.keywords:
            if keyword.arg == "num_workers" and ast.unparse(keyword.value) != "0":
                found.append((call.lineno, f"has {ast.unparse(keyword)}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg == "launcher":
            found.append((node.lineno, "has the fixture launcher"))
    return sorted(found)


def test_the_rule_sees_each_way_to_start_a_process_and_no_other_call() -> None:
    missed = [source for source in STARTING if not starts(source)]
    assert not missed, "\n\n".join(missed)
    accused = [source for source in INNOCENT if starts(source)]
    assert not accused, "\n\n".join(accused)


def test_no_file_of_unit_starts_a_process() -> None:
    files = sorted((TESTS / "unit").rglob("*.py"))
    assert len(files) > 100
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {what}; what starts or forks a process belongs in tests/e2e"
        for path in files
        for line, what in starts(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def is_a_folder_of_tests(path: Path) -> bool:
    """Whether git would keep it: a folder that is left of another branch has bytecode alone."""
    return (
        path.is_dir() and path.name[0] not in "._" and any(p.is_file() and p.suffix != ".pyc" for p in path.rglob("*"))
    )


def test_the_table_of_folders_names_each_folder_once() -> None:
    table = (TESTS / "README.md").read_text().split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)/` \| .", table, re.MULTILINE)
    folders = {path.name for path in TESTS.iterdir() if is_a_folder_of_tests(path)}
    wrong = [f"tests/README.md has no row for {name}/" for name in sorted(folders - set(rows))]
    wrong += [f"tests/README.md has a row for {name}/, which is not there" for name in sorted(set(rows) - folders)]
    wrong += [
        f"tests/README.md has {rows.count(name)} rows for {name}/" for name in sorted(set(rows)) if rows.count(name) > 1
    ]
    assert not wrong, "\n".join(wrong)
