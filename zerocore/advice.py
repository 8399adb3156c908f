"""Says what to do about a plan: which stage, and what to change where none fits."""

from __future__ import annotations

from collections.abc import Iterator

from zerocore.planner import MAX_RANKS, Planner
from zerocore.plans import Plan, StagePlan
from zerocore.quantities import format_nbytes, format_seconds

LITTLE_HEADROOM = 0.2  # of the device's memory
SLOW_LINK = 0.2  # exposed communication, of the step


def advise(plan: Plan, planner: Planner) -> list[str]:
    """Sentences, most important first."""
    fit = plan.smallest_fit
    roomy = fit is not None and fit.spare >= LITTLE_HEADROOM * plan.setting.memory_nbytes
    lines = [] if fit is not None else list(_where_none_fits(plan, planner))
    if fit is not None:
        lines.append(
            f"stage {fit.stage} is the smallest that fits: {format_nbytes(fit.spare)} to spare"
            + ("" if roomy else _headroom(plan, fit))
        )
        if fit.activations is not None and fit.activations > fit.peak.nbytes / 2:
            lines.append(
                f"activations are {fit.activations / fit.peak.nbytes:.0%} of its peak"
                + ("" if plan.setting.checkpointing else "; checkpointing would lower it")
            )
    if fit is None or fit.stage == 3 or not roomy:  # stage 3 is what one would choose
        lines += _slow_links(plan)
    return lines


def _headroom(plan: Plan, fit: StagePlan) -> str:
    following = [stage for stage in plan.stages[fit.stage + 1 :] if stage.spare > fit.spare]
    more = (
        f"; stage {following[-1].stage} leaves {format_nbytes(following[-1].spare)}"
        if following
        else ""
    )
    return f", which is little headroom{more}"


def _where_none_fits(plan: Plan, planner: Planner) -> Iterator[str]:
    setting, best = plan.setting, min(plan.stages, key=lambda stage: stage.peak.nbytes)
    yield (
        f"no stage fits: stage {best.stage} is the smallest with {format_nbytes(best.peak.nbytes)},"
        f" {format_nbytes(-best.spare)} too much"
    )
    memory, activations, spare = setting.memory_nbytes, best.activations or 0, best.spare
    checkpointed = plan.checkpointed.peak_nbytes if plan.checkpointed is not None else activations
    saved = activations - checkpointed
    with_it = ""
    if saved > 0 and not setting.checkpointing and (saved >= -spare or activations > memory / 2):
        activations, spare, with_it = checkpointed, spare + saved, " then"
        yield (
            "activations are the bottleneck: checkpoint the blocks, which saves "
            f"{format_nbytes(saved)}" + ("; it fits then" if spare >= 0 else "")
        )
    if spare >= 0:
        return
    if best.pool > memory / 2:
        yield (
            f"one layer is too large: the pool alone takes {format_nbytes(best.pool)}; smaller "
            "units, or tensor parallelism within the layer"
        )
    elif activations > memory:
        yield f"activations alone do not fit{with_it}: a smaller micro-batch or shorter samples"
    else:
        ranks = smallest_world_size(plan, planner, activations)
        if ranks is not None:
            yield f"stage 3 fits{with_it} from {ranks} ranks on (counted in doublings)"


def smallest_world_size(plan: Plan, planner: Planner, activations: int) -> int | None:
    """The first doubling of the ranks at which stage 3 fits; None up to MAX_RANKS."""
    setting, world_size = plan.setting, 2 * plan.setting.world_size
    while world_size <= MAX_RANKS:
        memory = planner.memory(3, world_size, prefetch=setting.prefetch)
        if memory.total + activations <= setting.memory_nbytes:
            return world_size
        world_size *= 2
    return None


def _slow_links(plan: Plan) -> Iterator[str]:
    stage2, stage3 = plan.stages[2], plan.stages[3]
    if plan.setting.world_size == 1:
        return
    for slow, other in zip(stage3.timings, stage2.timings, strict=True):
        if slow.exposed_s < SLOW_LINK * slow.step_s:
            continue
        waits = (
            f"{slow.link} is slow for this: stage 3 waits {format_seconds(slow.exposed_s)} of "
            f"{format_seconds(slow.step_s)}"
        )
        if stage2.fits:
            yield f"{waits}; stage 2 fits and takes {format_seconds(other.step_s)}"
        else:
            yield (
                f"{waits}; larger micro-batches hide more, or shard within a node and replicate "
                "across nodes (hybrid sharding: group= a 2-D DeviceMesh)"
            )
