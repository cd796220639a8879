"""The engine on a CUDA device: NVIDIA's driver, run-time compiler and cuBLASLt through ctypes; no Paddle, no torch.

driver      contexts, memory, streams, graphs            kernels/   CUDA C++, compiled for one model at start
libraries   where NVIDIA's libraries are found           compiler   NVRTC, and what it made, kept on disk
cublaslt    matrix products of NVIDIA's                  products   which way a product of one shape is computed
memory      address ranges that outlive their memory     weights    two weight slots on the device
inputs      a step's numbers, in one copy                operations decoder.Ops as launches
backend     a decoder on one device: steps and graphs    engine     worker.engine.base.Engine over it
drawing     tokens drawn where the logits are            edits      penalties, masks and biases, told to the device
self_test   refuses a device that computes wrong         reference  the same operations in numpy
digests     of versions, computed where they lie         filling    the spare slot, from the arena or a trainer's GPU
trainer_memory  mapped to copy from it
pinned      mappings that copy at the bus's speed        warming    a context, made while Python imports
nccl        sums over the GPUs of a replica, bounded     ranks      what ranks that share a model do together
"""
