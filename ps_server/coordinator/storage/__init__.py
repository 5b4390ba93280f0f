"""Where the coordinator keeps its state: a file, or etcd."""
