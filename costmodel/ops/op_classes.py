"""Which kind of work an op is."""

from functools import cache

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.ops import facts

_NAMES = {
    OpClass.MATMUL: "linear mm addmm bmm baddbmm addbmm matmul einsum experts dot mv addmv outer "
    "bilinear tensordot grouped_mm",
    OpClass.ATTENTION: "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention",
    OpClass.CONVOLUTION: "convolution _convolution conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d",
    OpClass.RECURRENT: "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell",
    OpClass.NORMALIZATION: "layer_norm native_layer_norm batch_norm _native_batch_norm_legit "
    "native_batch_norm cudnn_batch_norm group_norm instance_norm softmax _softmax "
    "log_softmax _log_softmax _safe_softmax cross_entropy_loss cross_entropy_sum "
    "nll_loss "
    "nll_loss_nd",
    OpClass.REDUCTION: "sum mean amax amin max min argmax argmin cumsum cumprod norm linalg_vector_"
    "norm var var_mean std std_mean prod any all count_valid count_rows topk sort argsort "
    "logsumexp histc "
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool1d "
    "adaptive_avg_pool2d mse_loss l1_loss smooth_l1_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits",
    OpClass.GATHER: "embedding embedding_bag _embedding_bag gather index index_select scatter "
    "scatter_add index_put index_put_ index_add index_copy take take_along_dim one_hot",
    OpClass.TRANSCENDENTAL: "gelu silu tanh sigmoid exp log erf sin cos pow mish softplus elu "
    "noise noise_of dropout native_dropout bernoulli rand rand_like logsigmoid gelu_ silu_",
    OpClass.COPY: "clone contiguous cat concat stack copy copy_ repeat repeat_interleave roll pad "
    "divide_gradient constant_pad_nd _to_copy to flip tril triu im2col",
    OpClass.VIEW: "view reshape _unsafe_view view_as reshape_as expand expand_as detach detach_ "
    "alias split split_with_sizes chunk unbind select slice squeeze unsqueeze transpose "
    "swapaxes t permute movedim flatten unflatten unfold diagonal narrow lift_fresh_copy getitem "
    "numpy_T mT broadcast_to tensor_split",
}
_CLASS = {name: op_class for op_class, names in _NAMES.items() for name in names.split()}

COMPUTE = frozenset({OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION, OpClass.RECURRENT})
"""Classes whose efficiency is a share of peak FLOP/s; that of the others is one of bandwidth."""


@cache
def op_name(target: str) -> str:
    """`linear` of `aten.linear.default`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@cache
def classify(target: str) -> OpClass:
    """The class of an op; what is not listed is elementwise."""
    known = facts(target)
    return known.op_class if known else _CLASS.get(op_name(target), OpClass.ELEMENTWISE)
