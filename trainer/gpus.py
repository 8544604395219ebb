"""GPU types: data-sheet numbers by device name, and the types that a memory estimate is made for. Torch-free."""

from dataclasses import dataclass

HOPPER = 90  # compute capability, times ten


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
    """The numbers of a device by its driver's name, None each where the device is not known."""
    return next((sheet for sheet in _DATA_SHEETS if sheet.device in device_name), _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU type to estimate memory for.

    `usable_gib`: torch.cuda's total memory; `sm`: its compute capability, times ten; `cublas_mib`: workspace of one
    thread's cuBLAS handle.
    """

    name: str
    usable_gib: float
    sm: int
    cublas_mib: float


# usable_gib: H100-96 and A100 from torchtitan's logs (its "CUDA capacity" line); the others as torch.cuda reports them.
# cublas_mib: torch's default workspace (2.11 to 2.13): 32 MiB on sm90 and later, before that 2·4096 + 8·16 KiB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80", 79.15, 80, 8.125),
        Gpu("h100-80", 79.11, HOPPER, 32),
        Gpu("h100-96", 95.04, HOPPER, 32),
        Gpu("h200", 139.8, HOPPER, 32),
        Gpu("b200", 178.3, 100, 32),
    )
}
DEFAULT_GPU = GPUS["h100-80"]
