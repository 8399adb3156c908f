"""The models that parity is proven on: how each is built, fed and scored."""

from __future__ import annotations

from tests import zoo_awkward, zoo_huggingface
from tests.zoo_case import Case

CASES: dict[str, Case] = {case.name: case for case in (*zoo_awkward.CASES, *zoo_huggingface.CASES)}

# Modules that a process may import ahead of time to build, adapt and compile any case quickly.
PRELOAD: tuple[str, ...] = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "peft",
    "torch.profiler",
    "torch.utils.cpp_extension",
    "torch.distributed.pipelining",
    "transformers.trainer",
    *zoo_huggingface.PRELOAD,
)
