"""The commands of ``sparserow``, one file each, with a function of the file's name."""
