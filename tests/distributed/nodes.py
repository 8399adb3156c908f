"""Nodes on one machine: network namespaces that a switch joins, and whose cables can be pulled."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from types import TracebackType

_numbers = itertools.count()
_NETWORK = 0x40000000  # of setns


def can_make_nodes() -> bool:
    """Whether this user may, and the tools are there."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"zc{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        _ip("netns", "delete", name)
    return made


class Nodes:
    """Nodes with the addresses 10.78.0.1 and up; nothing of them is left behind a ``with``.

    ``rate`` limits what each sends, as tc has it ("1gbit"). The switch has a namespace of its own,
    so several of these may be there at a time.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self._prefix = f"zc{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-s"
        self.names = [f"{self._prefix}-{node}" for node in range(count)]
        self._rate = rate

    def __enter__(self) -> Nodes:
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        for name in (self._switch, *self.names):
            _ip("netns", "add", name)
            subprocess.run(
                ["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"],
                capture_output=True,
            )
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for node, name in enumerate(self.names):
            port = f"port{node}"
            end = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "add", port, *end)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self._rate is not None:
                limit = ("root", "tbf", "rate", self._rate, "burst", "512kb", "latency", "200ms")
                command = ["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit]
                subprocess.run(command, check=True, capture_output=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in (*self.names, self._switch):  # their interfaces go with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    @staticmethod
    def address(node: int) -> str:
        return f"10.78.0.{node + 1}"

    def enter(self, node: int) -> None:
        """Puts this process, of one thread, on the node."""
        with open(f"/run/netns/{self.names[node]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {self.names[node]}")

    def set_cable(self, node: int, state: str) -> list[str]:
        """The command line that pulls the node's cable (``"down"``) or plugs it in (``"up"``)."""
        return ["ip", "-n", self._switch, "link", "set", f"port{node}", state]


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)
