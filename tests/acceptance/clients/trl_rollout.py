"""TRL's GRPOTrainer as it comes, with our rollout_func: every step pushes weights and samples from them."""

import json
import sys

import torch
from training import dataset, report, reward
from trl import GRPOConfig, GRPOTrainer

from rollout_client.adapters.metrics import flat
from rollout_client.adapters.trl_rollout import rollout_func

url, endpoint, model, out, steps = sys.argv[1:]
torch.manual_seed(0)
rollout = rollout_func(url, endpoint, run_id="trl-rollout", top_k=0)
versions = set()


def reward_and_versions(completions, weight_spans, **_):
    versions.update(span[0] for spans in weight_spans for span in spans)
    return reward(completions)


trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward_and_versions,
    rollout_func=rollout,
    train_dataset=dataset(),
    args=GRPOConfig(
        output_dir=out,
        max_steps=int(steps),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        temperature=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
)
trainer.train()
metrics = flat(rollout.push.counters)
rollout.close()
print(json.dumps(report(trainer) | {"versions": sorted(versions), "metrics": metrics}))
