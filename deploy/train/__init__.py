"""Runs a job file on one machine or under a launcher."""
