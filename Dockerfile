# Policies served and trained: docs/container.md.
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY lerobot_policy_vla.egg-info lerobot_policy_vla.egg-info
COPY lerobot_policy_vla lerobot_policy_vla
COPY robot_drivers robot_drivers
COPY sim sim
COPY vla_stack vla_stack
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=
# Headless rendering on the CPU, and FFmpeg's libraries for fast decoding of videos.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri libglib2.0-0 ffmpeg \
 && rm -rf /var/lib/apt/lists/*
# Versions are the lock file's. Its hashes are of PyTorch with CUDA; TORCH_INDEX may have one without.
COPY requirements.lock /tmp/requirements.lock
COPY --from=wheel /wheel /tmp/wheel
RUN sed -E '/^ +--hash/d; s/ *\\$//' /tmp/requirements.lock > /tmp/constraints.txt \
 && if [ -n "$TORCH_INDEX" ]; then \
      pip install --no-cache-dir --no-deps -c /tmp/constraints.txt --index-url "$TORCH_INDEX" torch torchvision; \
    fi \
 && pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /tmp/wheel/*.whl)[train,openpi]" \
 && rm -r /tmp/wheel /tmp/requirements.lock /tmp/constraints.txt
RUN useradd --create-home --uid 1000 vla && install -d -o vla -g vla /data
ENV MUJOCO_GL=egl VLA_KEYS=/data/keys NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
USER vla
WORKDIR /data
VOLUME /data
EXPOSE 5555
ENTRYPOINT ["vla"]
CMD ["doctor"]
