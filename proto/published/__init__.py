"""What a published version is on disk: its rows, its dense program, its registry."""
