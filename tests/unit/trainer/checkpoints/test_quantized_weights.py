"""Training and inference stop at a quantized weight whose codes or scales are NaN, and name it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from converters.common.errors import CheckpointError
from converters.quantized.stored_blocks import BlocksSource
from converters.source.weights import open_native
from tests import fp8_folders
from tests.doors import convert
from tests.models import gpt_oss
from tests.models.dense import write as write_tiny
from tests.tiny_infer import CPU
from titan_tools.infer.model.load import load_model
from trainer.checkpoints.load import load_weights
from trainer.config.sections import Checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('pg')}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def damaged_fp8(root, *, of):
    """A folder with one NaN among the codes or scales, and the native name of its weight."""
    write_tiny(root / "hf", "qwen3")
    whole = fp8_folders.write_fp8(root / "whole", root / "hf")
    held, name = fp8_folders.read_folder(whole), "model.layers.1.mlp.up_proj.weight"
    if of == "codes":
        held[name].view(torch.uint8)[3, 5] = 0xFF
    else:
        held[f"{name}_scale_inv"][0, 0] = float("nan")
    return whole, fp8_folders.save(root / "src", held, whole, fp8_folders.CONFIG), "layers.1.feed_forward.w3.weight"


def damaged_mxfp4(root, *, of):
    gpt_oss.write(root / "hf")
    gpt_oss.write_mxfp4(root / "whole", root / "hf")
    held = gpt_oss.read_folder(root / "whole")
    held["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 0] = 255
    src = gpt_oss.save(root / "src", held, root / "whole", gpt_oss.CONFIG)
    return root / "whole", src, "layers.1.moe.experts.mlp2_weight"


@pytest.mark.parametrize(
    ("damaged", "of"),
    [(damaged_fp8, "codes"), (damaged_fp8, "scales"), (damaged_mxfp4, "scales")],
    ids=["fp8 codes", "fp8 scales", "mxfp4 scales"],
)
def test_nan_in_quantized_weights_is_refused(group, tmp_path, damaged, of):
    whole, src, name = damaged(tmp_path, of=of)
    settings = Checkpoint(initial_load_in_hf=True, initial_load_in_hf_quantized=True)
    for path in (whole, src):
        with open_native(path, dequantized="float32") as weights:
            shapes, info = {fqn: each.shape for fqn, each in weights.tensors.items()}, weights.info
        state = SimpleNamespace(model=SimpleNamespace(state_dict=lambda s=shapes: {n: torch.zeros(s[n]) for n in s}))

        def train(path=path, state=state, info=info):
            load_weights(path, state, info=info, settings=settings, group=group)

        def infer(path=path, **options):
            with open_native(path) as weights:
                source = BlocksSource(weights.source) if options else weights.source
                load_model(source, weights.info, dtype=torch.float32, device=CPU, **options)

        for ask in (train, infer, lambda infer=infer: infer(quantize="stored")):
            if path == whole:
                ask()
                continue
            with pytest.raises(CheckpointError, match="NaN") as caught:
                ask()
            assert name in caught.value.message
    report = convert(src, tmp_path / "dcp", to="dcp", allow_nonfinite=True)  # which counts them
    assert list(report.non_finite) == [name]
