"""Runs published programs; the one folder of serving that imports torch."""
