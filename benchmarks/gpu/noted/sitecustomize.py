"""Imported by every Python process that has this folder on its path: notes when named functions run."""

from benchmarks.gpu.noting import follow

follow()
