#!/usr/bin/env bash
# Builds zerocore in place, tests it and runs all benchmarks on one GPU, and prints a summary.
#
#   benchmarks/gpu_suite.sh OUT_DIR [PART...]
#
# Parts, in four groups whose names stand for all of their parts; by default the first group:
#   first   build smoke test_uses test_parity test_steady_state kernels
#   second  test_delays memcheck racecheck test_kernels test_adamw test_events test_emulated_link link
#   third   optimizer overlap host step_emulated step_nccl step_bf16
#   fourth  memory_7b memory_4b
# Each part has a time limit, at which it is interrupted and says what it has, and may fail without
# stopping the next. The limits of a group add up to at most 570 seconds, and so does a call, unless
# BUDGET_S says otherwise. Call again at once for the next group, where a machine is lent by the
# minute: a new one has to build first. No network is used.
# OUT_DIR receives summary.txt, pictures, and results.tar.gz with all logs and result files. Without
# a GPU it rehearses, on the CPU and in small, what runs without one. PYTHON says which Python has
# torch (python3).
set -uo pipefail

if (($# < 1)); then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
  exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
chosen=" ${*:-first} "
group=first
python=${PYTHON:-python3}
budget_s=${BUDGET_S:-570}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/logs" "$work/results"
export PYTHONPATH=$root PYTHONUNBUFFERED=1 ZEROCORE_RESULTS=$work/results
cd "$root" || exit 1
# A warning of another version of a package is no failure of the GPU. A test that hangs shows all
# stacks after 20 s and ends after 25 s; compiling in a test takes longer than that on no GPU.
pytest=("$python" -m pytest -q -p no:cacheprovider -W default --maxfail=10
  --timeout=25 --timeout-method=thread -o faulthandler_timeout=20)

# After every part, so that an end by force loses one part only.
collect() {
  cp "$work/summary.txt" "$out/summary.txt"
  find "$work/results" -name '*.png' -exec cp {} "$out/" \;
  tar -czf "$out/results.tar.gz" -C "$work" logs results summary.txt
}

# note NAME SECONDS STATUS LAST_LINE
note() {
  printf '%-14s %5s s  exit %-4s %s\n' "$1" "$2" "$3" "${4:0:100}" >>"$work/summary.txt"
  collect
}

# By its own name or by that of its group.
is_chosen() {
  [[ "$chosen" == *" $1 "* || "$chosen" == *" $group "* ]]
}

# part NAME LIMIT_S COMMAND...
part() {
  local name=$1 limit=$2 log="$work/logs/$1.log" left=$((budget_s - SECONDS)) start=$SECONDS status
  shift 2
  is_chosen "$name" || return
  if ((left < 10)); then
    note "$name" 0 - "not run: the budget of $budget_s s is spent"
    return
  fi
  echo "== $name: $*"
  # An interrupt, so that pytest says what failed and a benchmark reports what it has measured.
  timeout --signal=INT --kill-after=10 "$((limit < left ? limit : left))" "$@" >"$log" 2>&1
  status=$?
  tail -n 40 "$log"
  ((status == 124 || status == 137)) && echo "stopped at the time limit" >>"$log"
  note "$name" "$((SECONDS - start))" "$status" "$(grep -v '^ *$' "$log" | tail -n 1)"
}

skip() {
  is_chosen "$1" && note "$1" 0 - "skipped: $2"
}

run_on_gpu() {
  # Kernels of others (the model's) are not checked, and every allocation is one of its own, so
  # that a step over its end is seen.
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  local sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --error-exitcode 9 --kernel-regex kns=zerocore)
  # Without the longest lists, which take minutes so, what needs the profiler for itself, and
  # captures, which cannot allocate so.
  local kernel_tests=("${pytest[@]}" --timeout=70 -x tests/gpu/test_kernels.py
    tests/gpu/test_adamw.py
    -k "not launch and not 2000 and not captured and not 150 and not 600")
  part build 200 env ZEROCORE_CUDA=1 "$python" setup.py build_ext --inplace
  part smoke 30 "${pytest[@]}" -x tests/gpu/test_parity.py -k stage3
  # A process for each file: after an illegal access no more of a GPU can be used in one.
  part test_uses 60 "${pytest[@]}" tests/gpu/test_uses.py
  part test_parity 90 "${pytest[@]}" tests/gpu/test_parity.py
  part test_steady_state 90 "${pytest[@]}" tests/gpu/test_steady_state.py
  part kernels 90 "$python" benchmarks/kernels.py
  group=second
  part test_delays 120 "${pytest[@]}" tests/gpu/test_delays.py
  if command -v compute-sanitizer >/dev/null; then
    part memcheck 75 "${sanitizer[@]}" --tool memcheck "${kernel_tests[@]}"
    part racecheck 75 "${sanitizer[@]}" --tool racecheck "${kernel_tests[@]}"
  else
    skip memcheck "no compute-sanitizer on PATH"
    skip racecheck "no compute-sanitizer on PATH"
  fi
  part test_kernels 80 "${pytest[@]}" tests/gpu/test_kernels.py
  part test_adamw 60 "${pytest[@]}" tests/gpu/test_adamw.py
  part test_events 60 "${pytest[@]}" tests/gpu/test_events.py
  part test_emulated_link 60 "${pytest[@]}" tests/gpu/test_emulated_link.py
  part link 40 "$python" benchmarks/link_accuracy.py
  group=third
  part optimizer 40 "$python" benchmarks/optimizer.py
  part overlap 120 "$python" benchmarks/overlap.py
  part host 60 "$python" benchmarks/host_overhead.py --device cuda --params 9,32 --passes 1
  part step_emulated 130 "$python" benchmarks/step.py --device cuda --link emulated --ranks 8 \
    --peers plain,ddp,fsdp2 --stages 0,2,3 --rounds 1
  part step_nccl 100 "$python" benchmarks/step.py --device cuda --ranks 1 \
    --peers plain,fsdp2 --stages 2,3 --rounds 1 --fused
  part step_bf16 120 "$python" benchmarks/step.py --device cuda --link emulated --ranks 8 \
    --peers plain,ddp,fsdp2 --stages 0,2,3 --rounds 1 --dtype bf16 --accumulate 4 --clip 1.0 \
    --optimizer zerocore
  group=fourth
  part memory_7b 300 "$python" benchmarks/memory.py --device cuda --size 7b --out "$work/results"
  part memory_4b 200 "$python" benchmarks/memory.py --device cuda --size 4b --world-size 2 \
    --dtype bfloat16 --out "$work/results"
}

rehearse() {
  if "$python" -c "import zerocore" 2>/dev/null; then
    skip build "zerocore imports already"
  else
    part build 500 env ZEROCORE_CUDA=0 "$python" setup.py build_ext --inplace
  fi
  part tests 240 "${pytest[@]}" --timeout=120 tests/gpu --rehearse
  part kernels 90 "$python" benchmarks/kernels.py --mib 8 --rounds 3
  part optimizer 60 "$python" benchmarks/optimizer.py --millions 1 --rounds 3
  part overlap 90 "$python" benchmarks/overlap.py --quick
  part link 60 "$python" benchmarks/link_accuracy.py
  skip memcheck "needs a GPU"
  skip racecheck "needs a GPU"
  part host 60 "$python" benchmarks/host_overhead.py --params 4 --rounds 2 --passes 1
  part step_emulated 60 "$python" benchmarks/step.py --link emulated --ranks 2 \
    --peers fsdp2 --stages 3 --size small --rounds 1
  skip step_nccl "needs a GPU"
  part step_bf16 60 "$python" benchmarks/step.py --link emulated --ranks 2 --peers fsdp2 \
    --stages 3 --size small --rounds 1 --dtype bf16 --accumulate 4 --clip 1.0 --optimizer zerocore
  skip memory_7b "needs a GPU"
  skip memory_4b "needs a GPU"
}

probe="import torch, typer, rich, matplotlib, pytest_timeout; print(torch.cuda.get_device_name(0))"
if gpu=$("$python" -c "$probe" 2>"$work/probe"); then
  # Machine code for the GPU that is here and no other: the build takes a fraction of the time.
  TORCH_CUDA_ARCH_LIST=$("$python" -c \
    "import torch; print('{}.{}'.format(*torch.cuda.get_device_capability(0)))")
  export TORCH_CUDA_ARCH_LIST
  echo "GPU: $gpu, compute capability $TORCH_CUDA_ARCH_LIST" | tee "$work/summary.txt"
  run_on_gpu
elif [[ -e /dev/nvidia0 ]] || nvidia-smi >/dev/null 2>&1; then
  echo "There is a GPU, but $python cannot use it, or misses a package:" >&2
  tail -n 3 "$work/probe" >&2
  exit 1
else
  echo "NO GPU: a rehearsal on the CPU, in small. Nothing here is a figure of a GPU." |
    tee "$work/summary.txt"
  rehearse
fi
collect
echo
cat "$work/summary.txt"
