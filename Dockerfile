# The image of the tutorial and of training jobs: docker build -t megalight . && docker run --gpus all -it megalight
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

# Triton compiles its launchers, and torch.compile its CPU kernels.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megalight
# Torch first: it is large, and changes least.
COPY constraints.txt ./
RUN pip install torch -c constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY megalight megalight
RUN pip install -e '.[transformers,parquet,plot,chat,hub]' -c constraints.txt
COPY recipes recipes
COPY examples examples

# Runs, and the cache of the Hugging Face Hub: mount a volume there.
ENV HF_HOME=/workspace/huggingface
VOLUME /workspace
WORKDIR /workspace
ENTRYPOINT ["megalight"]
CMD ["doctor"]
