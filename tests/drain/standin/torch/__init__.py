"""Stands in for torch: a cache of its own above the driver, and of torch's interface what a drain uses."""
from . import cuda
