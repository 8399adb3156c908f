"""The class that ``fully_shard`` gives to modules: their calls and their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from zerocore.fsdp.group import Group, group_of, groups_below
from zerocore.fsdp.root import apply_settings, call, gather_in, ready, ready_state, root_of
from zerocore.fsdp.state import read_state
from zerocore.model.unit_call import leave_calls_out_of_graphs


class GradientReduction:
    """The handle that :meth:`FSDPModule.finalize_backward` returns."""

    def wait(self) -> None:
        """Returns at once: the gradients are reduced already."""


class UnshardHandle(TorchUnshardHandle):
    """The handle of a gather, see :meth:`FSDPModule.unshard`."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def wait(self) -> None:
        """Waits until the module's full parameters are registered and may be used."""
        groups, self._groups = self._groups, []
        for group in groups:
            if (engine := group.engine) is not None:
                engine.show(group.unit)


class FSDPModule(TorchFSDPModule):
    """A module that unshards its parameters around its calls.

    Instances come from :func:`fully_shard`. The methods mean the same as in
    ``torch.distributed.fsdp``. Hints (prefetch lists, streams, buffers) are accepted and change
    nothing, because the engine learns the order of gathers from the calls.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance of the original class: a slice of a sharded container is plain."""
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 2]
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with full parameters."""
        return call(self._group(), super().__call__, args, kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization."
        )

    def _group(self) -> Group:
        group = group_of(cast(nn.Module, self))
        assert group is not None
        return group

    def _get_fsdp_state(self) -> Any:
        return read_state(self._group())

    def _groups(self, recurse: bool) -> list[Group]:
        if not recurse:
            group = self._group()
            return [group, *group.siblings]
        return list(groups_below(cast(nn.Module, self)))

    def _set(self, recurse: bool, **values: Any) -> None:
        for group in self._groups(recurse):
            for name, value in values.items():
                setattr(group, name, value)
            apply_settings(group)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        root = self._group().root
        if root is not None:
            root.release()  # a move replaces tensors that the engine holds
        original: Any = super(TorchFSDPModule, self)
        return original._apply(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshards this module's own parameters until its forward or :meth:`reshard`; collective.

        Args:
            async_op: return a handle at once, instead of waiting for the gather.
        """
        groups = [group for group in self._groups(False) if group.params]
        handle = UnshardHandle(groups)
        for group in groups:
            state = ready_state(group)
            for extension in () if group.is_unsharded else state.units[group.unit].extensions:
                extension.encode()
            state.engine.unshard(group.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Reshards this module's own parameters, unless one of its calls is running."""
        for group in self._groups(False):
            if group.params and (engine := group.engine) is not None:
                engine.reshard(group.unit)

    def reset_iter_state(self) -> None:
        """Drops the state of a failed forward or backward, as the next forward does by itself.

        Raises:
            RuntimeError: the module is not the root.
        """
        group = self._group()
        if group.root is not None and group.root.group is not group:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if (engine := group.engine) is not None:
            engine.reset()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backwards reduce gradients; if not, they accumulate on this rank."""
        self._set(recurse, reduces=requires_gradient_sync, reduces_across=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backwards reduce over replicas; if not, this rank accumulates gradients."""
        self._set(recurse, reduces_across=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether parameters are resharded after the forward.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for group in self._groups(recurse):
            root = group.root
            retains = bool(group.reshard_after_forward) != reshard_after_forward
            if root is not None and (group.num_near > 1 or (root.group is group and retains)):
                root.release()  # its engine assumes near ranks, or the root's old setting
        self._set(recurse, reshard_after_forward=reshard_after_forward, num_near=1)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether parameters are resharded after the backward."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_manual_backward_finalization(self, enable: bool) -> None:
        """Sets whether backwards leave reductions and reshards to :meth:`finalize_backward`.

        Backwards then accumulate full gradients in this root, also a pipeline's backwards for
        inputs or weights only. ``enable=False`` drops gradients that were not finalized.
        """
        root = root_of(self._group())
        engine = ready(root).engine
        if enable and not engine.defers_reductions:
            engine.begin_deferred()
        elif root.is_manual and not enable and engine.defers_reductions:
            engine.end_deferred(drops=True)
        root.is_manual = enable

    def finalize_backward(self, async_op: bool = False) -> GradientReduction | None:
        """Reduces the gradients of all backwards since the last call, and reshards.

        Args:
            async_op: return a handle. The gradients are reduced when this returns, all the same.

        Raises:
            RuntimeError: :meth:`set_manual_backward_finalization` was not called before.
        """
        root = root_of(self._group())
        if not root.is_manual:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization: call "
                "set_manual_backward_finalization(True) before the forward"
            )
        engine = ready(root).engine
        engine.end_deferred(drops=False)
        for group in root.units:
            apply_settings(group)
        engine.begin_deferred()
        return GradientReduction() if async_op else None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of the ranks' gradients by ``factor`` instead of the number of ranks."""
        self._set(False, divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Does the same as :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: every backward waits for its reductions at its end."""

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Changes nothing: the engine learns the order of gathers."""
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Changes nothing: the engine learns the order of gathers."""
        _check_modules(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Changes nothing: gathers wait for the stream that the optimizer runs on."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Changes nothing: reductions sum gradients that are divided beforehand."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Changes nothing: a backward unshards the modules that it goes through."""

    def set_reduce_scatter_unused_params(self, *args: Any, **kwargs: Any) -> None:
        """Changes nothing: a missing gradient counts as zero if another rank has one."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Changes only what readers of FSDP2's state see: one buffer is in flight.

        Raises:
            TypeError, ValueError: not an integer of 1 or more.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._set(recurse, max_input_buffers=max_input_buffers)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Changes nothing."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this module's parameters by ``comm``.

        Args:
            comm: an ``AllGather`` of torch, called with the output (all ranks' parts), the input
                (this rank's part), the group and ``async_op``. The memory is the engine's:
                ``allocate`` is not called.

        Raises:
            ValueError: the module's parameters are sharded over several meshes.
        """
        from zerocore.fsdp.collectives import gather_by  # late: few programs have their own

        gather = None if comm is None else gather_by(comm, self._group())
        self._set_collective("set_custom_all_gather", gather=gather)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces this module's gradients by ``comm``, a ``ReduceScatter`` of torch.

        Raises:
            ValueError: as :meth:`set_custom_all_gather`.
        """
        from zerocore.fsdp.collectives import reduce_by

        reduce = None if comm is None else reduce_by(comm, self._group())
        self._set_collective("set_custom_reduce_scatter", reduce=reduce)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Calls ``hook`` at the end of each backward with the gradients that it has reduced.

        Args:
            hook: changes in place this rank's part of the unit's gradients, 1-D, in the dtype of
                ``.grad``, summed over all ranks of the mesh, replicas included.
            stream: the device's stream to run it on.

        Raises:
            ValueError: as :meth:`set_custom_all_gather`, or a stream together with replicas.
            NotImplementedError: the gradients are on the host.
        """
        group = self._group()
        if stream is not None and group.mesh.ndim > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        if group.offloads:
            raise NotImplementedError(
                "set_all_reduce_hook: this module's gradients are copied to the host after their "
                "reduction; leave offload_policy= out"
            )
        if stream is not None:
            from zerocore.fsdp.collectives import on_stream

            hook = on_stream(hook, stream)
        self._set_collective("set_all_reduce_hook", after_reduce=hook)

    def _set_collective(self, name: str, **values: Any) -> None:
        if self._group().siblings:
            raise ValueError(
                f"{name} is not supported with multiple param groups: shard_placement_fn= has put "
                "parameters of this module on several meshes"
            )
        self._set(False, **values)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Changes nothing: memory comes from the engine's pool.

        Raises:
            AssertionError: the program has set a collective of its own.
        """
        group = self._group()
        if group.gather is not None or group.reduce is not None:
            raise AssertionError(
                "set_allocate_memory_from_process_group_for_comm and custom collectives exclude "
                "each other"
            )

    def set_keep_unsharded_storage(self, enable: bool) -> None:
        """Rejects ``enable=True``: the pool gives the block of a resharded unit to other units."""
        if enable:
            raise NotImplementedError(
                "zerocore.fsdp does not support FSDPModule.set_keep_unsharded_storage; call "
                "fully_shard with reshard_after_forward=False, so that modules stay unsharded"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Rejects the call: memory comes from the engine's pool."""
        raise NotImplementedError(
            "zerocore.fsdp does not support FSDPModule.set_symm_mem_for_comm; leave the call out, "
            "or shard this model with torch.distributed.fsdp"
        )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Sets whether reductions have a communicator of their own, the default on NCCL.

        All modules below a root share it, so ``enable=False`` for one of them turns it off for all.
        The next forward makes a new engine.
        """
        for group in self._groups(recurse):
            if group.overlaps_reductions != enable:
                group.overlaps_reductions = enable
                if group.root is not None:
                    group.root.release()


def _check_modules(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


@cache
def fsdp_class(cls: Any) -> Any:
    """Returns the fully sharded class of ``cls``, with ``FSDP`` before its name."""
    leave_calls_out_of_graphs(FSDPModule.__call__, call)
    return type(cls)(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def show_shards(module: nn.Module, *args: Any) -> None:
    """Reshards a module before its state dict is read or loaded, so that it shows DTensors."""
    cast(FSDPModule, module).reshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.<method_name>(...)`` unshard parameters, as a call of the module does.

    Does nothing for a module that is not fully sharded.

    Raises:
        ValueError: no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    gather_in(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Changes nothing: the roots of pipeline stages share streams already.

    Raises:
        ValueError: a module is not fully sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
