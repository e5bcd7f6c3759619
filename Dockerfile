# The images: docker build --target gateway|operator|engine-cpu|engine-cuda .
# Packages are layers below the code, so that a change of code rebuilds seconds' worth; gateway and operator share all
# layers. Packages are installed in stages of their own, into a virtual environment that is copied from there, so that pip
# and compilers stay behind. Bytecode is made for what runs and not for the thousands of modules that nothing imports; the
# root file system is read-only in the cluster, so what is not made here is never kept.

# engine-cuda starts from this: any glibc image with apt, such as one with the drivers' user-space parts of your cloud.
# torch's wheels bring the CUDA libraries that it was built with, so NVIDIA's larger `runtime` images would hold them twice.
ARG CUDA_BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

# Everything else starts from this. By digest it is the same image tomorrow:
#   --build-arg PYTHON_BASE=python:3.11-slim-bookworm@sha256:... --build-arg CUDA_BASE=...@sha256:...
ARG PYTHON_BASE=python:3.11-slim-bookworm

# The console's page is the build that is committed. From a base that has npm it is built anew:
#   --build-arg CONSOLE_BASE=node:22-bookworm-slim
ARG CONSOLE_BASE=${PYTHON_BASE}

FROM ${CONSOLE_BASE} AS console
WORKDIR /src/console
COPY console .
COPY gateway/mini_infer_gateway/console/assets /src/gateway/mini_infer_gateway/console/assets
RUN if command -v npm; then npm ci --no-audit --no-fund --ignore-scripts && npm run build; fi \
    && mv /src/gateway/mini_infer_gateway/console/assets /assets

