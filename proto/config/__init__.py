"""The configuration that operators write: job files and server options, checked before a program starts."""
