"""Autograd from within: the backward that runs, hooks, modes, and what belongs to a thread of it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _CachingTorchDispatchMode, _StopRecomputationError

__all__ = [
    "ENTER_INFERENCE_MODE",
    "EXIT_INFERENCE_MODE",
    "GET_DATA",
    "CachingTorchDispatchMode",
    "StopRecomputationError",
    "at_end_of_backward",
    "autocast_is_on",
    "current_backward",
    "has_tangent",
    "never_compiled",
    "no_autocast",
    "of_strand",
    "recording",
    "unseen",
    "without_hooks",
]

P = ParamSpec("P")
T = TypeVar("T")

# Raised through a checkpointed region that is computed again, once all that its backward needs is there.
StopRecomputationError = _StopRecomputationError

# The first of the two contexts that create_selective_checkpoint_contexts makes: it asks the policy about every operator
# that runs in it, and tags their nodes with its ac_graph_id.
CachingTorchDispatchMode = _CachingTorchDispatchMode

# What Dynamo's graph calls for `x.data`, for entering torch.inference_mode(mode), and for leaving what that returned.
GET_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
ENTER_INFERENCE_MODE: Any = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE_MODE: Any = torch.autograd.grad_mode._exit_inference_mode


def has_tangent(x: Any) -> bool:
    """Whether a forward-mode gradient goes in with it (torch.autograd.forward_ad.make_dual), on the level that is
    entered."""
    level = torch.autograd.forward_ad._current_level
    return level >= 0 and isinstance(x, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, and what it calls, as it is wherever Dynamo watches. It watches what a backward calls where a program
    that is compiled calls `loss.backward()`, and compiles it: as torch.compiler.disable, without importing Dynamo."""
    return torch._disable_dynamo(function)


def current_backward() -> int | None:
    """A number of the backward that the calling thread works for; None outside of all."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Has the engine call it when the backward that runs ends; one that fails frees it without a call."""
    Variable._execution_engine.queue_callback(callback)


def of_strand(key: str, make: Callable[[], Any]) -> Any:
    """The object that the calling thread keeps under `key`, made where there is none yet. The engine takes such objects
    along from the thread that calls a backward to those that run it."""
    if not torch._C._is_key_in_tls(key):
        made = make()
        references = sys.getrefcount(made)
        torch._C._stash_obj_in_tls(key, made)
        if sys.getrefcount(made) == references:  # torch 2.11 keeps it, and gives it up later, without having counted it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return torch._C._get_obj_in_tls(key)


def unseen() -> AbstractContextManager[None]:
    """For what is run beside the program: hooks of the program that see what is saved for a backward do not see it. A
    checkpoint around a call that is compiled would count it, and miss it when it computes again. Where the program has
    no hooks, or they are forbidden, there are none: functions of torch.func do not run where there is one."""
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return saved_tensors_hooks(as_it_is, as_it_is) if allowed and _top_hooks() is not None else nullcontext()


def as_it_is(saved: Any) -> Any:
    """The hook of `unseen`."""
    return saved


@contextmanager
def without_hooks() -> Iterator[None]:
    """Inside `unseen`, without any hook: functions of torch.func do not run where there is one. Elsewhere the hooks are
    the program's, and so is the error."""
    taken = list[tuple[Any, Any]]()
    if _top_hooks() == (as_it_is, as_it_is):
        while (top := _top_hooks()) is not None:
            taken.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _top_hooks() -> tuple[Any, Any] | None:
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def recording() -> Iterator[None]:
    """Autograd on, even inside an operator: the dispatcher excludes it there, and enable_grad alone records nothing."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def no_autocast() -> AbstractContextManager[None]:
    """Within it no operator casts, of whatever device autocast was on."""
    guard: AbstractContextManager[None] = torch._C._DisableAutocast()
    return guard


def autocast_is_on() -> bool:
    """Of any device."""
    return bool(torch._C._is_any_autocast_enabled())
