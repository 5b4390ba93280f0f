"""One file per command of ``sparserow``; each has a function of the file's name."""
