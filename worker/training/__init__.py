"""The trainer of a job file: its backends, steps, checkpoints and reports."""
