#!/usr/bin/env bash
# Runs multi_rank.py with several real NCCL ranks on one GPU.
#
#   benchmarks/multi_rank_gpu.sh [--nccl LIBRARY] [--ranks N] [--limit SECONDS] [-- OPTIONS]
#
# NCCL from 2.30 on can run several ranks on one GPU. Where torch's own is older, LIBRARY (or
# ZEROCORE_NCCL) is the path of a libnccl.so.2 that is new enough and has code for this GPU's
# architecture; it is preloaded. A CUDA MPS daemon, in a folder of its own, lets kernels of different
# ranks run at the same time; where it does not start, the ranks take turns. It runs twice, with the
# group bound to the device, whose communicator NCCL splits, and without; SECONDS are for both.
# Without a GPU the same runs once, on gloo, and there are no kernels to look at. PYTHON says which
# Python has torch (python3).
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
library=${ZEROCORE_NCCL:-}
ranks=2
limit=480
while (($# > 0)); do
  case $1 in
    --nccl) library=$2 && shift 2 ;;
    --ranks) ranks=$2 && shift 2 ;;
    --limit) limit=$2 && shift 2 ;;
    --) shift && break ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 2 ;;
  esac
done
command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks"
  "$root/benchmarks/multi_rank.py" "$@")
export OMP_NUM_THREADS=1 PYTHONPATH=$root

if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
  echo "NO GPU: $ranks gloo ranks; parity only, there are no kernels whose overlap could be seen"
  exec timeout --kill-after=45 "$limit" "${command[@]}"
fi
if [[ -n "$library" && ! -f "$library" ]]; then
  echo "no such library: $library" >&2
  exit 2
fi

mps=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
stop_mps() {
  if [[ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]]; then
    echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1
  fi
  rm -rf "$mps"
}
trap stop_mps EXIT

# The daemon may start and still refuse clients, so one is tried.
if timeout 20 nvidia-cuda-mps-control -d >/dev/null 2>&1 &&
  timeout 60 "$python" -c "import torch; torch.zeros(1).cuda().item()" >/dev/null 2>&1; then
  echo "CUDA MPS: on, kernels of different ranks may run at the same time"
else
  echo "CUDA MPS: does not start here, the ranks take turns on the GPU"
  echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
# torchrun needs up to 30 s to end ranks that hang.
status=0
for binds in --binds --no-binds; do
  echo "== $binds"
  NCCL_MULTI_RANK_GPU_ENABLE=1 LD_PRELOAD=$library \
    timeout --kill-after=45 $((limit / 2)) "${command[@]}" "$binds" || status=$?
done
exit "$status"
