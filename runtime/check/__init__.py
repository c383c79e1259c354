"""Before a job trains, what it does is compared with plain PyTorch, on one step."""
