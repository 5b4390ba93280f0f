"""Features of a model as pure functions of columns, for training and for serving."""
