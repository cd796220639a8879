"""Paddle's tensors over a slot's views; and memory that is given back."""

import numpy as np

from worker.device import select_cpu, tensors_over
from worker.memory import give_back_to_system


def test_a_cpu_computes_on_the_slot_itself_but_for_bfloat16():
    select_cpu()
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    bits = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensors = tensors_over({"f": floats, "b": bits})
    floats[0, 0] = 42
    assert tensors["f"][0, 0].item() == 42
    assert tensors["b"].numpy().tolist() == [1.5, -2.0]


def test_memory_that_was_freed_leaves_the_process():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    kept = [bytearray(1 << 16) for _ in range(1600)]  # below the mmap threshold: from the heap
    spacers = [bytearray(64) for _ in range(10)]
    before = resident()
    del kept
    give_back_to_system()
    assert before - resident() > 50 << 20
    assert len(spacers) == 10
