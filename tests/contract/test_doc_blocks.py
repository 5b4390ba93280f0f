"""Every code block of README.md and docs/ is run by a test, or checked by one, or named here with why it cannot be."""

from __future__ import annotations

import yaml

from doc_blocks import doc_blocks
from service_units import unit_blocks
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import validate
from sparserow.proto.security.quotas import Quotas
from sparserow.proto.security.security import Limits

BLOCKS = doc_blocks()
SHELL = [block for block in BLOCKS if block.language == ""]
# Blocks that no test runs, and why. Of their sparserow commands tests/contract/test_documents.py checks the options.
NOT_RUN = {
    "README.md: make demo": "it builds the native core; tests of the demo run `sparserow demo` itself",
    "README.md: 200 steps": "tests/e2e/test_first_block.py compares it with what the block before prints",
    "docs/admission.md: $ sparserow table sweep": "the output is of a table of 9 million rows",
    "docs/benchmarks.md: sparserow bench": "takes hours; tests/bench runs the small sizes",
    "docs/benchmarks.md: sparserow bench peers": "installs packages; tests/bench/test_bench_peers.py measures torch's",
    "docs/checkpoints.md: sparserow train": "alternatives in a line, and HOST:PORT",
    "docs/checkpoints.md: /ckpt/save": "a list of files",
    "docs/own-models.md: sparserow train": "tests/e2e/test_own_models.py runs the first in a folder of its own",
    "docs/models.md: sparserow serve": "needs a published model; tests/e2e/test_zoo_jobs.py runs the second on one",
    "docs/parallel-towers.md: /ckpt/save": "a list of files",
    "docs/compose.md: docker compose": "needs Docker; tests/e2e/test_compose.py runs the servers as processes",
    "docs/foreign-models.md: pip install": "installs packages; tests/e2e/test_foreign_models.py runs the scripts",
    "docs/gpu.md: make test-gpu": "installs torch for CUDA; tests/contract/test_gpu_target.py runs the second",
    "docs/gpu.md: docker build": "needs Docker",
    "docs/gpu.md: cd deploy/k8s/base": "needs a Kubernetes cluster",
    "docs/job-metrics.md: sparserow report": "test_run_report.py does it; the second needs TensorBoard",
    "docs/kubernetes.md: make images": "needs a Kubernetes cluster; tests/e2e/test_images.py builds the images",
    "docs/operations.md: sparserow --security": "needs a machine of that name and an NVMe disk",
    "docs/operations.md: sparserow status": "an option in brackets, and HOST:PORT",
    "docs/operations.md: pip install": "installs packages, and needs a collector",
    "docs/operations.md: sparserow checkpoint save s3": "needs an object store and a running cluster",
    "docs/operations.md: sparserow checkpoint save /ckpt": "needs two clusters, and an operator between them",
    "docs/operations.md: torchrun --nnodes 8": "needs several hosts; tests/e2e/test_node_check.py runs it on one",
    "docs/other-languages/README.md: # beside": "needs Go and protoc",
    "docs/other-languages/README.md: ./client": "needs the program that Go has built",
    "docs/plan.md: rows in a row cache": "tests/e2e/test_plan.py makes it by the command",
    "docs/plan.md: $ sparserow plan": "tests/e2e/test_plan.py makes it by the command",
    "docs/ray.md: sparserow --security": "needs a Ray cluster of several machines",
    "docs/security.md: sparserow security init": "needs machines of those names",
    "docs/security.md: sparserow security token": "writes to /etc",
    "docs/security.md: sparserow security signing-key": "writes to /etc",
    "docs/serving.md: sparserow serve": "needs an object store and a running cluster",
    "docs/serving.md: curl": "needs curl and grpcurl",
    "docs/train-your-model.md: sparserow up": "servers that run until they are stopped",
    "docs/train-your-model.md: sparserow coordinator": "needs etcd on three hosts",
    "docs/train-your-model.md: torchrun": "needs several hosts",
}


def test_every_block_is_run_or_checked_or_named() -> None:
    assert {block.language for block in BLOCKS} == {"", "python", "yaml", "ini"}
    left = [block.name for block in SHELL if not any(block.name.startswith(name) for name in NOT_RUN)]
    assert not left, "\n".join(("run these in a test, or name them in NOT_RUN with the reason:", *left))
    gone = [name for name in NOT_RUN if not any(block.name.startswith(name) for block in SHELL)]
    assert not gone, "\n".join(("NOT_RUN names what is on no page:", *gone))


def test_units_are_those_that_a_test_runs() -> None:
    assert len([block for block in BLOCKS if block.language == "ini"]) == len(unit_blocks())


def test_a_block_of_yaml_is_allowed() -> None:
    whole = {
        "data": {"format": "criteo", "train": "a", "test": "b"},
        "model": {"class": "DLRM", "args": {"rows": {"*": 1_000_000}}},
    }
    blocks = [block for block in BLOCKS if block.language == "yaml"]
    assert len(blocks) > 15
    wrong = []
    for block in blocks:
        try:
            tree = yaml.safe_load(block.text.replace(", ..., ", ", education, capital_gain, "))
            if "limits" in tree:
                Limits.model_validate(tree["limits"])
            elif "quotas" in tree:
                Quotas.model_validate(tree["quotas"])
            else:
                items = [task["item"] for task in tree.get("tasks", {}).values() if task and "item" in task]
                validate(JobConfig, {**whole, "features": {item: {"kind": "id"} for item in items}, **tree})
        except Exception as error:  # of any kind: each block is told with what is wrong in it
            wrong.append(f"{block.page}:{block.line}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
