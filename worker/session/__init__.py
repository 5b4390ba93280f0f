"""The session: steps, tables and optimizers of one worker of a job."""
