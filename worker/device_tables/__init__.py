"""Tables whose rows are spread over the devices of a job's ranks (docs/device-tables.md)."""
