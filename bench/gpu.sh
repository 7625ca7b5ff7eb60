#!/usr/bin/env bash
# Everything that needs a GPU, in one run: the tests marked gpu, compute-sanitizer on the small ones, the benchmarks.
# Leaves bench/results/<device>.json (every round's seconds) and bench/results/<device>.md (tables with ratios).
#
# Uses the iecl_fast that is installed or built in place; PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
if [ -z "$device" ]; then
  echo "bench/gpu.sh: no CUDA device here" >&2
  exit 2
fi
results=bench/results/$(echo "$device" | tr ' /' '--')
mkdir -p bench/results

"$python" -c 'from iecl_fast.doctor import report; print(report())'
"$python" -m pytest -q -m gpu python_tests
small="accuracy or (same_sets and 700) or (excluded and 700)"
for tool in memcheck racecheck; do
  if command -v compute-sanitizer > /dev/null; then
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m pytest -q -m gpu -x -k "$small" python_tests
  else
    echo "compute-sanitizer --tool $tool: not found, left out"
  fi
done
"$python" -m bench.report --rounds 9 --json "$results.json" | tee "$results.md"
