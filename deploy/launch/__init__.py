"""Starts processes on this machine, and waits until they are ready."""
