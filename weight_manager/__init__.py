"""Which weights are live and how new ones arrive: store, arena, plan, sessions, and the rank side."""
