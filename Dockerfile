# zerocore for NVIDIA GPUs, with the CUDA kernels: docker build -t zerocore .
# Not built by any test, as it takes a toolkit of gigabytes; no GPU has run it yet.
# CUDA must have the major version of the one that TORCH was built for (torch.version.cuda).
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
ARG TORCH=2.13.0
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir "torch==${TORCH}" "setuptools>=77.0.3" ninja
COPY . /opt/zerocore
WORKDIR /opt/zerocore
RUN ZEROCORE_CUDA=1 pip install --no-cache-dir --no-build-isolation ".[cli,plot,hf]"
WORKDIR /workspace
CMD ["python", "-m", "zerocore", "env"]
