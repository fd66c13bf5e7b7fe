"""Kind and direction of GPU kernels, from their names.

Kernels of a replayed CUDA graph carry no operation. Their names do say what they compute: cuBLAS, cuDNN, CUTLASS and
flash attention put the algorithm into a kernel's name, torch.compile the operations that it fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from autopar.ir.hardware import OpKind

KernelKind = OpKind | Literal["optimizer", "collective"]
Direction = Literal["forward", "backward", "update"]

# The first pattern that occurs in a name decides; a kernel without one only moves data.
PATTERNS: Mapping[str, KernelKind] = {
    r"nccl": "collective",
    r"multi_tensor_apply|^triton_for_": "optimizer",
    r"^triton_tem_.*(flex_)?attention": "attention",
    r"^triton_tem_.*depthwise": "depthwise",
    r"^triton_tem_.*convolution": "convolution",
    r"^triton_tem_": "matmul",
    r"^triton_|^(memcpy|memset)": "memory",  # a fused kernel may have addmm or convolution in its name, for its operand
    r"flash|fmha|sdpa|attention|mha_fwd|mha_bwd": "attention",
    r"depthwise|dwconv|conv_?dw|(conv2d|dgrad2d|wgrad2d|conv3d)_grouped_direct": "depthwise",
    r"fprop|dgrad|wgrad|implicit_?gemm|convolve|winograd|convolution|conv[123]d|conv_kernel|fft[123]d_": "convolution",
    r"gemm|nvjet|cutlass|gemv|splitk|cublas|dot_kernel|wgmma": "matmul",
}  # fmt: skip
COMPILED: Mapping[re.Pattern[str], KernelKind] = {re.compile(p, re.IGNORECASE): kind for p, kind in PATTERNS.items()}
BACKWARD = re.compile(r"backward|bwd|dgrad|wgrad|dq_dk_dv|_bprop", re.IGNORECASE)


def kernel_kind(name: str) -> KernelKind:
    """Kind of a kernel.

    Error: cuDNN's ``grouped_direct`` kernels count as depthwise; they also run other grouped convolutions. A foreach
        kernel counts as the optimizer, wherever in the step it runs.
    """
    for pattern, kind in COMPILED.items():
        if pattern.search(name):
            return kind
    return "memory"


def kernel_directions(names: Iterable[str]) -> list[Direction]:
    """Direction of each kernel of a step with one microbatch, in the order in which they started.

    The backward begins with the first kernel whose name says so: in a step, the gradient of the loss. A generated
    kernel does not begin it: one of the forward that computes what a norm's backward needs names that backward too.
    Kernels of the optimizer are the update.
    """
    directions, in_backward = list[Direction](), False
    for name in names:
        in_backward = in_backward or (not name.startswith("triton_") and BACKWARD.search(name) is not None)
        update = kernel_kind(name) == "optimizer"
        directions.append("update" if update else "backward" if in_backward else "forward")
    return directions
