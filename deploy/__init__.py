"""Programs that run Sparserow: the command line, local clusters, job files and benchmarks."""
