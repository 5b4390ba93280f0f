"""Traces a forward and expresses the ids that it looks up as functions of its batch."""
