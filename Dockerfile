# The three images: docker build --target gateway|operator|engine-cpu .
# Packages are layers below the code, so that a change of code rebuilds seconds' worth; gateway and operator share all layers.
# Bytecode is made for what runs and not for the thousands of modules that nothing imports; the root file system is
# read-only in the cluster, so what is not made here is never kept.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HOME=/tmp
ENV SITE=/usr/local/lib/python3.11/site-packages
# A name for the number: libraries that ask who they are fail without one.
RUN echo 'mini-infer:x:65532:65532::/tmp:/usr/sbin/nologin' >>/etc/passwd && echo 'mini-infer:x:65532:' >>/etc/group
COPY constraints.txt scripts/install_torch.sh /build/

FROM base AS code
WORKDIR /src
COPY . .
RUN pip install --quiet --no-deps --compile --prefix /code .

FROM base AS control-plane
COPY pyproject.toml scripts/requirements.py /build/
RUN python /build/requirements.py /build/pyproject.toml gateway operator >/build/requirements.txt \
    && pip install --quiet -c /build/constraints.txt -r /build/requirements.txt \
    && python -m compileall -q -j 0 "$SITE"
COPY --from=code /code /usr/local
USER 65532:65532
WORKDIR /tmp

FROM control-plane AS gateway
EXPOSE 8080
ENTRYPOINT ["mini-infer-gateway"]

FROM control-plane AS operator
ENTRYPOINT ["mini-infer-operator"]

FROM base AS engine-cpu
# Headers, link libraries and torch's own tests are for building on torch, not for running it.
RUN bash /build/install_torch.sh python /build/constraints.txt && python -c 'import torch' 2>/dev/null \
    && cd "$SITE/torch" && rm -rf include share test lib/*.a && find bin -type f ! -name torch_shm_manager -delete
COPY pyproject.toml scripts/requirements.py /build/
RUN python /build/requirements.py /build/pyproject.toml engine >/build/requirements.txt \
    && pip install --quiet -c /build/constraints.txt -r /build/requirements.txt \
    && python -m compileall -q -j 0 -x '/(torch|sympy|networkx)/' "$SITE"
COPY --from=code /code /usr/local
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 5557 5558
ENTRYPOINT ["mini-infer-serve"]
