"""The plan of a model's lookups: learnt from a traced forward, checked against each batch, made before its forward."""
