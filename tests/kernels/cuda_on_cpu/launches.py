"""Rewrites the launches of a CUDA source to calls that a C++ compiler understands."""

from __future__ import annotations

import re

_LAUNCH = re.compile(r"<<<(?P<config>[^;]*?)>>>\s*\(", re.DOTALL)


def rewrite(source: str) -> str:
    """``kernel<<<blocks, threads, shared, stream>>>(args)`` becomes a call of ``launch``.

    Raises:
        ValueError: a launch in a form that this does not know.
    """
    parts, done = [], 0
    for launch in _LAUNCH.finditer(source):
        start = max(source.rfind(mark, 0, launch.start()) for mark in ";{}") + 1
        end = _closing(source, launch.end() - 1) + 1
        config = launch["config"].split(",")
        if len(config) != 4 or source[end] != ";" or start < done:
            raise ValueError(f"a launch of another form: {source[start : end + 1]!r}")
        kernel, args = source[start : launch.start()].strip(), source[launch.end() : end - 1]
        parts.append(source[done:start])
        parts.append(f" cuda_on_cpu::launch({config[0]}, {config[1]}, [&] {{ {kernel}({args}); }})")
        done = end
    return "".join(parts) + source[done:]


def _closing(source: str, opening: int) -> int:
    depth = 0
    for index in range(opening, len(source)):
        depth += {"(": 1, ")": -1}.get(source[index], 0)
        if depth == 0:
            return index
    raise ValueError("a launch without an end")