FROM ${PYTHON_BASE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp PATH=/opt/mini-infer/bin:$PATH
# A name for the number: libraries that ask who they are fail without one. Packages of the base that nothing here runs go.
RUN echo 'mini-infer:x:65532:65532::/tmp:/usr/sbin/nologin' >>/etc/passwd && echo 'mini-infer:x:65532:' >>/etc/group
# Python's images come without bytecode of the standard library: each process would compile for half a second.
RUN python -m compileall -q -j 0 \
    -x '/(distutils|ensurepip|idlelib|lib2to3|pydoc_data|site-packages|test|tests|tkinter|turtledemo|unittest)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1
# This pip finds packages in a third of the time that Python 3.11's takes; where it is not to be had, that one will do.
ARG PIP_VERSION=26.3
RUN python -m venv /opt/mini-infer && { pip install --quiet --compile "pip==${PIP_VERSION}" || true; }
# Packages are installed by their hashes: what was locked is what runs. torch alone depends on the machine, and is pinned.
COPY constraints.txt constraints-control-plane.txt constraints-engine.txt scripts/install_torch.sh scripts/sbom.py /build/

# Our own code, to be laid over an environment that has the packages.
FROM build AS code
WORKDIR /src
COPY . .
COPY --from=console /assets gateway/mini_infer_gateway/console/assets
RUN pip install --quiet --no-deps --compile --prefix /code . \
    && cp -a /code /control-plane \
    && rm -r /control-plane/lib/python3.11/site-packages/mini_infer_engine /control-plane/bin/mini-infer-serve

FROM build AS control-plane-packages
# huggingface_hub downloads weights: tokenizers asks for it, and neither gateway nor operator downloads any. Of Pillow, headers of
# a few formats are read: fonts, colour profiles and AVIF go.
# zstandard brings its code twice; the half for PyPy is of no use here. kubernetes' generated API and models are nine tenths of
# it, and only the dynamic client is used; the build fails where what stays imports them.
RUN pip install --quiet --no-deps --require-hashes -r /build/constraints-control-plane.txt \
    && pip uninstall --quiet --yes hf_xet huggingface_hub fsspec setuptools pip \
    && python /build/sbom.py /opt/mini-infer/sbom.cdx.json \
    && cd /opt/mini-infer/lib/python3*/site-packages && rm -rf zstandard/_cffi*.so kubernetes/client/api kubernetes/aio/client/api \
    && find kubernetes/client/models kubernetes/aio/client/models -name '*.py' ! -name __init__.py ! -name v1_object_meta.py \
         ! -name v1_owner_reference.py ! -name v1_managed_fields_entry.py -delete \
    && find kubernetes -name '*_test.py' -delete && python -c 'import kopf, kubernetes.aio.config, kubernetes.aio.dynamic' \
    && rm -f PIL/_avif.* PIL/_imagingft.* PIL/_imagingcms.* PIL/_imagingtk.* PIL/_imagingmath.* PIL/_imagingmorph.* \
         pillow.libs/libavif-* pillow.libs/libharfbuzz-* pillow.libs/libfreetype-* pillow.libs/liblcms2-* pillow.libs/libpng16-* \
         pillow.libs/libbrotli* \
    && python -c 'import tokenizers; from PIL import Image, _webp, BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin' \
    && python -m compileall -q -j 0 /opt/mini-infer/lib

FROM base AS control-plane
COPY --from=control-plane-packages /opt/mini-infer /opt/mini-infer
COPY --from=code /control-plane /opt/mini-infer
RUN rm -rf /usr/local/lib/python3.11/site-packages/* /usr/local/lib/python3.11/ensurepip /usr/local/bin/pip*
USER 65532:65532
WORKDIR /tmp
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.vendor="mini-infer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      mini-infer.sbom="/opt/mini-infer/sbom.cdx.json"

FROM control-plane AS gateway
LABEL org.opencontainers.image.title="mini-infer-gateway" \
      org.opencontainers.image.description="Sends OpenAI requests to the engine that holds their prompt's KV cache"
EXPOSE 8080
ENTRYPOINT ["mini-infer-gateway"]

FROM control-plane AS operator
LABEL org.opencontainers.image.title="mini-infer-operator" \
      org.opencontainers.image.description="Turns InferenceServices into engine pods"
EXPOSE 8081
ENTRYPOINT ["mini-infer-operator"]

FROM build AS engine-cpu-packages
# Headers, link libraries and torch's own tests are for building on torch, not for running it; of NIXL's wheel, half is for
# the exchange of experts, which is not used.
RUN pip install --quiet --no-deps --require-hashes -r /build/constraints-engine.txt \
    && bash /build/install_torch.sh python /build/constraints.txt \
    && PYTHONDONTWRITEBYTECODE= python -c 'import torch, torch.distributed' 2>/dev/null \
    && cd /opt/mini-infer/lib/python3.11/site-packages/torch \
    && rm -rf include share test lib/*.a && find bin -type f ! -name torch_shm_manager -delete
RUN pip uninstall --quiet --yes pip && python /build/sbom.py /opt/mini-infer/sbom.cdx.json \
    && rm -rf /opt/mini-infer/lib/python3*/site-packages/nixl_ep_cu13 \
    && python -m compileall -q -j 0 -x '/(torch|sympy|networkx)/' /opt/mini-infer/lib

FROM base AS engine-cpu
COPY --from=engine-cpu-packages /opt/mini-infer /opt/mini-infer
COPY --from=code /code /opt/mini-infer
RUN rm -rf /usr/local/lib/python3.11/site-packages/* /usr/local/lib/python3.11/ensurepip /usr/local/bin/pip*
USER 65532:65532
WORKDIR /tmp
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="mini-infer-engine-cpu" \
      org.opencontainers.image.description="The inference engine, for CPUs" \
      org.opencontainers.image.vendor="mini-infer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      mini-infer.sbom="/opt/mini-infer/sbom.cdx.json"
EXPOSE 8000 5557 5558 5559
# SIGTERM waits until the command can take it: the kernel drops what the first process of a container has no handler for.
ENTRYPOINT ["env", "--block-signal=TERM", "mini-infer-serve"]

# Triton compiles a launcher in C for each kernel when it first meets a GPU: a compiler and Python's headers stay in.
FROM ${CUDA_BASE} AS cuda-base
ENV PYTHONUNBUFFERED=1 HOME=/tmp PATH=/opt/mini-infer/bin:$PATH
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev \
    && { command -v python3 || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
         python3 python3-venv python3-dev; } \
    && rm -rf /var/lib/apt/lists/* \
    && echo 'mini-infer:x:65532:65532::/tmp:/usr/sbin/nologin' >>/etc/passwd && echo 'mini-infer:x:65532:' >>/etc/group

FROM cuda-base AS engine-cuda-packages
ENV PIP_NO_CACHE_DIR=1 PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt constraints-gpu.txt constraints-engine.txt pyproject.toml scripts/requirements.py scripts/sbom.py /build/
# The pair of torch and Triton that was measured comes first and is not to change; the other packages follow.
RUN python3 -m venv /opt/mini-infer && python -m pip install --quiet $(grep -oE '^(torch|triton)==[^ ;]+' /build/constraints-gpu.txt) \
    && python -c 'import torch, triton; assert torch.version.cuda, "this torch is a build for CPUs"'
RUN python -m pip install --quiet --no-deps --require-hashes -r /build/constraints-engine.txt \
    && python /build/requirements.py /build/pyproject.toml engine disaggregated >/build/requirements.txt \
    && grep -vE '^(torch|triton|nvidia-|cuda-|setuptools)' /build/constraints.txt >/build/others.txt \
    && python -m pip install --quiet -c /build/others.txt -c /build/constraints-gpu.txt -r /build/requirements.txt
WORKDIR /src
COPY . .
RUN python -m pip install --quiet --no-deps --compile . && python -m pip uninstall --quiet --yes pip \
    && python /build/sbom.py /opt/mini-infer/sbom.cdx.json \
    && cd /opt/mini-infer/lib/python3*/site-packages && rm -rf torch/include torch/share torch/test torch/lib/*.a nixl_ep_cu13 \
    && python -m compileall -q -j 0 -x '/(sympy|networkx)/' /opt/mini-infer/lib

FROM cuda-base AS engine-cuda
# What the NVIDIA container toolkit mounts: the driver's libraries and nvidia-smi. NVIDIA's own images say the same.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Compiled kernels are kept in TRITON_CACHE_DIR: mount a volume there, and the second start of a pod compiles nothing. What
# scripts/prebuild_kernels.sh adds to the image, on a machine with a GPU, the first start need not compile either.
ENV TRITON_CACHE_DIR=/tmp/triton \
    TRITON_CACHE_MANAGER=mini_infer_engine.kernels.prebuilt_kernels:PrebuiltKernels \
    MINI_INFER_PREBUILT_KERNELS=/opt/mini-infer/kernels
COPY --from=engine-cuda-packages /opt/mini-infer /opt/mini-infer
USER 65532:65532
WORKDIR /tmp
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="mini-infer-engine-cuda" \
      org.opencontainers.image.description="The inference engine, for NVIDIA GPUs" \
      org.opencontainers.image.vendor="mini-infer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      mini-infer.sbom="/opt/mini-infer/sbom.cdx.json"
EXPOSE 8000 5557 5558 5559
# SIGTERM waits until the command can take it: the kernel drops what the first process of a container has no handler for.
ENTRYPOINT ["env", "--block-signal=TERM", "mini-infer-serve"]
