"""The version of the package, in one place and free of imports."""

__version__ = "0.1.0"
