#!/usr/bin/env bash
# Builds, on a machine without a GPU, the extension that benchmarks/gpu_first.sh takes to one.
#
#   scripts/build_for_gpu.sh          for Python 3.12, torch 2.11 and sm_90: 6 MB
#   scripts/build_for_gpu.sh --fits   status 0 if the extension was built from these sources
#
# Carry zerocore/_C.cpython-312-x86_64-linux-gnu.so and zerocore/_C.sources, which holds the hash
# of the sources. PYTHON312 names the interpreter (python3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
# Names and contents of the sources, then the extension's: another build in its place does not fit.
fingerprint() {
  find csrc setup.py zerocore/_C.cpython-312-x86_64-linux-gnu.so -type f \
    \( -path 'csrc/*.cpp' -o -path 'csrc/*.h' -o -path 'csrc/*.cu' -o -path 'csrc/*.cuh' \
    -o -name sources.txt -o -name setup.py -o -name '_C.*.so' \) -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}
built=zerocore/_C.sources
if [[ ${1:-} == --fits ]]; then
  [[ -f $built && $(<"$built") == "$(fingerprint 2>/dev/null)" ]]
  exit
fi
(($# == 0)) || { echo "build_for_gpu.sh: expected --fits or nothing, got '$*'" >&2 && exit 2; }
rm -f "$built"
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
fingerprint >"$built"
