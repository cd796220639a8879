"""Developer scripts: fetch the small real model, write test fixtures. Not part of the wheel."""
