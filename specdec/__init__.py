"""specdec: lossless speculative decoding for GGUF models."""

from __future__ import annotations

from specdec.version import __version__

__all__ = ["__version__"]
