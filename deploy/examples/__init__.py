"""Small programs that show one thing each; run with ``python -m sparserow.deploy.examples.NAME``."""
