"""Runs published programs. It is the only folder of serving that imports torch."""
