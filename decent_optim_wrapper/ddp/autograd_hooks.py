"""Reports the events of backward passes: complete gradients, the end, a failure."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel.distributed import _find_tensors

from decent_optim_wrapper.ddp.backward_step import BackwardStepper


class AutogradHooks:
    """Follows the backward passes through a model, without keeping it or the listener alive.

    Autograd runs a callback at the end of the pass in which it was queued. If it is queued when a
    gradient is complete, that may be the inner pass of a reentrant checkpoint; if it is queued at
    the outputs of the model, it is the outer one.

    Args:
        params: the parameters whose gradients are reported.
        listener: notified by one thread at a time: of each gradient that is complete in a pass, and
            of the end of the pass, or of its failure if the pass or the listener has raised.
    """

    def __init__(self, params: Iterable[Tensor], listener: BackwardStepper) -> None:
        self._listener = listener
        # Autograd has one thread for each device.
        self._lock = threading.RLock()
        self._in_pass = False
        self._begin_hook = _weakly(self._begin)
        self._gradient_hook = _weakly(self._on_gradient)
        self._watched: set[int] = set()
        self.watch(params)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Report these parameters, too, if they require gradients."""
        for param in params:
            if param.requires_grad and id(param) not in self._watched:
                self._watched.add(id(param))
                hook = self._gradient_hook
                param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def follow(self, outputs: Any) -> None:
        """Notice backward passes that start at these outputs of the model."""
        if torch.is_grad_enabled():
            for tensor in _find_tensors(outputs):  # type: ignore[no-untyped-call]
                # On a leaf the hooks would stay and add up with every forward pass.
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._begin_hook)

    def notify(self, event: Callable[[], None]) -> None:
        """Call a method of the listener, and report its failure: no later pass continues a step."""
        with self._lock:
            try:
                event()
            except BaseException:
                self._listener.on_failure()
                raise

    def _begin(self, _: Tensor) -> None:
        with self._lock:
            if not self._in_pass:
                end = _End(self._on_end, self._on_drop)
                Variable._execution_engine.queue_callback(end)
                self._in_pass = True

    def _on_gradient(self, param: Tensor) -> None:
        self._begin(param)
        self.notify(partial(self._listener.on_gradient, param))

    def _on_end(self) -> None:
        self._in_pass = False
        self.notify(self._listener.on_end)

    def _on_drop(self) -> None:
        self._in_pass = False
        self.notify(self._listener.on_failure)


class _End:
    """Owned by autograd only, which calls it at the end of a pass, or drops it if the pass fails.

    FSDP completes gradients in callbacks of its own, which may be queued behind this one: it queues
    itself once more, and then is behind all of them.

    Args:
        on_end: called at the end.
        on_drop: called if the pass fails.
    """

    def __init__(self, on_end: Callable[[], None], on_drop: Callable[[], None]) -> None:
        self._on_end = on_end
        self._is_last = False
        self._drop = weakref.finalize(self, on_drop)
        self._drop.atexit = False

    def __call__(self) -> None:
        if self._is_last:
            self._drop.detach()
            self._on_end()
        else:
            self._is_last = True
            Variable._execution_engine.queue_callback(self)


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Call the bound method as long as its object exists."""
    reference = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        if (found := reference()) is not None:
            found(tensor)

    return call
