"""Runs a job file, on one machine or as a worker under torchrun."""
