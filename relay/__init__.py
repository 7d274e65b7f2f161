"""The relay: pairs nodes with backbones, carries their frames, serves the page and the slices."""

__version__ = "0.1.0"
