"""The demo's GRPO with a torch trainer, on a GPU if there is one: its tensors are pushed from where they lie."""
