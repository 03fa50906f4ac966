"""Headrace: what producers and workers agree on."""

__version__ = "0.1.0"
