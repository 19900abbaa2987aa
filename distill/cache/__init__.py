"""The cache: folders of layers, each a teacher's records in sealed HDF5 shards (docs/cache-format.md)."""

from distill.cache.gate import Admissions
from distill.cache.layer import Layer, Located
from distill.cache.shard import FORMAT_VERSION, ShardImage, ShardInfo, ShardReader, build_shard
from distill.cache.source import Source, cut
from distill.cache.spec import LayerSpec, find_layers, readable_layers

__all__ = [
    "FORMAT_VERSION",
    "Admissions",
    "Layer",
    "LayerSpec",
    "Located",
    "ShardImage",
    "ShardInfo",
    "ShardReader",
    "Source",
    "build_shard",
    "cut",
    "find_layers",
    "readable_layers",
]
