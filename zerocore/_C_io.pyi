"""Types of files and host memory; at run time they are in ``zerocore._C``."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_NBYTES: int
"""Bytes of a block of a file, each of which has a checksum."""

class StreamWay:
    """How files are read and written: ANY goes past the page cache for large, uncached files."""

    ANY: StreamWay
    CACHED: StreamWay
    DIRECT: StreamWay

class FileStream:
    """Reads blocks of a file once, in order, with several threads.

    ``read`` returns the CRC-32 of each block from ``first_block`` to ``end_block``, or to the end.
    It takes pairs of an offset and a tensor to fill from there, in the order of the file. The first
    ``ahead_nbytes`` may be read before. Raises an OSError that names the file; ValueError for
    another order, a second call, and a tensor that is not contiguous or not on the CPU.
    """

    def __init__(
        self,
        path: str,
        ahead_nbytes: int = 0,
        num_threads: int = 2,
        way: StreamWay = StreamWay.ANY,
        first_block: int = 0,
        end_block: int = ...,
    ) -> None: ...
    def read(self, runs: Sequence[tuple[int, Tensor]] = ()) -> list[int]: ...
    is_direct: bool

class FileWriter:
    """Writes a new file whose bytes come in any order, each once, in large blocks.

    ``file`` is a descriptor, which the caller may close; in the end it has ``nbytes``. ``write``
    continues the CRC-32 ``crc`` with these bytes and returns it; several threads may call it.
    ``finish`` waits for all bytes. Raises OSError for errors of the system, also with earlier
    bytes; ValueError for bytes outside of the file or a tensor that is not contiguous or not on the
    CPU, and in ``finish`` for missing bytes. ``sums`` returns the CRC-32 of each block; if several
    writers share a file, XOR their sums.
    """

    RING_NBYTES: int  # host memory that it takes for larger files
    def __init__(self, file: int, nbytes: int, way: StreamWay = StreamWay.ANY) -> None: ...
    def write(self, tensor: Tensor, offset: int, crc: int = 0) -> int: ...
    def finish(self) -> None: ...
    def sums(self) -> list[int]: ...
    is_direct: bool

class HostMemory:
    """One mapping of host memory, zeros at first; ``view`` returns a 1-D tensor in it.

    A forked child inherits it if it is ``inherited``, except for the first bytes, which are pinned.
    Raises RuntimeError if there is too little memory, or bytes are to be pinned without CUDA;
    ValueError for a view outside of it, or more pinned bytes than there are.
    """

    def __init__(self, nbytes: int, *, pinned_nbytes: int = 0, inherited: bool = False) -> None: ...
    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor: ...
    nbytes: int
    pinned_nbytes: int
    address: int

def use_host_threads(num_threads: int) -> None:
    """Sets how many threads share the calling thread's CPU kernels; other threads keep theirs."""

def crc32(tensor: Tensor, crc: int = 0) -> int: ...
def reserve(file: int, nbytes: int) -> None: ...
