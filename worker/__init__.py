"""One inference rank: event loop, signal group, process groups, scheduler, engine, models."""
