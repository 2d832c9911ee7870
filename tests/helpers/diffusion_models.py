"""Transformers of pipelines of diffusers, tiny and random, and what they are called with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffusers
import torch


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux(layers: int = 1) -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=layers, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=12, axes_dims_rope=(8, 12, 12),
    ).eval()  # fmt: skip


def wan(layers: int = 2, kind: str = "WanTransformer3DModel", **options: Any) -> Any:
    """Cross attention has other lengths."""
    options = {"in_channels": 4, "out_channels": 4} | options
    return getattr(diffusers, kind)(
        num_attention_heads=2, attention_head_dim=32, text_dim=24, freq_dim=16, ffn_dim=64, num_layers=layers,
        rope_max_seq_len=32, **options,
    ).eval()  # fmt: skip


def wan_animate() -> Any:
    return wan(
        1, "WanAnimateTransformer3DModel", in_channels=12, latent_channels=4, image_dim=24, added_kv_proj_dim=64,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8}, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=8, face_encoder_hidden_dim=8, face_encoder_num_heads=1,
        inject_face_latents_blocks=1,
    )  # fmt: skip


def hunyuan_video(layers: int = 1, refiner_layers: int = 1) -> Any:
    """Attention of its refiner asks no backend."""
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=layers,
        num_single_layers=2, num_refiner_layers=refiner_layers, patch_size=2, text_embed_dim=24,
        pooled_projection_dim=12, rope_axes_dim=(8, 12, 12),
    ).eval()  # fmt: skip


def qwen_image(layers: int = 2) -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=layers, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(8, 12, 12),
    ).eval()  # fmt: skip


def hunyuan_video15(layers: int = 2) -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=layers,
        num_refiner_layers=1, text_embed_dim=24, text_embed_2_dim=12, image_embed_dim=10, rope_axes_dim=(8, 12, 12),
        target_size=16,
    ).eval()  # fmt: skip


def flux2(layers: int = 1) -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=layers, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, timestep_guidance_channels=16, mlp_ratio=2.0, axes_dims_rope=(8, 8, 8, 8),
    ).eval()  # fmt: skip


def z_image(layers: int = 2) -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=64, n_layers=layers, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=24,
        axes_dims=[8, 12, 12], axes_lens=[128, 32, 32],
    ).eval()  # fmt: skip


def minimax_h3(layers: int = 2) -> Any:
    """RoPE turns 24 channels of 32."""
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=32, hidden_size=64, num_layers=layers, num_refiner_layers=1,
        ffn_dim=64, in_channels=4, audio_in_channels=6, text_dim=24, freq_dim=16, time_embed_hidden_dim=32,
        time_embed_dim=32, rope_freq_dim=4,
    ).eval()  # fmt: skip


def ltx2(rope_type: str = "split", layers: int = 2, **options: Any) -> Any:
    """Video has 2 heads of 32 channels, and audio of 16."""
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
        audio_in_channels=6, audio_out_channels=6, audio_num_attention_heads=2, audio_attention_head_dim=16,
        audio_cross_attention_dim=32, num_layers=layers, caption_channels=24, rope_type=rope_type, **options,
    ).eval()  # fmt: skip


def kept_tokens(count: int, *kept: int) -> torch.Tensor:
    """A mask of so many tokens: the first of each sequence."""
    return (torch.arange(count) < torch.tensor(kept)[:, None]).long()


def inputs_of(model: Any) -> dict[str, Any]:
    """Two sequences. Of HunyuanVideo's text, behind the video, one has 11 tokens, the other 4."""
    time, text = torch.tensor([3, 500]), rand(2, 11, 24, seed=1)
    tokens = {"hidden_states": rand(2, 30, 16), "encoder_hidden_states": text[:, :9], "timestep": time / 1000}
    kind = type(getattr(model, "_orig_mod", model)).__name__
    if kind == "FluxTransformer2DModel":
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(6.0))
        return tokens | {"pooled_projections": rand(2, 12, seed=2), "img_ids": ids, "txt_ids": torch.zeros(9, 3)}
    if kind == "QwenImageTransformer2DModel":
        return tokens | {"img_shapes": [[(1, 5, 6)]] * 2}
    if kind == "HunyuanVideoTransformer3DModel":
        return {
            **{"hidden_states": rand(2, 4, 2, 8, 8), "timestep": time, "encoder_hidden_states": text},
            **{"encoder_attention_mask": kept_tokens(11, 11, 4), "pooled_projections": rand(2, 12, seed=2)},
            "guidance": torch.tensor([6.0, 6.0]),
        }
    if kind == "HunyuanVideo15Transformer3DModel":
        return {
            **{"hidden_states": rand(2, 9, 2, 5, 6), "timestep": time.float(), "encoder_hidden_states": text},
            **{"encoder_attention_mask": kept_tokens(11, 11, 4), "image_embeds": rand(2, 3, 10, seed=2)},
            **{"encoder_hidden_states_2": rand(2, 5, 12, seed=3), "encoder_attention_mask_2": kept_tokens(5, 5, 2)},
        }
    if kind == "Flux2Transformer2DModel":
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(6.0), torch.zeros(1))
        return tokens | {"img_ids": ids, "txt_ids": torch.zeros(9, 4), "guidance": torch.tensor([4.0, 4.0])}
    if kind == "ZImageTransformer2DModel":
        return {"x": [rand(4, 1, 10, 12)], "t": time[:1] / 1000, "cap_feats": [text[0]]}
    if kind == "MiniMaxH3Transformer3DModel":
        positions = torch.randint(0, 20, (30, 3), generator=torch.Generator().manual_seed(5))
        tags = torch.tensor([1] * 7 + [0] * 20 + [2] * 3)
        return {
            **{"hidden_states": rand(2, 20, 16), "audio_hidden_states": rand(2, 3, 6, seed=2)},
            **{"encoder_hidden_states": text[:, :7], "timestep": time / 1000, "timestep_indices": tags % 2},
            **{"token_tags": tags, "position_ids": positions, "text_indices": torch.arange(7)},
            **{"video_indices": torch.arange(7, 27), "audio_indices": torch.arange(27, 30)},
        }
    if kind == "LTX2VideoTransformer3DModel":
        return {
            **{"hidden_states": rand(2, 40, 4), "num_frames": 2, "height": 4, "width": 5},
            **{"audio_hidden_states": rand(2, 7, 6, seed=2), "audio_num_frames": 7, "timestep": time.float()},
            **{"encoder_hidden_states": text, "audio_encoder_hidden_states": text.flip(1)},
            "sigma": time.float(),
        }
    inputs = {"hidden_states": rand(2, 4, 2, 8, 10), "timestep": time, "encoder_hidden_states": text}
    if model.config.image_dim is not None:
        images = {"encoder_hidden_states_image": rand(2, 7, model.config.image_dim, seed=2)}
        inputs |= images | {"encoder_hidden_states": rand(2, 512, 24, seed=1)}
    if kind == "WanVACETransformer3DModel":
        inputs["control_hidden_states"] = rand(2, 6, 2, 8, 10, seed=3)
    if kind == "WanAnimateTransformer3DModel":
        inputs |= {"hidden_states": rand(2, 12, 2, 8, 10), "pose_hidden_states": rand(2, 4, 1, 8, 10, seed=3)}
        inputs["face_pixel_values"] = rand(2, 3, 1, 16, 16, seed=4)
    return inputs


