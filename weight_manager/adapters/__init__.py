"""LoRA adapters: each a line of versions of its own, staged, proved and committed as the base's are."""
