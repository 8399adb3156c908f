"""The emulated link between device and host that models get which are sharded from now on."""

from __future__ import annotations

from zerocore._C import LinkModel

_current: LinkModel | None = None


def emulated_host_link() -> LinkModel | None:
    """What was set last; None where nothing is emulated."""
    return _current


def set_emulated_host_link(link: LinkModel | None) -> None:
    """For models that are sharded from now on."""
    global _current
    _current = link
