#!/usr/bin/env bash
# Everything worth seeing on one GPU, in under five minutes, what is worth most first: is it right, then how fast.
# Needs no network and no installation: python3 with torch (CUDA), lightning, h5py, numpy, rich and pytest.
#   PYTHON=python3 bash benchmarks/gpu_check.sh [folder for the figures]
# Without a GPU it is a dry run: each check starts, and says "skipped: no CUDA".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-${OUT:-}}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
TOTAL_SECONDS=285  # for all; what is left when a check's turn comes is all that it gets
status=0

"$PYTHON" - <<'PY'
import h5py, lightning, torch
card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA: a dry run"
print(f"torch {torch.__version__}, lightning {lightning.__version__}, h5py {h5py.__version__}; {card}", flush=True)
PY

# check SECONDS WHAT COMMAND...: runs it within its limit, says how it ended.
check() {
    local limit=$1 what=$2 left=$((TOTAL_SECONDS - SECONDS)) before=$SECONDS
    shift 2
    echo "== $what"
    if ((left < 10)); then
        echo "left out: $TOTAL_SECONDS s are over"
        status=1
        return
    fi
    if timeout "$((limit < left ? limit : left))" "$@"; then
        echo "-- ended well after $((SECONDS - before)) s"
    else
        echo "-- FAILED, or was ended, after $((SECONDS - before)) s"
        status=1
    fi
}

# figures NAME: where a script writes what it measured, if a folder was given.
figures() { [ -z "$OUT" ] || echo "--json $OUT/$1.json"; }

# Right first. A configuration of its own: the project's names plug-ins that a GPU machine may lack. No group stops
# those after it.
tests() { check "$1" "tests of $2" "$PYTHON" -m pytest -c tests/gpu/pytest.ini --rootdir . -q -rsf --tb=short "${@:3}"; }
tests 60 "the feed: streams, tables, copies ahead, the reading process" tests/gpu/test_feed_gpu.py tests/gpu/hdf5 tests/gpu/device
tests 45 "the strategies and the split backward" tests/gpu/strategies tests/gpu/pipeline
tests 50 "the callbacks, and every precision" tests/gpu/callbacks tests/gpu/diagnose tests/gpu/test_precisions_gpu.py

# shellcheck disable=SC2046 # two words, or none
{
    check 60 "the feed against the copy's bound" "$PYTHON" benchmarks/gpu_feed.py $(figures gpu_feed)
    check 60 "OutOfOrderStrategy: what the order costs" "$PYTHON" benchmarks/gpu_sync.py $(figures gpu_sync)
    check 45 "OOMRecovery: what it costs, real out-of-memory" "$PYTHON" benchmarks/gpu_oom.py $(figures gpu_oom)
    check 40 "FeedMonitor: what it costs, what it sees" "$PYTHON" benchmarks/gpu_monitor.py $(figures gpu_monitor)
    check 40 "BatchEcho: what a pass costs" "$PYTHON" benchmarks/gpu_echo.py $(figures gpu_echo)
}
exit $status
