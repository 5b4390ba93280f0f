"""How Sparserow is run: command line, local cluster, job files."""
