# One image for every service of compose.yaml: the command says which one it is.
FROM python:3.11-slim-bookworm AS build
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH
COPY requirements.txt requirements-build.txt ./
RUN pip install --require-hashes -r requirements.txt && pip install --require-hashes -r requirements-build.txt
COPY pyproject.toml requirements.in README.md LICENSE ./
COPY app app
COPY producers producers
COPY workers workers
RUN pip install --no-deps --no-build-isolation .

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 1000 headrace
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
ENTRYPOINT ["headrace"]
CMD ["--help"]
