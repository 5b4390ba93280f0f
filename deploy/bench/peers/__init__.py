"""Other libraries that benchmarks measure beside ours, a file each; each needs an environment with that library."""
