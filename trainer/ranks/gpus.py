"""GPU types: data-sheet numbers by device name, and the types that a memory estimate is made for. Torch-free."""

import re
from dataclasses import dataclass

HOPPER, WORKSTATION_BLACKWELL = 90, 120  # compute capability, times ten


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A vendor's numbers. `device` is a part of the name that the driver reports; None: not known."""

    device: str
    bf16_flops: float | None  # dense, per second
    gb_per_sec: float | None  # memory bandwidth


# The first match counts, so longer names come first
_DATA_SHEETS = (
    DataSheet("H100 NVL", 835e12, 3938),
    DataSheet("H100 PCIe", 756e12, 2039),
    DataSheet("H100", 989e12, 3352),
    DataSheet("GH200 144G", 989e12, 4900),
    DataSheet("GH200", 989e12, 4000),
    DataSheet("H200", 989e12, 4800),
    DataSheet("H800", 989e12, None),
    DataSheet("B200", 2250e12, 8000),
    DataSheet("A100-SXM4-40GB", 312e12, 1555),
    DataSheet("A100-PCIE-40GB", 312e12, 1555),
    DataSheet("A100 80GB PCIe", 312e12, 1935),
    DataSheet("A100", 312e12, 2039),
    DataSheet("A800", 312e12, None),
    DataSheet("A10G", None, 600),
    DataSheet("L40S", 362e12, 864),
    DataSheet("L40", None, 864),
    DataSheet("L4", None, 300),
    DataSheet("V100", None, 900),
    DataSheet("MI325X", None, 6000),
    DataSheet("MI300X", 1307e12, 5300),
)
_UNKNOWN = DataSheet("", None, None)


def data_sheet(device_name: str) -> DataSheet:
    """The numbers of a device by its driver's name, None each if the device is not known."""
    return next((sheet for sheet in _DATA_SHEETS if sheet.device in device_name), _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU type to estimate memory for.

    `usable_gib`: torch.cuda's total memory; `sm`: its compute capability, times ten, for AMD's GPUs that of the nearest
    features; `cublas_mib`: workspace of one thread's cuBLAS handle.
    """

    name: str
    usable_gib: float
    sm: int
    cublas_mib: float

    @property
    def is_amd(self) -> bool:
        """Whether CUDA's allocator and kernels stand for ROCm's."""
        return self.name.startswith("mi")


_SMALL, _LARGE = 8.125, 32  # torch's default workspaces (2.11 to 2.13): 2·4096 + 8·16 KiB, and from sm90 on 32 MiB
# usable_gib: H100-96, A100-80 and GB300 from torchtitan's logs (its "CUDA capacity" line); H100-80, H200 and B200 as
# torch.cuda reports them; the others as torch's out-of-memory messages print it ("GPU 0 has a total capacity of"), the
# lowest of what public reports show: it varies by up to 0.3 GiB with the driver. A MI250X is two devices to torch.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80", 79.15, 80, _SMALL),
        Gpu("h100-80", 79.11, HOPPER, _LARGE),
        Gpu("h100-96", 95.04, HOPPER, _LARGE),
        Gpu("h200", 139.8, HOPPER, _LARGE),
        Gpu("b200", 178.3, 100, _LARGE),
        Gpu("a100-40", 39.39, 80, _SMALL),
        Gpu("h20", 95.0, HOPPER, _LARGE),
        Gpu("gh200-96", 94.5, HOPPER, _LARGE),
        Gpu("b300", 267.69, 103, _LARGE),
        Gpu("gb200", 184.31, 100, _LARGE),
        Gpu("gb300", 276.5, 103, _LARGE),
        Gpu("v100-16", 15.77, 70, _SMALL),
        Gpu("v100-32", 31.73, 70, _SMALL),
        Gpu("a10", 22.05, 86, _SMALL),
        Gpu("l4", 22.03, 89, _SMALL),
        Gpu("l40s", 44.39, 89, _SMALL),
        Gpu("a6000", 47.4, 86, _SMALL),
        Gpu("rtx3090", 23.57, 86, _SMALL),
        Gpu("rtx4090", 23.61, 89, _SMALL),
        Gpu("rtx5090", 31.36, WORKSTATION_BLACKWELL, _LARGE),
        Gpu("rtxpro6000", 94.96, WORKSTATION_BLACKWELL, _LARGE),
        Gpu("mi250x", 63.98, 80, _LARGE),
        Gpu("mi300x", 191.69, 94, _LARGE),
        Gpu("mi325x", 255.69, 94, _LARGE),
        Gpu("mi355x", 287.98, 95, _LARGE),
    )
}
DEFAULT_GPU = GPUS["h100-80"]
JUDGED = tuple(GPUS.values())[:5]
"""The types that an estimate has a verdict on if none is named."""
_NOISE = re.compile(r"nvidia|amd|geforce|instinct|tesla|quadro|rtx|sxm\d?|pcie|oam|hbm\d?e?|(?<=\d) ?gb|[^a-z0-9]")


def gpus_called(text: str) -> list[Gpu]:
    """The types of that name, as people write it: `A100-SXM4-80GB`, `RTX 4090`, `h100` (of which there are several)."""
    name = _squeezed(text)
    if exact := [gpu for gpu in GPUS.values() if _squeezed(gpu.name) == name]:
        return exact
    return [gpu for gpu in GPUS.values() if "-" in gpu.name and _squeezed(gpu.name.split("-")[0]) == name]


def _squeezed(name: str) -> str:
    return _NOISE.sub("", name.strip().lower())
