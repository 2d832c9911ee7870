"""Suites `steps`, `steps_new` and `steps_compiled`: one forward pass of whole transformers, by attention.

    python benchmarks/attention.py --suite steps
    python benchmarks/attention.py --suite steps_new
    python benchmarks/attention.py --suite steps_compiled

A denoising step of diffusers' models, and a prefill of transformers', at a batch of one. Weights are random numbers in
bf16, made on the GPU. `steps` runs eager: a step's time, what of it is attention, and the memory at its peak.
`steps_new` has MiniMax-H3, HunyuanVideo 1.5, FLUX.2 and Z-Image.
`steps_compiled` compiles the repeated blocks with `torch.compile`, inside of which nothing is timed; no language model
keeps a cache there.

Attention is what a backend does, from Q, K and V that are normalised and rotated; in a fused model norms and RoPE are
part of it, and with a mask the model is fused. With a tail it is not, since blocks are chosen by rotated Q and K.
Contenders warm up in a few layers, twice where they are compiled.
Each round runs all of them once, in a shuffled order. An error is that of the output beside native attention's.
`--dims` changes nothing here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Container, Iterator
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import helion_attn as ha
from benchmarks.cells import compile_all
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, nbytes, synchronize, version_of
from benchmarks.lib.plots import stacked
from benchmarks.lib.problem import first_line, workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Plot, Suite, console, progress
from benchmarks.lib.tables import LABELS, Table, error_text, number, ratio, rows_of, speed_text
from devtools.workloads import Workload
from helion_attn.integrations.diffusers import Backend
from helion_attn.integrations.fused.diffusers_processors import Processor
from helion_attn.integrations.fused.fuse_transformers import FusedAttention
from helion_attn.testing import relative_error

#: Rounds end when the slowest contender has run for so long, at the latest after so many.
SECONDS, MOST_ROUNDS = 3.0, 9

#: Layers of the model in which contenders warm up: Gemma 3's sixth is its first without a window.
WARM_LAYERS = 6

#: Where models keep their layers.
LAYERS = ("blocks", "transformer_blocks", "single_transformer_blocks", "layers")

#: Up to so many tokens `auto` is measured. On more it takes the preset.
AUTO_TOKENS = 16384

#: Of whose versions a result file tells as well.
PACKAGES = ("diffusers", "transformers", "sageattention")

#: Forms of the same blocks that are compiled in one process, at most. PyTorch's limit is 8.
MOST_COMPILED = 64

# --- models ---------------------------------------------------------------------------------------

Built = tuple[torch.nn.Module, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer, and what a step of it is given."""

    name: str  # in result rows
    build: Callable[[Model], Built]  # makes the module and its inputs
    config: dict[str, Any]  # what its class is given
    # Of the image or the video in latents, as the module takes them, or the tokens of a prompt: (tokens,).
    size: tuple[int, ...]
    text: int = 0  # tokens beside those of the image or the video
    heads: tuple[int, int] = (24, 24)  # query heads and KV heads
    D: int = 128  # head dim
    can_fuse: bool = True  # whether `fuse_diffusers` or `fuse_transformers` takes it
    # Of a mask of about a quarter of the blocks: tokens of a tile, and tiles of a window.
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
    sound: int = 0  # of the tokens of `text`, those of a video's sound, which come before the video

    @property
    def is_causal(self) -> bool:
        """Whether it is a language model."""
        return len(self.size) == 1

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens in each dimension; of latents of some videos 2 x 2 are one."""
        is_patched = len(self.size) == 3 and self.build in (wan, hunyuan)
        return (self.size[0], *(x // 2 for x in self.size[1:])) if is_patched else self.size

    @property
    def joint_text(self) -> int:
        """Tokens of the text that are part of self-attention."""
        return self.text if self.build in JOINT else 0

    @property
    def workload(self) -> Workload:
        """Its self-attention."""
        tokens = math.prod(self.grid) + self.joint_text
        w = workload(1, self.heads[0], tokens, tokens, self.D, self.is_causal)
        return dataclasses.replace(w, H_kv=self.heads[1])


def flux(m: Model) -> Built:
    """Flux.1."""
    import diffusers

    module, (rows, columns) = diffusers.FluxTransformer2DModel(guidance_embeds=True, **m.config), m.size
    config = module.config
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    return module, {
        "hidden_states": torch.randn(1, rows * columns, config.in_channels),
        "encoder_hidden_states": torch.randn(1, m.text, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(m.text, 3),
    }


def qwen_image(m: Model) -> Built:
    """Qwen-Image, whose pipeline passes no mask where the text has no padding."""
    import diffusers

    module, (rows, columns) = diffusers.QwenImageTransformer2DModel(**m.config), m.size
    return module, {
        "hidden_states": torch.randn(1, rows * columns, module.config.in_channels),
        "encoder_hidden_states": torch.randn(1, m.text, module.config.joint_attention_dim),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, rows, columns)]],
    }


def wan(m: Model) -> Built:
    """Wan 2.1."""
    import diffusers

    module = diffusers.WanTransformer3DModel(**m.config)
    return module, {
        "hidden_states": torch.randn(1, 16, *m.size),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, m.text, module.config.text_dim),
    }


def hunyuan(m: Model) -> Built:
    """HunyuanVideo; half of its text is padding."""
    import diffusers

    module = diffusers.HunyuanVideoTransformer3DModel(**m.config)
    return module, {
        "hidden_states": torch.randn(1, 16, *m.size),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, m.text, module.config.text_embed_dim),
        "encoder_attention_mask": (torch.arange(m.text) < m.text // 2).long()[None],
        "pooled_projections": torch.randn(1, module.config.pooled_projection_dim),
        "guidance": torch.tensor([6000.0]),
    }


def ltx(m: Model) -> Built:
    """LTX-Video, its text without padding."""
    import diffusers

    module, (frames, rows, columns) = diffusers.LTXVideoTransformer3DModel(**m.config), m.size
    return module, {
        "hidden_states": torch.randn(1, frames * rows * columns, module.config.in_channels),
        "encoder_hidden_states": torch.randn(1, m.text, module.config.caption_channels),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": None,
        "num_frames": frames,
        "height": rows,
        "width": columns,
    }


def hunyuan15(m: Model) -> Built:
    """HunyuanVideo 1.5; of its texts, half of the first is padding, and there is no image."""
    import diffusers

    module = diffusers.HunyuanVideo15Transformer3DModel(**m.config)
    config, glyphs, image = module.config, m.text // 4, m.text // 4
    text = m.text - glyphs - image
    return module, {
        "hidden_states": torch.randn(1, config.in_channels, *m.size),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, text, config.text_embed_dim),
        "encoder_attention_mask": (torch.arange(text) < text // 2).long()[None],
        "encoder_hidden_states_2": torch.randn(1, glyphs, config.text_embed_2_dim),
        "encoder_attention_mask_2": torch.ones(1, glyphs, dtype=torch.long),
        "image_embeds": torch.zeros(1, image, config.image_embed_dim),
    }


def flux2(m: Model) -> Built:
    """FLUX.2."""
    import diffusers

    module, (rows, columns) = diffusers.Flux2Transformer2DModel(**m.config), m.size
    config, axis = module.config, torch.zeros(1)
    places = torch.cartesian_prod(axis, torch.arange(float(rows)), torch.arange(float(columns)), axis)
    return module, {
        "hidden_states": torch.randn(1, rows * columns, config.in_channels),
        "encoder_hidden_states": torch.randn(1, m.text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([4.0]),
        "img_ids": places,
        "txt_ids": torch.zeros(m.text, 4),
    }


def z_image(m: Model) -> Built:
    """Z-Image, of one image."""
    import diffusers

    module, (rows, columns) = diffusers.ZImageTransformer2DModel(**m.config), m.size
    return module, {
        "x": [torch.randn(module.config.in_channels, 1, 2 * rows, 2 * columns)],
        "t": torch.tensor([0.5]),
        "cap_feats": [torch.randn(m.text, module.config.cap_feat_dim)],
    }


def minimax_h3(m: Model) -> Built:
    """MiniMax-H3: text, then sound, then video. `Model.text` counts text and sound."""
    import diffusers

    module, video = diffusers.MiniMaxH3Transformer3DModel(**m.config), math.prod(m.size)
    config, text = module.config, m.text - m.sound
    tags = torch.tensor([1, 2, 0]).repeat_interleave(torch.tensor([text, m.sound, video]))
    # Positions are counted by the video's frames; text and sound lie on one line.
    line = torch.arange(m.text, dtype=torch.float32)[:, None].expand(-1, 3)
    places = torch.cartesian_prod(*(torch.arange(x, dtype=torch.float32) for x in m.size))
    return module, {
        "hidden_states": torch.randn(1, video, config.in_channels * math.prod(config.patch_size)),
        "audio_hidden_states": torch.randn(1, m.sound, config.audio_in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.text_dim),
        "timestep": torch.tensor([0.5]),
        "timestep_indices": torch.zeros_like(tags),
        "token_tags": tags,
        "position_ids": torch.cat([line, m.text + places]),
        **{f"{name}_indices": (tags == i).nonzero()[:, 0] for i, name in enumerate(("video", "text", "audio"))},
    }


def language_model(config_name: str, class_name: str) -> Callable[[Model], Built]:
    """A prefill by these classes of transformers; of the last token alone there are logits, as in `generate`."""

    def build(m: Model) -> Built:
        transformers = importlib.import_module("transformers")
        module = getattr(transformers, class_name)(getattr(transformers, config_name)(**m.config))
        return module, {"input_ids": torch.randint(m.config["vocab_size"], (1, *m.size)), "logits_to_keep": 1}

    return build


llama = language_model("LlamaConfig", "LlamaForCausalLM")
qwen3 = language_model("Qwen3Config", "Qwen3ForCausalLM")
gemma3 = language_model("Gemma3TextConfig", "Gemma3ForCausalLM")

#: Their text is part of self-attention.
JOINT = (flux, qwen_image, hunyuan, hunyuan15, flux2, z_image, minimax_h3)

_WAN_SMALL = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
_WAN_720P, _WAN_480P = (21, 90, 160), (21, 60, 104)
_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN3 = _LLAMA | {"vocab_size": 151936, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
}
#: 26% of the blocks.
_720P_TILES = ((3, 5, 8), (3, 7, 6))
_480P_TILES = ((3, 10, 4), (5, 2, 5))
_544P_TILES = ((3, 9, 10), (5, 2, 6))

#: Blocks of the 50 of MiniMax-H3, which are alike: all of them are 64 GB.
H3_BLOCKS = 12


def minimax_h3_of(frames: int, text: int, sound: int, window: tuple[int, int, int]) -> Model:
    """MiniMax-H3 at a length of its videos of 1344 x 768 pixels; tiles are of 384 tokens."""
    size = (frames, 24, 42)
    name = f"MiniMax-H3, {H3_BLOCKS} of 50 blocks, {math.prod(size) + text + sound:,} tokens"
    config, tiles = {"num_layers": H3_BLOCKS}, ((8, 8, 6), window)
    return Model(name, minimax_h3, config, size, text + sound, (56, 56), tiles=tiles, sound=sound)


#: Videos of 5, 10 and 15 seconds.
H3_5S, H3_10S, H3_15S = (
    minimax_h3_of(37, 946, 414, (3, 2, 3)),
    minimax_h3_of(72, 854, 810, (5, 2, 4)),
    minimax_h3_of(107, 938, 1206, (7, 2, 4)),
)
WAN_SMALL = "Wan 2.1 1.3B, 1280 x 720, 81 frames"
WAN_480P, WAN_720P = "Wan 2.1 14B, 832 x 480, 81 frames", "Wan 2.1 14B, 1280 x 720, 81 frames"
LLAMA, FLUX = "Llama 8B, 32k tokens", "Flux.1, 1024 x 1024"

#: Those with a bound of their own first: a run may be cut short.
MODELS: tuple[Model, ...] = (
    Model(WAN_SMALL, wan, _WAN_SMALL, _WAN_720P, 512, (12, 12), tiles=_720P_TILES),
    Model(LLAMA, llama, _LLAMA, (32768,), heads=(32, 8)),
    Model(WAN_480P, wan, {}, _WAN_480P, 512, (40, 40), tiles=_480P_TILES),
    Model(WAN_720P, wan, {}, _WAN_720P, 512, (40, 40), tiles=_720P_TILES),
    Model(FLUX, flux, {}, (64, 64), 512),
    Model("Llama 8B, 8k tokens", llama, _LLAMA, (8192,), heads=(32, 8)),
    Model("Qwen3 8B, 8k tokens", qwen3, _QWEN3, (8192,), heads=(32, 8)),
    Model("Qwen3 8B, 32k tokens", qwen3, _QWEN3, (32768,), heads=(32, 8)),
    Model("Gemma 3 12B, 8k tokens", gemma3, _GEMMA3, (8192,), heads=(16, 8), D=256),
    Model("Gemma 3 12B, 32k tokens", gemma3, _GEMMA3, (32768,), heads=(16, 8), D=256),
    Model("LTX-Video 2B, 1216 x 704, 121 frames", ltx, {}, (16, 22, 38), 256, (32, 32), 64, can_fuse=False),
    Model("Qwen-Image 20B, 1328 x 1328", qwen_image, {}, (83, 83), 512),
    Model("HunyuanVideo 13B, 960 x 544, 129 frames", hunyuan, {}, (33, 68, 120), 256, tiles=_544P_TILES),
)

NEW_MODELS: tuple[Model, ...] = (
    H3_10S,
    H3_5S,
    H3_15S,
    Model("HunyuanVideo 1.5 8B, 832 x 480, 121 frames", hunyuan15, {}, (31, 30, 52), 1024, (16, 16)),
    Model("FLUX.2 32B, 1024 x 1024", flux2, {}, (64, 64), 512, (48, 48)),
    Model("Z-Image 6B, 1024 x 1024", z_image, {}, (64, 64), 512, (30, 30)),
)

_TINY_DIFFUSION = {"num_attention_heads": 1, "attention_head_dim": 64, "num_layers": 1}
_TINY_AXES = {"axes_dims_rope": (16, 24, 24), "joint_attention_dim": 32}
_TINY_LANGUAGE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_TINY_WAN = _TINY_DIFFUSION | {"ffn_dim": 64, "text_dim": 32}
_TINY_FLUX = _TINY_DIFFUSION | _TINY_AXES | {"num_single_layers": 1, "pooled_projection_dim": 32}
_TINY_HUNYUAN = _TINY_DIFFUSION | {
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": (16, 24, 24),
}
_TINY_HUNYUAN15 = _TINY_DIFFUSION | {
    "num_refiner_layers": 1,
    "in_channels": 9,
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (16, 24, 24),
}
_TINY_FLUX2 = _TINY_DIFFUSION | {
    "num_single_layers": 1,
    "in_channels": 16,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (16, 16, 16, 16),
}
_TINY_Z_IMAGE = {"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 1, "n_kv_heads": 1, "cap_feat_dim": 32} | {
    "axes_dims": [16, 24, 24]
}
_TINY_H3 = _TINY_DIFFUSION | {
    "hidden_size": 64,
    "num_refiner_layers": 1,
    "ffn_dim": 64,
    "text_dim": 32,
    "freq_dim": 16,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 32,
    "rope_freq_dim": 8,
}
_TINY_LTX = _TINY_DIFFUSION | {"cross_attention_dim": 64, "caption_channels": 32}

#: What a dry run measures: one of each class.
DRY: tuple[Model, ...] = (
    Model("Wan", wan, _TINY_WAN, (2, 8, 8), 8, (1, 1), 64, tiles=((1, 2, 4), (1, 1, 1))),
    Model("Llama", llama, _TINY_LANGUAGE, (32,), heads=(2, 1), D=32),
    Model("Flux", flux, _TINY_FLUX, (4, 4), 8, (1, 1), 64),
    Model("Qwen3", qwen3, _TINY_LANGUAGE, (32,), heads=(2, 1), D=32),
    Model("Gemma 3", gemma3, _TINY_LANGUAGE | {"sliding_window": 16}, (32,), heads=(2, 1), D=32),
    Model("LTX-Video", ltx, _TINY_LTX, (2, 4, 4), 8, (1, 1), 64, can_fuse=False),
    Model("Qwen-Image", qwen_image, _TINY_DIFFUSION | _TINY_AXES, (4, 4), 8, (1, 1), 64),
    Model("HunyuanVideo", hunyuan, _TINY_HUNYUAN, (2, 4, 4), 8, (1, 1), 64, tiles=((1, 2, 2), (1, 1, 1))),
)
DRY_NEW: tuple[Model, ...] = (
    Model("MiniMax-H3", minimax_h3, _TINY_H3, (2, 4, 4), 8, (1, 1), 64, tiles=((1, 2, 2), (1, 1, 1)), sound=3),
    Model("HunyuanVideo 1.5", hunyuan15, _TINY_HUNYUAN15, (2, 4, 4), 8, (1, 1), 64),
    Model("FLUX.2", flux2, _TINY_FLUX2, (4, 4), 8, (1, 1), 64),
    Model("Z-Image", z_image, _TINY_Z_IMAGE, (4, 4), 8, (1, 1), 64),
)


@contextlib.contextmanager
def bf16_on(device: torch.device) -> Iterator[None]:
    """What is made in it is in bf16 and on the device, as `from_pretrained` makes it: buffers that say so are fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def layers_of(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.ModuleList]]:
    """A model's lists of layers: where, under which name, and the list."""
    for parent in (module, getattr(module, "model", None)):
        for name in LAYERS:
            found = getattr(parent, name, None)
            if isinstance(parent, torch.nn.Module) and isinstance(found, torch.nn.ModuleList):
                yield parent, name, found


