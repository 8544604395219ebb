"""converters/containers/dcp_write.py in little memory; what it writes is tested with the reader."""

import tracemalloc

from converters.common.box import Box, TensorInfo
from converters.common.names import DCP_METADATA
from converters.containers.dcp_item import blob_item
from converters.containers.dcp_write import BLOB_FILE, plan_dcp
from converters.store.folder_output import FolderFiles


def test_what_surrounds_many_chunks_is_written_file_by_file(tmp_path):
    """Each item is a zip of its own: 0.7 kB around a chunk, and a third of a gigabyte for 405B on 512 ranks."""
    tensors = {f"layers.{n}.weight": TensorInfo("bfloat16", (64, 4)) for n in range(50)}
    files = {f"__{rank}_0.distcp": [(fqn, Box((rank, 0), (1, 4))) for fqn in tensors] for rank in range(64)}
    target = plan_dcp(tensors, files)
    tracemalloc.start()
    try:
        target.finish(FolderFiles(tmp_path), [0] * len(target.slots))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(target.file_bytes.values()) > 2.3e6 and peak < 1e6


def test_metadata_is_written_last():
    """Where a file system has no rename, it is what makes a checkpoint of files for stock DCP."""
    files = {f"__{rank}_0.distcp": [("w", Box((rank,), (1,)))] for rank in range(2)}
    target = plan_dcp({"w": TensorInfo("float32", (2,))}, files, blobs={"train_state.step": blob_item(3)})
    assert [*target.slots_by_file(), *target.other_files] == [*files, BLOB_FILE, DCP_METADATA]
