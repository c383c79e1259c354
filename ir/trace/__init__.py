"""How a model's training step becomes a graph; `trace` is the way in."""
