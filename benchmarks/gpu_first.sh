#!/usr/bin/env bash
# Runs checks, tests and benchmarks on a GPU for at most eight minutes, the most valuable part first.
#
#   benchmarks/gpu_first.sh OUT_DIR                     all parts, in this order
#   benchmarks/gpu_first.sh OUT_DIR only NAME...        these parts or checks, after a mend
#
#   extension  the carried build (scripts/build_for_gpu.sh) if it fits the sources, else a new one
#   checks     gpu_checks.py: all checks at once, each a process with a limit. The script ends with
#              status 3 where the machine, the kernels or the numbers are wrong: time is left to mend
#   ranks      several ranks on the one GPU, over gloo and NCCL, with nothing beside them. NCCL needs
#              a recent library in .nccl/libnccl.so.2.xz; no other part calls its collectives
#   tests      all of tests/gpu in 14 processes; memcheck and racecheck beside them
#   figures    the benchmarks, one after the other, alone on the GPU
#
# OUT_DIR receives summary.txt, checks.jsonl and results.tar.gz (logs and result files), new after
# each part; results of an earlier run move to OUT_DIR/before.*. Statuses: 2 wrong arguments, 3 the
# gate, 4 no extension. BUDGET_S (480) bounds the run; GATE=0 goes on behind a failed gate. Without a GPU
# the script rehearses the same on the CPU, in small. PYTHON names the interpreter (python3).
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
refuse() { echo "gpu_first.sh: $*" >&2 && exit 2; }
(($# == 1)) || [[ $# -gt 2 && $2 == only ]] || refuse "expected OUT_DIR [only NAME...], got '$*'"
mkdir -p "$1" && out=$(CDPATH='' cd "$1" && pwd) && : >"$out/.writable" && rm "$out/.writable" ||
  refuse "cannot write to OUT_DIR '$1'"
shift
wanted=" $* "
python=${PYTHON:-python3} budget=${BUDGET_S:-480}
[[ $budget =~ ^[1-9][0-9]*$ ]] || refuse "BUDGET_S: expected whole seconds, got '$budget'"
python=$(type -P "$python") || refuse "PYTHON: found no '${PYTHON:-python3}'"
[[ $python == /* ]] || python=$PWD/$python
type -P tar >/dev/null || refuse "found no tar"
work=$(mktemp -d) && mkdir "$work/logs" "$work/results" && cd "$root" || exit 1
all=($("$python" benchmarks/gpu_checks.py --list))
((${#all[@]})) || refuse "benchmarks/gpu_checks.py --list failed"
known="checks $(sed -nE 's/^ *part ([a-z0-9_]+) .*/\1/p' benchmarks/gpu_first.sh | sort -u | xargs) ${all[*]}"
for name in "${@:2}"; do
  [[ " $known " == *" $name "* ]] || refuse "no part or check is named '$name'; there are $known"
done
if [[ -e $out/summary.txt ]]; then # the results of an earlier run stay
  before=$(mktemp -d "$out/before.XXXX") && mv "$out"/{summary.txt,checks.jsonl,results.tar.gz} "$before"
fi
export PYTHONPATH=$root:$root/benchmarks PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export ZEROCORE_RESULTS=$work/results ZEROCORE_CHECKS=$work/checks.jsonl ZEROCORE_LOGS=$work/logs
export OMP_NUM_THREADS=1 TORCH_NCCL_DUMP_ON_TIMEOUT=0 ZEROCORE_STALL_SECONDS=25
# Streams of one process share eight hardware queues by default, which orders them by accident.
export CUDA_DEVICE_MAX_CONNECTIONS=32
touch "$ZEROCORE_CHECKS" "$work/summary.txt"

collect() {
  local new=$out/.results.$BASHPID # parts at the same time do not write one file
  cp "$work/summary.txt" "$work/checks.jsonl" "$out/" &&
    { tar -czf "$new" -C "$work" logs results summary.txt checks.jsonl 2>/dev/null || (($? == 1)); } &&
    gzip -t "$new" 2>/dev/null && mv "$new" "$out/results.tar.gz" && return 0 # tar: 1 if a log grew
  rm -f "$new"
  echo "gpu_first.sh: cannot write to $out; all results are in $work" >&2
  return 1
}
# `timeout` ends what ignores the signal after 4 s.
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null && wait; collect && rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# part NAME LIMIT_S COMMAND...: an interrupt at the limit or at the end of the budget, then by force.
part() {
  local name=$1 limit=$2 start=$SECONDS left=$((budget - SECONDS)) status log=$work/logs/$1.log
  shift 2
  if [[ $wanted == *" only "* && $wanted != *" $name "* ]]; then return 0; fi
  if ((left < 8)); then
    note "$name" 0 - "not run: $budget s are spent"
    return 0
  fi
  ((limit < left)) || limit=$left
  ZEROCORE_CHECK_LIMIT=$((limit - 3)) \
    timeout --signal=INT --kill-after=4 "$limit" "$@" >"$log" 2>&1 &
  # The end of a part in the background ends its command.
  [[ $BASHPID == "$$" ]] || trap "kill $! 2>/dev/null; wait $!" TERM
  wait $! # so that a signal to this script is answered at once
  status=$?
  note "$name" $((SECONDS - start)) "$status" "$(grep -v '^ *$' "$log" | tail -n 1)"
  collect
  return "$status"
}
note() {
  printf '%4s s  %-14s %4s s  exit %-4s %s\n' "$SECONDS" "$1" "$2" "$3" "${4:0:110}" |
    tee -a "$work/summary.txt"
}
failed() { grep '"result": "failed"' "$ZEROCORE_CHECKS" | cut -c 1-900; }

# -- extension -------------------------------------------------------------------------------------
probe='import torch, zerocore._C as c; assert c.HAS_CUDA_KERNELS >= torch.cuda.is_available()'
extension() {
  if scripts/build_for_gpu.sh --fits && "$python" -c "$probe"; then return 0; fi
  ZEROCORE_CUDA=$has_gpu TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=$(nproc --all) \
    "$python" setup.py build_ext --inplace && "$python" -c "$probe"
}
has_gpu=0
nvidia-smi -L >"$work/logs/gpu.txt" 2>/dev/null && has_gpu=1
((has_gpu)) || echo "NO GPU: a rehearsal on the CPU. Nothing here is a figure of a GPU." |
  tee -a "$work/summary.txt"
export -f extension && export python probe has_gpu
timeout --kill-after=4 $((budget < 220 ? budget : 220)) bash -c extension >"$work/logs/extension.log" 2>&1 &
wait $! || { tail -n 30 "$work/logs/extension.log" && exit 4; }
note extension "$SECONDS" 0 "$(tail -n 1 "$work/logs/gpu.txt")"

# -- checks, and the gate --------------------------------------------------------------------------
if [[ $wanted == *" only "* ]]; then
  names=()
  for name in "${all[@]}"; do
    if [[ $wanted == *" $name "* || $wanted == *" checks "* ]]; then names+=("$name"); fi
  done
  ((${#names[@]} == 0)) || wanted+=" checks "
else
  names=("${all[@]}")
fi
part checks 75 "$python" benchmarks/gpu_checks.py "${names[@]}"
failed
for name in machine kernels adamw parity; do
  [[ " ${names[*]} " == *" $name "* ]] || continue
  if ! grep -q "\"check\": \"$name\", \"result\": \"ok\"" "$ZEROCORE_CHECKS"; then
    echo "GATE: $name is not ok. Give the machine back, mend, run again."
    tail -n 40 "$work/logs/$name.log"
    ((${GATE:-1})) && exit 3
  fi
done

# -- several ranks on one GPU ----------------------------------------------------------------------
nccl=$work/libnccl.so.2
ranks=("$python" -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1
  --local-addr 127.0.0.1 --master-port 29517)
if ((has_gpu)) && xz -dc .nccl/libnccl.so.2.xz >"$nccl" 2>/dev/null; then
  several=(env "LD_PRELOAD=$nccl" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_DEBUG=WARN)
  ranks=("${several[@]}" "${ranks[@]}")
else
  rm -f "$nccl" # an empty file would be preloaded
  ((!has_gpu)) || echo "no .nccl/libnccl.so.2.xz: NCCL ranks need a GPU each" | tee -a "$work/summary.txt"
fi
part rank_tests 100 env "ZEROCORE_NCCL=$nccl" "$python" -m pytest -q -p no:cacheprovider -W default \
  --timeout=90 --timeout-method=thread --rehearse tests/gpu/test_ranks.py
part multi_rank 75 "${ranks[@]}" benchmarks/multi_rank.py --no-binds
if ((has_gpu)); then
  part multi_rank_bound 60 "${ranks[@]}" benchmarks/multi_rank.py --binds
fi

# -- tests -----------------------------------------------------------------------------------------
pytest=("$python" -m pytest -q -p no:cacheprovider -W default --timeout-method=thread)
if ((has_gpu)); then
  # The sanitizers see zerocore's kernels alone. Without what needs the profiler, captures, or
  # minutes under them; each allocation is one of its own, so that an access behind its end is seen.
  checked=(tests/gpu/test_kernels.py tests/gpu/test_adamw.py
    -k "not launch and not 2000 and not captured and not 150 and not 600")
  sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9
    --kernel-regex kns=zerocore)
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  part memcheck 110 "${sanitizer[@]}" --tool memcheck "${pytest[@]}" --timeout=100 -x "${checked[@]}" &
  part racecheck 110 "${sanitizer[@]}" --tool racecheck "${pytest[@]}" --timeout=100 -x "${checked[@]}" &
  part tests 150 "${pytest[@]}" --timeout=60 -n 14 --maxfail=40 tests/gpu
  wait %2 %3 2>/dev/null || wait
  grep -hsE '^(FAILED|ERROR) ' "$work/logs/tests.log" | cut -c 1-200
else
  part tests 120 "${pytest[@]}" --timeout=100 tests/gpu --rehearse -k "stage3 and plain"
fi

# -- figures ---------------------------------------------------------------------------------------
step=("$python" benchmarks/step.py --peers plain,ddp,fsdp2 --rounds 1)
if ((has_gpu)); then
  part kernels_rate 45 "$python" benchmarks/kernels.py --rounds 5 --mib 256
  part step_one 60 "${step[@]}" --device cuda --ranks 1 --stages 0,2,3
  part step_emulated 60 "${step[@]}" --device cuda --link emulated --ranks 8 --stages 0,2,3
  part overlap 75 "$python" benchmarks/overlap.py --rounds 2 --ratios 0.8
  part memory 130 "$python" benchmarks/memory.py --device cuda --size 7b
  part step_two 90 "${several[@]:-env}" "${step[@]}" --device cuda --ranks 2 --stages 0,2,3
  part host 45 "$python" benchmarks/host_overhead.py --device cuda --params 9,32 --passes 1 --rounds 5
  part step_bf16 45 "${step[@]}" --device cuda --link emulated --ranks 8 --stages 2,3 --dtype bf16
  part optimizer 40 "$python" benchmarks/optimizer.py --rounds 5
  part link_rate 30 "$python" benchmarks/link_accuracy.py
else
  part kernels_rate 60 "$python" benchmarks/kernels.py --rounds 2 --mib 8
  part step_emulated 60 "${step[@]}" --link emulated --ranks 2 --stages 3 --size small
  part overlap 90 "$python" benchmarks/overlap.py --quick
fi
exit 0 # whatever the last part returned; summary.txt has the status of each
