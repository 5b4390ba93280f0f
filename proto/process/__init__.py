"""The parts that every server process has: listening, access, logs, metrics, stopping."""
