# An image with hf_posttrain and the tested versions of its dependencies.
#     docker build -t hf_posttrain .                            for CPUs
#     docker build -t hf_posttrain:cuda --build-arg DEVICE=cuda .    for NVIDIA GPUs: torch's wheels bring CUDA
ARG BASE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
FROM ${BASE}

ARG DEVICE=cpu
# index of torch's wheels for CPUs
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# torch.compile and DeepSpeed compile code at run time
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 trainer \
    && mkdir /workspace \
    && chown trainer:trainer /workspace
WORKDIR /opt/hf_posttrain

# First torch and the other dependencies, which change less often than the code. torch's index has other versions of
# torch's dependencies, which the constraints replace afterwards.
COPY constraints.txt setup.cfg pyproject.toml README.md ./
RUN if [ "$DEVICE" = cpu ]; then \
      pip install "$(grep '^torch==' constraints.txt)" --index-url "$TORCH_INDEX"; \
    elif [ "$DEVICE" = cuda ]; then \
      pip install -c constraints.txt torch liger-kernel; \
    else \
      echo "DEVICE must be cpu or cuda, not $DEVICE" >&2; exit 2; \
    fi
RUN python -c "from configparser import ConfigParser as C; c = C(); c.read('setup.cfg'); e = c['options.extras_require']; \
      print(c['options']['install_requires'], e['deepspeed'], e['quant'], sep='\n')" > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt

COPY hf_posttrain hf_posttrain
COPY recipes recipes
COPY accelerate_configs accelerate_configs
COPY docs docs
RUN pip install -c constraints.txt '.[deepspeed,quant]'

# jobs read and write here: docker run -v "$PWD:/workspace" hf_posttrain recipe.yaml
# as a number, so that Kubernetes sees that it is not root
USER 1000:1000
WORKDIR /workspace
# the second one is for users without a home: docker run --user
ENV HF_HOME=/workspace/.cache/huggingface \
    TRITON_HOME=/tmp
ENTRYPOINT ["hf-posttrain"]
CMD ["--help"]
