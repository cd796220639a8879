"""Routes, one module per dialect: each maps names to the operations of control, generation and weights."""
