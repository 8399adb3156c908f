"""Writes the advice of a plan: which stage to use, and what to change if none fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerocore.common.quantities import format_nbytes, format_seconds
from zerocore.options.stages import HIGHEST_STAGE, placements_of, stages_above
from zerocore.planning.candidates import Candidate, call_of, candidates
from zerocore.planning.division import Division
from zerocore.planning.planner import Planner
from zerocore.planning.result import Plan, StagePlan

SLOW_LINK = 0.2  # a link is slow if exposed communication is this part of the step


def advise(plan: Plan, planner: Planner) -> list[str]:
    """Returns sentences, the most important first."""
    fit = plan.smallest_fit
    roomy = fit is not None and plan.verdict(fit) == "yes"
    lines = [] if fit is not None else list(_where_none_fits(plan, planner))
    if fit is not None:
        unknown = " without activations" if fit.activations is None else ""
        lines.append(
            f"stage {fit.stage} is the smallest that fits{unknown}: "
            f"{format_nbytes(fit.spare)} to spare" + ("" if roomy else _headroom(plan, fit))
        )
        if fit.activations is not None and fit.activations > fit.peak.nbytes / 2:
            lines.append(
                f"activations are {fit.activations / fit.peak.nbytes:.0%} of its peak"
                + ("" if plan.setting.workload.checkpointing else "; checkpointing would lower it")
            )
    if fit is None or fit.stage == HIGHEST_STAGE or not roomy:  # a stage that users would choose
        lines += _slow_links(plan, planner)
    if (share := plan.setting.host_share) is not None:
        lines.append(_offload(plan, share))
    return lines


def _headroom(plan: Plan, fit: StagePlan) -> str:
    higher = (stage for stage in plan.stages if stage.stage in stages_above(fit.stage))
    following = [stage for stage in higher if stage.spare > fit.spare]
    if not following:
        return ", which is little headroom"
    best = following[-1]
    return f", which is little headroom; stage {best.stage} leaves {format_nbytes(best.spare)}"


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
    enough = saved >= -spare or activations > memory / 2
    if saved > 0 and enough and not setting.workload.checkpointing:
        activations, spare, with_it = checkpointed, spare + saved, " then"
        yield (
            "activations are the bottleneck: checkpoint the blocks, which saves "
            f"{format_nbytes(saved)}" + ("; it fits then" if spare >= 0 else "")
        )
    if spare >= 0:
        return
    if best.pool_reserved > memory / 2:
        yield (
            "one layer is too large: the pool alone takes "
            f"{format_nbytes(best.pool_reserved)}; smaller units, or tensor parallelism within the "
            "layer"
        )
    elif activations > memory:
        yield f"activations alone do not fit{with_it}: a smaller micro-batch or shorter samples"
    else:
        yield from _other_ranks(plan, planner, activations, with_it)


def _other_ranks(plan: Plan, planner: Planner, activations: int, with_it: str) -> Iterator[str]:
    """Yields the advice to use fewer replicas, or else more ranks (doubled until the model fits),
    both at the highest stage. A larger number of ranks is planned as one replica."""
    room = plan.setting.memory_nbytes - activations
    now, highest = _fully_sharded(plan, planner), f"stage {HIGHEST_STAGE}"

    def first(search: str, now: Candidate) -> Division | None:
        ways = (candidate for candidate in candidates(now) if candidate.search == search)
        return next((candidate.division for candidate in ways if candidate.nbytes <= room), None)

    if (fewer := first("replicas", now)) is not None:
        yield f"{highest} fits{with_it} with num_replicas={fewer.num_replicas}"
    elif (more := first("ranks", now.at(num_replicas=1))) is not None:
        in_one = " in one replica" if now.division.num_replicas > 1 else ""
        yield (
            f"{highest} fits{with_it} from {more.world_size} ranks on{in_one} (counted in "
            "doublings)"
        )


def _fully_sharded(plan: Plan, planner: Planner) -> Candidate:
    division = plan.setting.division(HIGHEST_STAGE)
    communication = replace(division.communication, regather=1)
    return Candidate(planner, replace(division, rank=0, communication=communication))


def _slow_links(plan: Plan, planner: Planner) -> Iterator[str]:
    first = [placements_of(stage.stage).parameters for stage in plan.stages].index(True)
    whole, gathered = plan.stages[first - 1 : first + 1]
    if plan.setting.world_size == plan.setting.num_replicas:
        return
    for slow, other in zip(gathered.timings, whole.timings, strict=True):
        if slow.exposed_s < SLOW_LINK * slow.step_s:
            continue
        waits = (
            f"{slow.link} is slow for this: stage {gathered.stage} waits "
            f"{format_seconds(slow.exposed_s)} of {format_seconds(slow.step_s)}"
        )
        if whole.fits:
            yield f"{waits}; stage {whole.stage} fits and takes {format_seconds(other.step_s)}"
        else:
            yield f"{waits}; larger micro-batches hide more{_hybrid(plan, planner, slow.link)}"


def _hybrid(plan: Plan, planner: Planner, link: str) -> str:
    """Returns the advice to shard within nodes, if there are several and the model fits one."""
    world_size, node = plan.setting.world_size, plan.setting.node
    shards = max(n for n in range(1, node.num_ranks + 1) if world_size % n == 0)
    replicas, activations = world_size // shards, plan.stages[-1].activations or 0
    if plan.setting.num_replicas > 1 or 1 in (shards, replicas):
        return ""
    within = _fully_sharded(plan, planner).at(num_replicas=replicas)
    if within.nbytes + activations > plan.setting.memory_nbytes:
        return ""
    machine, where = f"links=inside, replica_link='{link}'", ", inside= the link within a node"
    if link == node.link(world_size).name:
        machine, where = f"'{node.name}'", ""
    return (
        f", or hybrid sharding within nodes of {shards}: plan it with num_replicas={replicas}, "
        f"machine=zerocore.Machine({machine}){where}; run it with "
        f"group=init_device_mesh('cuda', ({replicas}, {shards}))"
    )


def _offload(plan: Plan, share: int) -> str:
    """Returns the least offload that fits, with the tokens a step whose compute takes as long as
    the host's update. ``share``: a rank's bytes of host memory."""
    fit = next((option for option in plan.offloads if option.fits), None)
    of_share = f"the {format_nbytes(share)} that a rank has on the host"
    if fit is None:
        least = min(plan.offloads, key=lambda option: option.device_nbytes)
        return (
            f"no offload fits: stage {least.stage} with {call_of(least.offload)} takes "
            f"{format_nbytes(least.device_nbytes)} of the device and "
            f"{format_nbytes(least.memory.host)} of {of_share}"
        )
    fits = (
        f"stage {fit.stage} with {call_of(fit.offload)} is the least offload that fits: "
        f"{format_nbytes(fit.device_nbytes)} of the device, {format_nbytes(fit.memory.host)} of "
        f"{of_share}"
    )
    if fit.memory.disk > 0:
        file = format_nbytes(fit.memory.disk)
        return f"{fits}, and a file of {file} for each rank, which every step reads and writes"
    return (
        f"{fits}; the update there is as long as the compute of {plan.setting.hiding_tokens:,} "
        "tokens a step on the machine (predicted)"
    )
