# mcore-mas on GPUs: the conda environment of environment.yml, with its second stage. In a checkout:
#   docker build --file containers/gpu.Dockerfile --tag mcore-mas-gpu .      (--build-arg CUDA=12 for older drivers)
#   docker run --rm --gpus all --shm-size 16g --volume "$PWD:/work" mcore-mas-gpu doctor
# SGLang's servers have an environment of their own, which SGLANG_PYTHON names. CUDA 12 has none.
FROM condaforge/miniforge3:latest
ARG CUDA=13
COPY . /opt/mcore-mas
WORKDIR /opt/mcore-mas
RUN conda env create --file environment.yml && conda clean --all --yes
RUN CUDA=$CUDA conda run --no-capture-output --name mcore-mas bash environment.post-deploy.sh
ENV PATH=/opt/conda/envs/mcore-mas/bin:$PATH SGLANG_PYTHON=/opt/mcore-mas/.venv-sglang/bin/python NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["mcore-mas"]
