"""The session of a training script: what it does with a model, a loader and a checkpoint, in one place."""
