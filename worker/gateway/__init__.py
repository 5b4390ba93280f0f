"""The gateway: serves rows of a training cluster over gRPC to programs in other languages."""
