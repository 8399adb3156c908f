"""Weights to processes that are none of the ranks: over shared memory, or over TCP."""

from __future__ import annotations

import json
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.common.agreement import on_all_ranks
from zerocore.common.quantities import parse_nbytes
from zerocore.model.state import ready_state_of
from zerocore.planning.export_steps import DEFAULT_BUCKET
from zerocore.weights.buckets import export

_ALIGNMENT = 64
_TAKEN = b"+"


class Receiver:
    """Takes weights in a process that need not know torch.distributed, one sender at a time.

    Attributes:
        address: ``host:port`` that senders are given.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener = socket.create_server((host, port))
        self._connection: socket.socket | None = None
        self._memory: SharedMemory | None = None
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"

    def receive(self) -> Iterator[dict[str, Tensor]]:
        """The buckets of one export: CPU tensors by name, valid until the next turn.

        Waits for a sender, and keeps its connection for the next export.

        Raises:
            ConnectionError: the sender has ended before its last bucket.
        """
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        while (header := self._next_header()) is not None:
            data = self._bytes_of(header)
            yield _tensors(data, header["tensors"])
            self._connection.sendall(_TAKEN)
        self._connection.sendall(_TAKEN)

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        if self._memory is not None:
            with suppress(BufferError):
                self._memory.close()

    def _next_header(self) -> dict[str, Any] | None:
        assert self._connection is not None
        try:
            (size,) = struct.unpack("!I", _read(self._connection, 4))
            header = json.loads(_read(self._connection, size))
        except ConnectionError:
            self._connection.close()
            self._connection = None
            raise
        return header if header["tensors"] else None

    def _bytes_of(self, header: dict[str, Any]) -> Tensor:
        assert self._connection is not None
        if header["memory"] is None:
            return torch.frombuffer(_read(self._connection, header["nbytes"]), dtype=torch.uint8)
        if self._memory is None or self._memory.name != header["memory"]:
            self._memory = SharedMemory(header["memory"])
            # The sender removes it; Python's tracker would, too, when this process ends.
            with suppress(Exception):
                resource_tracker.unregister(self._memory._name, "shared_memory")  # type: ignore[attr-defined]
        return torch.frombuffer(self._memory.buf, dtype=torch.uint8)


class Sender:
    """Sends the weights of a sharded model to receivers; made on all ranks, rank 0 connects.

    Args:
        addresses: of :class:`Receiver`, each of which gets all weights.
        shared: through shared memory, where the receivers are on rank 0's machine; else over TCP.
        max_bytes: of a bucket.
        timeout: seconds for a receiver to take a bucket.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        shared: bool = True,
        max_bytes: str | int = DEFAULT_BUCKET,
        timeout: float = 60.0,
    ) -> None:
        self.addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self.shared = shared
        self.max_bytes = parse_nbytes(max_bytes, "max_bytes")
        self.timeout = timeout
        self._connections: dict[str, socket.socket] = {}
        self._memory: SharedMemory | None = None

    def send(self, model: nn.Module, **options: Any) -> None:
        """One export to all receivers, by :func:`export` with ``options``; collective.

        Raises:
            ConnectionError: a receiver does not take weights; names it. RuntimeError that says so
                on the ranks that do not send.
        """
        state = ready_state_of(model)
        error: Exception | None = None
        buckets = export(model, to=0, max_bytes=self.max_bytes, **options)
        for bucket in buckets:
            try:
                self._send(bucket)
            except ConnectionError as caught:
                error = caught
                break
        buckets.close()

        def finish() -> None:
            if error is not None:
                raise error
            if state.rank == 0:
                self._send({})

        on_all_ranks(state.ranks.groups, finish, state.device)

    def close(self) -> None:
        """Ends the connections and frees the shared memory."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None

    def _send(self, bucket: dict[str, Tensor]) -> None:
        entries, nbytes = _layout(bucket)
        data = self._packed(bucket, entries, nbytes)
        name = self._memory.name if self.shared and self._memory is not None else None
        header = {"tensors": entries, "nbytes": nbytes, "memory": name}
        text = json.dumps(header).encode()
        for address in self.addresses:
            try:
                connection = self._connection(address)
                connection.sendall(struct.pack("!I", len(text)) + text)
                if entries and not self.shared:
                    connection.sendall(data)
            except OSError as error:
                self._fail(address, error)
        for address in self.addresses:
            try:
                _read(self._connections[address], 1)
            except OSError as error:
                self._fail(address, error)

    def _fail(self, address: str, error: OSError) -> None:
        if (connection := self._connections.pop(address, None)) is not None:
            connection.close()
        raise ConnectionError(f"the receiver of weights at {address}: {error}") from error

    def _connection(self, address: str) -> socket.socket:
        if address not in self._connections:
            host, port = address.rsplit(":", 1)
            made = socket.create_connection((host, int(port)), timeout=self.timeout)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[address] = made
        return self._connections[address]

    def _packed(
        self, bucket: dict[str, Tensor], entries: list[list[Any]], nbytes: int
    ) -> memoryview:
        memory = self._shared(nbytes) if self.shared else memoryview(bytearray(nbytes))
        if nbytes > 0:
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            for name, value in _tensors(flat, entries).items():
                value.copy_(bucket[name])
        return memory

    def _shared(self, nbytes: int) -> memoryview:
        """Shared memory of at least so many bytes, which stays for the next bucket."""
        if self._memory is None or self._memory.size < nbytes:
            if self._memory is not None:
                self._memory.unlink()
            name = f"zerocore-{secrets.token_hex(8)}"
            self._memory = SharedMemory(name, create=True, size=max(nbytes, 1))
        assert self._memory.buf is not None
        return self._memory.buf


def _layout(bucket: dict[str, Tensor]) -> tuple[list[list[Any]], int]:
    """Name, dtype, shape and first byte of each tensor, and the bytes of all."""
    entries: list[list[Any]] = []
    end = 0
    for name, value in bucket.items():
        entries.append([name, str(value.dtype).removeprefix("torch."), list(value.shape), end])
        end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    return entries, end


def _tensors(data: Tensor, entries: list[list[Any]]) -> dict[str, Tensor]:
    found = {}
    for name, kind, shape, begin in entries:
        dtype = getattr(torch, kind)
        part = data[begin : begin + prod(shape) * dtype.itemsize]
        found[name] = part.view(dtype).view(shape)
    return found


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the other side has ended")
        view = view[count:]
    return data
