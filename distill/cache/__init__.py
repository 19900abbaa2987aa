"""The cache: folders of layers, each a teacher's records in sealed HDF5 shards (docs/cache-format.md)."""

from distill.cache.layer import Layer, LayerSpec, Located
from distill.cache.shard import FORMAT_VERSION, ShardImage, ShardInfo, ShardReader, build_shard

__all__ = [
    "FORMAT_VERSION",
    "Layer",
    "LayerSpec",
    "Located",
    "ShardImage",
    "ShardInfo",
    "ShardReader",
    "build_shard",
]
