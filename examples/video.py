"""A video with fused 8-bit attention beside one in bf16, from one seed.

The first step and the outer layers stay in 16 bits, which costs little and keeps text and faces. Without a model it is
a small one with random weights, on a CPU too, whose clip is noise.

    python examples/video.py
    python examples/video.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "A cat walks on a wall."
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import diffusers
import torch

import helion_attn as ha
from helion_attn.testing import relative_error
from helion_attn.types import RecipeName

#: Up to this, latents are those of the same clip.
MOST = 0.1


def small() -> Any:
    """A pipeline of Wan that is given embeddings of a text, and gives latents."""
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, text_dim=24, freq_dim=16, ffn_dim=64, num_layers=3,
        rope_max_seq_len=32,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.WanPipeline(None, None, None, scheduler, transformer=transformer.bfloat16())


def latents_of(pipeline: Any, options: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The latents of a clip, and the seconds that it took."""
    began = time.perf_counter()
    latents = pipeline(**options, output_type="latent", generator=torch.Generator().manual_seed(0)).frames
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return latents, time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    """Parse `argv`, or the command line, and return how many clips differ by more than `MOST`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a pipeline of diffusers: a name on the Hub, or a folder")
    parser.add_argument("--prompt", default="A cat walks on a wall.", help="what it shows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.model is None:
        text = torch.randn(1, 8, 24, dtype=torch.bfloat16)
        options: dict[str, Any] = {"prompt_embeds": text, "negative_prompt_embeds": torch.zeros_like(text)}
        options |= {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 3}
        pipeline = small()
    else:
        options = {"prompt": args.prompt}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
    pipeline.to(args.device)
    pipeline.set_progress_bar_config(disable=args.model is None)
    base, base_s = latents_of(pipeline, options)
    layers = len(pipeline.transformer.blocks)

    def schedule(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> RecipeName | None:
        return "bf16" if step == 0 or layer in (0, layers - 1) else None

    ha.fuse_diffusers(pipeline.transformer, schedule=schedule, scheduler=pipeline.scheduler)
    fused, fused_s = latents_of(pipeline, options)
    error = relative_error(fused, base.double())
    print(f"bf16 {base_s:.1f} s, fused {fused_s:.1f} s; latents differ by {100 * error:.2f}%")
    return int(not error <= MOST)


if __name__ == "__main__":
    raise SystemExit(main())
