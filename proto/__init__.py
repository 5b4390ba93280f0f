"""The contract between processes: messages, errors, names and the configuration schema."""

import os

# At INFO, gRPC reports on stderr every fork of a process that has a channel: each DataLoader worker, each subprocess.
# gRPC reads these variables once, at its first import. Values that the user has set are kept.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# gRPC's fork support is on by default. With it, a child that is forked while another thread is inside gRPC may crash
# before its exec: of the processes that a busy coordinator started, 12 in 100 ended by SIGSEGV at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
