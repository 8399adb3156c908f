"""Names of collectives in the runtime's trace and in plans."""

GATHERS = ("all_gather", "gather_near")
"""From all ranks that share the state, and from those that are near."""
COLLECTIVES = (*GATHERS, "reduce_scatter", "all_reduce", "gather_sums")
"""Those of units; the planner predicts them."""
EXCHANGE = "all_to_all"
"""An optimizer of whole matrices issues it; its events belong to no unit."""
