"""Names of collectives in the runtime's trace and in plans."""

GATHERS = ("all_gather", "gather_near")
"""Gathers: from all ranks that share the state, and from the near ranks."""
COLLECTIVES = (*GATHERS, "reduce_scatter", "all_reduce", "gather_sums")
"""The collectives of units; the planner predicts them."""
EXCHANGE = "all_to_all"
"""The collective of matrix optimizers; its events belong to no unit."""
