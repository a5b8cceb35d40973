"""The GPU architectures that one source serves, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_COLUMNS = 512  # of the tensor memory of a multiprocessor of sm_100 and sm_103


@dataclass(frozen=True)
class Arch:
    """Facts of an architecture that plans depend on.

    Args:
        name: the compiler's name, e.g. "sm_90a".
        smem_bytes: shared memory that one CTA may take.
        tensor_columns: of the tensor memory of a multiprocessor; 0 where there is none.
    """

    name: str
    smem_bytes: int = 227 * 1024
    tensor_columns: int = 0


ARCHES = {
    arch.name: arch
    for arch in (Arch("sm_90a"), *(Arch(name, tensor_columns=TENSOR_COLUMNS) for name in ("sm_100a", "sm_103a")))
}
_BY_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def arch_of_capability(capability: tuple[int, int]) -> Arch:
    """The architecture to compile for on a device of this compute capability.

    Raises:
        NotImplementedError: the device is older than sm_90 or of a family without kernels here.
    """
    if capability not in _BY_CAPABILITY:
        raise NotImplementedError(
            f"compute capability: supported are {sorted(_BY_CAPABILITY)} (Hopper, B200, B300), got {capability}; "
            "move the tensors to the CPU to run the torch twin"
        )
    return ARCHES[_BY_CAPABILITY[capability]]
