"""Sparserow on a Ray cluster: Ray places and restarts processes, this says what they are (docs/ray.md)."""

from .cluster import RayCluster, RayOptions, ServingOptions, ray_cluster, start_on_ray
from .training import train_on_ray

__all__ = ["RayCluster", "RayOptions", "ServingOptions", "ray_cluster", "start_on_ray", "train_on_ray"]
