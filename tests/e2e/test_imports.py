"""What processes of a job import: a module that they do not need costs each of them its time."""

from __future__ import annotations

import subprocess
import sys


def test_readers_import_no_pandas() -> None:
    """pyarrow imports it where it is installed, which took a tenth of the start of every worker."""
    code = "import sys, sparserow.worker.training.trainer; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_model_of_deferred_tables_imports_no_compiler() -> None:
    """Torch imports it for the first numbers that it draws on the meta device, in 2.4 s of each worker."""
    code = "import sys, torch, sparserow as sr\nwith sr.deferred(min_rows=1): torch.nn.Embedding(10, 2)\n"
    code += "assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_serving_processes_import_arrow_with_the_first_values() -> None:
    """Most look rows up by key alone; Arrow, and pandas with it, would take half a second and 60 MB of each of them."""
    code = "import sys, sparserow.serving.process, sparserow.serving.service\n"
    code += "assert not {'pyarrow', 'pandas', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_command_that_starts_workers_imports_no_torch() -> None:
    """The workers import it; a second of every ``sparserow train`` was its own import."""
    code = (
        "import sys, sparserow.deploy.train.checked_nodes, sparserow.deploy.train.training_job\n"
        "import sparserow.deploy.train.job_workers, sparserow.deploy.train.training_display\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


_WITHOUT_EXTRAS = """
import re, sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires


def named(distribution):
    for line in requires(distribution) or ():
        if "extra ==" not in line:
            yield normal(re.match(r"[\\w.-]+", line)[0])


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


allowed, left = set(), {"sparserow"}
while left:
    name = left.pop()
    allowed.add(name)
    try:
        left |= {*named(name)} - allowed
    except PackageNotFoundError:  # of another platform, or Python
        pass
absent = {module for module, names in packages_distributions().items() if not {*map(normal, names)} & allowed}
assert {"opentelemetry", "pandas", "pytest", "ray"} <= absent, absent


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import sparserow
from sparserow.deploy import cli

for name in sparserow.__all__:
    getattr(sparserow, name)
for name in cli.COMMANDS:
    import_module(f"sparserow.deploy.commands.{name}")
"""


def test_what_users_import_needs_no_package_beyond_the_dependencies() -> None:
    """Development has every extra, so an import of one looks sound there."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT_EXTRAS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
