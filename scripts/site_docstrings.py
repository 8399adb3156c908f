"""An extension of griffe: roles of reStructuredText in docstrings become code in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Roles(griffe.Extension):
    """Replaces each ``:class:`X``` by the name alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object of the package that has been read."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
