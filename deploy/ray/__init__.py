"""Runs Sparserow on a Ray cluster, which places and restarts its processes (docs/ray.md)."""

from .cluster import RayCluster, RayOptions, ServingOptions, ray_cluster, start_on_ray
from .training import train_on_ray

__all__ = ["RayCluster", "RayOptions", "ServingOptions", "ray_cluster", "start_on_ray", "train_on_ray"]
