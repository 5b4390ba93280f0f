"""Saves and restores a job: its rows, dense side, reader and clock in one checkpoint (docs/checkpoints.md)."""

from .restore import RestoredCheckpoint, restore
from .save import SavedCheckpoint, keep_rows, save

__all__ = ["RestoredCheckpoint", "SavedCheckpoint", "keep_rows", "restore", "save"]
