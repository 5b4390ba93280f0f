"""The files of a published version: its rows, its dense program and the registry that names it."""
