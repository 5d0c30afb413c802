# A server with the default model inside:
#
#   docker build -t outpace . && docker run --rm -p 127.0.0.1:8000:8000 -e OUTPACE_API_KEY=choose-one outpace
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python -m venv /outpace && /outpace/bin/pip install --no-cache-dir "/source[serve]"

FROM python:3.12-slim
COPY --from=build /outpace /outpace
RUN useradd --create-home --uid 1000 outpace && mkdir /models && chown outpace /models
USER outpace
ENV PATH=/outpace/bin:$PATH OUTPACE_HOME=/models
ARG MODEL=smollm2-135m
ENV MODEL=$MODEL
RUN outpace pull "$MODEL" --quiet
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
STOPSIGNAL SIGTERM
# A public address needs a key: OUTPACE_API_KEY.
CMD exec outpace serve "$MODEL" --host 0.0.0.0 --port 8000
