"""The contract between processes: messages, errors, names and the configuration schema."""

import os

# gRPC tells stderr at INFO about every fork of a process that has a channel (each DataLoader worker, each
# subprocess). It reads these once, when it is first imported; settings of the user's stand.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# With gRPC's fork support on, which is its default, a child that is forked while another thread is inside gRPC may
# crash before its exec: of the processes that a busy coordinator started, 12 in 100 ended by SIGSEGV at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
