"""Announces parameters that are about to be read, module by module and one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from decent_optim_wrapper.forks import after_fork

# Called with parameters; None for all.
Announce = Callable[[Iterable[Tensor] | None], None]


class ForwardHooks:
    """Announces the parameters of each module right before its forward pass.

    A parameter may be read outside of the forward pass of its own module: `nn.MultiheadAttention`
    reads the parameters of its projection, and a model its output layer's for the embedding. So
    each parameter is also announced when it is read as an attribute of its module, and when code in
    a forward pass iterates over `parameters()`. Other code, as in TorchScript, may refer
    to parameters directly. So a module also announces the parameters of all modules below it that
    were not called in the previous pass. If a pass begins with another module than the model, the
    parameters of the model itself are announced first, and the parameters that no called module
    contains. All parameters are announced together

    - in the first pass, and in a pass that begins with another module than the previous one;
    - without gradients, since autograd would not notice a parameter that changes later;
    - if they are sharded, since FSDP gathers the shards of the next module ahead;
    - by a model that is compiled, or has compiled parts, since no hook runs in compiled code, and
      by compiled code that begins a pass, where they break the graph;
    - before `state_dict()` of any module, and before a module is copied or pickled.

    At the end of a pass through the whole model, all others are announced.

    Args:
        model: the model; a copy of it, or a model loaded from a file, announces nothing.
        announce: function that is called with parameters that are about to be read.
        settle: function that is called before parameters are saved.
    """

    def __init__(self, model: nn.Module, announce: Announce, settle: Callable[[], None]) -> None:
        is_fake = any(isinstance(param, FakeTensor) for param in model.parameters())
        # Outside of the mode in which torch.export calls modules with fake tensors.
        self._announce = announce if is_fake else unset_fake_temporarily()(announce)
        self._root, self._settle = model, settle
        self._sharded = any(isinstance(param, DTensor) for param in model.parameters())
        # The parameters of each module, by its id. Not as they are when it
        # is called: functional_call() puts other tensors in their place.
        self._own: dict[int, list[Tensor]] = {}
        # The modules that were called since the last step, and before it, by id; the first first.
        self._called: dict[int, None] = {}
        self._called_before: dict[int, None] = {}
        # Whether compiled code calls the model, calls parts of it, and begins passes.
        self._is_compiled = self._has_compiled = self._begins_compiled = False
        # What each of them announces, as long as the same modules are called.
        self._announced: dict[int, list[Tensor]] = {}
        # The parameters that were announced since the last step, by id.
        self._known: set[int] = set()
        self._end = ExitStack()
        self._end.callback(model.register_forward_hook(_Hook(self, "after")).remove)
        self.watch()
        weakref.finalize(self, self._end.close).atexit = False
        # A forked process has no connections.
        after_fork(self._end.close)

    def watch(self) -> None:
        """Follow the modules and parameters that the model has now."""
        names = "before_model", "before", "before_saving"
        first, before, saved = (_Hook(self, name) for name in names)
        for module in self._root.modules():
            # TorchScript modules take no hooks: the module above announces their parameters.
            if id(module) not in self._own and not isinstance(module, torch.jit.ScriptModule):
                called = first if module is self._root else before
                # First of all: FSDP gathers shards in such a hook.
                hook = module.register_forward_pre_hook(called, prepend=True)
                on_save = module.register_state_dict_pre_hook(saved)  # type: ignore[no-untyped-call]
                end_of_reads = _watch_parameters(module, weakref.ref(self))
                for end in (hook.remove, on_save.remove, end_of_reads):
                    self._end.callback(end)
            self._own[id(module)] = [*module.parameters(recurse=False)]
        self._announced, self._known = {}, set()

    @property
    def were_called(self) -> bool:
        """True if any module was called, or any parameter read, since the last step."""
        return bool(self._called or self._known)

    def end_step(self) -> None:
        """Note the end of a step: modules called from now on belong to the next one."""
        if self._called:
            if self._called.keys() != self._called_before.keys():
                self._announced = {}
            self._called_before, self._called = self._called, {}
        self._known = set()

    def before_model(self, model: nn.Module, *inputs: Any) -> None:
        """Announce the parameters that the model itself reads, or all if it is compiled."""
        if torch.compiler.is_compiling():
            self._announce_all(whole=True)
            return
        # A state may have been loaded since: a round is in flight again.
        self._known = set()
        self.before(model)

    def before(self, module: nn.Module, *inputs: Any) -> None:
        """Announce the parameters that a module is about to read."""
        # Without a look at the module: its code would be compiled again for each layer.
        if torch.compiler.is_compiling():
            self._announce_in_compiled_code()
            return
        key, begins = id(module), not self._called
        begins_anew = begins and next(iter(self._called_before), None) != key
        if self._sharded or self._has_compiled or not torch.is_grad_enabled() or begins_anew:
            self._announce(None)
        else:
            if begins and module is not self._root:
                # The model itself may be called later, or its parameters be read without that.
                self._announce_for(self._root)
            self._announce_for(module)
        self._called[key] = None

    def after(self, module: nn.Module, *results: Any) -> None:
        """Announce all other parameters."""
        if not torch.compiler.is_compiling():
            self._announce(None)

    def before_reading(self, param: nn.Parameter) -> None:
        """Announce a parameter that is read as an attribute, unless it was announced."""
        if torch.compiler.is_compiling():
            self._announce_in_compiled_code()
            return
        if not (self._is_compiled or id(param) in self._known):
            self._announce((param,))
            # Only now: another thread must wait, too.
            self._known.add(id(param))

    def before_listing(self, params: Iterable[nn.Parameter]) -> None:
        """Announce the parameters of a module that an iteration in the forward pass has come to.

        Between a step and the forward pass, nobody may compute with them, as in `zero_grad()`.
        """
        if self._called:
            for param in params:
                self.before_reading(param)

    def before_saving(self, *arguments: Any) -> None:
        """Finish the mixing, so that a state dict has whole rounds only."""
        self._settle()

    def _announce_in_compiled_code(self) -> None:
        """Announce all parameters in the code that is traced now, if it may begin a pass."""
        if torch.compiler.is_dynamo_compiling() and self._compiled_code_begins():
            self._announce_all(whole=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _announce_all(self, whole: bool) -> None:
        self._announce(None)
        self._called[id(self._root)] = None
        # From now on guards of the whole model read all parameters before that, where an error
        # would be lost.
        self._is_compiled |= whole

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _compiled_code_begins(self) -> bool:
        """Announce all parameters now, while a part of the model is compiled, and in each pass.

        Its hooks no longer run, or only for some inputs. Return whether it may be what begins
        a pass, and must announce them itself.
        """
        self._has_compiled = True
        self._begins_compiled = self._begins_compiled or not self._called
        self._announce(None)
        return self._begins_compiled

    def _announce_for(self, module: nn.Module) -> None:
        """Announce the parameters that a module may read, which are searched only once."""
        if (params := self._announced.get(id(module))) is None:
            params = self._announced[id(module)] = [*self._read_by(module)]
        if params:
            self._announce(params)
            self._known.update(map(id, params))

    def _read_by(self, module: nn.Module) -> Iterable[Tensor]:
        """The parameters of a module, and of those below it whose hooks do not run."""
        yield from self._own.get(id(module)) or module.parameters(recurse=False)
        for child in module.children():
            # The module above may call flatten_parameters(), which moves the weights on a GPU.
            if id(child) not in self._called_before or isinstance(child, nn.RNNBase):
                yield from self._read_by(child)


class WatchedParameters(dict[str, nn.Parameter | None]):
    """Announces parameters of a module, in place of the dict in which `module.weight` is looked up.

    All code that computes with `module.weight` goes through this class: the forward pass of the
    module or of another one, a method of the model. So does `parameters()`, which iterates.

    Hooks of modules alone are not enough. A weight may be read before its own module runs, as by a
    model that embeds with the weight of its output layer; often nothing is kept of it for the
    backward pass, so that autograd would not notice its later change. `copy.deepcopy` and `pickle`
    take the parameters of a module before its hooks. And `torch.export` calls hooks only while it
    traces, where no values can be mixed.

    Args:
        parameters: the parameters by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.watches: list[weakref.ref[ForwardHooks]] = []

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            for watch in self.watches:
                if hooks := watch():
                    hooks.before_reading(param)
        return param

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """The parameters by name, which are announced: an iteration has come to this module."""
        if not torch.compiler.is_compiling():
            for watch in self.watches:
                if hooks := watch():
                    hooks.before_listing([each for each in self.values() if each is not None])
        return super().items()

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        for watch in self.watches:
            if hooks := watch():
                hooks.before_saving()
        # A copy, or a module that is loaded from a file, announces nothing.
        return dict, (dict(self),)


def _watch_parameters(module: nn.Module, watch: weakref.ref[ForwardHooks]) -> Callable[[], None]:
    """Announce what is read of the parameters of a module; return the function that ends it."""
    found = vars(module)["_parameters"]
    if not isinstance(found, WatchedParameters):
        found = vars(module)["_parameters"] = WatchedParameters(found)
    found.watches.append(watch)
    return partial(found.watches.remove, watch)


class _Hook:
    """Calls a method of hooks as long as they exist.

    Args:
        hooks: the hooks.
        method: the name of the method.
    """

    def __init__(self, hooks: ForwardHooks, method: str) -> None:
        self._method, self._hooks = method, weakref.ref(hooks)

    def __call__(self, *arguments: Any) -> None:
        if hooks := self._hooks():
            getattr(hooks, self._method)(*arguments)

    def __reduce__(self) -> Any:
        # Nothing can be left out of the table of hooks that is copied or written to a file. This
        # takes any arguments, returns None, and is found where this library is not installed.
        return getattr, (nullcontext(), "__exit__")
