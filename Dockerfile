# The GPU stack in an image: docs/cluster.md says how to build and run it. CUDA's compiler, headers and libraries come as
# packages of requirements/gpu.lock, so the base flavor is enough; one with cuDNN would bring a second, which the doctor refuses.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Versions are the distribution's: they decide nothing that the locks do not pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc git openssh-client python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 trainer \
    && install -d -o trainer /opt/openrlhf_ext

WORKDIR /opt/openrlhf_ext
COPY --chown=trainer . .
USER 1001

ARG OPENRLHF_EXT_TORCH_INDEX=""
RUN PYTHON=python3.12 PIP_NO_CACHE_DIR=1 OPENRLHF_EXT_WITHOUT_GPU=1 bash examples/scripts/setup_env.sh gpu

ENV PATH=/opt/openrlhf_ext/.venv/bin:$PATH
ENTRYPOINT ["openrlhf-ext"]
CMD ["doctor"]
