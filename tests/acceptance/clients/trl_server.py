"""TRL's GRPOTrainer in server mode with our client subclass, at several temperatures in one process.

Arguments: url endpoint model out steps sync temperature... ; sync off = the mutation that never pushes.
"""

import json
import sys

import torch
from training import dataset, report, reward
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from rollout_client.adapters.trl_server import install

url, endpoint, model, out, steps, sync, *temperatures = sys.argv[1:]
push = install(endpoint, run_id="trl-server")
if sync == "off":
    vllm_generation.VLLMClient.update_named_params = lambda self, metadata, named_params: None

found = {}
for temperature in temperatures:
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=dataset(),
        args=GRPOConfig(
            output_dir=out,
            max_steps=int(steps),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-3,
            temperature=float(temperature),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_importance_sampling_correction=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    found[temperature] = report(trainer) | {"version": push.version}
print(json.dumps(found))
