"""Checks before a job starts: the plan of a table, the health of a machine, and its peers."""
