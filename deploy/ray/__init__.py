"""Runs Sparserow on a Ray cluster, which places and restarts its processes (docs/ray.md)."""

from ...proto.config.config import ClusterConfig, load_config
from ...proto.config.job import JobConfig
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