@contextlib.contextmanager
def few_layers(module: torch.nn.Module) -> Iterator[None]:
    """The model with its first layers alone."""
    found = list(layers_of(module))
    try:
        for parent, name, layers in found:
            setattr(parent, name, layers[:WARM_LAYERS])
        yield
    finally:
        for parent, name, layers in found:
            setattr(parent, name, layers)


# --- contenders -----------------------------------------------------------------------------------

#: Attention of q, k, v, BSHD: causal, sm_scale, earlier keys in a window or None.
Attention = Callable[[Tensor, Tensor, Tensor, bool, float | None, int | None], Tensor]


def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float | None, left: int | None) -> Tensor:
    """FlashAttention-3 in 16 bits."""
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func
    window = (-1, -1) if left is None else (left, 0)
    out: Tensor = function(q, k, v, softmax_scale=sm_scale, causal=causal, window_size=window)
    return out


def sage2(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float | None, left: int | None) -> Tensor:
    """SageAttention 2."""
    if left is not None:
        raise NotImplementedError("SageAttention has no windows")
    function = importlib.import_module("sageattention").sageattn_qk_int8_pv_fp8_cuda_sm90
    out: Tensor = function(q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=sm_scale)
    return out


#: What neither library has under a name of its own.
OTHERS: dict[str, Attention] = {"fa3_bf16": fa3, "sage2": sage2}

