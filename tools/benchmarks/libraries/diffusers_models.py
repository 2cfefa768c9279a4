"""Transformers of diffusers, tiny, in float64 and with random weights: `build(name)`.

What a number of the constructor is called says how small it becomes. What the rules get wrong is in EXCEPTIONS, by
class.
"""

from __future__ import annotations

import inspect
import re
import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ringopt.tools.benchmarks.libraries.diffusers_arguments import (
    AXES,
    CAPTION,
    FRAMES,
    SIDE,
    TEXT,
    TOKENS,
    Given,
    Sizes,
    arguments,
)

HEADS = 2

# The first that is found in the name of a number says how small it becomes, where it is larger.
RULES: tuple[tuple[str, float], ...] = (
    (r"drop", 0.0),
    (r"max_text_seq|text_len", CAPTION),
    (r"norm_num_groups", 2),
    (r"kernel|rope|freq|patch|scale|eps|theta|ratio|_lens$|axes|sigma|time_|timestep|rotary|_max_|max_", -1),
    (r"layers$|n_layers|depth$|blocks$", 2),
    (r"num_.*experts$|num_experts", 4),
    (r"vocab|codebook_size|num_embeds_ada", 128),
    (r"ffn|ff_dim|ff_inner|intermediate|mlp_hidden|hidden_dim$|d_ff", 64),
    (r"sample_(size|height|width)", SIDE),
    (r"frames$|video_length", FRAMES),
    (r"(text|caption|cap_feat|cross|joint|pooled|projection|context|cond|llm|encoder|siglip|image|global).*"
     r"(dim|channels|size|dim2|dim_t5|2_dim)$|text_dim|text_in_dim", TEXT),
)  # fmt: skip
HEAD_COUNTS = r"^(num_|n_|n|dit_)?(attention_)?heads$"
KV_COUNTS = r"(kv|key_value)_(attention_)?heads$"
WIDTHS = r"^(hidden_size|dim|model_dim|embed_dim|token_dim|dit_dim|d_model|inner_dim)$"
OPEN = {"in_channels": 4, "patch_size": 2}  # what may be left open, and models need

# By class: sizes of the constructor.
EXCEPTIONS: dict[str, Sizes] = {
    "CosmosTransformer3DModel": {"concat_padding_mask": False, "extra_pos_embed_type": None},
    "DreamLiteTransformer2DModel": {"in_channels": TEXT, "cross_attention_dim": TEXT},
    "EasyAnimateTransformer3DModel": {"out_channels": 4},
    "HunyuanDiT2DModel": {"use_style_cond_and_image_meta_size": False},
    "Kandinsky6Transformer3DModel": {"visual_cond": False},
    "LatteTransformer3DModel": {
        "norm_type": "ada_norm_single", "num_embeds_ada_norm": 100, "caption_channels": TEXT,
        "cross_attention_dim": 2 * 88, "norm_elementwise_affine": False,
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 1},
    "PixArtTransformer2DModel": {"caption_channels": TEXT},
    "PriorTransformer": {"embedding_dim": TEXT, "num_embeddings": CAPTION},
    "T5FilmDecoder": {"targets_length": TOKENS},
    "Transformer2DModel": {"in_channels": TEXT, "patch_size": None, "cross_attention_dim": TEXT},
    "TransformerTemporalModel": {"in_channels": TEXT},
    "WanVACETransformer3DModel": {"vace_layers": [0]},
}  # fmt: skip


def kinds() -> dict[str, Any]:
    """All models that diffusers has under `models.transformers`, by name."""
    package: Any = import_module("diffusers.models.transformers")
    mixin: Any = import_module("diffusers.models.modeling_utils").ModelMixin
    found: dict[str, Any] = {}
    for module in iter_modules(package.__path__):
        for name, value in vars(import_module(f"{package.__name__}.{module.name}")).items():
            if inspect.isclass(value) and issubclass(value, mixin) and value.__module__.endswith(f".{module.name}"):
                found[name] = value
    return found


def build(name: str) -> tuple[nn.Module, Given]:
    """The model, and arguments of its forward. Raises ValueError where the rules find none."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    kind = kinds()[name]
    sizes = shrunk(defaults_of(kind)) | EXCEPTIONS.get(name, {})
    model = kind(**sizes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread(parameter)
    return model, arguments(model, sizes)


def spread(parameter: Tensor) -> None:
    """Gates that begin closed are open, else nothing of a block would be seen."""
    deviation = float(parameter.std()) if parameter.numel() > 1 else 0.0
    if not parameter.any():
        parameter.normal_(0.0, 0.1)
    elif parameter.dim() > 1 and 0 < deviation < 0.1:
        parameter.mul_(0.1 / deviation)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def defaults_of(kind: type) -> Sizes:
    """Of its constructor."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def shrunk(defaults: Sizes) -> Sizes:
    """What is passed to the constructor: what is a product of heads and their size stays one."""
    heads = next((value for name, value in defaults.items() if re.search(HEAD_COUNTS, name) and value), None)
    depth = depth_of_heads(defaults, heads)
    given = {name: OPEN[name] for name, value in defaults.items() if name in OPEN and value is None}
    for name, value in defaults.items():
        if type(value) is not int:
            continue
        if name.endswith("heads"):
            same = not re.search(KV_COUNTS, name) or value == heads
            given[name] = min(value, HEADS if same else 1)
        elif depth and (value == (heads or 0) * depth or re.search(WIDTHS, name)):
            given[name] = HEADS * depth
        elif (small := smaller(name, value)) != value:
            given[name] = small
    return given


def depth_of_heads(defaults: Sizes, heads: int | None) -> int | None:
    """The size of one head."""
    named = defaults.get("attention_head_dim") or defaults.get("head_dim") or defaults.get("d_kv")
    width = next((value for name, value in defaults.items() if re.search(WIDTHS, name) and value), None)
    axes = next((defaults[name] for name in AXES if defaults.get(name)), None)
    if named:
        return int(named)
    return width // heads if width and heads else sum(axes) if axes else None


def smaller(name: str, value: int) -> int:
    """A number by what it is called."""
    small = next((small for pattern, small in RULES if re.search(pattern, name)), -1)
    return value if small < 0 or value <= small else int(small)
