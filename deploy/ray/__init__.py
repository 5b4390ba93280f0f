"""Runs Sparserow on a Ray cluster, which places and restarts its processes (docs/ray.md)."""

from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.job import JobConfig
from ...proto.options.document import load_config
from .cluster import RayCluster, RayOptions, ServingOptions, ray_cluster, start_on_ray
from .training import train_on_ray

__all__ = [
    "ClusterConfig",
    "JobConfig",
    "RayCluster",
    "RayOptions",
    "ServingOptions",
    "load_config",
    "ray_cluster",
    "start_on_ray",
    "train_on_ray",
]
