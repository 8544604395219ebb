"""No gradients are left in the thread of a device. In a process of its own, because it registers a type of device."""

import subprocess
import sys

CODE = """
import os, threading

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from trainer.loss.chunked import wait_for_autograd_thread

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # on one core a thread that wakes another is preempted
_setup_privateuseone_for_python_backend("thread_of_its_own")
create, library = torch._C._acc.create_empty_tensor, torch.library.Library("aten", "IMPL")
for name in ("detach", "view"):
    same = lambda tensor, *size: create(tuple(tensor.shape), tensor.dtype)
    torch.library.impl(f"aten::{name}", "privateuseone", lib=library)(same)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):
        return create((), torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        threads.add(threading.get_ident())
        return create((4,), torch.float32), create((8,), torch.float32)


threads = set()
leaves = [create((size,), torch.float32).requires_grad_() for size in (4, 8)]
for waits in (False, True):
    num_held = 0
    for _ in range(600):
        gradients = torch.autograd.grad(Backward.apply(*leaves), leaves, create((), torch.float32))
        if waits:
            wait_for_autograd_thread(create((), torch.float32))
        num_held += any(gradient._use_count() > 1 for gradient in gradients)
    print(num_held)
print(threading.get_ident() in threads, flush=True)
os._exit(0)  # the device's thread would fetch tensors' Python objects from an interpreter that is being torn down
"""


def test_a_wait_leaves_no_gradient_in_the_thread():
    without_wait, with_wait, is_same_thread = subprocess.check_output([sys.executable, "-c", CODE], text=True).split()
    assert int(without_wait) > 0, "torch has changed: the wait may go"
    assert (int(with_wait), is_same_thread) == (0, "False")
