"""Times the planning of a large model's save, without its ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator

import torch

from bench.lib.systems import import_zerocore

LAYERS, HIDDEN, INNER, KEY_VALUES, VOCABULARY = 80, 8192, 28672, 1024, 128256


def _units() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yields the parameters of each unit of Llama 70B."""
    yield [
        ("model.embed_tokens.weight", (VOCABULARY, HIDDEN)),
        ("lm_head.weight", (VOCABULARY, HIDDEN)),
        ("model.norm.weight", (HIDDEN,)),
    ]
    for layer in range(LAYERS):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEY_VALUES, HIDDEN),
            "self_attn.v_proj": (KEY_VALUES, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        yield [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()]


def plan_seconds(world_size: int) -> dict[str, float]:
    """Returns the seconds until a rank can write, and the metadata's on the first rank.

    Training waits for "wait": dividing all tensors over ranks, and one rank's plan.
    """
    import_zerocore()
    from zerocore._C import Layout, ParamSpec
    from zerocore.checkpoint.dcp.save_plan import SavePlan, Spread
    from zerocore.layout.cuts import Cut
    from zerocore.layout.save_ownership import SavedRanges

    layouts = [
        (unit, Layout.build([ParamSpec(n, list(s), 6, 4) for n, s in unit], world_size))
        for unit in _units()
    ]
    began = time.process_time()
    tensors = {}
    for kind in ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq"):
        for unit, layout in layouts:
            for position, (name, shape) in enumerate(unit):
                known = tensors.get(f"model.{name}")
                spread = known[1] if known else Spread(shape, SavedRanges(Cut.of(layout, position)))
                tensors[kind.format(name)] = (torch.float32, spread)
    plan = SavePlan(tensors, world_size)
    pieces = plan.pieces_of(world_size // 2)
    ready = time.process_time()
    metadata = plan.metadata({}, {})
    built = time.process_time()
    data = pickle.dumps(metadata)
    return {
        "wait": ready - began,
        "metadata": built - ready,
        "pickle": time.process_time() - built,
        "pieces of a rank": len(pieces),
        "pieces": len(metadata.storage_data),
        "metadata bytes": len(data),
    }
