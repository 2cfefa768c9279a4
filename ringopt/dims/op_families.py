"""Families of ATen operators, by their names (`op_name`): one operation by several names, or several of one kind.

Tables of rules by operator (in dims, recognize, sharding, frontend and passes) take names from here, so that a name
that one of them knows is known to all; tests/dims/test_op_families.py holds them to it. A table may add names of its
own, but none of SYNONYMS, which are renamed before.
"""

from __future__ import annotations

# ---- views -----------------------------------------------------------------------------------------------------------
RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze")  # dims are merged and split
TRANSPOSES = ("transpose", "t", "mT")  # two dims change places
PERMUTATIONS = (*TRANSPOSES, "movedim", "permute")
SLICES = ("slice", "narrow")
SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")  # several slices

# ---- copies ----------------------------------------------------------------------------------------------------------
COPIES = ("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy")  # the same elements, and their gradient
CASTS = ("to", "_to_copy", "type_as")  # of another dtype, or of the same
PADS = ("pad", "constant_pad_nd")

# ---- names with the same arguments and the same result, which frontend/plain_spelling.py renames ---------------------
SYNONYMS = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "multiply": "mul",
    "subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg", "absolute": "abs", "fix": "trunc",
    "arctan2": "atan2", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arccosh": "acosh", "arcsinh": "asinh",
    "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
    "swapdims": "transpose", "moveaxis": "movedim", "broadcast_to": "expand", "linalg_matmul": "matmul",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
    "special_expit": "sigmoid", "special_erf": "erf", "special_exp2": "exp2", "special_expm1": "expm1",
    "special_log1p": "log1p",
}  # fmt: skip

# ---- elementwise, without the tag torch.Tag.pointwise on all overloads -----------------------------------------------
ELEMENTWISE = frozenset(
    {"where", "masked_fill", "rsub", "floor_divide", "nan_to_num", "square", "softplus", "hardswish", "log_sigmoid"}
    | {"__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "isclose", "leaky_relu"}
)

# ---- products and what surrounds them --------------------------------------------------------------------------------
MATRIX_PRODUCTS = ("matmul", "mm", "bmm")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED_CONVOLUTIONS = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
POOLS = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")  # by windows
TRANSFORMS = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")  # along one dim
RUNNING = ("cumprod", "logcumsumexp")  # as cumsum, which has rules of its own
SAFE_SOFTMAXES = ("_safe_softmax",)  # rows that are hidden whole are zeros, not NaN
SOFTMAXES = ("softmax", "_softmax", *SAFE_SOFTMAXES)


def moving_dims(name: str) -> int:
    """In how many dims, the last ones, the windows of a pooling move: 2 of "avg_pool2d"."""
    return int(name[-2])
