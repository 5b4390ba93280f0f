"""The benchmarks of ``sparserow bench``, each of which measures against a reference in the same run."""

from ...cpp_ext import _bench
from ...proto.errors import error_of

_bench.set_error_factory(error_of)
