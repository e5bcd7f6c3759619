# The three images: docker build --target gateway|operator|engine-cpu .
# Packages are layers below the code, so that a change of code rebuilds seconds' worth; gateway and operator share all layers.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HOME=/tmp
# A name for the number: libraries that ask who they are fail without one.
RUN echo 'mini-infer:x:65532:65532::/tmp:/usr/sbin/nologin' >>/etc/passwd && echo 'mini-infer:x:65532:' >>/etc/group
COPY pyproject.toml constraints.txt scripts/requirements.py scripts/install_torch.sh /build/

FROM base AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --quiet --no-deps --wheel-dir /dist .

FROM base AS control-plane
RUN python /build/requirements.py /build/pyproject.toml gateway operator >/tmp/requirements.txt \
    && pip install --quiet -c /build/constraints.txt -r /tmp/requirements.txt && rm /tmp/requirements.txt
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist pip install --quiet --no-deps /dist/*.whl
USER 65532:65532
WORKDIR /tmp

FROM control-plane AS gateway
EXPOSE 8080
ENTRYPOINT ["mini-infer-gateway"]

FROM control-plane AS operator
ENTRYPOINT ["mini-infer-operator"]

FROM base AS engine-cpu
# Headers, link libraries and torch's own tests are for building on torch, not for running it.
RUN bash /build/install_torch.sh python /build/constraints.txt \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch" && rm -rf include share test lib/*.a && find bin -type f ! -name torch_shm_manager -delete
RUN python /build/requirements.py /build/pyproject.toml engine >/tmp/requirements.txt \
    && pip install --quiet -c /build/constraints.txt -r /tmp/requirements.txt && rm /tmp/requirements.txt
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist pip install --quiet --no-deps /dist/*.whl
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 5557 5558
ENTRYPOINT ["mini-infer-serve"]
