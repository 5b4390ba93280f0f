"""The contract between processes: messages, errors, names and the configuration schema."""
