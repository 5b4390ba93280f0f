"""The gateway: a worker over gRPC for programs in other languages."""
