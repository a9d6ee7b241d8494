"""Tables from a name to a class that is imported only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from specdec.errors import UnsupportedError, unknown_name


class Registry(dict[str, str]):
    """Maps a name to ``"module:Attribute"``; the order of the rows is meaningful to its owner."""

    def __init__(self, kind: str, rows: dict[str, str]) -> None:
        super().__init__(rows)
        self.kind = kind

    def load(self, name: str) -> Any:
        """The object behind ``name``; raises `UnsupportedError` that lists the known names."""
        if name not in self:
            raise UnsupportedError(unknown_name(self.kind, name, self))
        module, attribute = self[name].split(":")
        return getattr(importlib.import_module(module), attribute)
