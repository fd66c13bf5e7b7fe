"""Precision of each operation under mixed precision: autocast's lists as one table.

Source: aten/src/ATen/autocast_mode.h of PyTorch 2.15, the lists for CUDA, and torch.amp's "Autocast Op Reference".
autopar applies them on every device, so that a plan gives the same numbers on all of them. An operation that is not
listed runs in its operands' dtypes, with torch's type promotion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from autopar.ir.graph import NO_AUTOCAST, Op

# low: inputs are cast to the low precision; float32: inputs are cast to float32; float32 inside: the dtype argument is
# set to float32; widest: inputs are cast to the widest dtype among them; as given: nothing is cast.
Treatment = Literal["low", "float32", "float32 inside", "widest", "as given"]

LOW_PRECISION = (
    "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv "
    "addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d "
    "convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear "
    "lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention"
)
FLOAT32 = (
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss "
    "cosine_similarity dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss "
    "layer_norm linalg_matrix_sqrth log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm nuclear_norm pdist poisson_nll_loss pow "
    "reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss "
    "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_trilinear3d"
)
FLOAT32_INSIDE = "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum"
WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"

# Composite operations, traced as one, that autocast casts inside: in cuDNN's kernels or in their parts.
COMPOSED_LOW = "gru linalg_matmul lstm rnn_relu rnn_tanh"
COMPOSED_FLOAT32 = "cross_entropy_loss nll_loss_nd"
# Autocast refuses the first one on CUDA. The others have no low-precision kernels, on CPU (whose autocast list has
# them) or on any device.
WITHOUT_KERNELS = (
    "binary_cross_entropy avg_pool3d cholesky_inverse cholesky_solve complex ctc_loss fft_fft fft_fft2 fft_fftn "
    "fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn "
    "inverse linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lstsq "
    "linalg_qr linalg_solve linalg_svd linalg_svdvals pinverse polar quantile stft view_as_complex"
)

POLICY: Mapping[str, Treatment] = {
    **dict.fromkeys(f"{LOW_PRECISION} {COMPOSED_LOW}".split(), "low"),
    **dict.fromkeys(f"{FLOAT32} {COMPOSED_FLOAT32} {WITHOUT_KERNELS}".split(), "float32"),
    **dict.fromkeys(FLOAT32_INSIDE.split(), "float32 inside"),
    **dict.fromkeys(WIDEST.split(), "widest"),
}


def treatment_of(op: Op) -> Treatment:
    """How an operation's inputs are cast. Autocast does not cast for in-place operations."""
    if not op.outputs or op.autocast == NO_AUTOCAST:
        return "as given"
    return POLICY.get(base_name(op), "as given")


def base_name(op: Op) -> str:
    """``linear`` for ``aten.linear.default``; empty for operations outside ATen."""
    namespace, name, _ = op.target.split(".")
    return name if namespace == "aten" else ""
