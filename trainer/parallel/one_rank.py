"""Mixed precision on one rank: a parameter has a copy in the compute dtype from its module's forward to its gradient.

The numbers are those of FSDP over one rank, which casts, copies and divides what needs none of that: 149 GB of memory
traffic for a step of an 8B model with 12 layers, 44 GB here. FSDP needs less memory, as it makes the copies again in
backward: two bytes per parameter at the beginning of backward.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainer.models.units import ModelPart

# From torch 2.15 on, FSDP reduces a gradient in the dtype that backward computes it in, as a norm's in fp32; before, it
# was rounded to the compute dtype first.
FSDP_KEEPS_DTYPE_OF_GRADIENTS = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")


class ComputeCopy:
    """The copy of a parameter that modules compute with."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype):
        self._parameter, self._dtype = parameter, dtype
        self._copy: nn.Parameter | None = None
        self.holders: list[tuple[nn.Module, str]] = []  # several of a tied parameter

    def show(self) -> None:
        """Make the copy, and let the modules see it instead of the parameter."""
        if self._copy is None:  # the same object in every step: compiled code has guards on it
            values = self._parameter.detach().to(self._dtype)
            self._copy = nn.Parameter(values, requires_grad=self._parameter.requires_grad)
            if FSDP_KEEPS_DTYPE_OF_GRADIENTS:
                self._copy.grad_dtype = None
            if self._parameter.requires_grad:
                self._copy.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]
        else:
            storage = self._copy.untyped_storage()
            storage.resize_(self._copy.nbytes)
            self._copy.data.copy_(self._parameter.detach())  # autograd does not count a write to `data`
        self._let_see(self._copy)

    def hide(self) -> None:
        """Free the copy, and let the modules see the parameter."""
        self._let_see(self._parameter)
        assert self._copy is not None
        self._copy.untyped_storage().resize_(0)

    def _let_see(self, parameter: nn.Parameter) -> None:
        for module, name in self.holders:
            module._parameters[name] = parameter

    def _take_gradient(self, copy: Tensor) -> None:
        """Backward has used the copy for the last time."""
        self.hide()
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if self._parameter.grad is None:
            self._parameter.grad = gradient.to(self._parameter.dtype)
        else:
            if gradient.dtype.itemsize > self._parameter.dtype.itemsize:
                gradient = gradient.to(self._parameter.dtype)  # rounded before the sum, as by FSDP
            self._parameter.grad += gradient


def compute_in_copies(model: ModelPart, dtype: torch.dtype) -> None:
    """Make the modules of a model compute with copies of their parameters in another dtype.

    FQNs do not change; while a copy exists, its module shows it. Call it after anything that sets or ties parameters.
    """
    copies: dict[nn.Parameter, ComputeCopy] = {}
    first: dict[ComputeCopy, nn.Module] = {}  # the unit that needs the copy first
    last: dict[ComputeCopy, nn.Module] = {}
    units = [*(unit.module for unit in model.units()), model]  # as FSDP gathers them
    for unit in units:
        for module in unit.modules():
            for name, parameter in module.named_parameters(recurse=False):
                copy = copies.setdefault(parameter, ComputeCopy(parameter, dtype))
                if parameter.dtype != dtype and (module, name) not in copy.holders:
                    copy.holders.append((module, name))
                    first.setdefault(copy, unit)
                    last[copy] = unit
    for unit in units:
        created, freed = ([copy for copy, user in at.items() if user is unit] for at in (first, last))
        _add_hooks(unit, created, freed)


def _add_hooks(unit: nn.Module, created: list[ComputeCopy], freed: list[ComputeCopy]) -> None:
    def show(module: nn.Module, args: object) -> None:
        for copy in created:
            copy.show()

    def hide(module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            for copy in freed:
                copy.hide()

    unit.register_forward_pre_hook(show)
    unit.register_forward_hook(hide)