#: The recipe of each of ours.
RECIPES = {
    "balanced": DEFAULT, "fast": "fast", "auto": "auto", "fused": DEFAULT, "masked": DEFAULT, "tail": DEFAULT
}  # fmt: skip

#: The share of the blocks that "tail" visits.
TAIL_KEEP = 0.25

#: In the order of tables; "sdpa_bf16" is what PyTorch chooses.
CONTENDERS = ("sdpa_bf16", "cudnn_bf16", *OTHERS, *RECIPES)


class OtherBackend(Backend):
    """Another's attention as a backend of diffusers. Keys of padding, which come last, are left out."""

    def __init__(self, function: Attention) -> None:
        super().__init__(ha.BALANCED)
        self.function = function

    def forward(
        self,
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> Tensor:
        """As `Backend.forward`."""
        if attn_mask is not None:
            # One row, where rows of padding alone have others.
            of_keys = attn_mask[0, 0, 0] if attn_mask.dim() == 4 else attn_mask
            if attn_mask.dtype != torch.bool or of_keys.numel() != key.size(1) or len(attn_mask) > 1:
                raise NotImplementedError(f"a mask of {attn_mask.dtype} and shape {tuple(attn_mask.shape)}")
            keys = int(of_keys.sum())
            key, value = key[:, :keys], value[:, :keys]
        return self.function(query, key, value, is_causal, scale, None)


def other_function(
    function: Attention,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,  # what else transformers tells every attention function
) -> tuple[Tensor, None]:
    """Another's attention as a function of transformers, for a prefill without padding."""
    left = None if sliding_window is None or sliding_window >= key.size(2) else sliding_window - 1
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return function(q, k, v, True, scaling, left), None


def cudnn_function(*args: Any, **kwargs: Any) -> Any:
    """transformers' own function for PyTorch's attention, by cuDNN."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention_forward(*args, **kwargs)


def register_other(name: str, function: Attention) -> None:
    """Another's attention as a backend of diffusers."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    ha.register_diffusers(name)
    _AttentionBackendRegistry._backends[AttentionBackendName(name)] = OtherBackend(function)


def register(names: list[str], model: Model, module: torch.nn.Module) -> None:
    """Put contenders under their names into the model's library, but for those that are fused, which have none."""
    if model.is_causal:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import flash_attention_mask, sdpa_mask

        for name in names:
            if name in OTHERS:
                AttentionInterface.register(name, functools.partial(other_function, OTHERS[name]))
                AttentionMaskInterface.register(name, flash_attention_mask)
            elif name == "cudnn_bf16":
                AttentionInterface.register(name, cudnn_function)
                AttentionMaskInterface.register(name, sdpa_mask)
            elif name in RECIPES and name != "fused":
                ha.register_transformers(name, recipe=RECIPES[name])  # type: ignore[arg-type]
        return
    from diffusers.utils import logging

    logging.set_verbosity_error()  # each backend that is set is called experimental
    for name in names:
        if name in OTHERS:
            register_other(name, OTHERS[name])
        elif name == "tail":
            schedule: Any = functools.partial(blocks_with_tail, model.workload.N)
            ha.register_diffusers(name, schedule=schedule, models=module, scheduler=one_step())
        elif name in RECIPES and name not in ("fused", "masked"):
            ha.register_diffusers(name, recipe=RECIPES[name])  # type: ignore[arg-type]


def one_step() -> Any:
    """A scheduler of diffusers that has one step, for schedules."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(1)
    return scheduler


def blocks_with_tail(tokens: int, step: int, layer: int, q: Tensor, k: Tensor) -> ha.BlockMask | None:
    """A schedule of `register_diffusers`: the best blocks of self-attention, others by their means."""
    return ha.masks.top_blocks(q, k, keep=TAIL_KEEP, tail=True) if q.size(2) == k.size(2) == tokens else None


def of_self_attention(
    tiles: ha.masks.Reordered | None, step: int, layer: int, q: Tensor, k: Tensor
) -> ha.masks.Reordered | None:
    """A schedule of `fuse_diffusers`: attention of other tokens than the video's is dense."""
    return tiles if tiles is not None and (q.size(2), k.size(2)) == (tiles.mask.M, tiles.mask.N) else None


def tiles_of(model: Model, device: torch.device) -> ha.masks.Reordered | None:
    """What a video's tokens see, of a model that has tiles."""
    if model.tiles is None:
        return None
    tile, window = model.tiles
    # MiniMax-H3's other tokens come first.
    others = {"before" if model.build is minimax_h3 else "text": model.joint_text}
    return ha.masks.sliding_tile(model.grid, tile, window, **others, device=device)


def enter(name: str, model: Model, module: Any, processors: dict[Any, Any], tiles: ha.masks.Reordered | None) -> None:
    """Have the model take a contender.

    Args:
        name: of `CONTENDERS`.
        model: what it is.
        module: what `model.build` made.
        processors: diffusers' own, by the attention that they are of; none of transformers.
        tiles: of the model.
    """
    if model.is_causal and name == "fused":
        ha.fuse_transformers(module)
        return
    if model.is_causal:
        module.set_attn_implementation({"sdpa_bf16": "sdpa"}.get(name, name))
        return
    for attention, processor in processors.items():
        attention.set_processor(processor)
    if name in ("fused", "masked"):
        module.set_attention_backend("native")
        if name == "fused" or tiles is None:
            ha.fuse_diffusers(module)
            return
        ha.fuse_diffusers(module, schedule=functools.partial(of_self_attention, tiles), scheduler=one_step())
    else:
        module.set_attention_backend({"sdpa_bf16": "native", "cudnn_bf16": "_native_cudnn"}.get(name, name))


def names_of(model: Model, options: Options, compiled: bool) -> list[str]:
    """The contenders of a model."""
    left_out = {name for name in ("cudnn_bf16", *OTHERS) if name not in options.impls}
    if "helion_attn" not in options.impls:
        left_out |= set(RECIPES)
    if not model.can_fuse:
        left_out.add("fused")
    if model.tiles is None or compiled:  # a schedule runs on the host
        left_out |= {"masked", "tail"}
    if model.workload.N > AUTO_TOKENS or compiled:
        left_out.add("auto")
    return [name for name in CONTENDERS if name not in left_out]


# --- measurement ----------------------------------------------------------------------------------


class Clock:
    """Milliseconds between marks, of the GPU or on the CPU of the host.

    Attributes:
        device: that is measured.
        spans: begin and end of each call of attention.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """Now."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """From one mark to another."""
        passed: float = 1e3 * (end - begin) if self.device.type != "cuda" else begin.elapsed_time(end)
        return passed

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls are spans."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.mark()
            out = function(*args, **kwargs)
            self.spans.append((begin, self.mark()))
            return out

        return timed

    @contextlib.contextmanager
    def of_attention(self, model: Model) -> Iterator[None]:
        """Every call of attention in the model's library is a span."""
        if model.is_causal:
            from transformers import AttentionInterface

            known = AttentionInterface._global_mapping
        else:
            from diffusers.models.attention_dispatch import _AttentionBackendRegistry

            known = _AttentionBackendRegistry._backends
        timed = {name: self.around(function) for name, function in known.items()}
        with contextlib.ExitStack() as patched:
            patched.enter_context(patch.dict(known, timed))
            for kind in (Processor, FusedAttention):
                patched.enter_context(patch.object(kind, "attend", self.around(kind.attend)))
            yield


@dataclasses.dataclass(frozen=True)
class Measured:
    """One step."""

    ms: float  # its time
    attention_ms: float | None  # of it in attention; None where it is compiled
    peak_memory: int | None  # bytes of the weights, and the most that the step allocates; None on the CPU
    out: Tensor  # what it gives


@torch.no_grad()
def forward(module: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The logits of a language model, else what is predicted."""
    if "input_ids" in inputs:
        out: Tensor = module(**inputs).logits
    else:
        found = module(**inputs, return_dict=False)[0]
        # A list of images, of one.
        out = found[0] if isinstance(found, list) else found
    return out


def measure_step(
    model: Model, module: torch.nn.Module, inputs: dict[str, Any], device: torch.device, compiled: bool
) -> Measured:
    """One forward pass of what the model has been made to take."""
    on_gpu, clock = device.type == "cuda", Clock(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    with contextlib.nullcontext() if compiled else clock.of_attention(model):
        begin = clock.mark()
        out = forward(module, inputs)
        end = clock.mark()
        synchronize(device)
    attention_ms = None if compiled else sum(clock.ms(*span) for span in clock.spans)
    # What others keep, such as masks, is not counted.
    peak = nbytes(*module.parameters()) + torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    return Measured(clock.ms(begin, end), attention_ms, peak, out)


def measure_model(model: Model, options: Options, results: Results, compiled: bool) -> None:
    """Rounds of all contenders. What a row has is of the rounds until then."""
    device = options.device
    torch.manual_seed(0)
    with bf16_on(device):
        module, inputs = model.build(model)
    module.eval()
    names = names_of(model, options, compiled)
    register(names, model, module)
    tiles = tiles_of(model, device)
    attentions: list[Any] = [] if model.is_causal else [x for x in module.modules() if hasattr(x, "processor")]
    processors = {attention: attention.processor for attention in attentions}
    if compiled:
        if model.is_causal:
            inputs["use_cache"] = False  # else each layer is compiled anew, for its number in the cache
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        for _, _, layers in layers_of(module):
            for layer in layers:
                layer.compile()
    w = model.workload
    shape = {"model": model.name, "B": w.B, "H": w.H, "H_kv": w.H_kv, "M": w.M, "N": w.N, "D": w.D, "causal": w.causal}
    rows: dict[str, Row] = {}
    for name in names:
        ours = name in RECIPES
        row = {"impl": "helion_attn" if ours else name, "recipe": RECIPES.get(name), "stage": "e2e", "contender": name}
        rows[name] = row | shape

    def failed(name: str, error: Exception) -> None:
        row = rows.pop(name)
        row["error_message"] = first_line(error)
        results.add(*([] if "ms" in row else [row]))
        if device.type == "cuda":
            torch.cuda.empty_cache()

    # A form that was compiled for one contender is compiled anew when another has been there.
    for name in progress(list(rows) * (2 if compiled else 1), "warming up"):
        if name not in rows:
            continue
        try:
            enter(name, model, module, processors, tiles)
            with few_layers(module):
                forward(module, inputs)
        except Exception as error:  # one that fails is a result, not the end of the run
            failed(name, error)
    generator = random.Random(0)
    measured: dict[str, list[Measured]] = {name: [] for name in rows}
    for i in range(min(options.repeats, MOST_ROUNDS)):
        for name in progress(generator.sample(list(rows), len(rows)), f"{model.name}, round {i + 1}"):
            try:
                enter(name, model, module, processors, tiles)
                measured[name].append(measure_step(model, module, inputs, device, compiled))
            except Exception as error:
                failed(name, error)
                continue
            update(rows, measured)
            results.add(*([rows[name]] if i == 0 else []))
        if not rows or max(sum(x.ms for x in measured[name]) for name in rows) >= 1e3 * SECONDS:
            break
    enter("sdpa_bf16", model, module, processors, tiles)  # the backend that was set last is that of new models
    times = ", ".join(f"{LABELS[name]} {row['ms']:.0f}" for name, row in rows.items())
    console.print(f"{model.name}, ms: {times}", highlight=False)


def update(rows: dict[str, Row], measured: dict[str, list[Measured]]) -> None:
    """Write what was measured until now into the rows."""
    base = measured.get("sdpa_bf16")
    for name, row in rows.items():
        if not (steps := measured[name]):
            continue
        parts = [step.attention_ms for step in steps if step.attention_ms is not None]
        row |= {
            "ms": statistics.median(step.ms for step in steps),
            "attention_ms": statistics.median(parts) if parts else None,
            "peak_memory": steps[-1].peak_memory,
            "error_total": relative_error(steps[0].out, base[0].out.double()) if base else None,
            "rounds": len(steps),
        }


def run(options: Options, results: Results, compiled: bool = False, newer: bool = False) -> None:
    """All models whose library is installed, one after the other."""
    dry, whole = (DRY_NEW, NEW_MODELS) if newer else (DRY, MODELS)
    models = dry if options.device.type == "cpu" else whole
    if compiled:
        models = models[:2] if models is DRY else models
    if options.quick:
        models = models[:2]
    results.meta |= {package: version_of(package) for package in PACKAGES}
    if "helion_attn" in options.impls:
        kinds = {(model.D, model.is_causal): model.workload for model in models}
        compile_all(list(kinds.values()), (DEFAULT, "fast"), options)
    for model in models:
        try:
            measure_model(model, options, results, compiled)
        except Exception as error:  # such as a library that is not there, or too little memory for the weights
            console.print(f"[yellow]skipped {model.name}: {first_line(error)}")
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


# --- tables, plot and bounds ----------------------------------------------------------------------

#: The result files, by how models run.
FILES = {"eager": "steps", "newer models, eager": "steps_new", "compiled": "steps_compiled"}
EAGER = [file for how, file in FILES.items() if how != "compiled"]


def by_model(loaded: Loaded, file: str) -> dict[str, dict[str, Row]]:
    """Rows by model and contender, of what has a time."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows_of(loaded, file):
        if row.get("ms") is not None:
            found.setdefault(row["model"], {})[row["contender"]] = row
    return found


def speedup(of_model: dict[str, Row], *names: str, time: str = "ms") -> float | None:
    """FA3's time, of the step or of its attention, over that of the fastest of some contenders."""
    times = [of_model[name][time] for name in names if name in of_model]
    return ratio(of_model.get("fa3_bf16", {}).get(time), min(times, default=None))


#: With the default preset, dense.
BALANCED = ("balanced", "fused")


def tables(loaded: Loaded) -> list[Table]:
    """Times by contender; then what of them is attention, the memory, and the output."""
    found = []
    for how, file in FILES.items():
        models = by_model(loaded, file)
        names = [name for name in CONTENDERS if any(name in of_model for of_model in models.values())]
        body = []
        for model, of_model in models.items():
            times = [number(of_model.get(name, {}).get("ms"), ".1f") for name in names]
            body.append([model, *times, *(speed_text(speedup(of_model, name)) for name in BALANCED)])
        headers = ["a step of", *(LABELS[name] for name in names), "FA3's time / BALANCED's", "/ BALANCED's, fused"]
        if body:
            found.append(Table(f"Time of a step, ms, {how}", headers, body))
    body = []
    for model, of_model in (item for file in EAGER for item in by_model(loaded, file).items()):
        for name, row in sorted(of_model.items(), key=lambda item: CONTENDERS.index(item[0])):
            share, peak = ratio(row["attention_ms"], row["ms"]), row["peak_memory"]
            error = "-" if name == "sdpa_bf16" else error_text(row["error_total"])
            memory = number(ratio(peak, 2**30), ".1f")
            body.append([model, LABELS[name], number(row["attention_ms"], ".1f"), number(share, ".0%"), memory, error])
    headers = [
        "a step of",
        "attention",
        "of it, ms",
        "of the step",
        "most memory, GiB",
        "output beside SDPA's",
    ]
    return [*found, Table("What of a step is attention, eager", headers, body)] if body else found


#: What the plot shows.
DRAWN = ("sdpa_bf16", "fa3_bf16", "sage2", "balanced", "fused", "masked")


def plot(loaded: Loaded, models: Container[str] | None = None) -> Figure | None:
    """Attention and the rest of a step, over FA3's step; of all models or of some."""
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for model, of_model in by_model(loaded, "steps").items():
        if "fa3_bf16" not in of_model or (models is not None and model not in models):
            continue
        whole = of_model["fa3_bf16"]["ms"]
        for name in DRAWN:
            if name in of_model:
                row = of_model[name]
                parts = row["attention_ms"] / whole, (row["ms"] - row["attention_ms"]) / whole
                groups.setdefault(model.replace(", ", "\n", 1), {})[name] = parts
    return stacked(groups, "a step's time over FA3's: attention, and the rest in grey", 1.0) if groups else None


#: Least speed over FA3's step of some models, of all others, and with a quarter of the blocks.
BOUNDS = {WAN_SMALL: 1.28, WAN_480P: 1.15, WAN_720P: 1.25, LLAMA: 1.10}
BOUNDS |= {H3_5S.name: 1.22, H3_10S.name: 1.30}
OTHER_BOUND, MASKED_BOUNDS, TAIL_BOUNDS = 1.0, {WAN_SMALL: 2.0}, {WAN_SMALL: 2.3}


def judged(loaded: Loaded, file: str, model: str, *names: str) -> float | None:
    """`speedup` of a model; NaN, which fails, where none of the contenders has a time, and one raised."""
    faster = speedup(by_model(loaded, file)[model], *names)
    rows = [row for row in rows_of(loaded, file, model=model) if row["contender"] in names]
    return math.nan if faster is None and any("error_message" in row for row in rows) else faster


def checks(loaded: Loaded) -> list[Check]:
    """Speeds over FA3's steps: of the default preset, plain or fused, and with a mask."""
    found = []
    for how, file in FILES.items():
        for model in by_model(loaded, file):
            promise, cell, bound = f"a step, {how}, plain or fused", model, OTHER_BOUND
            if file in EAGER and model in BOUNDS:
                promise, cell, bound = f"a step of {model}, plain or fused", "", BOUNDS[model]
            faster = judged(loaded, file, model, *BALANCED)
            found.append(Check(f"{promise}, speed / FA3's", cell, faster, bound, at_least=True))
            if file in EAGER and model in MASKED_BOUNDS:
                name = f"a step of {model}, a quarter of the blocks, speed / FA3's"
                faster = judged(loaded, file, model, "masked")
                found.append(Check(name, "", faster, MASKED_BOUNDS[model], at_least=True))
            if file in EAGER and model in TAIL_BOUNDS and "tail" in by_model(loaded, file)[model]:
                name = f"a step of {model}, a quarter of the blocks and a tail, speed / FA3's"
                found.append(Check(name, "", judged(loaded, file, model, "tail"), TAIL_BOUNDS[model], at_least=True))
    return found


PLOT = Plot("steps", "A step's time, attention and the rest, over FlashAttention-3's", plot)
SUITE = Suite("steps", run, {"steps": Block("steps", tables, (PLOT,), beside=("steps_new", "steps_compiled"))})
NEW_SUITE = Suite("steps_new", functools.partial(run, newer=True))
COMPILED_SUITE = Suite("steps_compiled", functools.partial(run, compiled=True))
