"""What users pin: its text, its check against model and cluster, and plans that keep it."""
