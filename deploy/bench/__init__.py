"""Benchmarks of ``sparserow bench``: each measures against a reference in the same run."""
