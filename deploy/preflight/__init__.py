"""Checks before a job starts: its plan, its peers, the health of its parts."""
