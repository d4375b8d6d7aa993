#!/usr/bin/env bash
# Runs the packed tests on a machine with a GPU; Rust is not needed there.
# Usage: run.sh [REPORT.json]
set -u
here=$(cd "$(dirname "$0")" && pwd)
report=${1:-$here/report.json}
log=$(mktemp)

# The tests find their data by the path of the checkout that they were built in. The data is in this
# folder, or, where only the binaries were packed, in the checkout around it.
built_in='@ROOT@'
data=$here
[ -d "$here/tests/data" ] || data=$(dirname "$here")
if [ ! -e "$built_in" ]; then
    mkdir -p "$(dirname "$built_in")" && ln -s "$data" "$built_in" || exit 1
fi

start=$(date +%s)
"$here/host" check | tee "$here/check.log"
check=${PIPESTATUS[0]}
# Without the checkout's sources, the tests of texts have nothing to read.
ZINC_GPU=1 ZINC_REPORT="$here/errors.json" "$here/validation" --skip tidy:: --skip ptx:: 2>&1 | tee "$log"
tests=${PIPESTATUS[0]}
# Alone, so that nothing else is on the GPU: time and bandwidth of every kernel.
ZINC_GPU=1 ZINC_BENCH="$here/bench.json" "$here/validation" --nocapture the_kernel_benchmark_on_a_gpu
seconds=$(($(date +%s) - start))

count() {
    sed -n "s/^test result:.* \([0-9]*\) $1.*/\1/p" "$log" | tail -1
}
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 | tr -d '"\\')
failures=$(sed -n 's/^test \([^ ]*\) \.\.\. FAILED$/"\1"/p' "$log" | paste -sd, -)
printf '{"gpu": "%s", "check_exit": %s, "tests_exit": %s, "passed": %s, "failed": %s, "failures": [%s], "seconds": %s,\n "errors": %s,\n "kernels": %s}\n' \
    "${gpu:-none}" "$check" "$tests" "$(count passed || true)" "$(count failed || true)" "$failures" "$seconds" \
    "$(cat "$here/errors.json" 2>/dev/null || echo null)" "$(cat "$here/bench.json" 2>/dev/null || echo null)" >"$report"
cat "$report"
rm -f "$log"
[ "$check" -eq 0 ] && [ "$tests" -eq 0 ]
