"""The status of a cluster in figures and sentences: one document for terminals, for programs and for the page."""
