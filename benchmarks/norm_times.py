"""Times of quantising with norms and RoPE over plain quantising: run in each tree's root, `PYTHONPATH=$PWD python .gpu/norm_times.py`."""

import statistics

import torch

import helion_attn as ha

#: name: query heads, KV heads, tokens, interleaved RoPE.
SHAPES = {
    "Wan 1.3B 720p": (12, 12, 75600, True),
    "Wan 14B 480p": (40, 40, 32760, True),
    "Flux": (24, 24, 4608, True),
    "Llama 32k": (32, 8, 32768, False),
}
D, ROUNDS = 128, 15


def medians(calls):
    """Milliseconds of each call, all interleaved, after three warm ones."""
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    spans = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda._sleep(400_000)  # the launches do not wait for Python
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in spans.items()}


def main():
    print(torch.cuda.get_device_name(), ha.__file__)
    lines = []
    for name, (H, H_kv, S, interleaved) in SHAPES.items():
        q, k, v = (torch.randn(1, S, h, D, device="cuda", dtype=torch.bfloat16) for h in (H, H_kv, H_kv))
        angle = torch.arange(S, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, D, 2, device="cuda") / D)
        rope = ha.Rope(angle.cos(), angle.sin(), interleaved)

        def norms(*channels):
            made = (ha.RMSNorm(torch.ones(n, device="cuda", dtype=torch.bfloat16)) for n in channels)
            return dict(zip(("q_norm", "k_norm"), made))

        cases = {
            "plain": {},
            "RoPE": {"rope": rope},
            "by head": {"rope": rope, **norms(D, D)},
            "over heads": {"rope": rope, **norms(H * D, H_kv * D)},
        }
        for preset in ("BALANCED", "FAST"):
            calls = {
                case: lambda given=given: ha.quantize(q, k, v, layout="bshd", recipe=getattr(ha, preset), **given)
                for case, given in cases.items()
            }
            ms = medians(calls)
            print(name, preset, {case: round(x, 4) for case, x in ms.items()}, "ms", flush=True)
            lines.append((name, preset, *(ms[case] / ms["plain"] for case in cases)))
        del q, k, v
        torch.cuda.empty_cache()
    print(f"{'over plain quantising':24}{'':10}" + "".join(f"{case:>12}" for case in cases))
    for name, preset, *ratios in lines:
        print(f"{name:24}{preset:10}" + "".join(f"{x:12.3f}" for x in ratios))


if __name__ == "__main__":
    main()
