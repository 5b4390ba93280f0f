"""The page of a running cluster: one HTML file, one JSON reply, and the last hour of some series."""
