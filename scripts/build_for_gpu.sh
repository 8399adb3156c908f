#!/usr/bin/env bash
# Builds, on a machine without a GPU, the extension that benchmarks/gpu_first.sh takes to one.
#
#   scripts/build_for_gpu.sh          for Python 3.12, torch 2.11 and sm_90: 6 MB
#   scripts/build_for_gpu.sh --fits   status 0 if what was built is of the sources as they are
#
# Carry zerocore/_C.cpython-312-x86_64-linux-gnu.so and zerocore/_C.sources, which holds the hash
# of the sources. PYTHON312 names the interpreter (python3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
hash=$({ cat csrc/sources.txt setup.py && find csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 cat; } |
  sha256sum | cut -d' ' -f1)
built=zerocore/_C.sources
if [[ ${1:-} == --fits ]]; then
  [[ -f $built && $(<"$built") == "$hash" ]]
  exit
fi
venv=${XDG_CACHE_HOME:-$HOME/.cache}/zerocore/gpu-venv
wanted=(torch==2.11.0 numpy 'setuptools>=77.0.3,<81' 'ninja>=1.11.1')
if [[ "$(cat "$venv/.complete" 2>/dev/null)" != "${wanted[*]}" ]]; then
  "${PYTHON312:-python3.12}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet "${wanted[@]}"
  echo "${wanted[*]}" >"$venv/.complete"
fi
PATH="$venv/bin:$PATH" ZEROCORE_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 \
  "$venv/bin/python" setup.py build_ext --inplace
strip --strip-unneeded zerocore/_C.cpython-312-*.so
"$venv/bin/python" -c "import torch; from zerocore._C import HAS_CUDA_KERNELS, build; \
assert HAS_CUDA_KERNELS; print(build)"
echo "$hash" >"$built"