#: By name: what makes the model, and inputs in place of those of `inputs_of`.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "flux": (flux, {}),
    "wan": (wan, {}),
    "wan_of_images": (functools.partial(wan, image_dim=24, added_kv_proj_dim=64), {}),
    # As Wan 2.2 with 5B parameters: each token has a time.
    "wan_of_times": (wan, {"timestep": torch.linspace(3, 500, 80).view(2, 40)}),
    "wan_vace": (
        functools.partial(wan, 1, "WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=6),
        {},
    ),
    "wan_animate": (wan_animate, {}),
    "chrono_edit": (
        functools.partial(wan, 1, "ChronoEditTransformer3DModel", image_dim=24, added_kv_proj_dim=64),
        {},
    ),
    "hunyuan_video": (hunyuan_video, {}),
    "hunyuan_video_of_one_length": (hunyuan_video, {"encoder_attention_mask": kept_tokens(11, 4, 4)}),
    "qwen_image": (qwen_image, {}),
    # Padding between text and image.
    "qwen_image_padded": (qwen_image, {"encoder_hidden_states_mask": kept_tokens(9, 9, 4)}),
    "hunyuan_video15": (hunyuan_video15, {}),
    "flux2": (flux2, {}),
    "z_image": (z_image, {}),
    "z_image_of_two": (
        z_image,
        {
            "x": [rand(4, 1, 10, 12), rand(4, 1, 8, 8)],
            "t": torch.tensor([0.3, 0.7]),
            "cap_feats": [rand(9, 24), rand(40, 24)],
        },
    ),
    "minimax_h3": (minimax_h3, {}),
    "ltx2": (
        ltx2,
        {"encoder_attention_mask": kept_tokens(11, 11, 4), "audio_encoder_attention_mask": kept_tokens(11, 4, 11)},
    ),
    "ltx2_interleaved": (functools.partial(ltx2, "interleaved"), {}),
    # As LTX-2.3: the first sequence takes values in place of attention in block 1.
    "ltx2_perturbed": (
        functools.partial(
            ltx2,
            perturbed_attn=True,
            gated_attn=True,
            audio_gated_attn=True,
            cross_attn_mod=True,
            audio_cross_attn_mod=True,
        ),
        {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([0.0, 1.0])},
    ),
}


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs. Weights have one size, so that attention looks somewhere, and norms differ by channel."""
    torch.manual_seed(0)
    make, others = MODELS[name]
    model = make()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
            elif "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.normal_(1.0, 0.4)
    return model, inputs_of(model) | others
