"""distill: teach a small language model from large ones, offline, through a compact cache of their distributions."""

__version__ = "0.1.0"
