"""Holds the headers that kernels are compiled from; a package only so that they install beside the Python code."""
