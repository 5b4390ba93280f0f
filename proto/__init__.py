"""The contract between processes: messages, errors, names and the configuration schema."""

import os

# gRPC tells stderr at INFO about every fork of a process that has a channel (each DataLoader worker, each
# subprocess). It reads this once, when it is first imported; a setting of the user's stands.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
