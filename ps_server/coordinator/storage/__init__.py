"""The stores of the coordinator's state: a file, or etcd."""
