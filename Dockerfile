#   docker build -t elastic-trainer .
#   docker run --rm --gpus all elastic-trainer elastic-trainer doctor
#
# On x86-64 pip's plain torch is for NVIDIA GPUs. Horovod is then built with NCCL: torch brings it,
# and the build fetches CUDA's compiler. It needs no GPU and no image with CUDA. The kernels are for
# all GPUs; for some alone:
#   --build-arg CUDA_ARCH=8.0,9.0
# A CPU image, several GB smaller, needs an index that has CPU builds:
#   --build-arg TORCH_SPEC=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=<that index>
#
# The digests are of the indexes of all platforms. apt's packages are the newest of the base's
# release: sbom.cdx.json in the image lists them.
#   docker run --rm elastic-trainer cat sbom.cdx.json
#
# Both bases must have the same Python: .venv is built on the first and runs on the second.
#
# The image starts no program by itself; give it a command:
#   docker run --rm elastic-trainer elastic-trainer --help
# As a host for horovodrun, a container also runs sshd (/usr/sbin/sshd -D -p 2222 -h <key> works for
# any user).

ARG BUILD_BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BUILD_BASE} AS build
# The tools that install.sh needs and cannot install. Their versions come with the pinned base.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && if ! command -v python3; then \
        apt-get install -y --no-install-recommends python3-dev python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/elastic-trainer
COPY setup.cfg pyproject.toml LICENSE ./
COPY deploy/constraints.txt deploy/constraints-nvidia.txt deploy/
COPY deploy/hashes.py deploy/hashes.txt deploy/install.sh deploy/
COPY elastic_trainer/host elastic_trainer/host
COPY elastic_trainer/setup elastic_trainer/setup
# The sources come last, so that a change in them needs no new install. Empty packages replace them
# here.
RUN for name in . commands driver evaluate events examples horovod_style reduce schedule \
        training views wire world; do \
        mkdir -p "elastic_trainer/$name" && touch "elastic_trainer/$name/__init__.py"; done \
    && mkdir discovery state && touch discovery/__init__.py state/__init__.py \
    && ln -s ../discovery ../state elastic_trainer/
ARG TORCH_SPEC=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
ARG CUDA_ARCH
# pip's downloads and the built Horovod stay with the builder, not in the image.
RUN --mount=type=cache,target=/root/.cache deploy/install.sh \
        ${CUDA_ARCH:+--cuda-arch "$CUDA_ARCH"}

FROM ${BASE}
# ssh: how horovodrun reaches other hosts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && if ! command -v python3; then apt-get install -y --no-install-recommends python3; fi \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --shell /bin/bash trainer
WORKDIR /opt/elastic-trainer
COPY --from=build /opt/elastic-trainer ./
COPY horovodrun_elastic.sh ./
COPY elastic_trainer elastic_trainer
COPY discovery discovery
COPY state state
COPY deploy/licences.txt deploy/sbom.py deploy/vulnerabilities.json deploy/
RUN .venv/bin/python -B deploy/sbom.py >sbom.cdx.json
ENV PATH=/opt/elastic-trainer/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
CMD ["elastic-trainer", "--help"]
