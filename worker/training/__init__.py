"""The trainer of a job file: backends, steps, checkpoints, reports."""
