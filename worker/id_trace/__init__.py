"""Which ids a forward looks up, as functions of its batch."""
