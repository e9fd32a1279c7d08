"""
The table of device faults. It says for each text of a device error which kind of fault the error
is.

A framework raises a device error as a `RuntimeError`. Its message contains the text that
`cudaGetErrorString` returns for a CUDA error code, or that torch_npu has for an error code of CANN.
The kind of fault is that of the first line of the table whose pattern (`words`) matches the
message. `docs/explanation/device_faults.md` shows the table.
"""

from tft.spi.types import DeviceFault

_CUDA = r"(CUDA (driver )?error: |Triton Error \[CUDA\]: |Cuda failure (\d+ )?')"
"""The prefixes that torch, Triton and NCCL put before the text of the CUDA runtime or driver."""
_CODE = r"[Ee]rror[ _]?[Cc]ode\D{0,8}"
"""The prefix that torch_npu and MindSpore put before the number of a CANN error."""
_RUNTIME = "CUDA Runtime API, cudaError_t"
_MINDSPORE = "MindSpore, train/model.py"
_CANN = "CANN, return codes of aclrt; torch_npu's words for them"

DEVICE_FAULTS = (
    # ---------------------------------------------------------------- bugs of the user
    DeviceFault(
        words=r"(CUDA|HIP|NPU|XPU) out of memory|CUDA error: out of memory",
        kind=None,
        source=f"torch's allocators; {_RUNTIME} 2",
    ),
    DeviceFault(
        words=_CUDA + r"device-side assert triggered",
        kind=None,
        context_lost=True,
        source=f"{_RUNTIME} 710",
    ),
    DeviceFault(
        words=_CUDA + r"(an illegal memory access|an illegal instruction|misaligned address"
        r"|invalid program counter|operation not supported on global/shared address space)",
        kind=None,
        context_lost=True,
        source=f"{_RUNTIME} 700, 715 to 718",
    ),
    # ---------------------------------------------------------------- memory faults
    DeviceFault(
        words=_CUDA + r"uncorrectable ECC error encountered",
        kind="memory",
        context_lost=True,
        source=f"{_RUNTIME} 214",
    ),
    DeviceFault(
        words=_CUDA + r"Invalid access of peer GPU memory over nvlink or a hardware error",
        kind="memory",
        context_lost=True,
        source=f"{_RUNTIME} 226, an error that the device has contained",
    ),
    DeviceFault(
        words=r"UCE ERROR|" + _CODE + r"507053\b", kind="memory", source=f"{_CANN}, 507053"
    ),
    DeviceFault(
        words=r"HBM MULTI BIT ECC|" + _CODE + r"507054\b", kind="memory", source=f"{_CANN}, 507054"
    ),
    DeviceFault(words=r"UCEError", kind="memory", source=_MINDSPORE),
    # ---------------------------------------------------------------- links and collectives
    DeviceFault(
        words=_CUDA + r"uncorrectable NVLink error",
        kind="network",
        context_lost=True,
        source=f"{_RUNTIME} 220",
    ),
    DeviceFault(
        words=r"SUSPECT MEM ERROR|" + _CODE + r"507055\b",
        kind="network",
        source=f"{_CANN}, 507055: the memory is that of another device",
    ),
    DeviceFault(
        words=r"HCCS LINK ERROR|" + _CODE + r"507056\b", kind="network", source=f"{_CANN}, 507056"
    ),
    DeviceFault(
        words=r"SUSPECT REMOTE ERROR|" + _CODE + r"507057\b",
        kind="network",
        source=f"{_CANN}, 507057: the other end has failed",
    ),
    DeviceFault(
        words=r"HCCL OP RETRY FAILED|UB LINK ERROR",
        kind="network",
        source="torch_npu; MindIO TFT, tft_exception_handler",
    ),
    DeviceFault(
        words=r"FORCE STOP",
        kind="network",
        source="torch_npu, stop_device: the wait for the other ranks was interrupted",
    ),
    DeviceFault(words=r"HCCEError|SuspectRemoteError", kind="network", source=_MINDSPORE),
    DeviceFault(
        words=r"ForceStopError",
        kind="network",
        source=f"{_MINDSPORE}: the wait for the other ranks was interrupted",
    ),
    # ---------------------------------------------------------------- faults of the whole device
    DeviceFault(
        words=r"error occurred in the previous step of this model execution"
        r"|Invalid output number for flatten stub output nodes",
        kind="process",
        context_lost=True,
        source="MindSpore, seen on CPU: a compiled graph that has failed once runs no more",
    ),
    DeviceFault(
        words=_CUDA + r"(unspecified launch failure|hardware stack error"
        r"|the launch timed out and was terminated)",
        kind="process",
        context_lost=True,
        source=f"{_RUNTIME} 719, 714, 702",
    ),
    DeviceFault(
        words=r"CU(BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_(EXECUTION_FAILED|EXEC_FAILED|MAPPING_ERROR)",
        kind="process",
        context_lost=True,
        source="cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT: a kernel was not carried out",
    ),
    DeviceFault(
        words=_CUDA + r"(CUDA-capable device\(s\) is/are busy or unavailable"
        r"|no CUDA-capable device is detected|system not yet initialized|context is destroyed"
        r"|unknown error)",
        kind="process",
        context_lost=True,
        source=f"{_RUNTIME} 46, 100, 802, 709, 999",
    ),
)
