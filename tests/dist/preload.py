"""Imports for the fork server, once: ranks inherit them, and their garbage collector skips what was imported."""

import gc

import grain  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401
import torchao.float8  # noqa: F401

import tests.dist.runs  # noqa: F401
import tests.models.dense  # noqa: F401
import tests.tiny_infer  # noqa: F401
import titan_tools.infer.run  # noqa: F401

gc.collect()
gc.freeze()
