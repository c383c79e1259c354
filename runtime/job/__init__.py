"""A job: how it is put together from a plan and a model, and what users call."""
