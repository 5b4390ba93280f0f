"""What an operator writes: job files and server options, checked before anything starts."""
