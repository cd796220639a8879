"""GRPO on Paddle against live rollout workers: a 109k-parameter Llama learns to sort five digits."""
