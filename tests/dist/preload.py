"""Imports for the fork server, once: ranks inherit them, and their garbage collector skips what was imported.

Meshes of the same degrees are made once in a rank: an equal mesh whose groups are gone would answer for the next one in
what DTensor remembers.
"""

import gc
from functools import cache

import trainer.ranks.mesh

trainer.ranks.mesh.make_meshes = cache(trainer.ranks.mesh.make_meshes)  # before it is imported by name

import grain  # noqa: E402, F401
import torch._inductor.compile_fx  # noqa: E402, F401
import torchao.float8  # noqa: E402, F401

import tests.dist.runs  # noqa: E402, F401
import tests.models.dense  # noqa: E402, F401
import tests.tiny_infer  # noqa: E402, F401
import titan_tools.infer.run  # noqa: E402, F401

tests.dist.runs.two_layers().__enter__()
gc.collect()
gc.freeze()
