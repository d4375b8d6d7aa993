#!/usr/bin/env bash
# Runs the packed tests on a machine with a GPU; Rust is not needed there, nor the checkout.
# Usage: bash run.sh [REPORT.json]
set -u
here=$(cd "$(dirname "$0")" && pwd)
report=${1:-$here/report.json}
log=$(mktemp)
errors=$(mktemp)
bench=$(mktemp)
trap 'rm -f "$log" "$errors" "$bench"' EXIT

for program in host validation; do
    xz -dkc "$here/$program.xz" >"$here/$program" && chmod +x "$here/$program" || {
        rm -f "$here/$program"
        echo "run.sh: $program.xz cannot be unpacked (is xz installed?)" >&2
        exit 2
    }
done

# Models and test data are in this folder, or, where only the binaries were packed, in the checkout around it.
export ZINC_ROOT=$here
[ -d "$here/tests/data" ] || ZINC_ROOT=$(dirname "$here")

start=$(date +%s)
echo "== host check"
"$here/host" check 2>&1 | tee "$log"
check=${PIPESTATUS[0]}
if grep -q '^chosen' "$log"; then
    export ZINC_GPU=1
    echo "== tests, on the emulated device and on the GPU"
else
    echo "== NO GPU THAT CAN BE USED (see above): the tests run on the emulated device only"
    unset ZINC_GPU
fi
# The rules about the checkout's texts have nothing to read here.
ZINC_REPORT=$errors "$here/validation" --skip tidy:: --skip ptx:: 2>&1 | tee "$log"
tests=${PIPESTATUS[0]}
if [ -n "${ZINC_GPU:-}" ]; then
    # Alone, so that nothing else is on the GPU.
    echo "== time and bandwidth of every kernel; worst error of its tests, relative to the largest element"
    ZINC_REPORT=$errors ZINC_BENCH=$bench "$here/validation" --nocapture --exact kernels::bench::the_kernel_benchmark_on_a_gpu
    speed=$?
else
    speed=0
fi
seconds=$(($(date +%s) - start))

count() {
    sed -n "s/^test result:.* \([0-9]*\) $1.*/\1/p" "$log" | tail -1
}
json() {
    if [ -s "$1" ]; then cat "$1"; else echo null; fi
}
gpu=null
if [ -n "${ZINC_GPU:-}" ]; then
    gpu=\"$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 | tr -d '"\\')\"
fi
failures=$(sed -n 's/^test \([^ ]*\) \.\.\. FAILED$/"\1"/p' "$log" | paste -sd, -)
passed=$(count passed)
failed=$(count failed)
printf '{"gpu": %s, "check_exit": %s, "tests_exit": %s, "bench_exit": %s, "passed": %s, "failed": %s, "failures": [%s], "seconds": %s,\n "errors": %s,\n "kernels": %s}\n' \
    "$gpu" "$check" "$tests" "$speed" "${passed:-null}" "${failed:-null}" "$failures" "$seconds" \
    "$(json "$errors")" "$(json "$bench")" >"$report"
echo "== ${passed:-0} tests passed, ${failed:-0} failed; host check: $([ "$check" -eq 0 ] && echo READY || echo NOT READY); report: $report"
[ "$check" -eq 0 ] && [ "$tests" -eq 0 ] && [ "$speed" -eq 0 ]
