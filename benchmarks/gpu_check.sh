#!/usr/bin/env bash
# Everything worth seeing on one GPU, in under five minutes: the marked tests, then the figures.
# Needs no network and no installation: python3 with torch (CUDA), lightning, h5py, numpy, rich and pytest.
#   PYTHON=python3 bash benchmarks/gpu_check.sh [folder for the figures]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-${OUT:-}}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0

"$PYTHON" - <<'PY'
import h5py, lightning, torch
card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA: each check below says skipped"
print(f"torch {torch.__version__}, lightning {lightning.__version__}, h5py {h5py.__version__}; {card}")
PY

echo "== tests marked gpu"
# A configuration of its own: the project's names plug-ins that a GPU machine may lack.
timeout 105 "$PYTHON" -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu -q -rs || status=1

echo "== feed to the device"
timeout 65 "$PYTHON" benchmarks/gpu_feed.py ${OUT:+--json "$OUT/gpu_feed.json"} || status=1
echo "== BatchEcho on the device"
timeout 40 "$PYTHON" benchmarks/gpu_echo.py ${OUT:+--json "$OUT/gpu_echo.json"} || status=1
echo "== OOMRecovery on the device"
timeout 45 "$PYTHON" benchmarks/gpu_oom.py ${OUT:+--json "$OUT/gpu_oom.json"} || status=1
echo "== FeedMonitor on the device"
timeout 40 "$PYTHON" benchmarks/gpu_monitor.py ${OUT:+--json "$OUT/gpu_monitor.json"} || status=1
echo "== OutOfOrderStrategy on the device"
timeout 60 "$PYTHON" benchmarks/gpu_sync.py ${OUT:+--json "$OUT/gpu_sync.json"} || status=1
exit $status
