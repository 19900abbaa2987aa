"""Caches that people hand to each other: what is in one, as text and as samples, and how one is given away."""

from distill.sharing.describe import describe_cache, describe_sample
from distill.sharing.export import ExportReport, choose_layers, export_file, export_folder
from distill.sharing.plain import import_plain
from distill.sharing.samples import sample_at, samples_of

__all__ = [
    "ExportReport",
    "choose_layers",
    "describe_cache",
    "describe_sample",
    "export_file",
    "export_folder",
    "import_plain",
    "sample_at",
    "samples_of",
]
