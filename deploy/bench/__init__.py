"""The benchmarks of ``sparserow bench``, each of which measures against a reference in the same run."""
