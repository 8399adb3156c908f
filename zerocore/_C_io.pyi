"""Types of files and of the memory of the host, all in ``zerocore._C``; not for run time."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_NBYTES: int
"""Bytes of a block of a file, each of which has a checksum."""

class StreamWay:
    """How files are read and written; ANY is past the page cache what is large and not in it."""

    ANY: StreamWay
    CACHED: StreamWay
    DIRECT: StreamWay

class FileStream:
    """Blocks of a file that several threads read once, in their order.

    ``read`` returns the CRC-32 of each block from ``first_block`` to ``end_block``, or to the end.
    It takes pairs of an offset and the tensor that the bytes from there on fill, in the order of
    the file. The first ``ahead_nbytes`` may be read before. Raises OSError that names the file;
    ValueError for another order, a second call, and a tensor that is not contiguous or not on the
    CPU.
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
    """A new file whose bytes are given in any order, each once, and go to the disk in large blocks.

    ``file`` is a descriptor, which the caller may close; in the end it has ``nbytes``. ``write``
    returns the CRC-32 of what ``crc`` is that of, and of these bytes; several threads may call it.
    ``finish`` waits for all. Raises OSError for what the system refuses, of bytes that were given
    before, too; ValueError for bytes outside of the file or a tensor that is not contiguous or not
    on the CPU, and in ``finish`` for missing bytes.
    ``sums`` is the CRC-32 of each block; if several writers share a file, the XOR of theirs is.
    """

    RING_NBYTES: int  # host memory that it takes where the file is larger
    def __init__(self, file: int, nbytes: int, way: StreamWay = StreamWay.ANY) -> None: ...
    def write(self, tensor: Tensor, offset: int, crc: int = 0) -> int: ...
    def finish(self) -> None: ...
    def sums(self) -> list[int]: ...
    is_direct: bool

class HostMemory:
    """One mapping of host memory, zeros at first; ``view`` is a 1-D tensor of bytes of it.

    A child of a fork has a copy if it is ``inherited``, but of the first bytes that are pinned.
    Raises RuntimeError where there is not enough, or nothing that pins it; ValueError for a view
    that is not within it, or more pinned bytes than there are.
    """

    def __init__(self, nbytes: int, *, pinned_nbytes: int = 0, inherited: bool = False) -> None: ...
    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor: ...
    nbytes: int
    pinned_nbytes: int
    address: int

def use_host_threads(num_threads: int) -> None:
    """How many threads share the CPU kernels that the calling thread runs; others keep theirs."""

def crc32(tensor: Tensor, crc: int = 0) -> int: ...
def reserve(file: int, nbytes: int) -> None: ...
