"""TRL's AsyncGRPOTrainer, with our weight_transfer or syncing an adapter by itself. Only what needs a GPU is replaced.

Replaced: the check that vLLM is installed, the lookup of a GPU's peak FLOPs, and the flash-attention kernel over packed
samples, by the same attention computed segment by segment.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import trl
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.async_rollout_worker as worker_module
from training import dataset, report, reward
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

from rollout_client.adapters.trl_async import WeightTransfer


class Attention:
    """Stands for the kernel: each query segment sees its keys up to its own position, aligned at the end."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
        assert causal
        groups = q.shape[1] // k.shape[1]
        parts = []
        for i in range(len(cu_q) - 1):
            query = q[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
            keys, values = (x[cu_k[i] : cu_k[i + 1]].repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
            shape = query.shape[1], keys.shape[1]
            seen = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
            out = torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen, scale=softmax_scale
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


def main() -> None:
    url, endpoint, model, out, steps, staleness, every, what = sys.argv[1:]
    trainer_module.get_peak_flops_per_device = lambda accelerator, dtype: None
    worker_module.is_vllm_available = lambda: True
    packing._flash_attn = lambda: Attention
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    transfer = WeightTransfer(url, endpoint, run_id="trl-async") if what == "weights" else None
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules="all-linear")
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=dataset(),
        processing_class=tokenizer,
        weight_transfer=transfer,
        peft_config=None if transfer else lora,
        args=AsyncGRPOConfig(
            output_dir=out,
            max_steps=int(steps),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            max_staleness=int(staleness),
            weight_sync_steps=int(every),
            learning_rate=1e-3,
            temperature=1.0,
            dtype="float32",
            token_budget=0,
            vllm_server_base_url=url,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    history = trainer.state.log_history
    more = {
        key: [entry[key] for entry in history if key in entry]
        for key in ("ratio", "sample/staleness_mean", "sample/staleness_max", "perf/weight_sync_s")
    }
    counters = {}
    if transfer is not None:
        counters = transfer.metrics()
        transfer.destroy()
    print(json.dumps(report(trainer) | {"more": more, "counters": counters, "keys": sorted(history[0])}))


if __name__ == "__main__":  # TRL's rollout worker is a spawned process, which imports this file
    main()
