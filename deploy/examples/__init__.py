"""Small programs that show one thing each; run one with ``python -m sparserow.deploy.examples.NAME``."""
