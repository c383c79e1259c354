"""What torch.autocast does with operators, by kind of device.

Read from torch 2.13: `aten/src/ATen/autocast_mode.h` for GPUs, `autocast_mode.cpp` for CPUs. Tests
hold it beside torch's dispatcher and what operators return.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal

Cast = Literal["narrow", "float32", "result", "widest", "products"]
"""Operands are cast to autocast's dtype, to float32, or to the widest of them; or they stay, and
the result is in float32. `products`: to autocast's dtype but for states, which stay; the result is
as wide as these."""
_LISTS: tuple[tuple[str, Cast, str], ...] = (
    (
        "cpu cuda",
        "narrow",
        "_convolution addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d conv_transpose3d linalg_vecdot linear matmul mm prelu "
        "scaled_dot_product_attention",
    ),
    (
        "cuda",
        "narrow",
        "_scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv "
        "addr chain_matmul convolution cudnn_convolution cudnn_convolution_transpose einsum "
        "gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell rnn_tanh_cell",
    ),
    (
        "cpu",
        "narrow",
        "_addmm_activation _native_multi_head_attention mkldnn_rnn_layer",
    ),
    (
        "cpu cuda",
        "float32",
        "binary_cross_entropy_with_logits cdist cosine_embedding_loss hinge_embedding_loss "
        "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
        "multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss "
        "soft_margin_loss triplet_margin_loss",
    ),
    (
        "cuda",
        "float32",
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d acos asin cosh cosine_similarity "
        "dist erfinv exp expm1 frobenius_norm group_norm layer_norm log log10 log1p log2 "
        "logsumexp native_layer_norm nuclear_norm pdist pow reciprocal renorm rms_norm rsqrt "
        "sinh softplus tan upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
    ),
    (
        "cpu",
        "float32",
        "_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d "
        "avg_pool3d binary_cross_entropy cholesky cholesky_inverse cholesky_solve "
        "cross_entropy_loss ctc_loss fake_quantize_per_tensor_affine fft_fft fft_fft2 "
        "fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 "
        "fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d "
        "geqrf grid_sampler grid_sampler_2d grid_sampler_3d inverse linalg_cholesky "
        "linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
        "linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank "
        "linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve "
        "lu_solve max_pool3d max_unpool2d max_unpool3d multilabel_margin_loss_forward "
        "nanquantile orgqr ormqr pinverse polar prod qr quantile reflection_pad1d "
        "reflection_pad2d replication_pad1d replication_pad2d replication_pad3d stft svd "
        "trace triangular_solve view_as_complex",
    ),
    (
        "cuda",
        "result",
        "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax norm prod softmax sum",
    ),
    (
        "cuda",
        "widest",
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add "
        "tensordot vdot",
    ),
    (
        "cpu",
        "widest",
        "cat index_copy stack",
    ),
)
_MADE_OF = {
    "square": "pow",
    "cross_entropy_loss": "log_softmax",
    "nll_loss_nd": "nll_loss",
    "einsum": "bmm",
    "tensordot": "mm",
    "lstm": "linear",
    "rnn_tanh": "linear",
    "rnn_relu": "linear",
    "gru": "gru_cell",
}
"""What autocast sees of operators that it does not know itself: the calls that they are made of."""
_WITH_STATES = frozenset({"gru"})
"""On a CPU these are made of linear layers, and of states to which what those make is added."""


def cast_of(target: str, kind: str) -> Cast | None:
    """Return what autocast does on devices of a kind (`cpu`, `cuda`) with an operator such as
    `aten.pow.Tensor_Scalar`; None if it leaves it alone."""
    namespace, name, *_ = *target.split("."), ""
    if namespace != "aten":
        return None
    if kind == "cpu" and name in _WITH_STATES:
        return "products"
    known = _by_kind()[kind]
    return known.get(name) or known.get(_MADE_OF.get(name, ""))


def known_names(kind: str) -> frozenset[str]:
    """Return the names of the operators that autocast knows on devices of a kind."""
    return frozenset(_by_kind()[kind])


@cache
def _by_kind() -> dict[str, dict[str, Cast]]:
    found: dict[str, dict[str, Cast]] = {"cpu": {}, "cuda": {}}
    for kind, cast, name in _each():
        found[kind][name] = cast
    return found


def _each() -> Iterator[tuple[str, Cast, str]]:
    for kinds, cast, names in _LISTS:
        yield from ((kind, cast, name) for kind in kinds.split() for name in names.split())
