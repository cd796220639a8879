"""Two GRPO runs against one service: each trains a LoRA adapter of its own on one base, and pushes only that."""
