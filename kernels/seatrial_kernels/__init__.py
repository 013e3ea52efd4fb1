"""Kernels and patches that SGLang 0.5.23 is served with."""

__version__ = "0.1.0"
