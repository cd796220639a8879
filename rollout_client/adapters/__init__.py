"""What other trainers plug in. Nothing here imports TRL, transformers or torch until a trainer uses it.

push.Pusher                        any loop: call it with named tensors every step
metrics.flat                       reports and counters -> one flat dict for wandb or tensorboard
trl_rollout.rollout_func           TRL GRPOTrainer(rollout_func=...)
trl_server.install                 TRL GRPOTrainer(use_vllm=True, vllm_mode="server")
trl_async.WeightTransfer           TRL AsyncGRPOTrainer(weight_transfer=...)
"""
